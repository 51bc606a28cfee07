"""Fronts of training time against rent."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.solve.training_problems import random_iteration
from tvmhet.solve import IterationProblem, Status, solve_iteration
from tvmhet.solve.iteration_price import iteration_front

#: A draw whose front has several points.
SEED = 5


def priced(seed: int) -> IterationProblem:
    """A random problem without interleaving, whose groups cost 1, 2, ... USD per hour."""
    problem = random_iteration(seed, most_nodes=4, most_devices=3)
    groups = tuple(replace(g, usd_per_h=1.0 + i) for i, g in enumerate(problem.groups))
    options = tuple(replace(o, forward=replace(o.forward, groups=groups)) for o in problem.options)
    plain = tuple(s for s in problem.schedules if s.value != "interleaved") or problem.schedules
    return replace(problem, options=options, schedules=plain)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 100_000))
def test_the_front_ends_at_the_fastest_plan_and_each_point_is_the_best_of_its_devices(seed):
    problem = priced(seed)
    front = iteration_front(problem, step=1e-6)
    best = solve_iteration(problem)
    if best.status is Status.INFEASIBLE or not front.plans:
        return
    rents = [p.usd_per_h for p in front.plans]
    assert rents == sorted(set(rents))
    assert [p.iteration_s for p in front.plans] == sorted((p.iteration_s for p in front.plans), reverse=True)
    fastest = front.fastest()
    assert fastest is not None
    assert fastest.iteration_s >= best.iteration_s * (1 - 1e-9)
    assert fastest.iteration_s <= best.iteration_s * 1.05


def test_deadlines_and_budgets_pick_from_the_front():
    front = iteration_front(priced(SEED), step=1e-6)
    cheapest, fastest = front.cheapest(), front.fastest()
    assert cheapest is not None and fastest is not None
    assert cheapest.usd_per_iteration <= fastest.usd_per_iteration
    assert front.fastest(max_usd_per_h=0.5) is None
    assert front.cheapest(max_iteration_s=fastest.iteration_s) == fastest
    job = front.job(10, deadline_s=10 * fastest.iteration_s, budget_usd=1e9)
    assert job == fastest
    assert front.job(10, budget_usd=cheapest.usd_per_iteration * 9) is None
    assert cheapest.usd_per_iteration == pytest.approx(cheapest.usd_per_h * cheapest.iteration_s / 3600)
