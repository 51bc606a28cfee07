"""Forward graphs, times and a cluster -> the numbers of a training iteration.

The graph is that of the forward pass of one micro-batch; the same model at several batch sizes makes the micro-batch
size a decision. Where no time of a backward kernel is known it is

    backward seconds = forward seconds x (the cost model's gradient kernel / its forward kernel)

so that measured forward times count. The cost models take a gradient as twice the arithmetic, and as reading the
inputs, the results and their gradients. Optimisers are bound by memory bandwidth: bytes moved per byte of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from tvmhet import _tvm
from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.groups import Group
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.cost.model import KernelDesc
from tvmhet.cost.table import TimeTable
from tvmhet.errors import BadBatch, BadInput, Infeasible
from tvmhet.graph.opgraph import OpGraph
from tvmhet.ir.prepare import Prepared
from tvmhet.planning import make_problem, named_reason, resolve_pins, stage_of
from tvmhet.plans import Plan, PlannedStage, TimelineEvent, TrainedStage, TrainingFigures
from tvmhet.solve import (
    AllReduce,
    IterationProblem,
    IterationSolution,
    IterationStage,
    Link,
    MicroBatch,
    Problem,
    Schedule,
    SolvedStage,
    Status,
    TrainingTimeline,
    Weight,
    check_training,
    simulate_training,
    solve_iteration,
    stashes_of_edges,
)
from tvmhet.times import Candidates, time_table


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """What an optimiser holds and moves per byte of weights: gradients, its state, and bytes moved by one update."""

    gradient_ratio: float
    state_ratio: float
    moved_ratio: float


#: Schedules in the order in which equal values are broken.
_PREFERRED = (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.GPIPE)
MAX_STEPS = 60_000_000  # of the search, where the caller does not say
_SHOWN_MICROBATCHES = 64  # in a plan's timeline
_MEMORY_ROUNDS, _LESS = 8, 0.98  # in each round with less memory than before, at least
_RESERVE = 1.05  # of a device's memory, for what kernels take while they run

#: Bytes that each device will take, by its id, when a plan runs.
Allocated = Callable[[Plan], Mapping[str, int]]
_Solver = Callable[[IterationProblem], IterationSolution]

#: Weights and gradients in float32. Moved: weights and state are read and written, gradients read.
OPTIMIZERS: Mapping[str, OptimizerCost] = MappingProxyType(
    {
        "sgd": OptimizerCost(1, 0, 3),
        "momentum": OptimizerCost(1, 1, 5),
        "adamw": OptimizerCost(1, 2, 7),
        # bfloat16 weights and gradients, float32 masters and moments: all per byte of the bfloat16 weights
        "sgd-bf16": OptimizerCost(1, 2, 6),
        "momentum-bf16": OptimizerCost(1, 4, 10),
        "adamw-bf16": OptimizerCost(1, 6, 14),
    }
)


@dataclass(frozen=True, slots=True)
class TrainingGraph:
    """The forward pass at one micro-batch size: its graph, candidate kernels, and the known times of those."""

    size: int
    graph: OpGraph
    candidates: Candidates
    forward: TimeTable
    backward: NDArray[np.float64]  # seconds, shape (kernels, device types of `forward`)
    backward_source: str
    stashes: tuple[Weight, ...] | None = None  # what is kept for the backward pass; None: whatever is read
    update_s_per_byte: Mapping[str, float] = field(default_factory=dict)  # by device type, where it was measured
    module_key: str = ""  # of this size's module, where there are several


BY_RATIO = "assumed: forward x the cost model's ratio of gradient to forward (twice the arithmetic)"


def training_graph(
    size: int, graph: OpGraph, candidates: Candidates, forward: TimeTable, devices: Sequence[DeviceType]
) -> TrainingGraph:
    """Return the graph with backward times by the rule above."""
    ahead = time_table(candidates, devices, None)
    gradients = replace(
        candidates,
        keys=tuple(f"{key} backward" for key in candidates.keys),
        descs=tuple(gradient_of(d) for d in candidates.descs),
    )
    back = time_table(gradients, devices, None)
    runs = np.isfinite(ahead.seconds) & np.isfinite(back.seconds)
    ratio = np.where(runs, np.where(runs, back.seconds, 1.0) / np.where(runs, ahead.seconds, 1.0), np.inf)
    return TrainingGraph(size, graph, candidates, forward, forward.seconds * ratio, BY_RATIO)


def gradient_of(desc: KernelDesc) -> KernelDesc:
    """Return the kernel that computes the gradients of `desc`: see `tvmhet.cost.workload.counts`."""
    return replace(
        desc,
        ops=tuple(replace(op, backward=True) for op in desc.ops),
        flop=2 * desc.flop,
        read_bytes=desc.read_bytes + 2 * desc.write_bytes,
        write_bytes=desc.read_bytes,
    )


@dataclass(frozen=True, slots=True)
class TrainingGoal:
    """What a training plan is asked for. `schedules` are names of `Schedule`; the best of them is taken.

    `unlike_replicas` allows replicas of a stage on unlike device types, each with its own share of the micro-batches.
    `microbatch` is the samples of one, "auto" to choose it, or None for those of the model's example.
    """

    global_batch: int
    optimizer: str = "adamw"
    schedules: tuple[str, ...] = tuple(s.value for s in Schedule)
    recompute: bool = True
    unlike_replicas: bool = False
    reduce_overlap: float = 0.0
    microbatch: int | str | None = None

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise BadBatch(f"the global batch is {self.global_batch}", "give at least 1 sample")
        if isinstance(self.microbatch, str) and self.microbatch != "auto":
            raise BadInput(f"microbatch is {self.microbatch!r}", 'give a number of samples, "auto" or None')
        if self.optimizer not in OPTIMIZERS:
            raise BadInput(f"optimizer {self.optimizer!r} is unknown", f"use one of {', '.join(OPTIMIZERS)}")
        known = [s.value for s in Schedule]
        if unknown := sorted(set(self.schedules) - set(known)):
            raise BadInput(f"schedule {unknown[0]!r} is unknown", f"use one of {', '.join(known)}")
        if not self.schedules:
            raise BadInput("no schedule is allowed", f"use one or more of {', '.join(known)}")


def make_training_problem(
    graphs: Sequence[TrainingGraph],
    cluster: ClusterSpec,
    groups: Sequence[Group],
    pins: Mapping[int, frozenset[int]],
    goal: TrainingGoal,
) -> IterationProblem:
    """Return the numbers of one iteration."""
    cost = OPTIMIZERS[goal.optimizer]
    return IterationProblem(
        options=tuple(_micro_batch(g, cluster, groups, pins) for g in graphs),
        global_batch=goal.global_batch,
        all_reduce=tuple(_all_reduce(g, cluster) for g in groups),
        update_s_per_byte=tuple(
            graphs[0].update_s_per_byte.get(g.device.name, cost.moved_ratio / g.device.dram_byte_per_s) for g in groups
        ),
        gradient_ratio=cost.gradient_ratio,
        state_ratio=_state_ratio(cost, groups),
        reduce_overlap=goal.reduce_overlap,
        schedules=tuple(s for s in _PREFERRED if s.value in goal.schedules),
        may_recompute=goal.recompute,
        may_mix=goal.unlike_replicas,
        replicate_interleaved=False,  # the runtime runs one ring
    )


def _state_ratio(cost: OptimizerCost, groups: Sequence[Group]) -> float:
    """What is held beside weights and gradients, per byte of weights.

    On CPU types that is what `runtime.training_worker` holds: weights and state twice, old and new sums of gradients.
    """
    if not all(g.device.is_cpu for g in groups):
        return cost.state_ratio
    return 2 * (1 + cost.state_ratio) - 1 + cost.gradient_ratio


def _micro_batch(
    made: TrainingGraph, cluster: ClusterSpec, groups: Sequence[Group], pins: Mapping[int, frozenset[int]]
) -> MicroBatch:
    columns = [made.forward.column(g.device.name) for g in groups]
    forward = _kept_on_devices(
        make_problem(made.graph, made.candidates.kernels, made.forward.seconds[:, columns], cluster, groups, pins)
    )
    names = [t for t in made.graph.tensors if not t.is_param and (t.consumers or t.is_output)]
    whole = frozenset(i for i, t in enumerate(names) if not t.dtype.startswith(("float", "bfloat")))
    backward = tuple(tuple(map(float, row)) for row in made.backward[:, columns])
    return MicroBatch(made.size, forward, backward, made.stashes or stashes_of_edges(forward), whole)


def _kept_on_devices(problem: Problem) -> Problem:
    """The forward pass of training returns nothing to the host: its results go into the loss."""
    return replace(problem, edges=tuple(replace(e, is_output=False) for e in problem.edges))


def _all_reduce(group: Group, cluster: ClusterSpec) -> AllReduce:
    inside = Link(group.link.latency_s, group.link.byte_per_s)
    if len(group.machines) == 1:
        return AllReduce(inside, max(1, group.num_devices), inside)
    between = cluster.link(group, group)
    return AllReduce(inside, group.num_devices // len(group.machines), Link(between.latency_s, between.byte_per_s))


def make_training_plan(
    prepared: Prepared,
    graphs: Sequence[TrainingGraph],
    cluster: ClusterSpec,
    goal: TrainingGoal,
    pin: Mapping[str, str],
    time_limit_s: float,
    notes: Sequence[str] = (),
    max_steps: int = MAX_STEPS,
    allocated: Allocated | None = None,
) -> Plan:
    """Solve, check independently, simulate, and write the answer down by name. `graphs[0]` is that of `prepared`.

    With `allocated` the plan fits by what its devices will take, to the byte, not only by the solver's sums. Raises
    Infeasible with the binding constraint and the mend, BadInput for a global batch that no size divides.
    """
    groups = cluster.groups()
    fitting = dividing(graphs, goal.global_batch)
    pins = resolve_pins(graphs[0].graph, groups, pin)
    problem = make_training_problem(fitting, cluster, groups, pins, goal)
    solver = partial(solve_iteration, max_steps=max_steps, time_limit_s=time_limit_s)
    write = partial(_plan_of, prepared, fitting, problem, groups=groups, cluster=cluster, goal=goal, notes=notes)
    if allocated is None:
        return write(_solved(problem, solver, graphs[0], groups))
    return _fitting(problem, solver, write, allocated, graphs[0], groups)


def _solved(
    problem: IterationProblem, solver: _Solver, graph: TrainingGraph, groups: Sequence[Group]
) -> IterationSolution:
    solution = solver(problem)
    if solution.status is Status.INFEASIBLE:
        raise Infeasible(*named_reason(solution.reason, graph.graph, groups))
    check_training(problem, solution)
    return solution


def _fitting(
    problem: IterationProblem,
    solver: _Solver,
    write: Callable[[IterationSolution], Plan],
    allocated: Allocated,
    graph: TrainingGraph,
    groups: Sequence[Group],
) -> Plan:
    """Return the first plan that fits by what is allocated, giving the solver less memory in each round.

    Where no plan of its choice of schedules fits so, those that keep fewer micro-batches are asked for alone.
    """
    for schedules in dict.fromkeys((problem.schedules, *((s,) for s in _PREFERRED if s in problem.schedules))):
        tighter = replace(problem, schedules=schedules)
        for round_ in range(_MEMORY_ROUNDS):
            try:
                solution = _solved(tighter, solver, graph, groups)
            except Infeasible:
                if round_ == 0 and schedules == problem.schedules:
                    raise
                break
            plan = write(solution)
            plan = _with_memory(plan, allocated(plan))
            if not (beyond := _beyond(plan, solution, groups)):
                return plan
            tighter = _with_less_memory(tighter, {i: groups[i].memory_bytes - b for i, b in beyond.items()})
    raise Infeasible(
        f"memory: no stages fit by what they allocate when they run; the last exceed {groups[min(beyond)].name!r}",
        "add devices or memory, or import the step with a smaller micro-batch",
    )


def _with_memory(plan: Plan, taken: Mapping[str, int]) -> Plan:
    stages = tuple(replace(s, memory_bytes=max(taken[d] for d in s.placement.devices)) for s in plan.stages)
    return replace(plan, stages=stages)


def _beyond(plan: Plan, solution: IterationSolution, groups: Sequence[Group]) -> dict[int, float]:
    """By group whose memory a stage exceeds: how much it takes beyond what the solver counts."""
    found: dict[int, float] = {}
    for stage, solved in zip(plan.stages, solution.stages, strict=True):
        group = solved.placing.group
        if stage.memory_bytes * _RESERVE > groups[group].memory_bytes:
            excess = stage.memory_bytes * _RESERVE - solved.memory_bytes
            found[group] = max(excess, found.get(group, 0.0))
    return found


def _with_less_memory(problem: IterationProblem, most: Mapping[int, float]) -> IterationProblem:
    """Return the problem with at most so much memory on some groups, and less than before."""
    groups = tuple(
        replace(g, memory_bytes=int(min(most[i], _LESS * g.memory_bytes))) if i in most else g
        for i, g in enumerate(problem.groups)
    )
    options = tuple(replace(o, forward=replace(o.forward, groups=groups)) for o in problem.options)
    return replace(problem, options=options)


def _plan_of(
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
    chosen = fitting[solution.option]
    line = simulate_training(problem, solution)
    devices = _devices_of_places(solution, groups)
    stages = tuple(_stage(i, chosen, s, groups, devices[s.placing.place]) for i, s in enumerate(solution.stages))
    rent = sum(groups[g].usd_per_h * solution.devices(g) for g in range(len(groups)))
    return Plan(
        model=prepared.model.name,
        module_key=chosen.module_key or prepared.key,
        cluster_key=cluster.content_hash(),
        tvm_version=_tvm.TVM_VERSION,
        objective="training",
        objective_value=solution.iteration_s,
        lower_bound=solution.lower_bound_s,
        status=solution.status.value,
        solver=solution.solver,
        steps=solution.steps,
        latency_s=solution.iteration_s,
        period_s=solution.iteration_s / goal.global_batch,
        usd_per_h=rent,
        stages=stages,
        timeline=_timeline(line, devices),
        notes=(*notes, *_small_batch_note(fitting, problem)),
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


def dividing(graphs: Sequence[TrainingGraph], global_batch: int) -> list[TrainingGraph]:
    """Return the graphs whose micro-batches divide the global batch. Raises BadBatch if there is none."""
    fitting = [g for g in graphs if global_batch % g.size == 0]
    if not fitting:
        sizes = ", ".join(str(g.size) for g in graphs)
        raise BadBatch(
            f"the global batch {global_batch} is no multiple of the micro-batch of {sizes} samples",
            "choose a multiple, or import the model with a batch that divides it",
        )
    return fitting


def _small_batch_note(graphs: Sequence[TrainingGraph], problem: IterationProblem) -> tuple[str, ...]:
    if len(graphs) > 1:
        return ()
    return (
        f"the micro-batch of {graphs[0].size} samples ({problem.num_microbatches(0)} micro-batches) was given by the "
        'model\'s batch; microbatch="auto", or the model at several batch sizes, lets the planner choose',
    )


def _devices_of_places(solution: IterationSolution, groups: Sequence[Group]) -> dict[int, tuple[str, ...]]:
    """Give each place its own devices of its group, in order of the stages."""
    used = [0] * len(groups)
    out: dict[int, tuple[str, ...]] = {}
    for s in solution.stages:
        p = s.placing
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
    return replace(made_of, memory_bytes=stage.memory_bytes)


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


def _timeline(line: TrainingTimeline, devices: Mapping[int, tuple[str, ...]]) -> tuple[TimelineEvent, ...]:
    return tuple(
        TimelineEvent(e.stage, devices[e.place][e.replica], e.microbatch, e.kind, e.start_s, e.finish_s)
        for e in line.events
        if e.microbatch < _SHOWN_MICROBATCHES or e.microbatch < 0
    )
