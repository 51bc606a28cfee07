"""`solve` against exhaustive search, and the laws it must keep."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import brute_force
from tests.solve.problems import random_problem
from tvmhet.errors import BadGraph, BadTime, EmptyCluster
from tvmhet.solve import IN_SECONDS, DeviceGroup, Edge, Kernel, Link, Objective, Problem, Status, Weight, check, solve

seeds = st.integers(0, 1_000_000)
objectives = st.sampled_from(IN_SECONDS)


def chain(times: list[float], count: int, *, memory: float = 1000, weight: int = 0, size: int = 0) -> Problem:
    """A chain of single-node kernels on one group."""
    n = len(times)
    edges = tuple(Edge(v, (v + 1,) if v + 1 < n else (), size, v + 1 == n) for v in range(n))
    return Problem(
        n,
        tuple(Kernel((v,), (t,)) for v, t in enumerate(times)),
        edges,
        tuple(Weight((v,), weight) for v in range(n)),
        (DeviceGroup("g", count, memory),),
        ((Link(),),),
        (Link(),),
    )


def compare(problem: Problem, objective: Objective) -> None:
    solution = solve(problem, objective)
    check(problem, solution, objective)
    best = brute_force(problem, objective is Objective.LATENCY)
    if math.isinf(best):
        assert solution.status is Status.INFEASIBLE
        assert solution.reason
    else:
        assert solution.objective == pytest.approx(best, rel=1e-9)
        assert solution.lower_bound <= best * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(seeds, objectives)
def test_equals_exhaustive_search(seed, objective):
    compare(random_problem(seed), objective)


@settings(max_examples=50, deadline=None)
@given(seeds, objectives)
def test_equals_exhaustive_search_with_unlike_links_and_three_groups(seed, objective):
    compare(random_problem(seed, most_groups=3, one_link=False), objective)


@settings(max_examples=25, deadline=None)
@given(seeds, objectives)
def test_scaling_every_time_scales_the_optimum(seed, objective):
    problem = random_problem(seed)
    scaled = replace(
        problem,
        kernels=tuple(replace(k, time_s=tuple(3 * t for t in k.time_s)) for k in problem.kernels),
        groups=tuple(replace(g, stage_overhead_s=3 * g.stage_overhead_s) for g in problem.groups),
        links=tuple(tuple(Link(3 * x.latency_s, x.byte_per_s / 3) for x in row) for row in problem.links),
        host_links=tuple(Link(3 * x.latency_s, x.byte_per_s / 3) for x in problem.host_links),
    )
    assert solve(scaled, objective).objective == pytest.approx(3 * solve(problem, objective).objective, rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(seeds, objectives)
def test_another_device_or_faster_links_never_hurt(seed, objective):
    problem = random_problem(seed, one_link=False)
    before = solve(problem, objective).objective
    more = replace(problem, groups=tuple(replace(g, num_devices=g.num_devices + 1) for g in problem.groups))
    fast = replace(problem, links=tuple(tuple(Link(x.latency_s, 2 * x.byte_per_s) for x in r) for r in problem.links))
    for better in (more, fast):
        assert solve(better, objective).objective <= before * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(seeds, objectives)
def test_the_order_and_names_of_groups_do_not_matter(seed, objective):
    problem = random_problem(seed, one_link=False)
    turn = list(range(len(problem.groups)))[::-1]
    turned = replace(
        problem,
        kernels=tuple(replace(k, time_s=tuple(k.time_s[g] for g in turn)) for k in problem.kernels),
        groups=tuple(replace(problem.groups[g], name=f"other {g}") for g in turn),
        links=tuple(tuple(problem.links[a][b] for b in turn) for a in turn),
        host_links=tuple(problem.host_links[g] for g in turn),
        pins={v: frozenset(turn.index(g) for g in gs) for v, gs in problem.pins.items()},
    )
    assert solve(turned, objective).objective == pytest.approx(solve(problem, objective).objective, rel=1e-9)


def test_the_same_problem_gives_the_same_solution():
    problem = random_problem(7, most_nodes=9, most_groups=3)
    assert solve(problem) == solve(problem)


def test_one_device_gets_the_fastest_fusion():
    problem = replace(
        chain([4.0, 3.0, 2.0], 1),
        kernels=(
            *(Kernel((v,), (t,)) for v, t in enumerate([4.0, 3.0, 2.0])),
            Kernel((0, 1), (5.0,)),
            Kernel((1, 2), (2.0,)),
        ),
    )
    solution = solve(problem)
    assert solution.status is Status.OPTIMAL
    assert solution.objective == pytest.approx(6.0)
    assert [problem.kernels[k].nodes for k in solution.stages[0].kernels] == [(0,), (1, 2)]


def test_a_kernel_may_span_a_join_whose_other_side_comes_later_in_the_given_order():
    # conv(0) -> add(2) <- shortcut(1): the kernel (0, 2) needs node 1 first.
    problem = Problem(
        3,
        (Kernel((0,), (2.0,)), Kernel((1,), (2.0,)), Kernel((2,), (1.0,)), Kernel((0, 2), (2.0,))),
        (Edge(0, (2,), 1), Edge(1, (2,), 1), Edge(2, (), 1, True)),
        (),
        (DeviceGroup("g", 1, 100),),
        ((Link(),),),
        (Link(),),
    )
    assert solve(problem).objective == pytest.approx(4.0)


def test_side_inputs_do_not_multiply_the_states():
    # 40 independent sources read by a chain: 2^40 downsets, solved at once and proved on one device.
    n = 40
    edges = [Edge(v, (n + v,), 1) for v in range(n)]
    edges += [Edge(n + v, (n + v + 1,) if v + 1 < n else (), 1, v + 1 == n) for v in range(n)]
    kernels = [Kernel((v,), (1.0,)) for v in range(2 * n)] + [Kernel((v, n + v), (1.5,)) for v in range(n)]
    group = (DeviceGroup("g", 1, 1e6),)
    solution = solve(Problem(2 * n, tuple(kernels), tuple(edges), (), group, ((Link(),),), (Link(),)))
    assert solution.status is Status.OPTIMAL
    assert solution.objective == pytest.approx(1.5 * n)


def test_replicas_share_the_load():
    assert solve(chain([6.0], 3)).objective == pytest.approx(2.0)


def test_pins_are_kept():
    base = chain([1.0, 1.0], 1)
    problem = replace(
        base,
        kernels=tuple(Kernel(k.nodes, (1.0, 5.0)) for k in base.kernels),
        groups=(DeviceGroup("fast", 1, 100), DeviceGroup("slow", 1, 100)),
        links=((Link(), Link()), (Link(), Link())),
        host_links=(Link(), Link()),
        pins={1: frozenset([1])},
    )
    solution = solve(problem)
    check(problem, solution)
    assert [problem.groups[s.group].name for s in solution.stages] == ["fast", "slow"]


def test_infeasible_names_the_node_that_no_device_runs():
    problem = replace(chain([1.0, math.inf], 1))
    assert "node 1" in solve(problem).reason


def test_infeasible_names_the_pin():
    problem = replace(chain([1.0, 1.0], 1), pins={0: frozenset()})
    assert "node 0 is pinned" in solve(problem).reason


def test_infeasible_names_the_node_that_fits_nowhere_and_how_much_is_missing():
    problem = replace(chain([1.0, 1.0], 2, memory=100), weights=(Weight((0,), 50), Weight((1,), 130)))
    reason = solve(problem).reason
    assert "node 1" in reason
    assert "130 bytes" in reason
    assert "30 bytes more" in reason


def test_infeasible_gives_the_smallest_mend():
    solution = solve(chain([1.0] * 4, 1, memory=100, weight=60))
    assert solution.status is Status.INFEASIBLE
    assert "3 more devices of 'g'" in solution.reason


def test_an_empty_model_is_solved():
    problem = Problem(0, (), (), (), (DeviceGroup("g", 1, 1),), ((Link(),),), (Link(),))
    assert solve(problem).stages == ()


def test_a_missing_link_is_named_and_never_used():
    base = chain([1.0, 1.0], 1, size=10)
    problem = replace(
        base,
        kernels=(Kernel((0,), (1.0, math.inf)), Kernel((1,), (math.inf, 1.0))),
        groups=(DeviceGroup("left", 1, 1000), DeviceGroup("right", 1, 1000)),
        links=((Link(), Link(0.0, 0.0)), (Link(), Link())),
        host_links=(Link(), Link()),
    )
    solution = solve(problem)
    assert solution.status is Status.INFEASIBLE
    assert "'left' -> 'right'" in solution.reason
    other_way = replace(problem, links=((Link(), Link()), (Link(0.0, 0.0), Link())))
    assert solve(other_way).status is Status.OPTIMAL


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"edges": (Edge(1, (0,), 1),)}, BadGraph),
        ({"edges": (Edge(0, (1,), -1),)}, BadGraph),
        ({"weights": (Weight((0,), -5),)}, BadGraph),
        ({"groups": (DeviceGroup("g", 0, 10),)}, EmptyCluster),
        ({"groups": (DeviceGroup("g", -1, 10),)}, BadGraph),
        ({"links": ()}, BadGraph),
        ({"host_links": ()}, BadGraph),
        ({"kernels": (Kernel((0,), (1.0, 2.0)),)}, BadTime),
        ({"kernels": (Kernel((7,), (1.0,)),)}, BadGraph),
        ({"groups": (DeviceGroup("g", 1.5, 10),)}, BadGraph),
        ({"groups": (DeviceGroup("g", 1, 10, usd_per_h=-1.0),)}, BadGraph),
        ({"groups": (DeviceGroup("g", 1, 10, usd_per_h=math.nan),)}, BadGraph),
        ({"pins": {9: frozenset([0])}}, BadGraph),
        ({"pins": {0: frozenset([3])}}, BadGraph),
    ],
)
def test_bad_problems_are_refused(change, error):
    with pytest.raises(error):
        replace(chain([1.0, 1.0], 1), **change)


@pytest.mark.parametrize("time_s", [math.nan, -1.0])
def test_bad_times_are_refused(time_s):
    with pytest.raises(BadTime):
        Kernel((0,), (time_s,))
    with pytest.raises(BadTime):
        Link(time_s)
