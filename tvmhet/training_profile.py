"""Measure a training step on this machine's CPU types: its kernels alone, then the whole step on one device of each.

    kernels of the forward and the backward half, each alone ──► what plans are made of
    the step as one stage, as it is emitted                  ──► what the halves and the update take inside the step
    the same, recomputed                                     ──► what recomputing adds to them
    each of its halves alone, every call timed               ──► what each operator takes inside the step
    the same as replicas on all CPU devices at once          ──► what the halves take while other devices work
    a plan, if one is given, as it is                        ──► what its operators take in its stages

`training_times` scales the first to the others.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

import numpy as np

from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.context import company, context_factor, keep_context, keep_operators
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.cost.table import TimeTable
from tvmhet.errors import MeasurementFailed, NotSupported
from tvmhet.ir.training_functions import backward_function, forward_function
from tvmhet.ir.training_model import TrainingModel
from tvmhet.ir.training_stages import split_stages
from tvmhet.plans import Plan
from tvmhet.profiling import Profiler, ProfileReport, local_timer, local_types
from tvmhet.runtime.training_program import Function
from tvmhet.runtime.training_turns import shared_cores
from tvmhet.solve.schedules import Schedule
from tvmhet.times import Candidates
from tvmhet.training import HetTrainer
from tvmhet.training_build import build_training, model_of, placement_of
from tvmhet.training_example import example_batch
from tvmhet.training_inside import Half
from tvmhet.training_parts import keep_handovers, keep_repeated, keep_update, per_parameter_s
from tvmhet.training_placement import TrainingPlacement
from tvmhet.training_runs import STEPS, WARM_STEPS, run_plan
from tvmhet.training_times import BACKWARD, FORWARD, StepKernels

_MICROBATCHES = 4  # of the step that is measured as a whole
_MOST_PASSES = 16  # of one device in a step, while the slowest runs _MICROBATCHES
_Passes = dict[tuple[str, str], tuple[float, ...]]  # by device type and half of the step


def profile_training(
    model: TrainingModel,
    *,
    cluster: ClusterSpec,
    budget_s: float,
    makers: Sequence[str],
    database: MeasuredKernels,
    plan: Plan | TrainingPlacement | None = None,
    progress: bool = False,
) -> ProfileReport:
    """Measure until every kernel of the step is known on every type of `cluster` that is here, or time is up.

    `budget_s` bounds the kernels; a CPU type all of whose kernels are known is then measured as a whole, once. `plan`
    is run as it is, at its micro-batch size; where the step was measured as a whole before, nothing else is measured.
    """
    started = time.monotonic()
    model = model_of(plan, model) if plan is not None else model
    kernels = StepKernels.of(model, makers)
    placement = placement_of(plan, kernels.step) if plan is not None else None
    if placement is not None and max(placement.team_sizes) > 1:
        raise NotSupported(
            "the plan has split stages: of a step only whole kernels and stages are measured",
            "profile without the plan; times of parts follow from those of the whole by the cost models",
        )
    if placement is not None and _is_profiled(kernels, placement, cluster, database):
        run_plan(model, kernels, placement, cluster=cluster, makers=makers, database=database)
        return ProfileReport(complete=True, proved=True, plans_run=1, seconds=time.monotonic() - started)
    types = cluster.device_types()
    here = local_types(types)
    halves = ((kernels.forward_graph, kernels.forward), (kernels.backward_graph, kernels.backward))
    report = ProfileReport(
        candidates=sum(len(set(c.keys)) for _, c in halves),
        rounds=1,
        unreachable=tuple(sorted({d.name for d in types} - {d.name for d in here})),
    )
    for graph, candidates in halves:
        prepared = replace(kernels.prepared if graph is kernels.forward_graph else kernels.step.prepared, graph=graph)
        with Profiler(prepared, candidates, database) as profiler:
            wanted = {d.name: _unmeasured(kernels, candidates, d, database, calm=True) for d in here}
            profiler.measure({d.name: d for d in here}, wanted, started + budget_s, report, progress)
    report.skipped = {
        d.name: sum(len(_unmeasured(kernels, candidates, d, database)) for _, candidates in halves) for d in here
    }
    report.complete = report.proved = not any(report.skipped.values())
    alone_s = {}
    whole = [d for d in here if d.is_cpu and report.skipped[d.name] == 0]
    inside = _halves(kernels, makers) if whole else ()
    for device in whole:
        passes, compiled = _measure_whole(model, kernels, cluster, device, makers, database)
        alone_s[device.name] = sum(median(times) for times in passes.values())
        for part in (FORWARD, BACKWARD):
            factor = context_factor(database, kernels.step.prepared.key, device, part)
            report.factors[f"{device.name}, {part.strip()}"] = factor
        try:
            _measure_operators(kernels, device, inside, compiled, passes, database)
        except MeasurementFailed as error:
            report.failed.append(f"operators of the step on {device.name}: {error.problem}")
    _measure_together(model, kernels, cluster, alone_s, makers, database)
    if placement is not None and _is_profiled(kernels, placement, cluster, database):
        run_plan(model, kernels, placement, cluster=cluster, makers=makers, database=database)
        report.plans_run = 1
    elif placement is not None:
        report.failed.append("the plan was not run: the step is not measured as a whole yet; give a larger budget")
    report.seconds = time.monotonic() - started
    return report


def _is_profiled(
    kernels: StepKernels, plan: TrainingPlacement, cluster: ClusterSpec, database: MeasuredKernels
) -> bool:
    """Was the step run as a whole on every CPU type that `plan` uses?"""
    used = {d for devices in plan.devices for d in devices}
    types = [g.device for g in cluster.groups() if g.device.is_cpu and used & set(g.device_ids)]
    key = kernels.step.prepared.key
    return all(context_factor(database, key, d, half) != 1.0 for d in types for half in (FORWARD, BACKWARD))


def _unmeasured(
    kernels: StepKernels, candidates: Candidates, device: DeviceType, database: MeasuredKernels, *, calm: bool = False
) -> list[int]:
    """The distinct kernels without a measured time (a failure counts as one), `calm`: taken while nothing else ran."""
    tables = kernels.times([device], database, in_context=False)
    table = tables[0] if candidates is kernels.forward else tables[1]
    first = {key: i for i, key in reversed(list(enumerate(candidates.keys)))}
    entries = {i: table.entry(i, device.name) for i in first.values()}
    return sorted(i for i, e in entries.items() if e.source != "measured" or (calm and "busy" in e.note))


def _measure_whole(
    model: TrainingModel,
    kernels: StepKernels,
    cluster: ClusterSpec,
    device: DeviceType,
    makers: Sequence[str],
    database: MeasuredKernels,
) -> tuple[dict[str, tuple[float, ...]], tuple[Function, Function]]:
    """Run the step as one stage on one device, keeping and recomputing; record what its halves and its update take.

    Return seconds of passes by half, and the halves compiled, of the stage that keeps.
    """
    own = next(g.device_ids[0] for g in cluster.groups() if g.device.name == device.name)
    size = model.batch_size * _MICROBATCHES
    stages = (kernels.step.forward,)
    found = []
    for again in (True, False):
        placement = TrainingPlacement(stages, ((own,),), (again,), Schedule.ONE_F_ONE_B, _MICROBATCHES)
        with build_training(model, cluster=cluster, plan=placement, global_batch=size, makers=makers) as trainer:
            ran = _run(trainer, cluster)
            program = trainer.program
        found.append({part: ran.passes[device.name, part] for part in (FORWARD, BACKWARD)})
    repeated_s, halves_s = (sum(median(times) for times in halves.values()) for halves in found)
    halves = found[-1]
    keep_repeated(database, kernels.step, device, repeated_s - halves_s, median(halves[FORWARD]))
    _keep(kernels, device, halves, database)
    renewed = [[n for n in f.outputs if n in kernels.step.gradients] for f in program.updates_of(own)]
    sizes = [[program.state[n].nbytes for n in names] for names in renewed]
    each_s = per_parameter_s(sizes, np.median(ran.functions, axis=0), median(ran.updates))
    keep_update(database, kernels.step, device, ran.updates, each_s)
    (stage,) = program.stages
    return halves, (stage.forward[0], stage.backward[0])


def _halves(kernels: StepKernels, makers: Sequence[str]) -> tuple[Half, Half]:
    """The halves of the step as one stage."""
    step = kernels.step
    (parts,) = split_stages(step, [step.forward])
    ahead, back = forward_function(step, parts, recompute=False), backward_function(step, parts, recompute=False)
    return Half.of(ahead, makers), Half.of(back, makers)


def _measure_operators(
    kernels: StepKernels,
    device: DeviceType,
    halves: Sequence[Half],
    compiled: Sequence[Function],
    passes: Mapping[str, Sequence[float]],
    database: MeasuredKernels,
) -> None:
    """Keep what each operator takes inside the step and alone. Raises MeasurementFailed."""
    key, tables = kernels.step.prepared.key, kernels.times([device], database, in_context=False)
    candidates = (kernels.forward, kernels.backward)
    with local_timer(device) as timer:
        for i, part in enumerate((FORWARD, BACKWARD)):
            inside = halves[i].operator_seconds(compiled[i], timer.measure, median(passes[part]))
            kernel_s = zip(kernels.operators(candidates[i]), tables[i].seconds[:, 0].tolist(), strict=True)
            alone = {name: seconds / len(own) for own, seconds in kernel_s for name in own if name in inside}
            each = [[name] for name in alone]
            keep_operators(database, key, device, each, [inside[n] for n in alone], list(alone.values()), part)


def _keep(
    kernels: StepKernels,
    device: DeviceType,
    halves: Mapping[str, tuple[float, ...]],
    database: MeasuredKernels,
    company: str = "",
) -> None:
    """Record seconds of passes beside the sums of their kernels alone."""
    tables = kernels.times([device], database, in_context=False)
    for part, table in zip((FORWARD, BACKWARD), tables, strict=True):
        keep_context(database, kernels.step.prepared.key, device, halves[part], _sum_s(table), company + part)


def _measure_together(
    model: TrainingModel,
    kernels: StepKernels,
    cluster: ClusterSpec,
    alone_s: Mapping[str, float],
    makers: Sequence[str],
    database: MeasuredKernels,
) -> None:
    """Run the step on all CPU devices at once, as replicas that take about as long; keep what the halves take.

    Devices that share cores of this machine, as it has fewer, take turns on them. Not where a device was not measured
    alone.
    """
    devices = [(d, g.device) for g in cluster.groups() if g.device.is_cpu for d in g.device_ids]
    if len(devices) < 2 or any(t.name not in alone_s for _, t in devices):
        return
    slowest = max(alone_s.values())
    shares = tuple(min(round(_MICROBATCHES * slowest / alone_s[t.name]), _MOST_PASSES) for _, t in devices)
    names = tuple(name for name, _ in devices)
    placement = TrainingPlacement(
        (kernels.step.forward,), (names,), (False,), Schedule.ONE_F_ONE_B, sum(shares), (shares,)
    )
    size = model.batch_size * sum(shares)
    with build_training(model, cluster=cluster, plan=placement, global_batch=size, makers=makers) as trainer:
        ran = _run(trainer, cluster)
    for device in {t.name: t for _, t in devices}.values():
        halves = {part: ran.passes[device.name, part] for part in (FORWARD, BACKWARD)}
        _keep(kernels, device, halves, database, company(cluster))
        if ran.handovers:
            keep_handovers(database, device, company(cluster), ran.handovers)


def _sum_s(table: TimeTable) -> float:
    return float(table.seconds[np.isfinite(table.seconds)].sum())


@dataclass(frozen=True, slots=True)
class _Ran:
    """Seconds of some steps: of passes by device type and half, one figure per step, its median pass; of updates; of
    the first device's functions in each; of handovers, between passes of devices that share a core.
    """

    passes: _Passes
    updates: tuple[float, ...]
    functions: tuple[list[float], ...]
    handovers: tuple[float, ...]


def _run(trainer: HetTrainer, cluster: ClusterSpec) -> _Ran:
    batch = example_batch(trainer.batch_specs)
    types = {d: g.device.name for g in cluster.groups() for d in g.device_ids}
    halves: dict[tuple[str, str], list[float]] = {}
    updates, functions, handovers = list[float](), list[list[float]](), list[float]()
    for step in range(WARM_STEPS + STEPS):
        trainer.train_step(batch)
        if step < WARM_STEPS:
            continue
        passes: dict[tuple[str, str], list[float]] = {}
        for p in trainer.times():
            if p.action is None:
                updates.append(p.worked_s)
            else:
                part = BACKWARD if p.action.backward else FORWARD
                passes.setdefault((types[p.device], part), []).append(p.worked_s)
        for key, seconds in passes.items():
            halves.setdefault(key, []).append(median(seconds))
        functions.append(trainer.update_times(trainer.program.devices[0]))
        handovers += _handovers(trainer)
    every = {key: tuple(times) for key, times in halves.items()}
    return _Ran(every, tuple(updates), tuple(functions), tuple(handovers))


def _handovers(trainer: HetTrainer) -> list[float]:
    """Seconds between passes in a row of devices that share a core, in the last step."""
    bindings = trainer.program.bindings
    found = []
    for core in shared_cores(bindings):
        ran = sorted(
            (p for p in trainer.times() if p.action and core in bindings[p.device].cores), key=lambda p: p.start_s
        )
        found += [b.start_s - a.end_s for a, b in pairwise(ran) if a.device != b.device]
    return found
