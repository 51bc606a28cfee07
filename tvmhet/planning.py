"""A plan by name: the solver runs on the numbers of planning_problem.py, and its answer gets the names back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from tvmhet import _tvm
from tvmhet.cluster.groups import Group
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.cluster.units import duration, gib
from tvmhet.cost.table import TimeTable
from tvmhet.errors import Infeasible, NotSupported
from tvmhet.graph.concurrent import between_kernels
from tvmhet.graph.cutting import part_of
from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.library import place_kernel
from tvmhet.graph.opgraph import OpGraph
from tvmhet.graph.panels import generated, panel_weights, panels_of_stage
from tvmhet.graph.placement import KernelPlacement, StagePlacement
from tvmhet.graph.rewrites import some_of
from tvmhet.graph.states import kept_bytes
from tvmhet.graph.storage import stage_bytes
from tvmhet.graph.transposed import between_bytes
from tvmhet.ir.prepare import Prepared
from tvmhet.planning_problem import make_problem, resolve_pins
from tvmhet.plans import KernelPrediction, Plan, PlannedLine, PlannedStage, TimelineEvent
from tvmhet.solve import (
    Objective,
    Problem,
    Solution,
    SolvedStage,
    Status,
    check,
    simulate,
    solve,
)
from tvmhet.solve.ablate import Search, Solver, together
from tvmhet.solve.cheapest import cheapest
from tvmhet.solve.evaluate import StageChoice, evaluate, period_s, transfers, wire_loads_s
from tvmhet.solve.price_limits import PriceLimits
from tvmhet.splitting import PricedSplit, host_note, longer_through_host_s, split_problem

_SIMULATED_INPUTS = 12
_MEMORY_ROUNDS = 4
_WAITING = 1.1  # the simulated period over the planned one from which a plan says so


def make_plan(
    prepared: Prepared,
    kernels: Sequence[LegalKernel],
    table: TimeTable,
    cluster: ClusterSpec,
    objective: Objective,
    pin: Mapping[str, str],
    time_limit_s: float,
    seed: int,
    search: Search = together,
    known: Sequence[StageChoice] = (),
    limits: PriceLimits | None = None,
    splits: Sequence[PricedSplit] = (),
) -> Plan:
    """Solve, check independently, simulate, and write the answer down by name. Raises Infeasible with the mend.

    `search` decides, with `solve` as its solver, or `cheapest` within `limits`. The plan is never worse than the stages
    `known`, if any. Stages may run on teams of devices where `splits` have times.
    """
    graph = prepared.operator_graph
    groups = cluster.groups()
    seconds = np.stack([table.seconds[:, table.column(g.device.name)] for g in groups], axis=1)
    problem = make_problem(graph, kernels, seconds, cluster, groups, resolve_pins(graph, groups, pin))
    problem, teams = split_problem(problem, groups, splits, graph)
    waits = objective is Objective.LATENCY or bool(problem.wires)  # closed forms do not know who waits for whom
    solver: Solver = partial(solve, time_limit_s=time_limit_s, seed=seed, simulated=waits)
    if objective is Objective.COST:
        solver = partial(_cheapest, limits=limits, time_limit_s=time_limit_s)
    for _ in range(_MEMORY_ROUNDS):
        solution = search(problem, objective, solver)
        if solution.status is Status.INFEASIBLE:
            raise Infeasible(*named_reason(solution.reason, graph, groups))
        if known:
            stages, value = evaluate(problem, known, objective)
            if value < solution.objective:
                solution = replace(solution, stages=stages, objective=value, solver="stages known before")
        check(problem, solution, objective)
        plan = _plan_of(prepared, graph, kernels, table, cluster, groups, teams, problem, solution, objective)
        if not (beyond := _beyond_liveness(plan, solution, problem, groups)):
            return plan
        problem = replace(
            problem,
            groups=tuple(
                replace(g, memory_bytes=g.memory_bytes - beyond.get(i, 0)) for i, g in enumerate(problem.groups)
            ),
        )
    raise Infeasible(
        "memory: no stages fit once TVM has planned their storage; the last plan exceeds "
        f"{problem.groups[min(beyond)].name!r}",
        "add devices or memory",
    )


def _cheapest(
    problem: Problem, _: Objective, /, *, limits: PriceLimits | None, time_limit_s: float, bounded: bool = True
) -> Solution:
    return cheapest(problem, limits, time_limit_s=time_limit_s)


def _beyond_liveness(plan: Plan, solution: Solution, problem: Problem, groups: Sequence[Group]) -> dict[int, int]:
    """Return, by group whose memory some stage exceeds, how much the stage holds beyond what the solver counts.

    The solver counts what is live; TVM's storages are larger where they fit their tensors badly (`graph.storage`).
    """
    held: dict[int, tuple[int, int, int]] = {}  # by the first stage of a set of devices: group, bytes, bytes counted
    for i, (stage, solved) in enumerate(zip(plan.stages, solution.stages, strict=True)):
        first = i if solved.shares < 0 else solved.shares
        _, bytes_, counted = held.get(first, (solved.group, 0, 0))
        held[first] = solved.group, bytes_ + stage.memory_bytes, counted + int(solved.memory_bytes)
    beyond: dict[int, int] = {}
    for group, bytes_, counted in held.values():
        if bytes_ > groups[problem.pool(group)].memory_bytes:
            beyond[group] = max(bytes_ - counted, beyond.get(group, 0))
    return beyond


def with_names(reason: str, graph: OpGraph) -> str:
    """Return the solver's words with operators by name."""
    return re.sub(r"\bnode (\d+)\b", lambda m: f"operator {graph.operators[int(m[1])].name!r}", reason)


def named_reason(reason: str, graph: OpGraph, groups: Sequence[Group]) -> tuple[str, str]:
    """The solver's words with operators by name: (problem, remedy)."""
    text = with_names(reason, graph)
    problem, _, remedy = text.rpartition("; ") if "; " in text else (text, "", "")
    have = ", ".join(f"{g.num_devices} x {g.name}" for g in groups)
    return f"{problem} (the cluster has {have})", remedy or "add devices or memory"


def _plan_of(
    prepared: Prepared,
    graph: OpGraph,
    kernels: Sequence[LegalKernel],
    table: TimeTable,
    cluster: ClusterSpec,
    groups: Sequence[Group],
    teams: Sequence[PricedSplit],
    problem: Problem,
    solution: Solution,
    objective: Objective,
) -> Plan:
    devices = _devices_of(problem, solution, groups)
    stages = tuple(
        stage_of(i, graph, kernels, stage, table, groups[problem.pool(stage.group)], devices[i])
        for i, stage in enumerate(solution.stages)
    )
    stages = tuple(
        stage if s.group < len(groups) else split_stage(stage, s, teams[s.group - len(groups)])
        for stage, s in zip(stages, solution.stages, strict=True)
    )
    timeline = simulate(problem, solution, _SIMULATED_INPUTS)
    alone = simulate(problem, solution, 1)
    used = sum(
        len(d) * groups[problem.pool(s.group)].usd_per_h
        for d, s in zip(devices, solution.stages, strict=True)
        if s.shares < 0
    )
    return Plan(
        model=prepared.model.name,
        module_key=prepared.key,
        cluster_key=cluster.content_hash(),
        tvm_version=_tvm.TVM_VERSION,
        objective=objective.value,
        objective_value=solution.objective,
        lower_bound=solution.lower_bound,
        status=solution.status.value,
        solver=solution.solver,
        steps=solution.steps,
        latency_s=alone.makespan_s,
        period_s=period_s(problem, _choices(solution)),
        usd_per_h=used,
        stages=stages,
        timeline=tuple(
            TimelineEvent(e.stage, device, e.input_index, e.kind, e.start_s, e.finish_s)
            for e in timeline.events
            for device in team_of(devices[e.stage], e.replica, stages[e.stage].degree)
        ),
        notes=(
            *_sharing_notes(problem, solution),
            *_state_notes(graph),
            *_split_notes(graph, stages, cluster),
            *_panel_notes(graph, stages, cluster),
        ),
        lines=_lines(problem, solution),
    )


def _choices(solution: Solution) -> tuple[StageChoice, ...]:
    return tuple(StageChoice(s.kernels, s.group, s.num_replicas, s.shares) for s in solution.stages)


def _lines(problem: Problem, solution: Solution) -> tuple[PlannedLine, ...]:
    """What crosses each line between regions; lines that nothing crosses are left out."""
    seconds = wire_loads_s(problem, transfers(problem, _choices(solution)))
    return tuple(
        PlannedLine(w.name, round(s * w.byte_per_s), s) for w, s in zip(problem.wires, seconds, strict=True) if s > 0
    )


def _sharing_notes(problem: Problem, solution: Solution) -> tuple[str, ...]:
    """Say which stages take turns on the same devices, and where waiting makes the simulated period longer.

    Devices wait for crowded lines between regions, and for each other where several stages share them.
    """
    turns = [
        f"stages {', '.join(str(j) for j in (i, *rest))} take turns on the same devices: their loads add up"
        for i in range(len(solution.stages))
        if (rest := [j for j, s in enumerate(solution.stages) if s.shares == i])
    ]
    if not turns and not _lines(problem, solution):
        return ()
    inputs = max(_SIMULATED_INPUTS, 8 * max(s.num_replicas for s in solution.stages))
    simulated, planned = simulate(problem, solution, inputs).period_s, period_s(problem, _choices(solution))
    if simulated > planned * _WAITING:
        turns.append(
            f"devices wait for lines or for each other: simulated, results come every {simulated * 1e3:.3g} ms "
            f"instead of {planned * 1e3:.3g} ms"
        )
    return tuple(turns)


def _state_notes(graph: OpGraph) -> tuple[str, ...]:
    """Say what calls hand on to each other."""
    if not graph.states:
        return ()
    size, n = gib(sum(graph.tensors[now].size_bytes for now, _ in graph.states)), graph.num_sessions
    sessions = "one session" if n == 1 else f"{n} sessions, whose calls overlap"
    return (f"state: {len(graph.states)} tensors, {size}, stay on the devices between calls, for {sessions}",)


def _split_notes(graph: OpGraph, stages: Sequence[PlannedStage], cluster: ClusterSpec) -> tuple[str, ...]:
    """Say of stages that are split over GPUs what their exchanges take as the runtime makes them."""
    types = {t.name: t for t in cluster.device_types()}
    found = []
    for stage in (s for s in stages if s.degree > 1 and not types[s.placement.device_type].is_cpu):
        ops = [graph.index(o) for o in stage.placement.ops]
        part = part_of(graph, stage.degree, joins=True)
        longer_s = longer_through_host_s(part, ops, types[stage.placement.device_type])
        found.append(host_note(stage.index, stage.degree, longer_s, "an input"))
    return tuple(found)


def _panel_notes(graph: OpGraph, stages: Sequence[PlannedStage], cluster: ClusterSpec) -> tuple[str, ...]:
    """Say which weights come in no panels, though kernels of CPUs are expected to read panels of them."""
    cpus = {t.name for t in cluster.device_types() if t.is_cpu}
    weights = {t: {graph.operators[o].name for o in graph.tensors[t].consumers} for t in panel_weights(graph)}
    whole: set[str] = set()
    for stage in stages:
        if stage.placement.device_type in cpus:
            own, panels = generated(stage.kernels), panels_of_stage(graph, stage.kernels)
            whole |= {graph.tensors[t].name for t, readers in weights.items() if t not in panels and readers & own}
    if not whole:
        return ()
    return (
        f"weights that come in no panels, as several stages or both makers read them: {some_of(sorted(whole))}; "
        "generated products of them take longer than planned",
    )


def team_of(devices: Sequence[str], replica: int, degree: int) -> Sequence[str]:
    """Return the devices of one replica of a stage."""
    return devices[replica * degree : (replica + 1) * degree]


def _devices_of(problem: Problem, solution: Solution, groups: Sequence[Group]) -> list[tuple[str, ...]]:
    """Give each stage its own devices of its group, in order; the largest teams first, so that none parts machines."""
    used = [0] * len(groups)
    devices: dict[int, tuple[str, ...]] = {}
    degree = [problem.groups[s.group].degree for s in solution.stages]
    for i in sorted(range(len(degree)), key=lambda i: (-degree[i], i)):
        stage, pool = solution.stages[i], problem.pool(solution.stages[i].group)
        if stage.shares >= 0:
            devices[i] = devices[stage.shares]
            continue
        first = used[pool]
        used[pool] += stage.num_replicas * degree[i]
        devices[i] = groups[pool].device_ids[first : used[pool]]
    return [devices[i] for i in range(len(degree))]


def split_stage(stage: PlannedStage, solved: SolvedStage, split: PricedSplit) -> PlannedStage:
    """Return the stage with the times and the memory of its teams."""
    entries = [split.entries[k] for k in solved.kernels]
    return replace(
        stage,
        predictions=tuple(KernelPrediction(e.seconds, e.low, e.high, e.source) for e in entries),
        memory_bytes=int(solved.memory_bytes),
        degree=split.degree,
    )


def _prediction(table: TimeTable, kernel: int, device_type: str) -> KernelPrediction:
    entry = table.entry(kernel, device_type)
    return KernelPrediction(entry.seconds, entry.low, entry.high, entry.source)


def stage_of(
    index: int,
    graph: OpGraph,
    candidates: Sequence[LegalKernel],
    solved: SolvedStage,
    table: TimeTable,
    group: Group,
    devices: tuple[str, ...],
) -> PlannedStage:
    kernels = [candidates[k] for k in solved.kernels]
    schedules = [table.schedules.get((k, table.column(group.device.name)), "") for k in solved.kernels]
    placed = tuple(place_kernel(graph, k, s) for k, s in zip(kernels, schedules, strict=True))
    inside = {i for k in kernels for i in k.ops}
    reads = dict.fromkeys(t for k in kernels for i in k.ops for t in graph.operators[i].inputs)
    live_in = [graph.tensors[t] for t in reads if graph.tensors[t].producer not in inside]
    made = [graph.tensors[t] for k in kernels for i in k.ops for t in graph.operators[i].outputs]
    between = frozenset(t for k in kernels if k.branches for t in between_kernels(graph, k))
    return PlannedStage(
        placement=StagePlacement(index, placed, group.device.name, devices),
        predictions=tuple(_prediction(table, k, group.device.name) for k in solved.kernels),
        inputs=tuple(t.name for t in live_in if not t.is_param),
        weights=tuple(t.name for t in live_in if t.is_param),
        outputs=tuple(t.name for t in made if t.is_output or not inside.issuperset(t.consumers)),
        compute_s=solved.compute_s,
        transfer_s=solved.transfer_s,
        load_s=solved.load_s,
        memory_bytes=stage_bytes(graph, [k.ops for k in kernels], between)
        + max(between_bytes(graph, k) for k in kernels)
        + kept_bytes(graph, inside),
    )


def with_job(plan: Plan, limits: PriceLimits | None) -> Plan:
    """Return the plan; where it is for a job, with a note that says how long that takes and what it costs."""
    if limits is None or limits.samples is None:
        return plan
    seconds = limits.samples * plan.period_s
    note = f"the job of {limits.samples} samples takes {duration(seconds)} and costs"
    return replace(plan, notes=(*plan.notes, f"{note} {seconds * plan.usd_per_h / 3600:.4g} USD"))


def whole_plan(
    prepared: Prepared, cluster: ClusterSpec, objective: Objective, limits: PriceLimits | None = None
) -> Plan:
    """Place a model that cannot be cut on the best single device: the fastest by peak rate whose memory holds it.

    Nothing is predicted: times are 0 and the plan says why. Raises Infeasible if its parameters fit on no device.
    """
    groups = [g for g in cluster.groups() if g.num_devices > 0]
    held = prepared.model.num_sessions + 2  # those of each session, the first ones, and what a call makes of them
    need = prepared.model.param_bytes + prepared.model.state_bytes * held
    if limits is not None and limits.any:
        raise NotSupported(
            f"limits of time or price for a model that cannot be cut ({prepared.whole_reason}): nothing is predicted",
            "leave the limits out",
        )
    fitting = [g for g in groups if g.memory_bytes >= need]
    if not fitting:
        largest = max(groups, key=lambda g: g.memory_bytes)
        raise Infeasible(
            f"the model cannot be cut ({prepared.whole_reason}) and its parameters need {need} bytes; "
            f"the largest device, {largest.name!r}, has {largest.memory_bytes} bytes",
            f"add a device type with {need} bytes of memory",
        )
    best = max(fitting, key=lambda g: (g.device.peak_flop_per_s.get("float32", 0.0), g.name))
    main = prepared.mod["main"]
    kernel = KernelPlacement("main", ("main",), "tvm")
    names = tuple(str(p.name) for p in main.params)
    stage = PlannedStage(
        placement=StagePlacement(0, (kernel,), best.device.name, best.device_ids[:1]),
        predictions=(KernelPrediction(0.0, 0.0, 0.0, "unknown"),),
        inputs=names[: prepared.model.num_inputs],
        weights=names[prepared.model.num_inputs :],
        outputs=(),
        compute_s=0.0,
        transfer_s=0.0,
        load_s=0.0,
        memory_bytes=need,
    )
    return Plan(
        model=prepared.model.name,
        module_key=prepared.key,
        cluster_key=cluster.content_hash(),
        tvm_version=_tvm.TVM_VERSION,
        objective=objective.value,
        objective_value=0.0,
        lower_bound=0.0,
        status=Status.FEASIBLE.value,
        solver="whole model on the fastest device that holds it",
        steps=0,
        latency_s=0.0,
        period_s=0.0,
        usd_per_h=best.usd_per_h,
        stages=(stage,),
        timeline=(),
        notes=(f"placed whole: {prepared.whole_reason}",),
        whole_reason=prepared.whole_reason,
    )
