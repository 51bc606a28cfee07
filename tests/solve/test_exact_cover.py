"""The cheapest cover in any order, against every cover there is; and what plans of large models gain from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import brute_force, covers, quotient
from tests.solve.problems import random_problem
from tvmhet.solve import (
    DeviceGroup,
    Edge,
    Kernel,
    Link,
    Objective,
    Problem,
    Status,
    check,
    phases,
    solve,
    state_graphs,
)
from tvmhet.solve.evaluate import StageChoice, evaluate
from tvmhet.solve.exact_cover import Cover, covered_again, exact_cover, fits
from tvmhet.solve.pack import allowed_times
from tvmhet.solve.state_graphs import all_graphs

seeds = st.integers(0, 1_000_000)
OBJECTIVES = st.sampled_from([Objective.THROUGHPUT, Objective.LATENCY])


def waiting(problem: Problem, kernels: Sequence[int]) -> nx.DiGraph:
    """The graph between kernels, by their positions."""
    return quotient(problem, [problem.kernels[k].nodes for k in kernels])


def least_of_all(problem: Problem, seconds: np.ndarray) -> float:
    running = (c for c in covers(problem) if nx.is_directed_acyclic_graph(waiting(problem, c)))
    return min((math.fsum(seconds[list(c)]) for c in running), default=math.inf)


@settings(max_examples=100, deadline=None)
@given(seeds)
def test_no_cover_takes_less(seed):
    problem = random_problem(seed, most_nodes=7)
    seconds = allowed_times(problem)[:, 0]
    cover = exact_cover(problem, seconds)
    least = least_of_all(problem, seconds)
    if math.isinf(least):
        assert cover.kernels == ()
        return
    assert tuple(sorted(cover.kernels)) in {tuple(sorted(c)) for c in covers(problem)}
    assert all(before < after for before, after in waiting(problem, cover.kernels).edges)
    assert math.fsum(seconds[list(cover.kernels)]) == pytest.approx(least)
    assert cover.least_s == pytest.approx(least) and cover.least_s <= least


def ring() -> Problem:
    """Kernels of 0 and 3 and of 1 and 2 would wait for each other."""
    edges = (Edge(0, (1,), 1), Edge(2, (3,), 1), Edge(1, (), 1, is_output=True), Edge(3, (), 1, is_output=True))
    times = {(0, 3): 1.0, (1, 2): 1.5, (0,): 2.0, (1,): 2.0, (2,): 2.0, (3,): 2.0}
    kernels = tuple(Kernel(nodes, (s,)) for nodes, s in times.items())
    return Problem(4, kernels, edges, (), (DeviceGroup("g", 1, 100),), ((Link(),),), (Link(),))


def test_kernels_do_not_wait_for_each_other():
    problem = ring()
    cover = exact_cover(problem, allowed_times(problem)[:, 0])
    assert {problem.kernels[k].nodes for k in cover.kernels} == {(0, 3), (1,), (2,)}
    assert cover.least_s == pytest.approx(5.0)
    order = [problem.kernels[k].nodes for k in cover.kernels]
    assert order.index((2,)) < order.index((0, 3)) < order.index((1,))


def test_a_part_of_a_model_has_its_own_cover():
    problem = ring()
    cover = exact_cover(problem, allowed_times(problem)[:, 0], {1, 2})
    assert [problem.kernels[k].nodes for k in cover.kernels] == [(1, 2)]


def test_of_two_makers_the_faster_one_is_taken():
    problem = ring()
    twice = replace(problem, kernels=(*(replace(k, time_s=(9.0,)) for k in problem.kernels), *problem.kernels))
    cover = exact_cover(twice, allowed_times(twice)[:, 0])
    assert cover.least_s == pytest.approx(5.0) and min(cover.kernels) >= len(problem.kernels)


@pytest.fixture
def few_states(monkeypatch):
    """Small problems are searched as large ones are: over states that hold few of their covers."""
    monkeypatch.setattr(phases, "all_graphs", partial(all_graphs, full_states=1))
    monkeypatch.setattr(state_graphs, "_LINEAR_STATES", 8)


@pytest.mark.usefixtures("few_states")
@pytest.mark.parametrize("seeds", [range(i, i + 40) for i in range(0, 240, 40)], ids=str)
@pytest.mark.parametrize("objective", [Objective.THROUGHPUT, Objective.LATENCY])
def test_a_plan_for_one_device_is_the_best(seeds, objective):
    for seed in seeds:
        problem = random_problem(seed, most_nodes=7, most_devices=1)
        found, best = solve(problem, objective), brute_force(problem, objective is Objective.LATENCY)
        if math.isinf(best):
            assert found.status is Status.INFEASIBLE
            continue
        check(problem, found, objective)
        assert found.objective == pytest.approx(best)
        assert found.status is Status.OPTIMAL and found.lower_bound <= best * (1 + 1e-9)


def test_a_cover_that_is_not_proved_leaves_a_gap(monkeypatch):
    problem, record = ring(), phases.Record()
    monkeypatch.setattr(phases, "exact_cover", lambda *_: Cover((2, 4, 3, 5), 4.0))  # of 8 s, where 5 are the least
    phases._alone(problem, Objective.LATENCY, allowed_times(problem), record)
    assert (record.value_s, record.lower_s) == (8.0, 4.0)


@pytest.mark.usefixtures("few_states")
@pytest.mark.parametrize("seed", range(60))
def test_where_memory_is_tight_a_bound_is_still_one(seed):
    problem = random_problem(seed, most_devices=1, tight=True)
    found, best = solve(problem, Objective.LATENCY), brute_force(problem, True)
    if found.status is not Status.INFEASIBLE:
        check(problem, found, Objective.LATENCY)
        assert found.lower_bound <= best * (1 + 1e-9) <= found.objective * (1 + 2e-9)


@pytest.mark.usefixtures("few_states")
@pytest.mark.parametrize("objective", [Objective.THROUGHPUT, Objective.LATENCY])
def test_what_is_found_is_covered_again(objective):
    for seed in range(120):
        problem = random_problem(seed, most_nodes=7)
        found = solve(problem, objective)
        if found.status is not Status.INFEASIBLE:
            check(problem, found, objective)
            _, value = covered_again(problem, allowed_times(problem), found.stages, objective)
            assert value >= found.objective * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(seeds, OBJECTIVES, st.booleans())
def test_stages_covered_again_are_never_worse(seed, objective, tight):
    """From a plan of single operators, as good as the best kernels inside its stages."""
    problem = random_problem(seed, tight=tight)
    singles = replace(problem, kernels=tuple(k for k in problem.kernels if len(k.nodes) == 1))
    placed = solve(singles, objective)
    if placed.status is Status.INFEASIBLE:
        return
    stages, value = covered_again(problem, allowed_times(problem), placed.stages, objective)
    assert fits(problem, stages) and value <= placed.objective * (1 + 1e-9)
    check(problem, replace(placed, stages=stages, objective=value, lower_bound=0.0, status=Status.FEASIBLE), objective)
    roomy = replace(problem, groups=tuple(replace(g, memory_bytes=math.inf) for g in problem.groups))
    free, _ = covered_again(roomy, allowed_times(problem), placed.stages, objective)
    for stage in free:
        nodes = {v for k in stage.kernels for v in problem.kernels[k].nodes}
        inside = np.array([nodes.issuperset(k.nodes) for k in problem.kernels])
        seconds = np.where(inside, allowed_times(problem)[:, stage.group], np.inf)
        assert stage.compute_s == pytest.approx(exact_cover(problem, seconds, nodes).least_s)


def test_kernels_that_need_too_much_memory_are_not_taken():
    """Of two stages the first has no room for the workspace of its fused kernel, the second has."""
    edges = (Edge(0, (1,), 1), Edge(1, (2,), 1), Edge(2, (3,), 1), Edge(3, (), 1, is_output=True))
    kernels = (
        *(Kernel((v,), (2.0, 2.0)) for v in range(4)),
        Kernel((0, 1), (1.0, 1.0), 50),
        Kernel((2, 3), (1.0, 1.0)),
    )
    groups = (DeviceGroup("a", 1, 10), DeviceGroup("b", 1, 10))
    link = Link()
    problem = Problem(4, kernels, edges, (), groups, ((link, link), (link, link)), (link, link))
    stages, _ = evaluate(problem, [StageChoice((0, 1), 0), StageChoice((2, 3), 1)], Objective.LATENCY)
    again, value = covered_again(problem, allowed_times(problem), stages, Objective.LATENCY)
    assert [s.kernels for s in again] == [(0, 1), (5,)] and value == 5.0


def test_devices_that_several_stages_share_hold_them_all():
    """Each of two stages has room for its fused kernel, not both."""
    edges = (Edge(0, (1,), 1), Edge(1, (2,), 1), Edge(2, (3,), 1), Edge(3, (4,), 1), Edge(4, (), 1, is_output=True))
    fused = (Kernel((0, 1), (1.0, 1.0), 8), Kernel((3, 4), (1.0, 1.0), 8))
    kernels = (*(Kernel((v,), (2.0, 2.0)) for v in range(5)), *fused)
    groups = (DeviceGroup("a", 1, 12), DeviceGroup("b", 1, 12))
    link = Link()
    problem = Problem(5, kernels, edges, (), groups, ((link, link), (link, link)), (link, link))
    choices = [StageChoice((0, 1), 0), StageChoice((2,), 1), StageChoice((3, 4), 0, shares=0)]
    stages, before = evaluate(problem, choices, Objective.LATENCY)
    again, value = covered_again(problem, allowed_times(problem), stages, Objective.LATENCY)
    assert again == stages and value == before
