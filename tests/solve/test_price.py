"""Prices: the front against exhaustive search, and the laws of money."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import networkx as nx
import pytest

from tests.oracle import allowed, covers, least_memory, partitions, quotient, replica_counts, value
from tests.solve.problems import random_problem
from tvmhet.errors import BadInput
from tvmhet.solve import Problem
from tvmhet.solve.price import price_front


def priced(seed: int) -> Problem:
    """A small problem whose groups have prices."""
    problem = random_problem(seed, most_nodes=4, most_groups=2)
    return replace(problem, groups=tuple(replace(g, usd_per_h=1.0 + 1.5 * i) for i, g in enumerate(problem.groups)))


def all_trades(problem: Problem) -> list[tuple[float, float]]:
    """(period, rent) of every legal plan."""
    trades, memory = [], {}
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
                for replicas in replica_counts(problem, groups, False):
                    rent = sum(r * problem.groups[g].usd_per_h for r, g in zip(replicas, groups, strict=True))
                    trades.append((value(problem, stages, groups, replicas, False), rent))
    return trades


@pytest.mark.parametrize("seed", range(25))
def test_the_front_holds_every_trade(seed):
    problem = priced(seed)
    trades, front = all_trades(problem), price_front(problem)
    if not trades:
        assert front.reason
        return
    for period, rent in trades:
        best = front.cheapest_rent(max_period_s=period * (1 + 2e-3))
        assert best is not None
        assert best.usd_per_h <= rent * (1 + 1e-9)
    for plan in front.plans:
        assert any(t == pytest.approx(plan.period_s) and r == pytest.approx(plan.usd_per_h) for t, r in trades)


def test_a_deadline_and_a_budget_pick_from_the_front():
    front = price_front(priced(3))
    slow, fast = front.plans[0], front.plans[-1]
    assert front.fastest() == fast
    assert front.cheapest_rent() == slow
    assert front.fastest(max_usd_per_h=slow.usd_per_h) == slow
    assert front.cheapest_rent(max_period_s=fast.period_s) == fast
    assert front.cheapest_input(max_usd_per_h=0.0) is None
    least = front.cheapest_input()
    assert least.usd_per_input == pytest.approx(min(p.usd_per_h * p.period_s / 3600 for p in front.plans))


def test_a_lower_price_never_hurts():
    for seed in range(20):
        problem = priced(seed)
        cheaper = replace(problem, groups=tuple(replace(g, usd_per_h=g.usd_per_h / 2) for g in problem.groups))
        before, after = price_front(problem).cheapest_input(), price_front(cheaper).cheapest_input()
        if before is not None:
            assert after.usd_per_input <= before.usd_per_input * (1 + 1e-9)


def test_no_plan_has_a_reason():
    problem = priced(1)
    problem = replace(problem, kernels=tuple(replace(k, time_s=(math.inf,) * len(k.time_s)) for k in problem.kernels))
    assert "no kernel" in price_front(problem).reason


def test_a_job_has_a_deadline_or_a_budget():
    front = price_front(priced(3))
    slow, fast = front.plans[0], front.plans[-1]
    assert front.cheapest_job(100) == front.cheapest_input()
    assert front.cheapest_job(100, deadline_s=100 * fast.period_s) == fast
    assert front.cheapest_job(100, deadline_s=99 * fast.period_s) is None
    assert front.fastest_job(100, budget_usd=1e9) == fast
    cheapest = front.cheapest_input()
    assert cheapest is not None
    within = front.fastest_job(100, budget_usd=100 * cheapest.usd_per_input)
    assert within is not None
    assert within.usd_per_input == pytest.approx(cheapest.usd_per_input)
    assert front.fastest_job(100, budget_usd=99 * cheapest.usd_per_input) is None
    assert front.cheapest_job(1, max_usd_per_h=slow.usd_per_h / 2) is None
    with pytest.raises(BadInput, match="0 inputs"):
        front.cheapest_job(0)
