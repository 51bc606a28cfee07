"""The cheapest plan within limits, against exhaustive search over all plans."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import networkx as nx
import pytest

from tests.oracle import allowed, covers, least_memory, partitions, quotient, replica_counts, value
from tests.solve.problems import random_problem
from tests.solve.test_iteration_price import SEED
from tests.solve.test_iteration_price import priced as priced_iteration
from tests.solve.test_price import priced
from tvmhet.errors import BadInput
from tvmhet.solve import Objective, Problem, Status, check, check_training, simulate_training, solve, solve_iteration
from tvmhet.solve.cheapest import cheapest
from tvmhet.solve.cheapest_exact import every_chain
from tvmhet.solve.cheapest_iteration import cheapest_iteration, rent_of
from tvmhet.solve.price_limits import PriceLimits, Trade, cheapest_trade, nearest
from tvmhet.solve.problem import DeviceGroup, Kernel, Link

_STEP = 1 + 2e-3  # the front's own, twice


def every_plan(problem: Problem) -> list[tuple[float, float, float]]:
    """(period, rent, latency) of every legal plan."""
    out, memory = [], {}
    for cover in covers(problem):
        for stages in partitions(cover):
            nodes = [[v for k in s for v in problem.kernels[k].nodes] for s in stages]
            kernels = [problem.kernels[k].nodes for k in cover]
            if not all(nx.is_directed_acyclic_graph(quotient(problem, b)) for b in (kernels, nodes)):
                continue
            memory |= {tuple(s): least_memory(problem, s) for s in stages}
            for groups in itertools.product(range(len(problem.groups)), repeat=len(stages)):
                if not allowed(problem, stages, nodes, groups, memory):
                    continue
                soon = value(problem, stages, groups, (1,) * len(stages), True)
                for replicas in replica_counts(problem, groups, False):
                    rent = sum(r * problem.groups[g].usd_per_h for r, g in zip(replicas, groups, strict=True))
                    out.append((value(problem, stages, groups, replicas, False), rent, soon))
    return out


def least_usd(plans, limits: PriceLimits) -> float:
    """The least price of one input within the limits, of all plans; inf if none keeps them."""
    best = math.inf
    for period, rent, soon in plans:
        usd = rent * period / 3600
        time, paid = (soon, rent) if limits.samples is None else (limits.samples * period, limits.samples * usd)
        kept = time <= limits.deadline_s * (1 + 1e-9) and paid <= limits.budget_usd * (1 + 1e-9)
        if kept and period * limits.throughput_per_s <= 1 + 1e-9:
            best = min(best, usd)
    return best


def compare(problem: Problem, plans, limits: PriceLimits, loose: PriceLimits) -> None:
    """The answer is that of all plans within `limits`, up to the front's step, which `loose` knows."""
    found = cheapest(problem, limits)
    check(problem, found, Objective.COST)
    if found.status is Status.INFEASIBLE:
        assert math.isinf(least_usd(plans, limits)) and found.reason
        return
    assert least_usd(plans, loose) * (1 - 1e-9) <= found.objective <= least_usd(plans, limits) * _STEP
    assert found.lower_bound <= least_usd(plans, loose) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_without_limits_it_is_the_least_price_of_all_plans(seed):
    problem = priced(seed)
    compare(problem, every_plan(problem), PriceLimits(), PriceLimits())


@pytest.mark.parametrize("seed", [*range(30), 9000014, 9000028, 9200013])  # the last three: not by the front
def test_limits_are_kept_at_the_least_price(seed):
    problem = priced(seed)
    plans = every_plan(problem)
    if not plans:
        return
    fastest, soonest = min(p for p, _, _ in plans), min(s for _, _, s in plans)
    for factor in (1.0, 1.3, 2.0):
        # a front's neighbours differ by up to its step, so a limit between them may be missed by as much
        for limits in (
            PriceLimits(throughput_per_s=1 / (fastest * factor * _STEP)),
            PriceLimits(deadline_s=soonest * factor),
            PriceLimits(100, deadline_s=100 * fastest * factor * _STEP),
        ):
            compare(problem, plans, limits, limits)
    nothing = PriceLimits(throughput_per_s=1.01 / fastest) if fastest > 0 else PriceLimits(budget_usd=1e-12)
    refused = cheapest(problem, nothing)
    assert refused.status is Status.INFEASIBLE
    assert "price: no plan was found that keeps" in refused.reason


@pytest.mark.parametrize("seed", range(30))
def test_few_pipelines_are_proved(seed):
    problem = priced(seed)
    listed = cheapest(problem)
    plans = every_plan(problem)
    if not plans:
        assert listed.status is Status.INFEASIBLE
        return
    assert listed.status is Status.OPTIMAL
    assert listed.objective == pytest.approx(least_usd(plans, PriceLimits()), rel=1e-9)
    assert listed.lower_bound == listed.objective
    assert every_chain(problem, 0) is None


def test_of_plans_that_cost_the_same_the_fastest_is_taken():
    """Each device more costs as much as it does: all of them, though sums of thousands are rounded."""
    many = DeviceGroup("g", 5000, 1e9, usd_per_h=1.1)
    problem = Problem(1, (Kernel((0,), (24.0,)),), (), (), (many,), ((Link(),),), (Link(),))
    (stage,) = cheapest(problem).stages
    assert stage.num_replicas == 5000


def test_a_deadline_is_kept_cheaply_over_lines_between_regions():
    """Two cheap devices together answer in time; neither does alone, and the dear one does."""
    problem = random_problem(5022, most_nodes=4, most_groups=3, most_devices=4, regions=True)
    prices = (1.0, 2.5, 0.7)
    problem = replace(
        problem, groups=tuple(replace(g, usd_per_h=x) for g, x in zip(problem.groups, prices, strict=True))
    )
    assert problem.wires
    limits = PriceLimits(deadline_s=18.4)
    compare(problem, every_plan(problem), limits, limits)
    assert len(cheapest(problem, limits).stages) == 2


@pytest.mark.parametrize("seed", range(5000, 5040))
def test_three_groups_and_lines_and_two_limits(seed):
    problem = random_problem(seed, most_nodes=4, most_groups=3, one_link=seed % 2 == 0, regions=seed % 3 == 0)
    groups = tuple(replace(g, usd_per_h=(1.0, 2.5, 0.7)[i]) for i, g in enumerate(problem.groups))
    problem = replace(problem, groups=groups)
    plans = every_plan(problem)
    if not plans:
        assert cheapest(problem).status is Status.INFEASIBLE
        return
    period, soon = 2 * min(p for p, _, _ in plans) + 1e-9, 1.5 * min(s for _, _, s in plans) + 1e-9
    limits = PriceLimits(deadline_s=soon, throughput_per_s=1 / period)
    compare(problem, plans, limits, limits)


def test_the_nearest_limit_can_be_kept():
    problem = priced(3)
    refused = cheapest(problem, PriceLimits(throughput_per_s=1e6))
    nearest_rate = float(refused.reason.split("a throughput floor of ")[1].split(" /s")[0])
    kept = cheapest(problem, PriceLimits(throughput_per_s=nearest_rate))
    assert kept.status is not Status.INFEASIBLE
    least = cheapest(problem, PriceLimits(100, budget_usd=1e-9)).reason
    budget = float(least.split("a budget of ")[1].split(" USD")[0])
    assert cheapest(problem, PriceLimits(100, budget_usd=budget)).status is not Status.INFEASIBLE


def test_two_limits_that_exclude_each_other_are_both_named():
    trades = [Trade("slow", 2.0, 10.0, 1.0), Trade("fast", 1.0, 40.0, 8.0)]
    limits = PriceLimits(None, 1.0, 2.0, 0.0)
    assert cheapest_trade(trades, limits) is None
    text = nearest(trades, limits)
    assert "one input within 1 s and 2 USD per hour; give a deadline of 2.00002 s or a budget of 8.00008 USD" in text
    assert "loosen more than one limit" in nearest(trades, PriceLimits(None, 0.5, 0.5, 0.0))


@pytest.mark.parametrize("bad", [{"samples": 0}, {"deadline_s": 0.0}, {"budget_usd": -1.0}, {"throughput_per_s": -1.0}])
def test_limits_that_make_no_sense_are_refused(bad):
    with pytest.raises(BadInput):
        PriceLimits(**bad)


def test_a_deadline_that_binds_is_kept_by_branches_on_two_devices():
    problem = random_problem(6229, most_nodes=4, most_groups=3, most_devices=4, one_link=False)
    problem = replace(problem, groups=tuple(replace(g, usd_per_h=1.0) for g in problem.groups))
    plans = every_plan(problem)
    limits = PriceLimits(deadline_s=1.15 * min(soon for _, _, soon in plans))
    compare(problem, plans, limits, limits)


def test_solve_does_not_know_prices():
    with pytest.raises(BadInput, match="cheapest"):
        solve(priced(3), Objective.COST)


@pytest.mark.parametrize("seed", range(12))
def test_a_cheap_iteration_costs_no_more_than_the_fastest(seed):
    problem = priced_iteration(seed)
    fastest, found = solve_iteration(problem), cheapest_iteration(problem)
    assert (found.status is Status.INFEASIBLE) == (fastest.status is Status.INFEASIBLE)
    if found.status is Status.INFEASIBLE:
        return
    check_training(problem, found)
    usd = rent_of(problem, found.stages) * found.iteration_s
    counts_s = max(fastest.iteration_s, simulate_training(problem, fastest).iteration_s)
    assert usd <= rent_of(problem, fastest.stages) * counts_s * 1.05  # the step of the front
    assert found.lower_bound_s <= found.iteration_s


def test_an_iteration_keeps_its_deadline_as_simulated_and_a_job_its_budget():
    problem = priced_iteration(SEED)
    free = cheapest_iteration(problem)
    fastest = solve_iteration(problem)
    counts_s = max(fastest.iteration_s, simulate_training(problem, fastest).iteration_s)
    kept = cheapest_iteration(problem, PriceLimits(deadline_s=counts_s))
    assert max(kept.iteration_s, simulate_training(problem, kept).iteration_s) <= counts_s * (1 + 1e-9)
    assert rent_of(problem, kept.stages) >= rent_of(problem, free.stages)
    late = cheapest_iteration(problem, PriceLimits(deadline_s=counts_s / 2))
    assert late.status is Status.INFEASIBLE and "give a deadline of" in late.reason
    usd = rent_of(problem, free.stages) * free.iteration_s / 3600
    job = replace(PriceLimits(10 * problem.global_batch), budget_usd=10.01 * usd)
    assert cheapest_iteration(problem, job).stages == free.stages
    assert "budget" in cheapest_iteration(problem, replace(job, budget_usd=usd)).reason
