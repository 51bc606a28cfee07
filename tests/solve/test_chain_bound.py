"""Bounds by chains of stages: never above the optimum, and sharp where they can be."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import brute_force
from tests.solve.problems import random_problem
from tvmhet.solve import DeviceGroup, Edge, Kernel, Link, Objective, Problem, Weight
from tvmhet.solve.floor import floor_bound_s, node_floors
from tvmhet.solve.pack import allowed_times, state_graph
from tvmhet.solve.pipeline import StageSearch

seeds = st.integers(0, 1_000_000)


def chain(num_nodes: int, groups: tuple[DeviceGroup, ...], *, size: int = 0) -> Problem:
    """A chain of nodes of one second, alike on all groups, with links of one byte per second."""
    n = num_nodes
    edges = tuple(Edge(v, (v + 1,) if v + 1 < n else (), size, v + 1 == n) for v in range(n))
    kernels = tuple(Kernel((v,), (1.0,) * len(groups)) for v in range(n))
    links = tuple((Link(0.0, 1.0),) * len(groups) for _ in groups)
    return Problem(n, kernels, edges, (), groups, links, (Link(),) * len(groups))


@settings(max_examples=60, deadline=None)
@given(seeds, st.booleans(), st.booleans())
def test_the_floor_bound_never_exceeds_the_optimum(seed, one_link, tight):
    problem = random_problem(seed, most_groups=3, one_link=one_link, tight=tight)
    best = brute_force(problem)
    if math.isfinite(best):
        assert floor_bound_s(problem, allowed_times(problem), 0.0, 2 * best) <= best * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(seeds, st.booleans())
def test_the_bound_over_all_downsets_never_exceeds_the_optimum(seed, one_link):
    problem = random_problem(seed, most_groups=3, one_link=one_link)
    best = brute_force(problem)
    graph = state_graph(problem, range(problem.num_nodes), full=True, max_states=1000)
    if math.isfinite(best):
        search = StageSearch(problem, graph, allowed_times(problem), Objective.THROUGHPUT)
        assert search.bound_s(0.0, 2 * best) <= best * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seeds, st.booleans(), st.booleans())
def test_the_floor_bound_never_exceeds_the_optimum_on_many_instances(seed, one_link, tight):
    problem = random_problem(seed, most_nodes=7, most_groups=3, most_devices=6, one_link=one_link, tight=tight)
    best = brute_force(problem)
    if math.isfinite(best):
        assert floor_bound_s(problem, allowed_times(problem), 0.0, 2 * best) <= best * (1 + 1e-9)


def test_whole_devices_and_transfers_are_charged():
    # 4 nodes of 1 s on two unlike single devices, tensors of 1 s: 2 nodes and one transfer each. Fractional load: 2 s.
    problem = chain(4, (DeviceGroup("a", 1, 100), DeviceGroup("b", 1, 100)), size=1)
    problem = replace(problem, host_links=(Link(), Link()))
    assert floor_bound_s(problem, allowed_times(problem), 2.0, 4.0) == pytest.approx(3.0, rel=1e-5)


def test_weights_that_exceed_a_device_are_seen():
    # Each device holds the weight of 2 of 4 nodes: the fast one cannot take more.
    problem = chain(4, (DeviceGroup("fast", 1, 20), DeviceGroup("slow", 2, 20)))
    problem = replace(
        problem,
        kernels=tuple(replace(k, time_s=(1.0, 10.0)) for k in problem.kernels),
        weights=tuple(Weight((v,), 10) for v in range(4)),
    )
    assert floor_bound_s(problem, allowed_times(problem), 0.0, 40.0) == pytest.approx(10.0, rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(seeds, st.booleans())
def test_node_floors_never_exceed_a_kernel(seed, alike):
    problem = random_problem(seed, most_nodes=8, most_groups=3)
    time_s = allowed_times(problem)
    floors = node_floors(problem, time_s, alike=alike)
    for k, times in zip(problem.kernels, time_s, strict=True):
        finite = np.isfinite(times)
        assert (floors[list(k.nodes)].sum(axis=0)[finite] <= times[finite] * (1 + 1e-12)).all()
