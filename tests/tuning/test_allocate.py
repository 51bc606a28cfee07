"""Which kernel gets the next trials, by numbers alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvmhet.tuning.allocate import FIRST_HOPE, Curve, choose

SECONDS = st.floats(1e-6, 1.0)
CURVES = st.lists(SECONDS, min_size=1, max_size=6).map(lambda s: Curve(tuple(sorted(s, reverse=True))))


@given(CURVES)
def test_one_more_batch_reaches_less_than_batches_without_end(curve):
    assert 0 < curve.eventual_s() <= curve.next_s() <= curve.now_s


@given(CURVES, st.lists(SECONDS, max_size=4))
def test_a_curve_never_rises(curve, seconds):
    assert curve.after(seconds).now_s <= curve.now_s
    assert len(curve.after(seconds).best_s) == len(curve.best_s) + 1


@given(CURVES, st.floats(0.1, 10.0))
def test_the_unit_of_time_does_not_matter(curve, unit):
    scaled = Curve(tuple(s * unit for s in curve.best_s))
    assert scaled.next_s() == pytest.approx(curve.next_s() * unit)


def test_less_is_hoped_for_near_the_floor_but_never_nothing():
    saved = [1.0 - Curve((1.0,), floor_s=f).next_s() for f in (0.0, 0.5, 0.95, 2.0)]
    assert saved == pytest.approx([FIRST_HOPE, FIRST_HOPE / 2, FIRST_HOPE / 4, FIRST_HOPE / 4])


def test_hope_halves_with_every_fruitless_batch():
    curve, hopes = Curve((1.0,)), []
    for _ in range(4):
        hopes.append(1.0 - curve.next_s())
        curve = curve.after([2.0])
    assert hopes == pytest.approx([FIRST_HOPE, FIRST_HOPE / 2, FIRST_HOPE / 4, FIRST_HOPE / 8])


def test_the_kernel_that_moves_the_objective_most_is_chosen():
    a, b = ("a", "cpu"), ("b", "cpu")
    curves = {a: Curve((1.0,)), b: Curve((2.0,))}
    assert choose(curves, {a: 1.0, b: 1.0}, 3.0) == b
    assert choose(curves, {a: 4.0, b: 1.0}, 3.0) == a  # it is there four times
    assert choose(curves, {a: 1.0}, 3.0) == a  # b does not matter to the plan at all


def test_ties_go_by_name_and_what_is_not_worth_a_trial_is_left():
    a, b = ("a", "cpu"), ("b", "cpu")
    curves = {b: Curve((1.0,)), a: Curve((1.0,))}
    assert choose(curves, {a: 1.0, b: 1.0}, 2.0) == a
    assert choose(curves, {a: 1e-6, b: 1e-6}, 2.0) is None
    assert choose({}, {}, 1.0) is None
