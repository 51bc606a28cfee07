"""The answer of a training problem, written down by name: stages, devices, figures, the simulated timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tvmhet import _tvm
from tvmhet.cluster.groups import Group
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.ir.prepare import Prepared
from tvmhet.planning import split_stage, stage_of, team_of
from tvmhet.planning_training import TrainingGoal, TrainingGraph
from tvmhet.plans import Plan, PlannedStage, TimelineEvent, TrainedStage, TrainingFigures
from tvmhet.solve import (
    IterationProblem,
    IterationSolution,
    IterationStage,
    SolvedStage,
    TrainingTimeline,
    simulate_training,
)
from tvmhet.splitting import host_note, longer_through_host_s

_SHOWN_MICROBATCHES = 64  # in a plan's timeline


def plan_of(
    prepared: Prepared,
    fitting: Sequence[TrainingGraph],
    problem: IterationProblem,
    solution: IterationSolution,
    *,
    groups: Sequence[Group],
    cluster: ClusterSpec,
    goal: TrainingGoal,
    notes: Sequence[str],
) -> Plan:
    """Return the plan; `fitting` are the graphs among which `solution` chose its micro-batch."""
    chosen = fitting[solution.option]
    line = simulate_training(problem, solution)
    devices = _devices_of_places(solution, groups)
    stages = tuple(_stage(i, chosen, s, groups, devices[s.placing.place]) for i, s in enumerate(solution.stages))
    rent = sum(groups[g].usd_per_h * solution.devices(g) for g in range(len(groups)))
    unit = 1.0 if goal.price is None else rent / 3600.0  # what a second counts
    return Plan(
        model=prepared.model.name,
        module_key=chosen.module_key or prepared.key,
        cluster_key=cluster.content_hash(),
        tvm_version=_tvm.TVM_VERSION,
        objective="training" if goal.price is None else "cost",
        objective_value=solution.iteration_s * unit,
        lower_bound=solution.lower_bound_s * unit,
        status=solution.status.value,
        solver=solution.solver,
        steps=solution.steps,
        latency_s=solution.iteration_s,
        period_s=solution.iteration_s / goal.global_batch,
        usd_per_h=rent,
        stages=stages,
        timeline=_timeline(line, devices, stages),
        notes=(*notes, *_small_batch_note(fitting, problem, goal), *_split_notes(chosen, stages, cluster)),
        training=TrainingFigures(
            goal.global_batch,
            chosen.size,
            solution.num_microbatches,
            solution.schedule.value,
            goal.optimizer,
            solution.pipeline_s,
            solution.iteration_s,
            line.iteration_s,
            solution.bubble,
            chosen.backward_source,
            tuple(_trained(s, solution.num_microbatches) for s in solution.stages),
        ),
    )


def _small_batch_note(
    graphs: Sequence[TrainingGraph], problem: IterationProblem, goal: TrainingGoal
) -> tuple[str, ...]:
    if len(graphs) > 1 or goal.microbatch is not None:
        return ()
    return (
        f"the micro-batch of {graphs[0].size} samples ({problem.num_microbatches(0)} micro-batches) was given by the "
        'model\'s batch; microbatch="auto", or the model at several batch sizes, lets the planner choose',
    )


def _devices_of_places(solution: IterationSolution, groups: Sequence[Group]) -> dict[int, tuple[str, ...]]:
    """Give each place its own devices of its group, in order; the largest teams first, so that none parts machines."""
    used = [0] * len(groups)
    out: dict[int, tuple[str, ...]] = {}
    for p in sorted((s.placing for s in solution.stages), key=lambda p: -p.degree):
        if p.place not in out:
            first = used[p.group]
            used[p.group] += p.num_replicas * p.degree
            out[p.place] = groups[p.group].device_ids[first : used[p.group]]
    return out


def _stage(
    index: int, made: TrainingGraph, stage: IterationStage, groups: Sequence[Group], devices: tuple[str, ...]
) -> PlannedStage:
    p = stage.placing
    moved = stage.receive_s + stage.send_s
    solved = SolvedStage(
        p.kernels,
        p.group,
        p.num_replicas,
        stage.load_s / p.num_replicas,
        stage.forward_s + stage.backward_s,
        moved,
        stage.memory_bytes,
    )
    made_of = stage_of(index, made.graph, made.candidates.kernels, solved, made.forward, groups[p.group], devices)
    if p.degree == 1:
        return replace(made_of, memory_bytes=stage.memory_bytes)
    name = groups[p.group].device.name
    split = next(s for s in made.splits if (s.device_type, s.degree) == (name, p.degree))
    return split_stage(made_of, solved, split)


def _trained(s: IterationStage, count: int) -> TrainedStage:
    return TrainedStage(
        s.placing.place,
        s.placing.recompute,
        s.placing.share or count,
        s.forward_s,
        s.backward_s,
        s.receive_s + s.send_s,
        s.all_reduce_s,
        s.exposed_s,
        s.update_s,
        s.in_flight,
        s.weight_bytes,
        s.stash_bytes,
    )


def _split_notes(made: TrainingGraph, stages: Sequence[PlannedStage], cluster: ClusterSpec) -> tuple[str, ...]:
    """Say of stages that are split over GPUs what their exchanges take as the runtime makes them."""
    types = {t.name: t for t in cluster.device_types()}
    parts = {(s.device_type, s.degree): s.part for s in made.splits}
    found = []
    for stage in (s for s in stages if s.degree > 1 and not types[s.placement.device_type].is_cpu):
        ops, device = [made.graph.index(o) for o in stage.placement.ops], stage.placement.device_type
        longer_s = longer_through_host_s(parts[device, stage.degree], ops, types[device], trains=True)
        found.append(host_note(stage.index, stage.degree, longer_s, "a micro-batch"))
    return tuple(found)


def _timeline(
    line: TrainingTimeline, devices: Mapping[int, tuple[str, ...]], stages: Sequence[PlannedStage]
) -> tuple[TimelineEvent, ...]:
    return tuple(
        TimelineEvent(e.stage, device, e.microbatch, e.kind, e.start_s, e.finish_s)
        for e in line.events
        if e.microbatch < _SHOWN_MICROBATCHES or e.microbatch < 0
        for device in team_of(devices[e.place], e.replica, stages[e.stage].degree)
    )
