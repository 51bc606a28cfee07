"""What was measured of a training step that is no kernel's time: handovers of cores, recomputation, the update.

a pass on a core ends ──► another device's pass on it starts      seconds, whatever the model
a step that recomputes, less one that keeps                       a part of the forward pass
the update's functions, each timed                                seconds per byte of parameters, and per parameter
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from tvmhet.cluster.device import DeviceType
from tvmhet.context import keep_part, part_s
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.ir.training_step import Step

_HANDOVER, _ANY_MODEL = "handover", "any model"
_REPEATED, _ONCE = "repeated forward", "forward once"
_UPDATE, _UPDATE_EACH = "update", "update of each parameter"
_LEAST_S = 1e-9  # recorded for nothing, or for less by the noise of two runs


def keep_handovers(database: MeasuredKernels, device: DeviceType, company: str, times_s: tuple[float, ...]) -> None:
    """Record seconds from the end of a pass to the start of another device's on the same core, whatever the model."""
    keep_part(database, _ANY_MODEL, device, company + _HANDOVER, times_s)


def handover_s(database: MeasuredKernels, device: DeviceType, company: str) -> float:
    """Return the seconds last recorded by `keep_handovers`; 0 where there are none."""
    return part_s(database, _ANY_MODEL, device, company + _HANDOVER) or 0.0


def keep_repeated(database: MeasuredKernels, step: Step, device: DeviceType, added_s: float, forward_s: float) -> None:
    """Record what recomputing adds to the passes of the step as one stage, and its forward pass that keeps."""
    keep_part(database, step.prepared.key, device, _REPEATED, (max(added_s, _LEAST_S),))
    keep_part(database, step.prepared.key, device, _ONCE, (forward_s,))


def repeat_ratio(step: Step, devices: Sequence[DeviceType], database: MeasuredKernels | None) -> dict[str, float]:
    """Return what recomputing adds as a part of the forward pass, by device type, where it was measured.

    Less than all: the repeated pass leaves out what the backward pass does not read, neither pass writes what is kept,
    and kernels may hold what no longer need be.
    """
    if database is None:
        return {}
    found = {}
    for d in devices:
        added, once = (part_s(database, step.prepared.key, d, part) for part in (_REPEATED, _ONCE))
        if added is not None and once:
            found[d.name] = added / once
    return found


def keep_update(
    database: MeasuredKernels, step: Step, device: DeviceType, times_s: tuple[float, ...], each_s: float
) -> None:
    """Record what the update of the whole step takes, and what a parameter takes of it beside its bytes."""
    keep_part(database, step.prepared.key, device, _UPDATE, times_s)
    keep_part(database, step.prepared.key, device, _UPDATE_EACH, (max(each_s, _LEAST_S),))


def per_parameter_s(sizes: Sequence[Sequence[int]], times_s: NDArray[np.float64], total_s: float) -> float:
    """Return seconds per parameter of functions that update parameters of `sizes` bytes in `times_s`, and the rest.

    Least squares of parameters x a + bytes x b in relative terms, neither negative, so that all functions add up.
    `total_s` is more than their sum by what surrounds them, which goes by parameters too.
    """
    counts, bytes_ = np.array([len(s) for s in sizes], np.float64), np.array([sum(s) for s in sizes], np.float64)
    rows = np.stack([counts, bytes_], axis=1) / times_s[:, None]
    (each, _), *_ = np.linalg.lstsq(rows, np.ones(len(times_s)), rcond=None)
    each = min(max(float(each), 0.0), float(times_s.sum() / counts.sum()))
    return each + max(0.0, total_s - float(times_s.sum())) / float(counts.sum())


def update_costs(
    step: Step, devices: Sequence[DeviceType], database: MeasuredKernels | None
) -> tuple[dict[str, float], dict[str, int]]:
    """Return seconds per byte by device type where a whole update was measured, and `Weight.update_bytes` by parameter.

    The latter is the mean of the device types: both parts of an update are the host's work.
    """
    size = {t.name: t.size_bytes for t in step.prepared.operator_graph.tensors}
    total = sum(size[p] for p in step.gradients)
    per_byte_s: dict[str, float] = {}
    extra: list[float] = []
    if database is None or not total:
        return {}, {}
    for d in devices:
        whole, each = (part_s(database, step.prepared.key, d, part) for part in (_UPDATE, _UPDATE_EACH))
        if whole is not None:
            beside = min((each or 0.0) * len(step.gradients), whole / 2)
            per_byte_s[d.name] = (whole - beside) / total
            extra.append(beside / len(step.gradients) / per_byte_s[d.name])
    return per_byte_s, dict.fromkeys(step.gradients, round(mean(extra))) if extra else {}
