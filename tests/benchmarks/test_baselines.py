"""The other planners: fair, legal, and never better than ours where ours is proved."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.planner.baselines import load_baselines
from benchmarks.planner.baselines_general import problem_baselines
from benchmarks.planner.baselines_latency import latency_baselines
from tests.solve.problems import random_problem
from tests.solve.test_offload import makespan, random_offload
from tvmhet.solve import IN_SECONDS, solve
from tvmhet.solve.favourites import favourite_children, sct
from tvmhet.solve.list_schedule import Slot, Tasks
from tvmhet.solve.loads import LoadProblem, LoadType
from tvmhet.solve.offload import call_latency, offload


def chain(count: int, memory: float = math.inf) -> LoadProblem:
    """Six nodes in a row, free to move."""
    edges = tuple((v, v + 1) for v in range(5))
    types = (LoadType("acc", count, memory), LoadType("host", 1, math.inf, 0.0))
    return LoadProblem(((1.0, 10.0),) * 6, (1.0,) * 6, (0.0,) * 6, edges, types)


def test_baselines_of_a_chain_are_known():
    values = load_baselines(chain(3))
    assert values["one device"] == pytest.approx(6.0)
    assert values["equal split"] == values["PipeDream's DP"] == values["best homogeneous"] == pytest.approx(2.0)
    values = latency_baselines(chain(3))
    assert values["one device"] == values["HEFT"] == values["ETF"] == values["SCT"] == pytest.approx(6.0)
    assert latency_baselines(chain(2, 3.0))["greedy by memory"] == pytest.approx(6.0)


@pytest.mark.parametrize("seed", range(30))
def test_no_latency_baseline_beats_the_optimum(seed):
    problem = random_offload(seed)
    plan = offload(problem, moves=4000, rounds=2, seeds=2, bound_s=0.2)
    assert plan.objective <= min(latency_baselines(problem).values()) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_a_placement_is_worth_what_an_exhaustive_search_says(seed):
    problem = random_offload(seed)
    value = call_latency(problem)
    for code in range(40):
        home = [(code // 3**v) % (1 + problem.types[0].num_devices) for v in range(problem.num_nodes)]
        assert value(np.array(home, np.int32)) == pytest.approx(makespan(problem, home))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("objective", IN_SECONDS)
def test_no_general_baseline_beats_ours_on_small_problems(seed, objective):
    problem = random_problem(seed, most_groups=3, one_link=False)
    ours = solve(problem, objective).objective
    assert ours <= min(problem_baselines(problem, objective).values()) * (1 + 1e-9)


def test_the_child_behind_the_dearest_transfer_is_the_favourite():
    preds = [[], [0], [0], [1, 2]]
    move = np.zeros((4, 1, 1))
    move[0] = 5.0
    time_s = np.array([[1.0], [9.0], [1.0], [1.0]])
    tasks = Tasks(time_s, preds, move, np.ones(4), [Slot(0, 9.0), Slot(0, 9.0)])
    assert favourite_children(tasks)[1] == 0
    home = sct(tasks)
    assert home is not None
    assert home[0] == home[1]
