"""Units and fleets equal brute force; the integer program agrees with the whole table; nothing is double-counted."""

import math

import pytest

from tests.solve.fleets import every_fleet, random_case, rates
from tvmhet.solve import Solution, Status, check
from tvmhet.solve.fleet import Bundle, FleetProblem, _grid, fleets
from tvmhet.solve.objective import Objective
from tvmhet.solve.units import find_units, worth_having


def solved(case, latency_limit=math.inf):
    units = find_units(case.problem, max_devices=6, latency_limit_s=latency_limit)
    demand = tuple(u.devices for u in units.units)
    return units, FleetProblem(demand, tuple(u.rate_per_s for u in units.units), case.bundles)


@pytest.mark.parametrize("seed", range(40))
def test_the_rate_of_every_fleet_equals_brute_force(seed):
    case = random_case(seed)
    expected = every_fleet(case)
    units, problem = solved(case)
    found, complete = fleets(problem)
    assert units.complete and (complete or not units.units)
    for fleet in found:
        assert fleet.rate_per_s == pytest.approx(expected[fleet.instances])
    best = {count: max([0.0, *(f.rate_per_s for f in found if below(f.instances, count))]) for count in expected}
    assert best == pytest.approx(expected)


def below(a, b):
    return all(x <= y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("seed", range(0, 40, 2))
def test_a_latency_limit_is_kept_and_costs_no_more_than_it_must(seed):
    case = random_case(seed)
    free, _ = solved(case)
    limit = 1.2 * min(u.latency_s for u in free.units)
    expected = every_fleet(case, limit)
    units, problem = solved(case, limit)
    assert all(u.latency_s <= limit * (1 + 1e-9) for u in units.units)
    found, _ = fleets(problem)
    best = {count: max([0.0, *(f.rate_per_s for f in found if below(f.instances, count))]) for count in expected}
    assert best == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(12))
def test_units_pass_the_checker(seed):
    case = random_case(seed)
    for unit in solved(case)[0].units:
        answer = Solution(unit.stages, unit.period_s, 0.0, Status.FEASIBLE, 0, "units")
        check(case.problem, answer, Objective.THROUGHPUT)


@pytest.mark.parametrize("seed", range(12))
def test_the_integer_program_finds_the_cheapest_fleet_of_the_whole_table(seed):
    case = random_case(seed)
    _, problem = solved(case)
    found, _ = fleets(problem)
    if not found:
        return
    price = lambda f: sum(n * b.cost for n, b in zip(f.instances, case.bundles, strict=True))  # noqa: E731
    asked = [f.rate_per_s * 0.999 for f in found]
    made = _grid(problem, asked, ())
    for rate in asked:
        table = min(price(f) for f in found if f.rate_per_s >= rate)
        assert min(price(f) for f in made if f.rate_per_s >= rate) == pytest.approx(table, rel=1e-6)


def test_devices_that_do_better_apart_are_no_unit():
    assert worth_having({(1, 0): 8.0, (0, 1): 2.5, (1, 1): 10.2}) == [(0, 1), (1, 0)]
    assert worth_having({(1, 0): 8.0, (0, 1): 2.5, (1, 1): 10.6}) == [(0, 1), (1, 0), (1, 1)]
    assert worth_having({(2, 0): 5.0, (1, 1): 5.0, (3, 1): 9.9, (2, 1): 5.0}) == [(1, 1), (2, 0)]


def test_a_fleet_uses_no_device_twice():
    problem = FleetProblem(((1, 0), (2, 1)), (1.0, 5.0), (Bundle(4, 2, 1.0), Bundle(1, 3, 1.0)))
    for fleet in fleets(problem)[0]:
        for o, bundle in enumerate(problem.bundles):
            taken = sum(n * problem.demand[u][o] for u, n in fleet.units)
            assert taken <= bundle.size * fleet.instances[o]
        assert fleet.rate_per_s == pytest.approx(sum(n * problem.rate_per_s[u] for u, n in fleet.units))


def test_the_oracle_knows_that_more_devices_are_never_slower():
    table = rates(random_case(4))
    assert all(table[a] <= table[b] + 1e-12 for a in table for b in table if below(a, b))


def test_the_fastest_fleet_within_a_cost_is_found():
    _, problem = solved(random_case(2))
    found, _ = fleets(problem)
    cost = lambda f: sum(n * b.cost for n, b in zip(f.instances, problem.bundles, strict=True))  # noqa: E731
    for limit in sorted(cost(f) for f in found):
        made = max(f.rate_per_s for f in _grid(problem, (), (limit,)) if cost(f) <= limit * (1 + 1e-9))
        assert made == pytest.approx(max(f.rate_per_s for f in found if cost(f) <= limit * (1 + 1e-9)), rel=1e-6)


def test_a_cost_that_pays_for_nothing_makes_no_fleet():
    _, problem = solved(random_case(2))
    assert all(f.units for f in _grid(problem, (), (1e-9,)))
