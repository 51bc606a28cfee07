"""The bound by assignments to groups: never above the optimum, and sharp where wide models meet in one node."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import brute_force
from tests.solve.problems import random_problem
from tvmhet.solve import DeviceGroup, Edge, Kernel, Link, Problem, Weight, check, solve
from tvmhet.solve.assign_bound import _with_neighbours, assign_bound_s
from tvmhet.solve.floor import node_floors
from tvmhet.solve.pack import allowed_times
from tvmhet.solve.problem import Wire

seeds = st.integers(0, 1_000_000)


def bound_s(problem: Problem, upper_s: float) -> float:
    return assign_bound_s(problem, node_floors(problem, allowed_times(problem), alike=True), 0.0, upper_s)


def star(leaves: int, move_s: float, counts: tuple[int, ...] = (1, 1)) -> Problem:
    """Leaves of one second each on any group; one node reads them all, and moving one takes `move_s`."""
    n = leaves + 1
    edges = (*(Edge(v, (leaves,), 1) for v in range(leaves)), Edge(leaves, (), 0, True))
    kernels = tuple(Kernel((v,), (1.0,) * len(counts)) for v in range(n))
    groups = tuple(DeviceGroup(f"g{g}", c, 1e9) for g, c in enumerate(counts))
    links = tuple(tuple(Link(move_s) for _ in counts) for _ in counts)
    return Problem(n, kernels, edges, (), groups, links, tuple(Link() for _ in counts))


@settings(max_examples=60, deadline=None)
@given(seeds, st.booleans(), st.booleans(), st.booleans())
def test_never_exceeds_the_optimum(seed, one_link, tight, regions):
    problem = random_problem(seed, most_groups=3, one_link=one_link, tight=tight, regions=regions)
    best = brute_force(problem)
    if math.isfinite(best):
        assert bound_s(problem, 2 * best) <= best * (1 + 1e-9)
        assert bound_s(problem, best) <= best


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(seeds, st.booleans(), st.booleans(), st.booleans())
def test_never_exceeds_the_optimum_on_many_instances(seed, one_link, tight, regions):
    limits = {"most_nodes": 7, "most_groups": 3, "most_devices": 6}
    problem = random_problem(seed, one_link=one_link, tight=tight, regions=regions, **limits)
    best = brute_force(problem)
    if math.isfinite(best):
        assert bound_s(problem, 2 * best) <= best * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(seeds, st.booleans())
def test_nodes_without_time_that_go_with_a_neighbour_leave_the_bound_below_the_optimum(seed, one_link):
    problem = random_problem(seed, most_groups=3, one_link=one_link)
    kernels = tuple(
        replace(k, time_s=tuple(min(t, 0.0) for t in k.time_s)) if k.nodes[0] % 2 and len(k.nodes) == 1 else k
        for k in problem.kernels
    )
    problem = replace(problem, kernels=kernels, pins={})
    best = brute_force(problem)
    if 0 < best < math.inf:
        assert bound_s(problem, 2 * best) <= best * (1 + 1e-9)


def test_what_meets_in_one_node_is_charged_for_its_way_there():
    # 7 + 1 s of work on two devices: 4 s each if leaves moved for nothing. Each takes 0.5 s of both devices: with 4
    # leaves there, both are busy for 4 + 4 x 0.5 s.
    problem = star(7, 0.5)
    found = solve(problem)
    check(problem, found)
    assert found.objective == pytest.approx(6.0)
    assert bound_s(problem, 6.5) == pytest.approx(6.0)
    assert bound_s(star(7, 0.0), 6.5) == pytest.approx(4.0)


def test_a_wire_is_charged_for_what_surely_crosses():
    # All of one node's work is on one side, all of the other's there: 2 bytes at 0.1 byte/s.
    ways = frozenset({(0, 1), (1, 0)})
    problem = replace(
        star(1, 0.0),
        kernels=(Kernel((0,), (1.0, math.inf)), Kernel((1,), (math.inf, 1.0))),
        edges=(Edge(0, (1,), 2), Edge(1, (), 0, True)),
    )
    one_way = Wire("line", 0.1, frozenset({(0, 1)}))
    assert bound_s(replace(problem, wires=(one_way,)), 30.0) == pytest.approx(20.0)
    both = Wire("line", 0.1, ways)  # each group is a sender: nothing is surely received
    assert bound_s(replace(problem, wires=(both,)), 30.0) == pytest.approx(1.0)


def test_weights_that_do_not_fit_a_group_go_elsewhere():
    problem = star(3, 0.0, (1, 1))
    slow = tuple(replace(k, time_s=(1.0, 10.0)) for k in problem.kernels)
    groups = tuple(replace(g, memory_bytes=20.0) for g in problem.groups)
    weights = tuple(Weight((v,), 10) for v in range(4))
    assert bound_s(replace(problem, kernels=slow, groups=groups, weights=weights), 99.0) == pytest.approx(20.0)


def test_nodes_go_with_their_neighbour_only_where_that_moves_no_more():
    def made(sizes: tuple[int, int], readers: tuple[int, ...] = (2,)) -> Problem:
        times = ((1.0,), (0.0,), (1.0,), (1.0,))
        edges = (Edge(0, (1,), sizes[0]), Edge(1, readers, sizes[1]), Edge(2, (3,), 9), Edge(3, (), 0, True))
        return Problem(
            4, tuple(Kernel((v,), t) for v, t in enumerate(times)), edges, (), (DeviceGroup("g", 1, 1),), ((Link(),),),
            (Link(),),
        )  # fmt: skip

    def homes(problem: Problem) -> list[int]:
        return _with_neighbours(problem, node_floors(problem, allowed_times(problem), alike=True), 1e-12)

    assert homes(made((4, 4))) == [0, 0, 2, 3]  # with its maker
    assert homes(made((4, 5))) == [0, 2, 2, 3]  # with its reader
    assert homes(made((4, 5), (2, 3))) == [0, 1, 2, 3]  # two readers
    assert homes(replace(made((4, 4)), wires=(Wire("w", 1.0, frozenset({(0, 0)})),))) == [0, 1, 2, 3]
