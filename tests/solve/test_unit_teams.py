"""Units with teams of devices equal brute force, which knows nothing of teams as groups."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from tests.oracle_splits import best_split
from tests.solve.test_splits import drawn
from tvmhet.solve import Solution, Status, check, with_splits
from tvmhet.solve.objective import Objective
from tvmhet.solve.units import find_units


def random_case(seed):
    """A problem and its splits; memory is scarce in every other case."""
    return drawn(seed, tight=seed % 2 == 1, one_link=seed % 4 > 1)


def on(problem, counts):
    return replace(
        problem, groups=tuple(replace(g, num_devices=n) for g, n in zip(problem.groups, counts, strict=True))
    )


def together(rate, most):
    """The most results per second of every set of devices in any parts, each of them in one of `rate`."""
    best = {}
    for devices in itertools.product(*(range(n + 1) for n in most)):
        inside = [
            (r, tuple(a - b for a, b in zip(devices, part, strict=True)))
            for part, r in rate.items()
            if any(part) and all(b <= a for a, b in zip(devices, part, strict=True))
        ]
        best[devices] = max([0.0, *(r + best[rest] for r, rest in inside)])
    return best


def test_the_rate_of_every_set_of_devices_equals_brute_force():
    proved = 0
    for seed in range(60):
        problem, splits = random_case(seed)
        most = tuple(g.num_devices for g in problem.groups)
        rate = {}
        for counts in itertools.product(*(range(n + 1) for n in most)):
            if any(counts) and (period := best_split(on(problem, counts), splits)) < math.inf:
                rate[counts] = 1 / period
        units = find_units(with_splits(problem, splits), max_devices=sum(most))
        assert all(len(u.devices) == len(most) for u in units.units)
        found, expected = together({u.devices: u.rate_per_s for u in units.units}, most), together(rate, most)
        if units.complete:
            assert found == pytest.approx(expected)
            proved += len(splits) > 0 and len(units.units) > 0
        else:
            assert all(found[d] <= expected[d] * (1 + 1e-9) for d in expected)
    assert proved > 15


@pytest.mark.parametrize("seed", range(12))
def test_units_with_teams_pass_the_checker(seed):
    problem, splits = random_case(seed)
    both = with_splits(problem, splits)
    for unit in find_units(both, max_devices=6).units:
        check(both, Solution(unit.stages, unit.period_s, 0.0, Status.FEASIBLE, 0, "units"), Objective.THROUGHPUT)


@pytest.mark.parametrize("seed", range(24))
def test_a_latency_limit_is_kept(seed):
    problem, splits = random_case(seed)
    both, devices = with_splits(problem, splits), sum(g.num_devices for g in problem.groups)
    free = find_units(both, max_devices=devices).units
    if not free:
        return
    limit = 1.2 * min(u.latency_s for u in free)
    units = find_units(both, max_devices=devices, latency_limit_s=limit)
    assert units.units or not units.complete
    assert all(u.latency_s <= limit * (1 + 1e-9) for u in units.units)


def test_one_group_may_have_more_devices_than_sets_of_several():
    larger = 0
    for problem, splits in map(random_case, range(60)):
        both = with_splits(problem, splits)
        few = {u.devices: u.period_s for u in find_units(both, max_devices=1).units}
        total = sum(g.num_devices for g in problem.groups)
        every = {u.devices: u.period_s for u in find_units(both, max_devices=total).units}
        for group, known in enumerate(problem.groups):
            most = [known.num_devices if g == group else 0 for g in range(len(problem.groups))]
            more = {u.devices: u.period_s for u in find_units(both, max_devices=1, alone_up_to=most).units}
            of_it = {d: t for d, t in every.items() if sum(d) == d[group] > 1}
            assert more == pytest.approx(few | of_it)
            larger += len(of_it)
    assert larger > 10
