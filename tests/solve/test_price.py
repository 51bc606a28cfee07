"""Prices: the front against exhaustive search, and the laws of money."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import networkx as nx
import pytest

from tests.oracle import allowed, covers, least_memory, partitions, quotient, replica_counts, value
from tests.solve.problems import random_problem
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
        assert any(p.period_s <= period * (1 + 2e-3) and p.usd_per_h <= rent * (1 + 1e-9) for p in front.plans)
    for plan in front.plans:
        assert any(t == pytest.approx(plan.period_s) and r == pytest.approx(plan.usd_per_h) for t, r in trades)


def test_the_cheapest_input_is_the_least_product_of_rent_and_period():
    inside = 0
    for seed in range(25):
        front = price_front(priced(seed))
        if not front.plans:
            continue
        least = front.cheapest_input()
        assert least.usd_per_input == pytest.approx(min(p.usd_per_h * p.period_s / 3600 for p in front.plans))
        inside += least is not front.plans[0]
    assert inside > 0  # not always on the cheapest devices


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
    front = price_front(problem)
    assert "no kernel" in front.reason and front.cheapest_input() is None
