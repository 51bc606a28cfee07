"""Bounds and first plans for the latency of one input: never above the optimum, exact where they claim to be."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.oracle import brute_force
from tests.solve.problems import random_problem
from tvmhet.solve import DeviceGroup, Edge, Kernel, Link, Objective, Problem, Status, check, solve
from tvmhet.solve.latency import latency_start, plan_of
from tvmhet.solve.list_schedule import Slot
from tvmhet.solve.pack import allowed_times, state_graph
from tvmhet.solve.stage_chain import node_weights_s, stage_chain_s
from tvmhet.solve.two_devices import two_device_cuts


def weights(problem: Problem) -> np.ndarray:
    time_s = allowed_times(problem)
    return np.array([node_weights_s(problem, time_s[:, g]) for g in range(len(problem.groups))])


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_is_quicker_than_the_bounds(seed):
    problem = random_problem(seed, most_groups=3, one_link=False, tight=seed % 2 == 0)
    best = brute_force(problem, latency=True)
    weight_s = weights(problem)
    assert stage_chain_s(problem, weight_s) <= best * (1 + 1e-9)
    assert two_device_cuts(problem, weight_s)[0] <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_no_kernel_is_quicker_than_its_nodes_weights(seed):
    problem = random_problem(seed, most_nodes=8)
    weight_s, time_s = weights(problem), allowed_times(problem)
    for i, k in enumerate(problem.kernels):
        for g in range(len(problem.groups)):
            if math.isfinite(time_s[i, g]):
                assert weight_s[g, list(k.nodes)].sum() <= time_s[i, g] * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_first_plans_are_legal_and_as_good_as_they_say(seed):
    problem = random_problem(seed, most_nodes=9, most_groups=3, most_devices=6, one_link=False)
    graph = state_graph(problem, range(problem.num_nodes), full=True, max_states=1500)
    found, name, lower = latency_start(problem, graph, allowed_times(problem), None)
    if found is None:
        return
    assert name
    assert lower <= found.objective_s * (1 + 1e-9)
    solution = replace(solve(problem, Objective.LATENCY), stages=found.stages, objective=found.objective_s)
    check(problem, replace(solution, lower_bound=0.0, status=Status.FEASIBLE), Objective.LATENCY)


def diamond(seconds: tuple[tuple[float, float], ...], size: int) -> Problem:
    """0 -> (1, 2) -> 3 on one device of each of two groups."""
    edges = (Edge(0, (1, 2), size), Edge(1, (3,), size), Edge(2, (3,), size), Edge(3, (), 0, True))
    return Problem(
        4,
        tuple(Kernel((v,), t) for v, t in enumerate(seconds)),
        edges,
        (),
        (DeviceGroup("a", 1, 1e9), DeviceGroup("b", 1, 1e9)),
        ((Link(0.0, 1.0), Link(0.5, 1.0)), (Link(0.5, 1.0), Link(0.0, 1.0))),
        (Link(), Link()),
    )


def test_the_minimum_cut_is_the_optimum_without_fusion():
    problem = diamond(((1.0, 9.0), (1.0, 9.0), (8.0, 2.0), (9.0, 1.0)), 1)
    lower, homes = two_device_cuts(problem, weights(problem))
    best = brute_force(problem, latency=True)
    assert lower == pytest.approx(best)
    assert [0, 0, 1, 1] in homes
    assert solve(problem, Objective.LATENCY).status is Status.OPTIMAL


def test_three_devices_or_a_graph_in_pieces_have_no_cut():
    problem = diamond(((1.0, 9.0),) * 4, 1)
    three = replace(problem, groups=(DeviceGroup("a", 2, 1e9), DeviceGroup("b", 1, 1e9)))
    assert two_device_cuts(three, weights(three)) == (0.0, [])
    pieces = replace(problem, edges=(Edge(0, (1,), 1), Edge(2, (3,), 1), Edge(3, (), 0, True)))
    assert two_device_cuts(pieces, weights(pieces)) == (0.0, [])


def test_a_placement_whose_stages_wait_for_each_other_has_no_plan():
    problem = diamond(((1.0, 1.0),) * 4, 1)
    graph = state_graph(problem, range(4), full=True, max_states=100)
    slots = [Slot(0, 1e9), Slot(1, 1e9)]
    assert plan_of(problem, graph, allowed_times(problem), [0, 1, 0, 0], slots) is None
    legal = plan_of(problem, graph, allowed_times(problem), [0, 1, 1, 1], slots)
    assert legal is not None
    assert legal.objective_s == pytest.approx(5.5)
