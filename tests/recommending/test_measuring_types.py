"""Which types to keep money for: what is believed once trials are known, and the set that is chosen."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recommending.test_measuring import TYPES, belief, prices, values_of
from tvmhet.recommending.measuring import NOISE, choose_measurements
from tvmhet.recommending.measuring_types import _once_known, trials, types_to_start


def chosen(made, left, price, start=0.1, seed=0):
    """The types to start for `left` USD where an hour of each costs `price`."""
    tried = trials(made, prices(start), set())
    errors = made.draw(np.random.default_rng(seed), 128)
    return types_to_start(made, tried, left, errors, values_of(made, price), NOISE), tried


def test_what_is_believed_is_what_conditioning_on_each_result_gives():
    made = belief(kernels=3)
    pairs = [("a", "k0"), ("a", "k2"), ("b", "k1")]
    errors = made.draw(np.random.default_rng(0), 5)
    once = _once_known(made, pairs, errors, NOISE)
    for draw in range(5):
        after = made
        for p in pairs:
            after = after.after(p, after.seconds[p] * math.exp(errors[p][draw]))
        expected = after.mean + np.diag(after.cov) / 2
        np.testing.assert_allclose([once[p][draw] for p in made.pairs], expected, atol=1e-9)


def test_a_type_is_tried_by_its_longest_kernels():
    made = belief(kernels=4)
    seconds = {p: 1e-3 * (1 + 5 * (p[1] == "k2")) for p in made.pairs}
    tried = trials(type(made)(made.pairs, seconds, made.mean, made.cov), prices(), {"b"})
    assert set(tried) == {"a", "c"} and tried["a"].pairs == (("a", "k2"),)
    assert tried["a"].usd == pytest.approx(prices().usd("a", 6e-3, False))


def test_only_types_that_could_change_the_choice_are_started():
    made = belief()
    assert set(chosen(made, 10.0, {"a": 1.0, "b": 1.02, "c": 90.0})[0]) <= {"a", "b"}
    assert chosen(made, 10.0, {"a": 1.0, "b": 90.0, "c": 90.0})[0] == ()


@settings(deadline=None, max_examples=30)
@given(st.floats(0.0, 0.5), st.tuples(*[st.floats(0.8, 1.25)] * 3), st.integers(0, 9))
def test_what_is_started_is_paid_for_and_not_worse_than_any_one_type(left, price, seed):
    made = belief()
    by_type = dict(zip(TYPES, price, strict=True))
    found, tried = chosen(made, left, by_type, seed=seed)
    assert math.fsum(tried[n].usd for n in found) <= left
    errors = made.draw(np.random.default_rng(seed), 128)

    def worth(names):
        pairs = [p for n in names for p in tried[n].pairs]
        drawn = values_of(made, by_type)(_once_known(made, pairs, errors, NOISE))
        return drawn.mean(axis=1).min() / drawn.min(axis=0).mean() - 1

    for name in TYPES:
        if tried[name].usd <= left:
            assert worth(found) >= worth([name]) - 3e-4


def test_money_is_kept_for_the_second_machine():
    """Two types are close; details of the first must not spend what starting the second takes."""
    made = belief(kernels=6)
    dear = prices(start=1.0, per_h=(9.0, 9.0, 9.0))
    campaign = choose_measurements(made, dear, 2.032, values_of(made, {"a": 1.0, "b": 1.0, "c": 9.0}))
    assert {c.device_type for c in campaign.choices} == {"a", "b"}
