"""Devices that run several stages of a pipeline: against brute force, the checker, the simulator."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import brute_force_virtual
from tests.solve.problems import random_problem
from tvmhet.errors import BrokenSolution
from tvmhet.solve import DeviceGroup, Edge, Kernel, Link, Problem, Status, check, simulate, solve
from tvmhet.solve.floor import node_floors
from tvmhet.solve.flow_bound import flow_bound_s
from tvmhet.solve.pack import allowed_times
from tvmhet.solve.problem import Wire

seeds = st.integers(0, 1_000_000)
_SMALL = {"most_nodes": 4, "most_groups": 2, "most_devices": 4, "one_link": False}


def in_turn(memory_bytes: float = 100.0) -> Problem:
    """Four operators in a row: 0 and 2 are fast on a, 1 and 3 on b; one device of each."""
    fast_on_a, fast_on_b = (1.0, 20.0), (20.0, 1.0)
    return Problem(
        4,
        tuple(Kernel((v,), fast_on_b if v % 2 else fast_on_a) for v in range(4)),
        (Edge(-1, (0,), 0), *(Edge(v, (v + 1,), 1) for v in range(3)), Edge(3, (), 0, True)),
        (),
        (DeviceGroup("a", 1, memory_bytes), DeviceGroup("b", 1, memory_bytes)),
        ((Link(0.0, 10.0),) * 2,) * 2,
        (Link(), Link()),
    )


def test_two_devices_take_turns():
    problem = in_turn()
    assert solve(problem).objective > 20
    plan = solve(problem, virtual_stages=True)
    check(problem, plan)
    assert [s.shares for s in plan.stages] == [-1, -1, 0, 1]
    assert plan.objective == pytest.approx(2 + 3 * 0.1), "two operators and three transfers on each device"
    # A transfer needs both devices at once, and each may be computing: what that costs only the simulator knows.
    assert plan.objective <= simulate(problem, plan, 80).period_s * (1 + 1e-9) < 1.5 * plan.objective
    apart = replace(problem, overlap_transfers=True)
    plan = solve(apart, virtual_stages=True)
    assert plan.objective == pytest.approx(2.0)
    assert simulate(apart, plan, 80).period_s == pytest.approx(2.0, rel=0.1)


def test_stages_that_do_not_fit_together_stay_apart():
    need = sum(s.memory_bytes for s in solve(in_turn(), virtual_stages=True).stages if s.group == 0)
    plan = solve(in_turn(memory_bytes=need - 0.5), virtual_stages=True)
    assert all(s.shares < 0 for s in plan.stages)
    check(in_turn(memory_bytes=need - 0.5), plan)


@settings(max_examples=60, deadline=None)
@given(seeds, st.booleans(), st.booleans())
def test_virtual_stages_lie_between_brute_force_and_stages_of_their_own(seed, tight, regions):
    problem = random_problem(seed, **_SMALL, tight=tight, regions=regions)
    plan, alone = solve(problem, virtual_stages=True), solve(problem)
    check(problem, plan)
    best = brute_force_virtual(problem)
    assert plan.objective <= alone.objective * (1 + 1e-9)
    assert plan.objective >= best * (1 - 1e-9) or alone.status is Status.INFEASIBLE
    assert plan.status is Status.INFEASIBLE or plan.lower_bound <= best * (1 + 1e-9)
    if plan.status is Status.OPTIMAL:
        assert plan.objective == pytest.approx(best)


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_the_flow_bound_holds_for_every_plan_and_knows_lines(seed):
    problem = random_problem(seed, **{**_SMALL, "most_groups": 3}, regions=True)
    floor_s = node_floors(problem, allowed_times(problem))
    bound, without = flow_bound_s(problem, floor_s), flow_bound_s(replace(problem, wires=()), floor_s)
    best = brute_force_virtual(problem)
    assert bound <= best * (1 + 1e-9)
    assert without <= best * (1 + 1e-9)


def test_the_flow_bound_is_a_minimum_cut_where_both_regions_are_needed():
    only = tuple(
        Kernel((v,), (math.inf, 1.0) if v == 3 else (1.0, math.inf) if v == 0 else (1.0, 1.0)) for v in range(4)
    )
    edges = (Edge(-1, (0,), 0), Edge(0, (1,), 9), Edge(1, (2,), 2), Edge(2, (3,), 5), Edge(3, (), 0, True))
    lines = (Wire("there", 0.1, frozenset({(0, 1), (-1, 1)})), Wire("back", 0.1, frozenset({(1, 0), (1, -1)})))
    problem = replace(in_turn(), kernels=only, edges=edges, wires=lines)
    floor_s = node_floors(problem, allowed_times(problem))
    assert flow_bound_s(replace(problem, wires=()), floor_s) == pytest.approx(2.0, rel=0.01)
    assert flow_bound_s(problem, floor_s) == pytest.approx(20.0, rel=0.05), "2 bytes at 0.1 byte/s"
    plan = solve(problem)
    assert plan.objective == pytest.approx(20.0)
    assert plan.gap < 0.05


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"shares": 3}, "not before it"),
        ({"num_replicas": 2}, "not its group or replicas"),
    ],
)
def test_the_checker_knows_shared_devices(changed, match):
    problem = in_turn()
    plan = solve(problem, virtual_stages=True)
    stages = (*plan.stages[:2], replace(plan.stages[2], **changed), plan.stages[3])
    with pytest.raises(BrokenSolution, match=match):
        check(problem, replace(plan, stages=stages))


def test_the_checker_adds_up_loads_and_memory_of_a_device():
    problem = in_turn()
    plan = solve(problem, virtual_stages=True)
    with pytest.raises(BrokenSolution, match="the objective is"):
        check(
            problem,
            replace(plan, objective=max(s.load_s for s in plan.stages), lower_bound=0.0, status=Status.FEASIBLE),
        )
    need = max(s.memory_bytes for s in plan.stages)
    with pytest.raises(BrokenSolution, match=r"stages \[0, 2\] need"):
        check(replace(problem, groups=tuple(replace(g, memory_bytes=need) for g in problem.groups)), plan)
