"""How sure a recommendation is: laws of the draws, and cases whose answer is known."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvmhet.cluster import InstanceOffer, Running, device_type
from tvmhet.recommending.job import Goal, Job
from tvmhet.recommending.option import make_option
from tvmhet.recommending.uncertainty import (
    SHARES,
    KernelBelief,
    confidence,
    draw,
    spread,
    unit_periods,
    values,
)
from tvmhet.solve.solution import SolvedStage
from tvmhet.solve.units import Unit


def kernel(device, key, sigma=0.3, measured=False, family="conv2d", seconds=1.0):
    return KernelBelief(seconds, sigma, device, family, key, "measured" if measured else "learned")


def unit(group, seconds=1.0, transfer=0.0):
    stage = SolvedStage((0,), group, 1, seconds + transfer, seconds, transfer, 1)
    return Unit((stage,), tuple(int(g == group) for g in range(2)), seconds + transfer, seconds + transfer)


def option(job, name, usd_per_h, pipelines, rate):
    offer = InstanceOffer(name, device_type(name), 1, usd_per_h, 9)
    return make_option(job, Running(), [(offer, 1)], pipelines, rate, 1.0)


def two_options(sigma, price_b=1.5, job=Job(Goal.PRICE)):  # noqa: B008
    """t4 at 1 USD/h and l4 at `price_b`, both 1 input/s as predicted."""
    beliefs = {(0, 0): kernel("t4", "k", sigma), (0, 1): kernel("l4", "k", sigma)}
    draws = draw(list(beliefs.values()), 4000, seed=1)
    timed = {u: unit_periods(unit(u), beliefs, draws, [0.0, 0.0]) for u in (0, 1)}
    options = [option(job, "t4", 1.0, ((0, 1),), 1.0), option(job, "l4", price_b, ((1, 1),), 1.0)]
    drawn, kept = values(job, Running(), options, {u: t[0] for u, t in timed.items()}, {0: timed[0][1], 1: timed[1][1]})
    return options, drawn, kept


def test_shares_add_up():
    assert math.fsum(getattr(SHARES, f) for f in SHARES.__slots__) == pytest.approx(1.0)


def test_the_interval_is_the_middle_80_percent():
    sigma = spread(1.0, 0.7, 1.4)
    drawn = draw([kernel("t4", "k", sigma)], 20000, seed=0).errors["t4", "k"]
    assert float(np.std(drawn)) == pytest.approx(sigma, rel=0.03)
    inside = np.abs(drawn) <= math.log(1.4 / 0.7) / 2
    assert inside.mean() == pytest.approx(0.8, abs=0.01)


def test_errors_are_shared_as_stated():
    rows = [kernel("t4", "a"), kernel("t4", "b"), kernel("t4", "c", family="linear"), kernel("l4", "a"),
            kernel("l4", "z", measured=True)]  # fmt: skip
    errors = draw(rows, 40000, seed=0).errors

    def corr(p, q):
        return float(np.corrcoef(errors[p], errors[q])[0, 1])

    assert corr(("t4", "a"), ("t4", "b")) == pytest.approx(
        SHARES.everything + SHARES.device_type + SHARES.family, abs=0.02
    )
    assert corr(("t4", "a"), ("t4", "c")) == pytest.approx(SHARES.everything + SHARES.device_type, abs=0.02)
    assert corr(("t4", "a"), ("l4", "a")) == pytest.approx(SHARES.everything + SHARES.kernel, abs=0.02)
    assert corr(("l4", "a"), ("l4", "z")) == pytest.approx(0.0, abs=0.02)


def test_without_spread_the_choice_is_certain():
    options, drawn, kept = two_options(0.0)
    sure = confidence(options, 0, drawn, kept)
    assert (sure.probability, sure.regret, sure.regret_95, sure.keeps_limits) == (1.0, 0.0, 0.0, 1.0)
    assert sure.rivals == () and sure.low == sure.high == pytest.approx(1.0)


def test_two_independent_options_match_the_closed_form():
    """log values differ by N(0, 2 sigma^2 x the parts that types do not share); right: not 5 % dearer."""
    sigma, ratio = 0.3, 1.2
    options, drawn, kept = two_options(sigma, ratio)
    sure = confidence(options, 0, drawn, kept)
    apart = math.sqrt(2 * (SHARES.device_type + SHARES.family + SHARES.own)) * sigma
    right = 0.5 * math.erfc(-(math.log(ratio) + math.log(1.05)) / apart / math.sqrt(2))
    assert sure.probability == pytest.approx(right, abs=0.025)
    assert [o.short for o, _ in sure.rivals] == ["1 x l4"]
    assert sure.rivals[0][1] == pytest.approx(1 - right, abs=0.025)


@given(st.floats(0.01, 0.5), st.floats(1.1, 2.0))
def test_wider_intervals_are_never_surer(sigma, price):
    def probability(s):
        options, drawn, kept = two_options(s, price)
        return confidence(options, 0, drawn, kept).probability

    assert probability(sigma) >= probability(2 * sigma) - 1e-9


def test_an_option_that_misses_its_limit_is_charged_and_not_right():
    job = Job(Goal.PRICE, throughput_per_s=0.99)
    options, drawn, kept = two_options(0.3, 1.5, job)
    sure = confidence(options, 0, drawn, kept)
    assert sure.keeps_limits == pytest.approx(0.5, abs=0.05)
    assert sure.probability <= sure.keeps_limits
    assert (drawn[0][~kept[0]] > 1.0).all() and (drawn[0][kept[0]] == 1.0).all()


def test_transfers_keep_their_time():
    beliefs = {(0, 0): kernel("t4", "k", 0.5)}
    draws = draw(list(beliefs.values()), 100, seed=0)
    period, latency = unit_periods(unit(0, 1.0, transfer=2.0), beliefs, draws, [0.0, 0.0])
    expected = np.exp(draws.errors["t4", "k"]) + 2.0
    np.testing.assert_allclose(period, expected)
    np.testing.assert_allclose(latency, expected)


def test_the_same_seed_gives_the_same_draws():
    rows = [kernel("t4", "a"), kernel("l4", "b")]
    one, two, other = (draw(rows, 50, seed=s).errors for s in (3, 3, 4))
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])
        assert not np.array_equal(one[name], other[name])
