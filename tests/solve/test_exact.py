"""`solve` against exhaustive search, hundreds of instances by default and thousands with `-m slow`.

The best value must lie between the bound and the objective of every answer, and all of these are small enough to be
proved, whether memory decides or not. Each survey prints how often that was so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from tests.oracle import brute_force
from tests.solve.problems import random_problem
from tvmhet.solve import IN_SECONDS, Objective, Problem, Status, check, solve

BOTH = pytest.mark.parametrize("objective", IN_SECONDS)
_SAME = 1e-9  # relative: sums taken in another order


@dataclass
class Survey:
    """How many instances had a plan, how many answers were the best, and how many were proved to be."""

    feasible: int = 0
    best: int = 0
    proved: int = 0

    def add(self, problem: Problem, objective: Objective) -> None:
        """Compare one answer with exhaustive search."""
        solution = solve(problem, objective)
        check(problem, solution, objective)
        best = brute_force(problem, objective is Objective.LATENCY)
        assert (solution.status is Status.INFEASIBLE) == math.isinf(best)
        if math.isinf(best):
            return
        assert solution.lower_bound <= best * (1 + _SAME)
        assert solution.objective >= best * (1 - _SAME)
        same = solution.objective <= best * (1 + _SAME)
        assert same or solution.status is Status.FEASIBLE
        self.feasible += 1
        self.best += same
        self.proved += solution.status is Status.OPTIMAL


def survey(problems: Iterable[Problem], objective: Objective) -> Survey:
    """Compare and count."""
    out = Survey()
    for problem in problems:
        out.add(problem, objective)
    print(f"{objective.value}: {out.proved} of {out.feasible} proved, {out.best} best")
    return out


def ten_operators(seed: int) -> Problem:
    """Up to 10 operators, two fused kernels, up to 2 devices: what exhaustive search can still do."""
    problem = random_problem(seed, most_nodes=10, most_groups=3, most_devices=2, one_link=False)
    single = [k for k in problem.kernels if len(k.nodes) == 1]
    return replace(problem, kernels=(*single, *[k for k in problem.kernels if len(k.nodes) > 1][:2]))


@BOTH
def test_answers_are_the_best_where_memory_is_ample(objective):
    found = survey(
        (random_problem(s, most_nodes=5, most_groups=3, most_devices=6, one_link=s % 2 == 0) for s in range(90)),
        objective,
    )
    assert found.best == found.proved == found.feasible > 60


@BOTH
def test_answers_are_the_best_where_memory_is_tight(objective):
    found = survey(
        (random_problem(s, most_nodes=5, most_groups=3, tight=True, one_link=False) for s in range(60)), objective
    )
    assert found.best == found.proved == found.feasible > 25


@pytest.mark.slow
@BOTH
def test_thousands_of_answers_are_the_best_where_memory_is_ample(objective):
    shapes = {"most_nodes": 5, "most_groups": 3, "most_devices": 6}
    found = survey((random_problem(s, one_link=s % 2 == 0, **shapes) for s in range(1000, 2500)), objective)
    assert found.best == found.proved == found.feasible


@pytest.mark.slow
@BOTH
def test_hundreds_of_answers_are_the_best_where_memory_is_tight(objective):
    shapes = {"most_nodes": 6, "most_groups": 3, "tight": True, "one_link": False}
    found = survey((random_problem(s, **shapes) for s in range(1000, 1250)), objective)
    assert found.best == found.proved == found.feasible


@pytest.mark.slow
@BOTH
def test_ten_operators(objective):
    found = survey((ten_operators(s) for s in range(8)), objective)
    assert found.best == found.proved == found.feasible
