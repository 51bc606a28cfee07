"""Run a training plan as it is: what its passes take there corrects the times of the operators in them.

    the plan ──► built and run ──► seconds of each stage's passes ──► factors of its operators, half by half

A pass in a pipeline is no part of the step on one device: a stage's weights may stay in the caches between forward
passes in a row, what another stage made comes from another core, and other devices work beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.context import company_of, keep_run
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.cost.table import TimeTable
from tvmhet.ir.training_model import TrainingModel
from tvmhet.training import HetTrainer
from tvmhet.training_build import build_training
from tvmhet.training_example import example_batch
from tvmhet.training_parts import repeat_ratio
from tvmhet.training_placement import TrainingPlacement
from tvmhet.training_times import BACKWARD, FORWARD, StepKernels

WARM_STEPS, STEPS = 2, 7
_STARTS = 3  # of a plan: from one start of its workers to another passes differ by up to a tenth

#: Median seconds of a stage's passes on one device type: (stage, device type, half).
StageSeconds = Mapping[tuple[int, str, str], float]


@dataclass(frozen=True, slots=True)
class _Operators:
    """The operators of one half of a step, and their seconds on one device type: inside the step so far, and alone."""

    names: tuple[str, ...]
    inside_s: NDArray[np.float64]
    alone_s: NDArray[np.float64]


def run_plan(
    model: TrainingModel,
    kernels: StepKernels,
    placement: TrainingPlacement,
    *,
    cluster: ClusterSpec,
    makers: Sequence[str],
    database: MeasuredKernels,
) -> None:
    """Run `placement` and keep what the operators of its stages took on its CPU devices.

    Raises what building it raises, for example NotSupported for a device that is not here.
    """
    size = model.batch_size * placement.num_microbatches
    starts = []
    for _ in range(_STARTS):
        with build_training(model, cluster=cluster, plan=placement, global_batch=size, makers=makers) as trainer:
            starts.append(_stage_seconds(trainer, cluster))
    seconds = {key: median(s[key] for s in starts) for key in starts[0]}
    keep_stages(kernels, placement, seconds, cluster=cluster, database=database)


def keep_stages(
    kernels: StepKernels,
    placement: TrainingPlacement,
    seconds: StageSeconds,
    *,
    cluster: ClusterSpec,
    database: MeasuredKernels,
) -> None:
    """Keep what the operators of stages took, in proportion to what they were expected to.

    A stage that recomputes has its forward pass again in its backward pass, as `repeat_ratio` says.
    """
    company = company_of(cluster, {d for devices in placement.devices for d in devices})
    types = {d.name: d for d in cluster.device_types() if d.is_cpu}
    used = sorted({name for _, name, _ in seconds if name in types})
    repeat = repeat_ratio(kernels.step, [types[name] for name in used], database)
    for name in used:
        operators = dict(_operators(kernels, types[name], company, database))
        for k, stage in enumerate(placement.stages):
            if (k, name, FORWARD) not in seconds:
                continue
            forward_s, backward_s = (seconds[k, name, half] for half in (FORWARD, BACKWARD))
            again_s = repeat.get(name, 1.0) * forward_s if placement.recompute[k] else 0.0
            took = {FORWARD: (stage, forward_s), BACKWARD: (_backward_of(kernels, stage), backward_s - again_s)}
            for half, (own, took_s) in took.items():
                _keep(kernels, types[name], operators[half], frozenset(own), took_s, company + half, database)


def _stage_seconds(trainer: HetTrainer, cluster: ClusterSpec) -> StageSeconds:
    types = {d: g.device.name for g in cluster.groups() for d in g.device_ids}
    batch = example_batch(trainer.batch_specs)
    found: dict[tuple[int, str, str], list[float]] = {}
    for step in range(WARM_STEPS + STEPS):
        trainer.train_step(batch)
        for p in trainer.times() if step >= WARM_STEPS else ():
            if p.action is not None:
                half = BACKWARD if p.action.backward else FORWARD
                found.setdefault((p.action.stage, types[p.device], half), []).append(p.worked_s)
    return {key: median(times) for key, times in found.items()}


def _operators(
    kernels: StepKernels, device: DeviceType, company: str, database: MeasuredKernels
) -> Iterator[tuple[str, _Operators]]:
    inside = kernels.times([device], database, in_context=True, company=company)
    alone = kernels.times([device], database, in_context=False)
    for half, candidates, i in ((FORWARD, kernels.forward, 0), (BACKWARD, kernels.backward, 1)):
        operators = kernels.operators(candidates)
        names = tuple(name for ops in operators for name in ops)
        yield half, _Operators(names, _each(inside[i], operators), _each(alone[i], operators))


def _each(table: TimeTable, operators: Sequence[Sequence[str]]) -> NDArray[np.float64]:
    """Seconds of each operator: a kernel's in equal parts."""
    seconds = table.seconds[:, 0].tolist()
    return np.array([s / len(ops) for s, ops in zip(seconds, operators, strict=True) for _ in ops])


def _backward_of(kernels: StepKernels, stage: Sequence[str]) -> list[str]:
    """The backward operators that follow the forward operators of a stage."""
    own = frozenset(stage)
    return [name for part in kernels.parts if part.forward[0] in own for name in part.backward]


def _keep(
    kernels: StepKernels,
    device: DeviceType,
    operators: _Operators,
    own: frozenset[str],
    took_s: float,
    part: str,
    database: MeasuredKernels,
) -> None:
    mine = np.array([name in own for name in operators.names], bool)
    expected_s = float(operators.inside_s[mine].sum())
    if not 0 < expected_s < np.inf or took_s <= 0:
        return
    inside_s = operators.inside_s[mine] * (took_s / expected_s)
    names = [name for name, is_mine in zip(operators.names, mine.tolist(), strict=True) if is_mine]
    alone_s = operators.alone_s[mine].tolist()
    keep_run(database, kernels.step.prepared.key, device, names, inside_s.tolist(), alone_s, part)
