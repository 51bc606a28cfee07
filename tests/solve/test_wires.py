"""Lines that several pairs of devices share: exact against brute force, laws, the checker, the simulator."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import brute_force
from tests.oracle_training import best_iteration
from tests.solve.problems import random_problem
from tests.solve.training_problems import equal_chain, random_iteration
from tvmhet.errors import BadGraph, BadTime, BrokenSolution, NotSupported
from tvmhet.solve import (
    IN_SECONDS,
    DeviceGroup,
    Edge,
    Kernel,
    Link,
    Objective,
    Problem,
    Solution,
    Status,
    Weight,
    check,
    simulate,
    solve,
)
from tvmhet.solve.check_training import check_training
from tvmhet.solve.collectives import AllReduce
from tvmhet.solve.events import Task, run
from tvmhet.solve.iteration import IterationProblem, IterationSolution, StagePlacing
from tvmhet.solve.iteration_search import solve_iteration
from tvmhet.solve.iteration_value import evaluate_iteration
from tvmhet.solve.pipeline import Found
from tvmhet.solve.price import price_front
from tvmhet.solve.problem import Wire
from tvmhet.solve.schedules import Schedule
from tvmhet.solve.simulate_training import simulate_training
from tvmhet.solve.simulated import simulated_s
from tvmhet.solve.units import find_units

seeds = st.integers(0, 1_000_000)
objectives = st.sampled_from(IN_SECONDS)
_SMALL = {"most_nodes": 4, "most_groups": 3, "most_devices": 4, "one_link": False, "regions": True}


@settings(max_examples=60, deadline=None)
@given(seeds, objectives)
def test_shared_lines_equal_brute_force(seed, objective):
    problem = random_problem(seed, **_SMALL)
    solution = solve(problem, objective)
    check(problem, solution, objective)
    assert solution.objective == pytest.approx(brute_force(problem, objective is Objective.LATENCY))


@settings(max_examples=40, deadline=None)
@given(seeds, objectives, st.floats(1.0, 10.0))
def test_a_faster_line_never_hurts(seed, objective, factor):
    problem = random_problem(seed, **{**_SMALL, "most_nodes": 6})
    faster = replace(problem, wires=tuple(replace(w, byte_per_s=w.byte_per_s * factor) for w in problem.wires))
    none = replace(problem, wires=())
    ours = solve(problem, objective).objective
    assert solve(faster, objective).objective <= ours * (1 + 1e-9)
    assert solve(none, objective).objective <= ours * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_lines_faster_than_all_traffic_change_nothing(seed):
    problem = random_problem(seed, **_SMALL)
    idle = replace(problem, wires=tuple(replace(w, byte_per_s=1e12) for w in problem.wires))
    assert solve(idle).objective == pytest.approx(solve(replace(problem, wires=())).objective)


def two_regions(rate: float) -> Problem:
    """Four equal operators in a row, two devices here and two there; what passes between operators is 4 bytes."""
    return Problem(
        4,
        tuple(Kernel((v,), (4.0, 4.0)) for v in range(4)),
        (Edge(-1, (0,), 1), *(Edge(v, (v + 1,), 4) for v in range(3)), Edge(3, (), 1, True)),
        (),
        (DeviceGroup("here", 2, 100, usd_per_h=1.0), DeviceGroup("there", 2, 100, usd_per_h=1.0)),
        ((Link(0.0, 100.0),) * 2,) * 2,
        (Link(0.0, 100.0), Link(0.0, 100.0)),
        wires=(
            Wire("here -> there", rate, frozenset({(0, 1), (-1, 1)})),
            Wire("there -> here", rate, frozenset({(1, 0), (1, -1)})),
        ),
    )


def test_a_thin_line_bounds_the_period_and_then_keeps_the_model_in_one_region():
    assert solve(two_regions(1e9)).objective == pytest.approx(4.0, rel=0.05)
    thin = solve(two_regions(0.8))
    assert thin.objective == pytest.approx(4 / 0.8), "one cut of 4 bytes at 0.8 byte/s"
    assert {s.group for s in thin.stages} == {0, 1}
    thinner = solve(two_regions(0.1))
    assert {s.group for s in thinner.stages} == {0}
    assert thinner.objective == pytest.approx(8.0, rel=0.05)


def test_the_simulated_period_is_that_of_the_line():
    # Four devices on each side send at 0.8 byte/s each, 3.2 byte/s together, over a line of 0.8 byte/s.
    thin, slow = two_regions(0.8), Link(0.0, 0.8)
    problem = replace(
        thin,
        groups=tuple(replace(g, num_devices=4) for g in thin.groups),
        links=((Link(0.0, 100.0), slow), (slow, Link(0.0, 100.0))),
        host_links=(Link(0.0, 100.0), slow),
        kernels=tuple(Kernel(k.nodes, (6.0, 6.0)) for k in thin.kernels),
        overlap_transfers=True,
    )
    solution = solve(problem)
    assert solution.objective == pytest.approx(5.0)
    assert simulate(problem, solution, 160).period_s == pytest.approx(5.0, rel=0.02)
    # Devices that wait for the line compute nothing meanwhile, which only the simulated period knows.
    waiting = replace(problem, overlap_transfers=False)
    assert simulate(waiting, solve(waiting), 80).period_s > solve(waiting).objective * 1.5
    # 24 s on four devices of one region, without the line.
    chosen = solve(waiting, simulated=True)
    check(waiting, chosen)
    assert chosen.objective == pytest.approx(6.0, rel=1e-3)
    assert simulate(waiting, chosen, 80).period_s == pytest.approx(6.0, rel=1e-3)
    assert (chosen.status, chosen.lower_bound) == (Status.FEASIBLE, pytest.approx(5.0))
    assert chosen.solver.endswith("the best of 2 simulated")


@settings(max_examples=40, deadline=None)
@given(seeds, objectives)
def test_the_simulated_choice_never_counts_more(seed, objective):
    problem = random_problem(seed, **{**_SMALL, "most_nodes": 6})
    plain, chosen = solve(problem, objective), solve(problem, objective, simulated=True)
    if plain.status is Status.INFEASIBLE:
        assert chosen == plain
        return
    check(problem, chosen, objective)
    assert chosen.objective >= plain.lower_bound * (1 - 1e-9)

    def counts_s(plan: Solution) -> float:
        return max(plan.objective, simulated_s(problem, objective, Found(plan.stages, plan.objective, 0.0, 0)))

    assert counts_s(chosen) <= counts_s(plain) * (1 + 1e-9)


def test_the_checker_knows_lines():
    problem = two_regions(0.8)
    loose = solve(replace(problem, wires=()))
    with pytest.raises(BrokenSolution, match="the objective is"):
        check(problem, loose)


def test_prices_and_periods_know_lines():
    wide, thin = price_front(two_regions(1e9)), price_front(two_regions(0.1))
    assert wide.plans[-1].period_s < 5.0  # the fastest
    assert thin.plans[-1].period_s == pytest.approx(8.0, rel=0.05)
    with pytest.raises(NotSupported, match="lines between regions"):
        find_units(two_regions(1.0), max_devices=2)


def test_tasks_take_what_others_leave_of_a_line():
    # a asks for all of the line, b for a quarter: both get 4/5 of their pace; then b alone goes at its own pace.
    start, finish = run([Task(4.0, (), wires=(("w", 4.0),)), Task(8.0, (), wires=(("w", 2.0),))])
    assert start == [0.0, 0.0]
    assert finish == pytest.approx([5.0, 9.0])
    # c is slowed by its second line alone, which leaves d more of the first.
    lines = [Task(1.0, (), wires=(("w", 1.0), ("v", 4.0))), Task(1.0, (), wires=(("w", 1.0),))]
    assert run(lines)[1] == pytest.approx([4.0, 4 / 3])


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_line_without_a_rate_is_refused(rate):
    with pytest.raises(BadTime, match="carries"):
        Wire("w", rate, frozenset())


def test_a_line_to_nowhere_is_refused():
    with pytest.raises(BadGraph, match="names a group"):
        replace(two_regions(1.0), wires=(Wire("w", 1.0, frozenset({(0, 7)})),))


def test_a_line_is_no_reason_for_infeasibility():
    assert solve(two_regions(1e-6)).status is not Status.INFEASIBLE


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_training_over_shared_lines(seed):
    problem = random_iteration(seed, most_nodes=4, most_groups=2, most_devices=3, regions=True, one_link=False)
    free = with_forward(problem, wires=())
    plan, loose = solve_iteration(problem), solve_iteration(free)
    check_training(problem, plan)
    assert (plan.status is Status.INFEASIBLE) == (loose.status is Status.INFEASIBLE)
    if plan.status is Status.INFEASIBLE:
        return
    assert loose.iteration_s <= plan.iteration_s * (1 + 1e-9), "a line never helps"
    assert simulate_training(problem, plan).pipeline_s >= simulate_training(free, plan).pipeline_s * (1 - 1e-9)


def test_micro_batches_wait_for_the_line():
    """Two stages in two regions: 9 s of work a stage and micro-batch; 40 bytes each way at 1 byte/s."""
    base = equal_chain(2, 8, forward_s=3.0, backward_s=6.0, size=40, link=Link(0.0, 1e9))
    forward = base.options[0].forward
    kernels = tuple(Kernel((v,), tuple(3.0 if g == v else math.inf for g in (0, 1))) for v in (0, 1))
    forward = replace(
        forward,
        kernels=kernels,
        groups=(DeviceGroup("here", 1, 1e9), DeviceGroup("there", 1, 1e9)),
        links=((Link(0.0, 1e9),) * 2,) * 2,
        host_links=(Link(), Link()),
        overlap_transfers=True,
        wires=(Wire("there", 1.0, frozenset({(0, 1)})), Wire("back", 1.0, frozenset({(1, 0)}))),
    )
    micro = replace(base.options[0], forward=forward, backward_s=((6.0, math.inf), (math.inf, 6.0)))
    problem = replace(base, options=(micro,), all_reduce=base.all_reduce * 2, update_s_per_byte=(0.0, 0.0))
    plan = solve_iteration(problem)
    check_training(problem, plan)
    assert plan.pipeline_s == pytest.approx(8 * 40.0), "the line, not the devices' 8 * 9 s"
    assert simulate_training(problem, plan).pipeline_s == pytest.approx(8 * 40.0, rel=0.5)


def two_sides(rate: float, *, tied: bool = False, shared: bool = False) -> IterationProblem:
    """Two nodes with 30 bytes of weights each, three devices on both sides of a line; 4 micro-batches of 9 s a stage.

    What crosses the line alone takes 100 byte/s. `tied`: both nodes read the same 30 bytes. Stage 0's backward pass
    takes no time, so that both stages end at once.
    """
    base = equal_chain(2, 4, weight=30)
    forward = base.options[0].forward
    fast, slow = Link(0.0, 1e12), Link(0.0, 100.0)
    ways = [frozenset({(0, 1)}), frozenset({(1, 0)})]
    ways = [ways[0] | ways[1]] if shared else ways
    forward = replace(
        forward,
        kernels=tuple(Kernel((v,), (3.0, 3.0)) for v in (0, 1)),
        weights=(Weight((0, 1), 30),) if tied else forward.weights,
        groups=(DeviceGroup("here", 3, 1e9), DeviceGroup("there", 3, 1e9)),
        links=((fast, slow), (slow, fast)),
        host_links=(Link(), Link()),
        wires=tuple(Wire(f"line {i}", rate, w) for i, w in enumerate(ways)),
    )
    micro = replace(base.options[0], forward=forward, backward_s=((0.0, 0.0), (6.0, 6.0)))
    return replace(base, options=(micro,), all_reduce=(AllReduce(fast, 8, fast),) * 2, update_s_per_byte=(0.0, 0.01))


def with_forward(problem: IterationProblem, **changes: object) -> IterationProblem:
    options = tuple(replace(o, forward=replace(o.forward, **changes)) for o in problem.options)
    return replace(problem, options=options)


def both_sides(stage: int, replicas: int = 1) -> list[StagePlacing]:
    return [StagePlacing((stage,), g, replicas, 2 * stage + g, share=2) for g in (0, 1)]


def taken(problem: IterationProblem, placings: list[StagePlacing]) -> IterationSolution:
    value = evaluate_iteration(problem, 0, placings, Schedule.GPIPE)
    figures = (value.pipeline_s, value.iteration_s, value.bubble, 0.0)
    return IterationSolution(value.stages, 0, 4, Schedule.GPIPE, *figures, Status.FEASIBLE, 0, "given")


def reduced_s(problem: IterationProblem, placings: list[StagePlacing]) -> list[float]:
    """The all-reduce of each placing, the same in the checker and, after the passes, in the simulator."""
    problem = replace(problem, schedules=(Schedule.GPIPE,))
    plan = taken(problem, placings)
    check_training(problem, plan)
    line = simulate_training(problem, plan)
    assert line.iteration_s == pytest.approx(plan.iteration_s)
    rings = [e for e in line.events if e.kind == "all-reduce"]
    claimed = [plan.stages[e.stage].all_reduce_s for e in rings]
    assert all(e.finish_s - e.start_s <= s * (1 + 1e-9) for e, s in zip(rings, claimed, strict=True))
    assert max([0.0, *(e.finish_s - e.start_s for e in rings)]) == pytest.approx(max([0.0, *claimed]))
    return [s.all_reduce_s for s in plan.stages]


def test_two_stages_add_up_their_gradients_over_one_line():
    """Rings of 2 pass 30 bytes each way: 0.3 s at the link's 100 byte/s, 3 s at the line's 10, 6 s where both do."""
    one = [StagePlacing((0,), 0, 1, 0), *both_sides(1)]
    assert reduced_s(two_sides(100.0), one) == pytest.approx([0.0, 0.3, 0.3])
    assert reduced_s(two_sides(10.0), one) == pytest.approx([0.0, 3.0, 3.0])
    both = [*both_sides(0), *both_sides(1)]
    assert reduced_s(two_sides(1e9), both) == pytest.approx([0.3] * 4)
    assert reduced_s(two_sides(100.0), both) == pytest.approx([0.6] * 4)
    assert reduced_s(two_sides(10.0), both) == pytest.approx([6.0] * 4)
    assert reduced_s(two_sides(10.0, shared=True), both) == pytest.approx([12.0] * 4), "there and back on one line"
    more = [*both_sides(0, 2), *both_sides(1)]  # a ring of 4 passes on 2 * 3 / 4 of the bytes
    assert reduced_s(two_sides(10.0), more) == pytest.approx([7.5] * 4)


def test_a_tied_weight_crosses_the_line_between_its_stages():
    apart = [StagePlacing((0,), 0, 1, 0), StagePlacing((1,), 1, 1, 1)]
    assert reduced_s(two_sides(10.0), apart) == [0.0, 0.0]
    assert reduced_s(two_sides(10.0, tied=True), apart) == pytest.approx([3.0, 3.0])
    assert reduced_s(two_sides(100.0, tied=True), apart) == pytest.approx([0.3, 0.3])
    both = [*both_sides(0), *both_sides(1)]
    assert reduced_s(two_sides(10.0, tied=True), both) == pytest.approx([9.0] * 4), "two rings of stages, one of both"


def test_what_the_last_pass_hides_of_an_all_reduce_over_a_line():
    """The whole model on both sides: a ring of 60 bytes, 6 s at 10 byte/s, half of a pass of 6 s hides 3 of them."""
    problem = replace(two_sides(10.0), reduce_overlap=0.5)
    whole = [StagePlacing((0, 1), g, 1, g, share=2) for g in (0, 1)]
    assert reduced_s(problem, whole) == pytest.approx([6.0, 6.0])
    stages = taken(problem, whole).stages
    assert [s.exposed_s for s in stages] == pytest.approx([3.0, 3.0])


def test_the_checker_and_the_search_know_rings_over_lines():
    thin = two_sides(0.1)
    loose = solve_iteration(with_forward(thin, wires=()))
    assert len({s.placing.group for s in loose.stages if s.placing.share}) == 2, "without lines: copies on both sides"
    with pytest.raises(BrokenSolution, match="the iteration takes"):
        check_training(thin, loose)
    plan = solve_iteration(thin)
    check_training(thin, plan)
    assert all(s.placing.share == 0 for s in plan.stages), "60 bytes each way would take 600 s"
    assert plan.iteration_s < 60


def test_gradients_under_way_meet_those_that_are_added_up():
    """Stage 1 ends first; its ring then shares the line with the last gradient that stage 1 sends to stage 0.

    The closed form lets all-reduces begin after all passes, so it is no shorter.
    """
    problem = two_sides(10.0)
    forward = problem.options[0].forward
    edges = tuple(replace(e, size_bytes=30 if e.src == 0 else 0) for e in forward.edges)
    crossing = with_forward(problem, edges=edges)
    placings = [StagePlacing((0,), 0, 1, 0), *both_sides(1)]
    run_ = simulate_training(crossing, taken(crossing, placings))
    no_weights = with_forward(crossing, weights=())
    passes = simulate_training(no_weights, taken(no_weights, placings))
    assert run_.pipeline_s > passes.pipeline_s
    assert run_.iteration_s == pytest.approx(passes.pipeline_s + 3.0 + 0.3), "the line is busy until the update"


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 100_000))
def test_training_over_shared_lines_equals_brute_force(seed):
    problem = random_iteration(seed, most_nodes=4, most_groups=2, most_devices=3, regions=True, one_link=False)
    found, best = solve_iteration(problem), best_iteration(problem)
    assert math.isinf(best) == (found.status is Status.INFEASIBLE)
    if not math.isinf(best):
        assert found.iteration_s == pytest.approx(best, rel=1e-9)
        assert found.lower_bound_s <= best * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 100_000), st.floats(1.0, 10.0))
def test_a_faster_line_never_hurts_training(seed, factor):
    problem = random_iteration(seed, most_nodes=4, most_groups=2, most_devices=3, regions=True, one_link=False)
    options = []
    for o in problem.options:
        wires = tuple(replace(w, byte_per_s=w.byte_per_s * factor) for w in o.forward.wires)
        options.append(replace(o, forward=replace(o.forward, wires=wires)))
    faster = solve_iteration(replace(problem, options=tuple(options)))
    assert faster.iteration_s <= solve_iteration(problem).iteration_s * (1 + 1e-9)
