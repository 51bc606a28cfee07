"""The simulated training iteration against the closed forms, and shared wires against arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.solve.training_problems import equal_chain, random_iteration
from tvmhet.errors import BadInput
from tvmhet.solve import DeviceGroup, Edge, Kernel, Link, Problem, Status, Weight, simulate, solve
from tvmhet.solve.check_training import check_training
from tvmhet.solve.events import Task, run
from tvmhet.solve.iteration import IterationProblem, IterationSolution, StagePlacing
from tvmhet.solve.iteration_search import solve_iteration
from tvmhet.solve.iteration_shares import with_shares
from tvmhet.solve.iteration_value import evaluate_iteration
from tvmhet.solve.memory_over_time import of_training
from tvmhet.solve.problem import Wire
from tvmhet.solve.schedules import Schedule
from tvmhet.solve.simulate_training import Processors, simulate_training


def placed(problem: IterationProblem, placings: list[StagePlacing], schedule: Schedule) -> IterationSolution:
    """The solution with these placings."""
    value = evaluate_iteration(problem, 0, placings, schedule)
    figures = (value.pipeline_s, value.iteration_s, value.bubble, 0.0)
    count = problem.num_microbatches(0)
    return IterationSolution(value.stages, 0, count, schedule, *figures, Status.FEASIBLE, 0, "given")


def in_a_row(stages: int, places: int | None = None) -> list[StagePlacing]:
    return [StagePlacing((v,), 0, 1, v % (places or stages)) for v in range(stages)]


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B])
@settings(max_examples=25, deadline=None)
@given(stages=st.integers(1, 6), microbatches=st.integers(1, 20))
def test_equal_stages_take_what_the_closed_form_says(schedule, stages, microbatches):
    problem = equal_chain(stages, microbatches, size=3)
    plan = placed(problem, in_a_row(stages), schedule)
    line = simulate_training(problem, plan)
    assert line.iteration_s == pytest.approx((microbatches + stages - 1) * 3.0)
    assert line.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1), abs=1e-9)
    for curve in of_training(problem, plan, line):
        assert curve.peak_bytes == plan.stages[curve.place].memory_bytes


@settings(max_examples=25, deadline=None)
@given(stages=st.integers(1, 6), microbatches=st.integers(1, 20))
def test_two_waves_take_half_a_cycle_each_and_keep_two_micro_batches_or_one(stages, microbatches):
    problem = equal_chain(stages, microbatches, size=3)
    plan = placed(problem, in_a_row(stages), Schedule.WAVELET)
    line = simulate_training(problem, plan)
    assert line.iteration_s == pytest.approx((stages + (microbatches - 1) * -(-stages // 2)) * 3.0)
    assert plan.iteration_s == pytest.approx(line.iteration_s)
    for curve in of_training(problem, plan, line):
        most = 1 if curve.place >= stages // 2 else min(2, microbatches)
        assert plan.stages[curve.place].in_flight == most
        assert curve.peak_bytes == plan.stages[curve.place].memory_bytes


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B])
def test_devices_of_one_processor_take_turns_on_it(schedule):
    """All of the work, one pass after another: no stage gains by having a device of its own."""
    stages, microbatches = 3, 5
    problem = equal_chain(stages, microbatches, size=3)
    plan = placed(problem, in_a_row(stages), schedule)
    line = simulate_training(problem, plan, processors={(place, 0): Processors((0,)) for place in range(stages)})
    assert line.iteration_s == pytest.approx(stages * microbatches * 3.0)
    slower = {(place, 0): Processors((0,), handover_s=0.25) for place in range(stages)}
    line = simulate_training(problem, plan, processors=slower)
    assert line.iteration_s == pytest.approx(stages * microbatches * 3.5)


@settings(max_examples=20, deadline=None)
@given(places=st.integers(2, 4), chunks=st.integers(2, 3), rounds=st.integers(1, 4))
def test_equal_interleaved_chunks_take_what_the_closed_form_says(places, chunks, rounds):
    problem = equal_chain(places * chunks, places * rounds, size=3)
    plan = placed(problem, in_a_row(places * chunks, places), Schedule.INTERLEAVED)
    line = simulate_training(problem, plan)
    assert line.iteration_s == pytest.approx(plan.iteration_s)
    assert line.bubble == pytest.approx((places - 1) / (chunks * places * rounds + places - 1), abs=1e-9)
    for curve in of_training(problem, plan, line):
        most = plan.stages[curve.place].memory_bytes  # where the last chunk runs, its missing result may be at the peak
        assert most - 3 * (curve.place == places - 1) <= curve.peak_bytes <= most


@settings(max_examples=20, deadline=None)
@given(
    times=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5),
    microbatches=st.integers(1, 12),
    schedule=st.sampled_from([Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.WAVELET]),
)
def test_unlike_stages_in_a_row_never_exceed_gpipes_closed_form_nor_beat_the_bottleneck(times, microbatches, schedule):
    problem = equal_chain(len(times), microbatches)
    forward = replace(
        problem.options[0].forward, kernels=tuple(Kernel((v,), (float(f),)) for v, (f, _) in enumerate(times))
    )
    micro = replace(problem.options[0], forward=forward, backward_s=tuple((float(b),) for _, b in times))
    problem = replace(problem, options=(micro,))
    plan = placed(problem, in_a_row(len(times)), schedule)
    line = simulate_training(problem, plan)
    loose = placed(problem, in_a_row(len(times)), Schedule.GPIPE).iteration_s
    if schedule is Schedule.WAVELET:  # which may wait for what GPipe has room for
        loose = microbatches * sum(f + b for f, b in times)
        assert line.iteration_s >= (microbatches + 1) // 2 * sum(f + b for f, b in times) * (1 - 1e-9) or len(times) < 3
        assert 0.75 < line.iteration_s / plan.iteration_s < 1.35
    assert line.iteration_s <= loose * (1 + 1e-9)
    assert line.iteration_s >= microbatches * max(f + b for f, b in times)
    if schedule is Schedule.GPIPE:
        assert line.iteration_s == pytest.approx(plan.iteration_s)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 100_000))
def test_random_plans_stay_near_the_closed_form_and_within_its_memory(seed):
    problem = random_iteration(seed, most_nodes=5, most_devices=4)
    plan = solve_iteration(problem)
    if plan.status is Status.INFEASIBLE:
        return
    line = simulate_training(problem, plan)
    assert line.iteration_s <= plan.iteration_s * 1.2
    for curve in of_training(problem, plan, line):
        most = max(s.memory_bytes for s in plan.stages if s.placing.place == curve.place)
        assert curve.peak_bytes <= most + 1e-6
    busy: dict[tuple, float] = {}
    overlap = problem.options[0].forward.overlap_transfers
    for e in line.events:
        if e.kind in ("all-reduce", "update"):
            continue
        kind = e.kind if e.kind in ("send", "receive") else "pass"
        lane = (e.place, e.replica, kind if overlap else "")
        assert e.start_s >= busy.get(lane, 0.0) - 1e-9  # one thing at a time
        busy[lane] = e.finish_s


def test_the_all_reduce_hides_behind_the_last_backward_pass():
    problem = replace(equal_chain(1, 4, devices=2, weight=40, link=Link(0.0, 40.0)), reduce_overlap=0.5)
    plan = placed(problem, [StagePlacing((0,), 0, 2, 0)], Schedule.ONE_F_ONE_B)
    line = simulate_training(problem, plan)
    reduce = [e for e in line.events if e.kind == "all-reduce"]
    assert [(e.start_s, e.finish_s) for e in reduce] == [
        (5.0, 6.0)
    ] * 2  # 2 x 20 bytes at 40 byte/s; the pass ends at 6
    assert line.iteration_s == pytest.approx(6.0)


def test_replicas_of_unlike_speed_get_unlike_shares():
    base = equal_chain(1, 6)
    forward = replace(
        base.options[0].forward,
        kernels=(Kernel((0,), (1.0, 2.0)),),
        groups=(DeviceGroup("fast", 1, 1e9), DeviceGroup("slow", 1, 1e9)),
        links=((Link(), Link()), (Link(), Link())),
        host_links=(Link(), Link()),
    )
    micro = replace(base.options[0], forward=forward, backward_s=((2.0, 4.0),))
    problem = replace(base, options=(micro,), all_reduce=base.all_reduce * 2, update_s_per_byte=(0.0, 0.0))
    plan = solve_iteration(problem)
    assert [(s.placing.group, s.placing.share) for s in plan.stages] == [(0, 4), (1, 2)]
    assert plan.iteration_s == pytest.approx(12.0)
    assert simulate_training(problem, plan).iteration_s == pytest.approx(12.0)


def with_groups(base: IterationProblem, speeds: list[float], devices: list[int]) -> IterationProblem:
    """The chain on groups of these speeds."""
    n = len(speeds)
    micro = base.options[0]
    forward = replace(
        micro.forward,
        kernels=tuple(replace(k, time_s=tuple(k.time_s[0] / s for s in speeds)) for k in micro.forward.kernels),
        groups=tuple(DeviceGroup(f"g{i}", d, 1e9) for i, d in enumerate(devices)),
        links=((Link(),) * n,) * n,
        host_links=(Link(),) * n,
    )
    backward = tuple(tuple(row[0] / s for s in speeds) for row in micro.backward_s)
    micro = replace(micro, forward=forward, backward_s=backward)
    return replace(base, options=(micro,), all_reduce=base.all_reduce * n, update_s_per_byte=(0.0,) * n)


def test_one_stage_of_two_has_replicas_on_unlike_types():
    """Stage 0 takes a fast device's whole time, stage 1 is shared by one twice as fast as the other: no one waits."""
    micro = with_groups(equal_chain(2, 12), [1.0, 2 / 3, 1 / 3], [1, 1, 1])
    whole = [StagePlacing((0,), 0, 1, 0), StagePlacing((1,), 1, 1, 1, share=8), StagePlacing((1,), 2, 1, 2, share=4)]
    plan = placed(micro, whole, Schedule.ONE_F_ONE_B)
    line = simulate_training(micro, plan)
    assert plan.iteration_s == pytest.approx(3.0 + 12 * 3.0 + 1.5)  # the first one's way and 11 more of stage 0
    assert line.iteration_s == pytest.approx(plan.iteration_s, rel=0.05)
    assert [
        c.peak_bytes <= s.memory_bytes for c, s in zip(of_training(micro, plan, line), plan.stages, strict=True)
    ] == [True] * 3


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_unlike_replicas_stay_near_their_closed_form_and_within_its_memory(data):
    stages, microbatches = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([4, 9, 24]))
    speeds = data.draw(st.lists(st.sampled_from([1.0, 1.5, 3.0]), min_size=2, max_size=3))
    problem = with_groups(equal_chain(stages, microbatches, size=3), speeds, [2 * stages] * len(speeds))
    teams = []
    for v in range(stages):
        groups = data.draw(st.lists(st.integers(0, len(speeds) - 1), min_size=1, max_size=2, unique=True))
        teams.append([StagePlacing((v,), g, data.draw(st.integers(1, 2)), 0) for g in groups])
    found = with_shares(problem, 0, teams)
    placings = [replace(p, place=i) for i, p in enumerate(found)]
    plan = placed(problem, placings, data.draw(st.sampled_from([s for s in Schedule if s is not Schedule.INTERLEAVED])))
    line = simulate_training(problem, plan)
    assert sum(e.kind == "forward" for e in line.events) == stages * microbatches
    assert 0.6 < line.iteration_s / plan.iteration_s < 1.5
    for curve in of_training(problem, plan, line):
        assert curve.peak_bytes <= plan.stages[curve.place].memory_bytes + 1e-6


def test_transfers_on_one_wire_share_it_fairly():
    # 2 s and 1 s of data: both at half pace until 2 s, then the longer one alone: 3 s.
    start, finish = run(
        [Task(2.0, ("a",), wires=(("w", 2.0),)), Task(1.0, ("b",), wires=(("w", 1.0),)), Task(1.0, ("c",))]
    )
    assert start == [0.0, 0.0, 0.0]
    assert finish == pytest.approx([3.0, 2.0, 1.0])


def test_tasks_in_a_circle_are_refused():
    with pytest.raises(BadInput, match="circle"):
        run([Task(1.0, (), (1,)), Task(1.0, (), (0,))])


def test_pairs_on_one_wire_contend_in_inference_too():
    # Two branches of one producer: both results leave at once, over ways that share a wire or do not.
    problem = Problem(
        3,
        (Kernel((0,), (1.0, 9e9, 9e9)), Kernel((1,), (9e9, 1.0, 9e9)), Kernel((2,), (9e9, 9e9, 1.0))),
        (Edge(-1, (0,), 0), Edge(0, (1,), 4), Edge(1, (2,), 4), Edge(2, (), 0, True)),
        (),
        tuple(DeviceGroup(n, 1, 100) for n in "abc"),
        tuple(tuple(Link(0.0, 2.0) for _ in range(3)) for _ in range(3)),
        (Link(), Link(), Link()),
    )
    solution = solve(problem)
    alone = simulate(problem, solution, 12)
    switched = replace(problem, wires=(Wire("switch", 2.0, frozenset({(0, 1), (1, 2)})),))
    shared = simulate(switched, solution, 12)
    assert shared.makespan_s >= alone.makespan_s
    one = simulate(switched, solution, 1)
    assert one.makespan_s == pytest.approx(simulate(problem, solution, 1).makespan_s)


def test_a_plan_without_stages_is_refused():
    problem = equal_chain(1, 2, weight=5, memory=1)
    with pytest.raises(BadInput):
        simulate_training(problem, solve_iteration(problem))


def test_a_tied_weight_is_updated_by_its_first_stage_only():
    """Two stages; each has 30 bytes of its own, and both read 100 bytes: 1.3 s of updates, then 0.3 s."""
    base = equal_chain(2, 4, size=3)
    weights = (Weight((0,), 30), Weight((0, 1), 100), Weight((1,), 30))
    micro = replace(base.options[0], forward=replace(base.options[0].forward, weights=weights))
    problem = replace(base, options=(micro,), update_s_per_byte=(0.01,))
    plan = placed(problem, in_a_row(2), Schedule.ONE_F_ONE_B)
    assert [s.update_s for s in plan.stages] == pytest.approx([1.3, 0.3])
    assert [s.weight_bytes for s in plan.stages] == [130, 130], "each keeps a copy"
    check_training(problem, plan)
    run_ = simulate_training(problem, plan)
    updates = {e.stage: e.finish_s - e.start_s for e in run_.events if e.kind == "update"}
    assert updates == pytest.approx({0: 1.3, 1: 0.3})
    assert run_.iteration_s == pytest.approx(plan.iteration_s)
