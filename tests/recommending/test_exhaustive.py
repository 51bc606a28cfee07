"""Recommendations equal exhaustive search: 8 blocks, 3 types, up to 6 devices, every kind of limit."""

import itertools
import math

import pytest

from tests.recommending.markets import every_fleet, exhaustive, random_case, random_job, space_of
from tvmhet.cluster import Running
from tvmhet.errors import Infeasible
from tvmhet.recommending.feasibility import refusal
from tvmhet.recommending.job import Goal, Job
from tvmhet.recommending.option import best, front, meets, value
from tvmhet.recommending.space import options_of
from tvmhet.solve.units import find_units

RUNNING = Running(startup_s=600.0, checkpoint_s=30.0)
NEAR = 1e-5  # a job of millions of samples also waits for one input's latency, which the oracle leaves out


def answers(seed: int):
    """(job, options, best, the exhaustive answer) of one random instance."""
    case = random_case(seed)
    table = every_fleet(case)
    if not any(table.values()):
        return None
    job = random_job(seed, table, case)
    space = space_of(case, RUNNING)
    units = find_units(case.problem, max_devices=6)
    options, complete = options_of(space, job, units.units)
    assert complete
    return job, options, best(job, options), exhaustive(case, job, RUNNING, table)


def compare(seed: int) -> str:
    """Check one instance; return whether it was solved, refused or empty."""
    found = answers(seed)
    if found is None:
        return "empty"
    job, options, chosen, expected = found
    if chosen is None:
        # refused only if nothing keeps the limits by more than the latency of one input
        tight = {n: v * (1 + NEAR if n == "throughput_per_s" else 1 - NEAR) for n, v in job.limits().items()}
        assert math.isinf(expected.best) or best(job, options, tight) is None
        text = str(refusal(job, options))
        assert all(n in text for n in job.limits()) and "nearest" in text
        return "refused"
    assert meets(chosen, job.limits())
    assert value(job, chosen) == pytest.approx(expected.best, rel=NEAR)
    single = best(job, [o for o in options if o.is_homogeneous])
    assert (math.inf if single is None else value(job, single)) == pytest.approx(expected.single, rel=NEAR)
    assert value(job, chosen) <= (math.inf if single is None else value(job, single))
    return "solved"


@pytest.mark.parametrize("seed", range(40))
def test_the_best_fleet_is_found(seed):
    compare(seed)


@pytest.mark.slow
def test_the_best_fleet_is_found_500_times():
    outcomes = [compare(seed) for seed in range(100, 600)]
    assert outcomes.count("solved") > 250 and outcomes.count("refused") > 20


@pytest.mark.parametrize("seed", range(0, 30, 2))
def test_a_latency_limit_is_kept(seed):
    case = random_case(seed)
    free = find_units(case.problem, max_devices=6)
    limit = 1.1 * min(u.latency_s for u in free.units)
    job = Job(Goal.PRICE, latency_ms=limit * 1e3)
    units = find_units(case.problem, max_devices=6, latency_limit_s=limit)
    options, _ = options_of(space_of(case, RUNNING), job, units.units)
    chosen = best(job, options)
    assert chosen is not None and chosen.latency_s <= limit * (1 + 1e-9)
    assert value(job, chosen) == pytest.approx(exhaustive(case, job, RUNNING).best)


@pytest.mark.parametrize("seed", range(10))
def test_the_front_holds_every_trade(seed):
    found = answers(seed)
    if found is None:
        return
    _, options, _, _ = found
    points = front(options)
    for option in options:
        assert any(p.time() <= option.time() * (1 + 1e-8) and p.cost() <= option.cost() * (1 + 1e-8) for p in points)
    for a, b in itertools.pairwise(points):
        assert a.cost() <= b.cost() and a.time() > b.time()


def test_contradicting_limits_are_named_with_what_each_would_have_to_be():
    case = random_case(0)
    space, units = space_of(case, RUNNING), find_units(case.problem, max_devices=6)
    free = Job(Goal.PRICE, 10_000_000)
    options, _ = options_of(space, free, units.units)
    fast, cheap = min(o.hours for o in options), min(o.usd for o in options)
    job = Job(Goal.PRICE, 10_000_000, fast * 1.0001, cheap * 1.0001)
    assert best(job, options) is None
    text = str(refusal(job, options))
    assert "contradict each other" in text
    assert text.count("nearest") == 1 and "deadline_h=" in text and "budget_usd=" in text
    for part in text.partition("nearest: ")[2].split("; or "):
        name, _, rest = part.partition("=")
        moved = {**job.limits(), name: float(rest.split()[0])}
        assert any(meets(o, moved) for o in options), part


def test_a_limit_out_of_reach_is_named():
    case = random_case(0)
    units = find_units(case.problem, max_devices=6)
    options, _ = options_of(space_of(case, RUNNING), Job(), units.units)
    job = Job(Goal.PRICE, throughput_per_s=1e9)
    error = refusal(job, options)
    assert isinstance(error, Infeasible)
    assert "throughput_per_s=1e+09 alone is out of reach" in str(error)
