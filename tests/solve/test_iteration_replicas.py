"""Whole copies on many fleets at once against the form for one; bounds against exhaustive search."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle_training import best_iteration
from tests.solve.training_problems import random_iteration
from tvmhet.solve import check_training, solve_iteration
from tvmhet.solve.iteration import IterationProblem
from tvmhet.solve.iteration_candidate import judge
from tvmhet.solve.iteration_mixed import mixed_placings, whole_placings
from tvmhet.solve.iteration_replicas import replicated_s, whole_model, work_bounds_s
from tvmhet.solve.iteration_tables import IterationTables
from tvmhet.solve.pack import StateGraph, state_graph
from tvmhet.solve.schedules import Schedule

seeds = st.integers(0, 1_000_000)


def drawn(seed: int, **limits: int) -> IterationProblem:
    """A random problem without tensor splits: those are more than copies."""
    problem = random_iteration(seed, **limits)
    return replace(problem, options=tuple(replace(o, splits=()) for o in problem.options))


def downsets(problem: IterationProblem, option: int) -> StateGraph:
    forward = problem.options[option].forward
    return state_graph(forward, range(forward.num_nodes), full=True, max_states=1500)


def one_by_one(problem: IterationProblem, option: int) -> dict[tuple[int, ...], float]:
    """Devices of each group -> seconds, of every placing of whole models, each valued by itself."""
    graph = downsets(problem, option)
    tables = IterationTables(problem, option, graph, np.array([0, graph.num_states - 1], np.int32))
    found: dict[tuple[int, ...], float] = {}
    for placings in (*mixed_placings(tables), *whole_placings(tables)):
        made = judge(problem, option, placings, Schedule.ONE_F_ONE_B, "test")
        if made is not None and all(p.degree == 1 for p in placings):
            counts = tuple(sum(p.num_replicas for p in placings if p.group == g) for g in range(len(problem.groups)))
            found[counts] = min(found.get(counts, math.inf), made.value.iteration_s)
    return found


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_many_fleets_equal_one_by_one(seed):
    problem = drawn(seed, most_nodes=4, most_devices=4)
    for option in range(len(problem.options)):
        expected = one_by_one(problem, option)
        if not expected:
            continue
        rows = np.array(list(expected))
        made = replicated_s(problem, option, whole_model(problem, option, downsets(problem, option)), rows)
        np.testing.assert_allclose(made, list(expected.values()), rtol=1e-9)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(seeds)
def test_no_plan_is_below_the_bound(seed):
    problem = drawn(seed, most_nodes=4, most_devices=3)
    best = best_iteration(problem)
    rows = np.array([[g.num_devices for g in problem.groups]])
    if not all(g.num_devices for g in problem.groups):
        return
    bounds = [float(work_bounds_s(problem, o, downsets(problem, o), rows)[0]) for o in range(len(problem.options))]
    assert min(bounds) <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_a_hurried_search_is_no_worse_than_whole_copies(seed):
    problem = drawn(seed, most_nodes=5, most_devices=4)
    if Schedule.ONE_F_ONE_B not in problem.schedules:
        return
    whole = [s for o in range(len(problem.options)) for s in one_by_one(problem, o).values()]
    found = solve_iteration(problem, max_steps=1)
    assert found.iteration_s <= min(whole, default=math.inf) * (1 + 1e-9)


def test_too_little_memory_altogether():
    for seed in itertools.count():
        problem = drawn(seed, most_nodes=4, most_devices=3)
        if all(g.num_devices for g in problem.groups) and problem.options[0].forward.weights:
            break
    weights = problem.options[0].forward.weights
    need = sum(w.size_bytes for w in weights if w.nodes) * (1 + problem.gradient_ratio + problem.state_ratio)
    one = np.eye(len(problem.groups), dtype=np.int64)
    bounds = work_bounds_s(problem, 0, downsets(problem, 0), one)
    for g, bound in zip(problem.groups, bounds, strict=True):
        assert math.isinf(bound) == (g.memory_bytes < need)


@settings(max_examples=15, deadline=None)
@given(seeds)
def test_no_more_copies_than_micro_batches(seed):
    problem = drawn(seed, most_nodes=4, most_devices=3)
    groups = tuple(replace(g, num_devices=60) for g in problem.groups)
    many = replace(
        problem, options=tuple(replace(o, forward=replace(o.forward, groups=groups)) for o in problem.options)
    )
    for option in range(len(many.options)):
        graph = downsets(many, option)
        tables = IterationTables(many, option, graph, np.array([0, graph.num_states - 1], np.int32))
        for placings in whole_placings(tables):
            assert placings[0].num_replicas <= many.num_microbatches(option) < 60
    found = solve_iteration(many, max_steps=20_000, explain=False)
    if found.stages:
        check_training(many, found)
