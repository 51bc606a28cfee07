"""No interleaved plan is below its bound: against every plan of small problems, and many plans of longer chains."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.solve.training_problems import equal_chain, random_iteration, unlike_chain
from tvmhet.solve.floor import node_floors
from tvmhet.solve.iteration_bound import iteration_bound_s
from tvmhet.solve.iteration_exact import interleaved_over
from tvmhet.solve.iteration_graphs import state_graphs
from tvmhet.solve.iteration_option_bound import least_work_s
from tvmhet.solve.iteration_ring_bound import ring_bound_s
from tvmhet.solve.iteration_search import solve_iteration
from tvmhet.solve.iteration_tables import IterationTables
from tvmhet.solve.iteration_value import evaluate_iteration
from tvmhet.solve.iteration_ways import KernelWays
from tvmhet.solve.problem import Link
from tvmhet.solve.schedules import Schedule
from tvmhet.solve.solution import Status

seeds = st.integers(0, 1_000_000)


def bound_s(problem, option, upper_s):
    floor_s = node_floors(problem.options[option].forward, least_work_s(problem, option), alike=True)
    return ring_bound_s(problem, option, floor_s, upper_s)


@settings(max_examples=25, deadline=None)
@given(seeds, st.booleans(), st.booleans())
def test_no_plan_of_a_small_problem_is_below(seed, replicated, slow):
    problem = random_iteration(seed, most_nodes=4, most_groups=3, most_devices=4)
    options = tuple(replace(o, splits=()) for o in problem.options)
    problem = replace(problem, options=options, schedules=(Schedule.INTERLEAVED,), replicate_interleaved=replicated)
    if slow:
        links = tuple(tuple(Link(0.1, 1.0) for _ in problem.groups) for _ in problem.groups)
        options = tuple(replace(o, forward=replace(o.forward, links=links)) for o in options)
        problem = replace(problem, options=options)
    found = solve_iteration(problem)  # all plans are listed at this size
    if found.status is Status.INFEASIBLE:
        return
    for upper_s in (found.iteration_s * (1 + 1e-9), 3 * found.iteration_s):
        bounds = [bound_s(problem, o, upper_s) for o in range(len(problem.options))]
        assert min(bounds) <= found.iteration_s * (1 + 1e-9)


@settings(max_examples=10, deadline=None)
@given(seeds, st.sampled_from([0.0, 0.05]))
def test_no_plan_of_a_chain_is_below(seed, overhead):
    problem = unlike_chain(seed)
    micro = problem.options[0]
    groups = tuple(replace(g, memory_bytes=1e9, stage_overhead_s=overhead) for g in micro.forward.groups)
    micro = replace(micro, forward=replace(micro.forward, groups=groups))
    problem = replace(problem, options=(micro,), schedules=(Schedule.INTERLEAVED,))
    rng = random.Random(seed)
    (graph,) = state_graphs(problem, 0)
    tables = IterationTables(problem, 0, graph, np.arange(graph.num_states, dtype=np.int32))
    for _ in range(3):
        places, chunks = rng.choice([2, 4]), rng.choice([2, 3, 4])
        if places * chunks > micro.forward.num_nodes:
            continue
        inner = sorted(rng.sample(range(1, micro.forward.num_nodes), places * chunks - 1))
        plans = list(interleaved_over(KernelWays(tables), (0, *inner, micro.forward.num_nodes), places))
        for placings in rng.sample(plans, min(8, len(plans))):
            value_s = evaluate_iteration(problem, 0, placings, Schedule.INTERLEAVED).iteration_s
            assert bound_s(problem, 0, value_s * (1 + 1e-9)) <= value_s * (1 + 1e-9)


def test_equal_chunks_on_all_devices_are_as_fast_as_the_bound():
    """Two chunks of 3 s on each of two devices, 4 micro-batches: 6 s of one round, then 7 chunks of 3 s."""
    problem = equal_chain(4, 4, devices=2, schedules=(Schedule.INTERLEAVED,), most_chunks=2, may_mix=False)
    assert solve_iteration(problem).iteration_s == pytest.approx(27.0)
    assert bound_s(problem, 0, 27.0) == pytest.approx(27.0)
    assert iteration_bound_s(problem, 0, least_work_s(problem, 0), 27.0) == pytest.approx(27.0)


def test_what_passes_between_places_counts():
    """Between two places one tensor at least passes: 4 s there and 4 s back, of which each place's load has all."""
    link = Link(0.0, 1.0)
    problem = equal_chain(4, 4, size=4, devices=2, link=link, schedules=(Schedule.INTERLEAVED,), most_chunks=2)
    upper_s = solve_iteration(problem).iteration_s
    assert bound_s(problem, 0, upper_s) == pytest.approx(27.0 + 8.0 / 2 + 8.0 * (4 - 1 / 2))
    assert upper_s > 27.0 + 32.0


def test_places_divide_the_micro_batches():
    """Four micro-batches make no ring of three, so a third device does not help; of 5 there is no ring at all."""
    two, three = (equal_chain(4, 4, devices=n, schedules=(Schedule.INTERLEAVED,), most_chunks=2) for n in (2, 3))
    assert bound_s(three, 0, 30.0) == pytest.approx(bound_s(two, 0, 30.0))
    assert math.isinf(bound_s(replace(three, global_batch=5), 0, 30.0))
