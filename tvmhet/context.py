"""What kernels take inside the model against alone: factors per model and device type, measured by `profile`.

    alone: caches warm with its own data          inside: weights come from memory, the VM calls one after another
    sum of the plan's kernels, each alone  ──►  the same plan run as one stage       factor = whole / sum
                                           ──►  the same while every other CPU device of the cluster runs its own

The first factor is for plans in which one device works at a time, the second for pipelines: cores share the last cache
and the memory's bandwidth. A factor scales every time of its device type in the time table, so it moves stage
boundaries, not fusion choices.
"""

from __future__ import annotations

import hashlib
import json
import math

from tvmhet import _tvm
from tvmhet.cluster.device import DeviceType
from tvmhet.cost.measure import Measurement
from tvmhet.cost.measured import KernelKey, MeasuredKernels
from tvmhet.emit.lower import lowering_version
from tvmhet.kernel_keys import cpu_model


def context_factor(database: MeasuredKernels, model_key: str, device: DeviceType, part: str = "") -> float:
    """Return how much longer kernels take inside this model than alone on `device`; 1.0 where it was not measured.

    `part` names a half of a training step, or the company of other devices: see `beside`.
    """
    if not device.is_cpu:
        return 1.0
    whole, alone = (database.runs(_key(model_key, device, part + kind)) for kind in ("whole", "sum"))
    if not whole or not alone:
        return 1.0
    factor = whole[-1].median_s / alone[-1].median_s
    return factor if math.isfinite(factor) and factor > 0 else 1.0


def beside(num_others: int) -> str:
    """Return what the factor of a device type is called while so many other devices of the machine work."""
    return f"beside {num_others} " if num_others else ""


def keep_context(
    database: MeasuredKernels,
    model_key: str,
    device: DeviceType,
    whole_s: tuple[float, ...],
    sum_s: float,
    part: str = "",
) -> None:
    """Record runs of the whole model on one device, and the sum of its kernels' times alone."""
    database.insert(_key(model_key, device, part + "whole"), Measurement("ok", whole_s))
    database.insert(_key(model_key, device, part + "sum"), Measurement("ok", (sum_s,)))


def keep_part(
    database: MeasuredKernels, model_key: str, device: DeviceType, part: str, times_s: tuple[float, ...]
) -> None:
    """Record what a part of the model takes that is not made of known kernels, such as an optimiser's update."""
    database.insert(_key(model_key, device, part), Measurement("ok", times_s))


def part_s(database: MeasuredKernels, model_key: str, device: DeviceType, part: str) -> float | None:
    """Return the seconds last recorded by `keep_part`; None where there are none."""
    runs = database.runs(_key(model_key, device, part)) if device.is_cpu else []
    return runs[-1].median_s if runs else None


def _key(model_key: str, device: DeviceType, kind: str) -> KernelKey:
    return KernelKey(
        kernel_hash=hashlib.sha256(f"{kind} {model_key}".encode()).hexdigest()[:32],
        target=json.dumps(dict(device.target), sort_keys=True),
        device=cpu_model(),
        toolchain=f"whole model, lowering {lowering_version(device.kind)}; {device.num_sms} cores",
        tvm_version=_tvm.TVM_VERSION,
    )
