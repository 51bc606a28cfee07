"""What kernels take inside the model against alone: factors per model and device type, measured by `profile`.

    alone: caches warm with its own data          inside: weights come from memory, the VM calls one after another
    sum of the plan's kernels, each alone  ──►  the same plan run as one stage       factor = whole / sum
                                           ──►  the same while every other CPU device of the cluster runs its own

The first factor is for plans in which one device works at a time, the second for pipelines: cores share the last cache
and the memory's bandwidth. Where every call of the run was timed, a kernel's factor is that of the operators in it:
large weights make late layers slower than early ones.

Then plans are run as they are, stage by stage or all stages at once, and every call of them is timed, or every pass of
a training step. A kernel that ran so takes its own factor: two kernels of one operator differ (weights that one maker
reads in a better order), and so do one kernel's times in a short stage, whose weights stay in the cache, and in the
whole model. Kernels that no such plan had take the factor of their operators, corrected as those that ran were, the
more the more of the model ran so.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tvmhet import _tvm
from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.cost.measure import Measurement
from tvmhet.cost.measured import KernelKey, MeasuredKernels
from tvmhet.emit.lower import lowering_version
from tvmhet.kernel_keys import cpu_model

_IN_PLANS = "kernels in plans"
_LEAST_S = 1e-9  # of a part of a kernel that the clock did not see
_HOPE = 0.85  # of what is expected of a kernel that never ran inside, but not less than alone
_AS_EXPECTED = 0.1  # share of the model that counts as having taken what was expected, beside the kernels that ran


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


def company(cluster: ClusterSpec) -> str:
    """Return under what name factors are kept of a CPU device of `cluster` while all its CPU devices work."""
    counts = cluster.counts()
    return beside(sum(counts[d.name] for d in cluster.device_types() if d.is_cpu) - 1)


def company_of(cluster: ClusterSpec, devices: Collection[str]) -> str:
    """Return under what name factors are kept of a CPU device of `cluster` while those named in `devices` work."""
    cpus = (d for g in cluster.groups() if g.device.is_cpu for d in g.device_ids)
    return beside(sum(d in devices for d in cpus) - 1)


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


def keep_operators(
    database: MeasuredKernels,
    model_key: str,
    device: DeviceType,
    kernels: Sequence[Sequence[str]],
    inside_s: Sequence[float],
    alone_s: Sequence[float],
    half: str = "",
) -> None:
    """Record what each kernel (its operators' names) took inside the model and alone, in equal parts per operator.

    `half` names a half of a training step.
    """
    note = " ".join(name for ops in kernels for name in ops)
    for kind, seconds in (("inside by operator", inside_s), ("alone by operator", alone_s)):
        parts = tuple(max(s / len(ops), _LEAST_S) for ops, s in zip(kernels, seconds, strict=True) for _ in ops)
        database.insert(_key(model_key, device, half + kind), Measurement("ok", parts, note=note))


def factor_in_company(database: MeasuredKernels, model_key: str, device: DeviceType, company: str, part: str) -> float:
    """Return the factor of a part of the model while other devices work; the one without them if that is all."""
    together = context_factor(database, model_key, device, company + part)
    return together if together != 1.0 else context_factor(database, model_key, device, part)


def keep_run(
    database: MeasuredKernels,
    model_key: str,
    device: DeviceType,
    keys: Sequence[str],
    inside_s: Sequence[float],
    alone_s: Sequence[float],
    part: str = "",
) -> None:
    """Record what the kernels of a stage, by their keys, took in one run of a plan, and alone.

    `part` names the company of other devices; of a training step, whose operators' names are the keys, the half too.
    """
    times = tuple(max(s, _LEAST_S) for s in (*inside_s, *alone_s))
    database.insert(_key(model_key, device, part + _IN_PLANS), Measurement("ok", times, note=" ".join(keys)))


def kernel_factors(
    database: MeasuredKernels,
    model_key: str,
    device: DeviceType,
    kernels: Sequence[Sequence[str]],
    part: str = "",
    half: str = "",
    *,
    ran: Sequence[Sequence[str]] = (),
    hopeful: bool = False,
) -> NDArray[np.float64] | None:
    """Return the factor of each kernel (its operators' names), shape (len(kernels),); None where no model was run.

    `part` names the company of other devices, `half` a half of a training step. Operators that the run did not have,
    as rewrites make them, take the model's factor. With `ran`, the names under which `keep_run` has each kernel (its
    key, or its operators), those of which a part ran in plans take its own; with `hopeful`, the others take the least
    that can be hoped for.
    """
    out = _by_operators(database, model_key, device, kernels, part, half)
    if out is None or not ran:
        return out
    seen = _seen(database, model_key, device, part + half)
    parts = [[seen[name] for name in own if name in seen] for own in ran]
    is_seen = np.array([bool(own) for own in parts])
    if is_seen.any():
        weights = np.array([sum(alone_s for _, alone_s in own) for own in parts])
        inside_s = np.array([sum(inside_s for inside_s, _ in own) for own in parts])
        usual_s = _AS_EXPECTED * _whole_s(database, model_key, device, part, half)
        corrected = out * _correction(seen, ran, out, usual_s)
        own_factor = inside_s / np.where(is_seen, weights, 1.0)
        out = np.where(is_seen, own_factor, np.maximum(corrected, np.minimum(out, 1.0)))
    if hopeful:
        out = np.where(is_seen, out, np.minimum(out, np.maximum(_HOPE * out, 1.0)))
    return out


def _correction(
    seen: Mapping[str, tuple[float, float]], ran: Sequence[Sequence[str]], factors: NDArray[np.float64], usual_s: float
) -> float:
    """Return how much longer than by `factors` what ran took, `usual_s` more seconds having taken what was expected.

    A stage of 2 us that took 4 says nothing of a product of 600. Candidates that share a name share its seconds.
    """
    count = Counter(name for own in ran for name in own if name in seen)
    inside_s = sum(seen[name][0] for name in count)
    alone_s = np.array([sum(seen[name][1] / count[name] for name in own if name in seen) for own in ran])
    return (inside_s + usual_s) / (float(factors @ alone_s) + usual_s)


def _whole_s(database: MeasuredKernels, model_key: str, device: DeviceType, part: str, half: str) -> float:
    """Seconds of the run of the whole model, in company if there was one."""
    whole = f"{half}whole"
    runs = database.runs(_key(model_key, device, part + whole)) or database.runs(_key(model_key, device, whole))
    return runs[-1].median_s


def _seen(database: MeasuredKernels, model_key: str, device: DeviceType, part: str) -> dict[str, tuple[float, float]]:
    """Seconds inside and alone, by the kernels' keys or operators, of all runs of plans."""
    seen: dict[str, tuple[float, float]] = {}
    for run in database.runs(_key(model_key, device, part + _IN_PLANS)):
        keys, half = run.note.split(" "), len(run.times_s) // 2
        for key, inside_s, alone_s in zip(keys, run.times_s[:half], run.times_s[half:], strict=True):
            before = seen.get(key, (0.0, 0.0))
            seen[key] = before[0] + inside_s, before[1] + alone_s
    return seen


def _by_operators(
    database: MeasuredKernels,
    model_key: str,
    device: DeviceType,
    kernels: Sequence[Sequence[str]],
    part: str,
    half: str,
) -> NDArray[np.float64] | None:
    """The factor of each kernel by those of its operators in the run of the whole model; see `kernel_factors`."""
    alone = context_factor(database, model_key, device, half)
    whole = factor_in_company(database, model_key, device, part, half)
    if whole == 1.0:  # not measured
        return None
    known = [database.runs(_key(model_key, device, f"{half}{kind} by operator")) for kind in ("inside", "alone")]
    if not all(known):
        return np.full(len(kernels), whole)
    inside, before = (dict(zip(runs[-1].note.split(" "), runs[-1].times_s, strict=True)) for runs in known)
    slower = whole / alone
    out = np.full(len(kernels), whole)
    for i, ops in enumerate(kernels):
        in_run = [name for name in ops if name in inside]
        if in_run:
            out[i] = slower * sum(inside[n] for n in in_run) / sum(before[n] for n in in_run)
    return out


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
