"""The bound where slow links keep a plan on one side: never above the optimum, and sharp where crossing is dear."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import brute_force
from tests.solve.problems import random_problem
from tvmhet.solve import DeviceGroup, Edge, Kernel, Link, Problem, solve
from tvmhet.solve.apart_bound import apart_bound_s
from tvmhet.solve.floor import floor_bound_s
from tvmhet.solve.pack import allowed_times


def side_s(problem: Problem, lower_s: float, upper_s: float) -> float:
    return floor_bound_s(problem, allowed_times(problem), lower_s, upper_s)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1_000_000), st.booleans(), st.booleans(), st.sampled_from([0.0, 1.0, 4.0, 30.0]))
def test_never_exceeds_the_optimum(seed, tight, regions, slow_s):
    limits = {"most_nodes": 5, "most_groups": 3, "most_devices": 5}
    problem = random_problem(seed, one_link=False, tight=tight, regions=regions, **limits)
    links = tuple(
        tuple(x if a == b or a + b == 1 else replace(x, latency_s=x.latency_s + slow_s) for b, x in enumerate(row))
        for a, row in enumerate(problem.links)
    )
    problem = replace(problem, links=links)
    best = brute_force(problem)
    if math.isfinite(best) and best > 0:
        for upper_s in (best, 2 * best):
            assert apart_bound_s(problem, best / 10, upper_s, side_s) <= best * (1 + 1e-9)


def chain(move_s: float) -> Problem:
    """Four nodes of a second each on two groups of two devices; moving a tensor between the groups takes `move_s`."""
    edges = (*(Edge(v, (v + 1,), 1) for v in range(3)), Edge(3, (), 0, True))
    links = tuple(tuple(Link(move_s if a != b else 0.0) for b in range(2)) for a in range(2))
    groups = (DeviceGroup("near", 2, 1e9), DeviceGroup("far", 2, 1e9))
    return Problem(4, tuple(Kernel((v,), (1.0, 1.0)) for v in range(4)), edges, (), groups, links, (Link(), Link()))


@pytest.mark.parametrize(
    ("move_s", "bound"),
    [
        (10.0, 2.0),  # each group alone takes 2 s; crossing would load two devices with 5 s each
        (3.0, 1.5),  # from 1.5 s on crossing is possible
        (0.5, 1.0),  # it always is: nothing is learned
    ],
)
def test_a_border_that_cannot_be_crossed_leaves_one_side(move_s, bound):
    assert apart_bound_s(chain(move_s), 1.0, 2.0, side_s) == pytest.approx(bound, rel=1e-6)


def test_a_model_in_two_parts_may_use_both_sides():
    problem = chain(10.0)
    apart = replace(problem, edges=(*(e for e in problem.edges if e.src != 1), Edge(1, (), 0, True)))
    assert apart_bound_s(apart, 0.5, 2.0, side_s) == 0.5
    assert solve(apart).objective == pytest.approx(1.0)


def test_links_that_can_be_used_later_are_not_forgotten():
    """Two nodes of 4 s on two groups that 2 s join: 6 s. Five groups of no use are joined before, one after another."""

    def move_s(a: int, b: int) -> float:
        a, b = min(a, b), max(a, b)
        return 0.0 if a == b else 2.0 if (a, b) == (0, 1) else 1.1 + 0.1 * a if 2 <= a == b - 1 else 50.0

    times = (4.0, 4.0, *[1000.0] * 5)
    edges = (Edge(0, (1,), 1), Edge(1, (), 0, True))
    groups = tuple(DeviceGroup(f"g{g}", 1, 1e9) for g in range(7))
    links = tuple(tuple(Link(move_s(a, b)) for b in range(7)) for a in range(7))
    problem = Problem(2, (Kernel((0,), times), Kernel((1,), times)), edges, (), groups, links, (Link(),) * 7)
    assert solve(problem).objective == pytest.approx(6.0)
    assert apart_bound_s(problem, 1.0, 8.0, side_s) == pytest.approx(1.6)  # four loads are looked at
