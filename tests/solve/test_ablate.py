"""The lesser searches: plans of the same problem, never better than the joint one, and worse where they must be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import brute_force
from tests.solve.problems import random_problem
from tvmhet.errors import BadInput
from tvmhet.solve import IN_SECONDS, DeviceGroup, Edge, Kernel, Link, Objective, Problem, Solution, Status, check, solve
from tvmhet.solve.ablate import SEARCHES, fuse_first, jointly, no_fusion, place_first

seeds = st.integers(0, 1_000_000)


@settings(max_examples=60, deadline=None)
@given(seeds, st.sampled_from(IN_SECONDS), st.sampled_from(sorted(SEARCHES)))
def test_a_lesser_plan_is_a_plan_and_never_better(seed, objective, name):
    problem = random_problem(seed)
    joint, lesser = solve(problem, objective), SEARCHES[name](problem, objective, solve)
    if lesser.status is Status.INFEASIBLE:
        return
    check(problem, lesser, objective)
    assert joint.objective <= lesser.objective * (1 + 1e-9)


@pytest.mark.parametrize("objective", IN_SECONDS)
def test_the_joint_plan_is_never_worse_even_where_the_solver_is_weak(objective):
    """A solver that only places single operators stands for one that misses the best plan and proves nothing."""

    def weak(problem: Problem, objective: Objective, *, bounded: bool = True) -> Solution:
        if any(len(k.nodes) > 1 for k in problem.kernels) and len(problem.kernels) > problem.num_nodes:
            return replace(no_fusion(problem, objective), status=Status.FEASIBLE, lower_bound=0.5)
        return solve(problem, objective)

    problem = unlike_fusion()
    lesser = [search(problem, objective, weak) for search in (fuse_first, place_first)]
    found = jointly(problem, objective, weak)
    check(problem, found, objective)
    assert found.objective == min(s.objective for s in (weak(problem, objective), *lesser))
    assert found.lower_bound == 0.5


def test_a_stage_of_a_lesser_plan_gets_the_kernels_of_its_own_device(monkeypatch):
    """Two pairs of operators, fused for a (3 s), which runs one of them; b runs the other in 5 s fused, in 4 apart."""

    def weak(problem: Problem, objective: Objective, *, bounded: bool = True) -> Solution:
        found = solve(problem, objective, bounded=bounded)
        alone = replace(problem, groups=(problem.groups[0], replace(problem.groups[1], num_devices=0)))
        return replace(solve(alone), status=Status.FEASIBLE, lower_bound=0.5) if problem is pairs else found

    apart = tuple(Kernel((v,), (2.0, 2.0)) for v in range(4))
    fused = (Kernel((0, 1), (3.0, 5.0)), Kernel((2, 3), (3.0, 5.0)))
    edges = (Edge(0, (1,), 0), Edge(1, (2,), 0), Edge(2, (3,), 0), Edge(3, (), 0, True))
    pairs = replace(unlike_fusion(), num_nodes=4, kernels=(*apart, *fused), edges=edges)
    assert fuse_first(pairs, Objective.THROUGHPUT, weak).objective == 5.0
    none = Solution((), math.inf, math.inf, Status.INFEASIBLE, 0, "none")
    monkeypatch.setattr("tvmhet.solve.ablate.place_first", lambda *_: none)
    found = jointly(pairs, Objective.THROUGHPUT, weak)
    check(pairs, found, Objective.THROUGHPUT)
    assert (found.objective, found.lower_bound) == (4.0, 0.5)


def test_without_a_bound_a_plan_is_the_same_and_takes_less_work(monkeypatch):
    monkeypatch.setattr("tvmhet.solve.search.is_far", lambda record: record.best is not None)
    asked = []
    monkeypatch.setattr(
        "tvmhet.solve.search.apart_bound_s", lambda problem, lower_s, *_: asked.append(problem) or lower_s
    )
    monkeypatch.setattr("tvmhet.solve.search._assigned_s", lambda problem, record: asked.append(problem) or 0.0)
    for seed in range(20):
        problem = random_problem(seed)
        asked.clear()
        without = solve(problem, bounded=False)
        assert not asked
        with_bound = solve(problem)
        assert asked or with_bound.status is Status.INFEASIBLE or problem.num_nodes == 0
        assert without.stages == with_bound.stages and without.lower_bound <= with_bound.lower_bound


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_without_fusion_is_exhaustive_search_over_single_operators(seed):
    problem = random_problem(seed)
    singles = replace(problem, kernels=tuple(k for k in problem.kernels if len(k.nodes) == 1))
    best = brute_force(singles, False)
    found = no_fusion(problem, Objective.THROUGHPUT)
    assert found.objective == pytest.approx(best) if math.isfinite(best) else found.status is Status.INFEASIBLE


def unlike_fusion() -> Problem:
    """Two operators; device a runs them fastest fused (3 s against 4), b apart (2 s against 9); a is the faster alone.

    Both devices may be had, one stage each; a tensor of 0 bytes crosses. Joint, throughput: {0} on a, {1} on b: 2 s.
    Fusion first: {0 1} on a: 3 s. Placement first: {0} on a, {1} on b.
    """
    kernels = (Kernel((0,), (2.0, 3.0)), Kernel((1,), (2.0, 1.0)), Kernel((0, 1), (3.0, 9.0)))
    edges = (Edge(0, (1,), 0), Edge(1, (), 0, True))
    groups = (DeviceGroup("a", 1, 100.0), DeviceGroup("b", 1, 100.0))
    return Problem(2, kernels, edges, (), groups, ((Link(), Link()), (Link(), Link())), (Link(), Link()))


def test_each_search_decides_as_it_says():
    values = {name: search(unlike_fusion(), Objective.THROUGHPUT, solve) for name, search in SEARCHES.items()}
    assert solve(unlike_fusion()).objective == 2.0
    assert {name: s.objective for name, s in values.items()} == {
        "fuse-first": 3.0,
        "place-first": 2.0,
        "no-fusion": 2.0,
    }
    latency = {name: search(unlike_fusion(), Objective.LATENCY, solve).objective for name, search in SEARCHES.items()}
    assert latency == {"fuse-first": 3.0, "place-first": 3.0, "no-fusion": 3.0}


def test_pins_that_forbid_a_fused_kernel_are_kept():
    pinned = replace(unlike_fusion(), pins={0: frozenset({0}), 1: frozenset({1})})
    for search in SEARCHES.values():
        assert search(pinned, Objective.THROUGHPUT, solve).objective == 2.0


def test_an_operator_without_a_kernel_of_its_own_is_refused():
    fused_only = replace(unlike_fusion(), kernels=unlike_fusion().kernels[2:])
    with pytest.raises(BadInput, match="no kernel of their own"):
        no_fusion(fused_only, Objective.THROUGHPUT)
