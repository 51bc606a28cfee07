"""The time table of one planning problem: every candidate kernel on every device type, the best known figure of each.

    measured on this kind of device  >  calibrated by other kernels measured there  >  learned or roofline

A prediction for a TVM-generated kernel is the library's time multiplied by what generated kernels of its family are
known to take more (`cost_models/generated.yaml`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median

import torch
import yaml

from tvmhet import _tvm
from tvmhet._data import data_path
from tvmhet.cluster.device import DeviceType
from tvmhet.cost.calibration import model_for
from tvmhet.cost.describe import describe
from tvmhet.cost.measure import Measurement
from tvmhet.cost.measured import KernelKey, MeasuredKernels
from tvmhet.cost.model import CostModel, KernelDesc, Predictions
from tvmhet.cost.roofline import Efficiency, Roofline, supports
from tvmhet.cost.table import Entry, TimeTable, measured_entry
from tvmhet.cost.tuning_store import kept_schedules, scheduled_key
from tvmhet.emit.lower import LOWERING_VERSION
from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.kernel_key import kernel_key
from tvmhet.graph.opgraph import OpGraph

#: What calling a library kernel from the VM on a CPU takes beyond the kernel: Python, DLPack and torch's dispatcher.
#: `benchmarks/stage_overhead.py` on one idle core: 7.3 us a call; the rooflines of CPU types count 2 us of it.
LIBRARY_CALL_S = 5e-6

#: Measured kernels of one family before others of it are calibrated by them.
_MIN_CALIBRATION = 1
_ENOUGH_TO_SPREAD = 8


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidate kernels of a graph: legal kernels, their keys, and descriptions for the cost models."""

    kernels: tuple[LegalKernel, ...]
    keys: tuple[str, ...]
    descs: tuple[KernelDesc, ...]

    @staticmethod
    def of(graph: OpGraph, kernels: Sequence[LegalKernel]) -> Candidates:
        """Describe `kernels` of `graph`; equal kernels share one description."""
        keys = tuple(kernel_key(graph, k.ops, k.maker) for k in kernels)
        known: dict[str, KernelDesc] = {}
        for key, kernel in zip(keys, kernels, strict=True):
            if key not in known:
                known[key] = describe(graph, kernel.ops, kernel.maker)
        return Candidates(tuple(kernels), keys, tuple(known[key] for key in keys))


def measured_key(key: str, maker: str, device: DeviceType) -> KernelKey:
    """Return the database key of a kernel on a device type: on CPUs bound to this processor's model."""
    made = f"torch {torch.__version__}" if maker == "library" else f"lowering {LOWERING_VERSION}"
    return KernelKey(
        kernel_hash=key,
        target=json.dumps(dict(device.target), sort_keys=True),
        device=cpu_model() if device.is_cpu else device.name,
        toolchain=f"{made}; {device.num_sms} cores" if device.is_cpu else made,
        tvm_version=_tvm.TVM_VERSION,
    )


@lru_cache(maxsize=1)
def cpu_model() -> str:
    """The processor's name as the kernel gives it; the machine type where it gives none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else "unknown processor"


@lru_cache(maxsize=1)
def _generated_ratios() -> Mapping[str, Mapping[str, float]]:
    tree: dict[str, dict[str, float]] = yaml.safe_load(data_path("generated.yaml").read_text())["ratio"]
    return tree


def time_table(
    candidates: Candidates,
    devices: Sequence[DeviceType],
    database: MeasuredKernels | None,
    factors: Mapping[str, float] | None = None,
    *,
    tuned: bool = False,
) -> TimeTable:
    """Return the table of all candidates on `devices`.

    A dtype that a device has no rate for is priced as float32, which is what TVM's code falls back to. `factors` scales
    the times of a device type by name: what kernels take inside the model against alone. With `tuned` a generated
    kernel that has a tuned schedule takes its time where that is shorter, and the entry holds the schedule: for plans
    that are built with it.
    """
    efficiency = Efficiency.load()
    table = TimeTable.empty(len(candidates.kernels), [d.name for d in devices])
    first = {key: i for i, key in reversed(list(enumerate(candidates.keys)))}
    for device in devices:
        entries = _predicted(candidates, first, device, efficiency)
        measured = _measured(candidates, first, device, database)
        entries = _calibrated(candidates, first, entries, measured) | measured
        if tuned and database is not None:
            entries |= _tuned(candidates, first, device, database, measured)
        if (factor := (factors or {}).get(device.name, 1.0)) != 1.0:
            entries = {key: _in_context(entry, factor) for key, entry in entries.items()}
        table = table.with_entries(device.name, {i: entries[key] for i, key in enumerate(candidates.keys)})
    return table


def _in_context(entry: Entry, factor: float) -> Entry:
    if not math.isfinite(entry.seconds):
        return entry
    note = "; ".join(n for n in (entry.note, f"times {factor:.2f} inside this model") if n)
    seconds, low, high = (t * factor for t in (entry.seconds, entry.low, entry.high))
    return replace(entry, seconds=seconds, low=low, high=high, note=note)


def _predicted(
    candidates: Candidates, first: Mapping[str, int], device: DeviceType, efficiency: Efficiency
) -> dict[str, Entry]:
    descs = [_computable(device, candidates.descs[i]) for i in first.values()]
    predictions = _model(device, efficiency).predict(descs)
    entries = {key: _scaled(predictions, j, _ratio(device.kind, descs[j])) for j, key in enumerate(first)}
    if not device.is_cpu:
        return entries
    library = {key for key, desc in zip(first, descs, strict=True) if desc.maker == "library"}
    return {key: _called(entry) if key in library else entry for key, entry in entries.items()}


def _called(entry: Entry) -> Entry:
    seconds, low, high = (t + LIBRARY_CALL_S for t in (entry.seconds, entry.low, entry.high))
    return replace(entry, seconds=seconds, low=low, high=high)


def _model(device: DeviceType, efficiency: Efficiency) -> CostModel:
    """The model for GPUs, calibrated if it is, whose kernels follow each other in a stream; the roofline for CPUs."""
    return Roofline(device, efficiency) if device.is_cpu else model_for(device, "queued")


def _computable(device: DeviceType, desc: KernelDesc) -> KernelDesc:
    """The kernel itself, or, in a dtype that the device has no rate for, as its float32 units would emulate it."""
    if supports(device, desc):
        return desc
    return replace(desc, dtype="float32", ops=tuple(replace(op, dtype="float32") for op in desc.ops))


def _ratio(kind: str, desc: KernelDesc) -> float:
    """How much longer a TVM-generated kernel of this family takes than the library's; 1 for the library's own."""
    if desc.maker == "library":
        return 1.0
    ratios = _generated_ratios()[kind]
    return ratios.get(desc.root.family, ratios["default"])


def _scaled(predictions: Predictions, j: int, ratio: float) -> Entry:
    note = "" if predictions.in_range[j] else "outside the range the model was fitted on"
    if ratio != 1.0:
        note = "; ".join(n for n in (note, f"generated kernel assumed at {ratio:g} times the library's") if n)
    seconds, low, high = (float(a[j]) * ratio for a in (predictions.seconds, predictions.low, predictions.high))
    return Entry(seconds, low, high, predictions.source[j], note)


def _measured(
    candidates: Candidates, first: Mapping[str, int], device: DeviceType, database: MeasuredKernels | None
) -> dict[str, Entry]:
    if database is None:
        return {}
    entries = {}
    for key, i in first.items():
        entry = _best_run(database.runs(measured_key(key, candidates.kernels[i].maker, device)))
        if entry is not None:
            entries[key] = entry
    return entries


def _best_run(runs: Sequence[Measurement]) -> Entry | None:
    good = [r for r in runs if r.status == "ok"]
    calm = [r for r in good if not r.busy]
    if chosen := calm or good:
        return measured_entry(min(chosen, key=lambda r: r.median_s))
    return measured_entry(runs[-1]) if runs else None


def _tuned(
    candidates: Candidates,
    first: Mapping[str, int],
    device: DeviceType,
    database: MeasuredKernels,
    measured: Mapping[str, Entry],
) -> dict[str, Entry]:
    """Kernels whose tuned schedule was measured, and faster than the rules' kernel was."""
    kept = kept_schedules(database.path, device.name, measured_key("0", "tvm", device))
    entries = {}
    for key, i in first.items():
        if candidates.kernels[i].maker != "tvm" or key not in measured:
            continue
        plain = measured_key(key, "tvm", device)
        known = [(_best_run(database.runs(scheduled_key(plain, s))), s) for s in kept.get(key, ())]
        faster = [(e, s) for e, s in known if e is not None and e.seconds < measured[key].seconds]
        if faster:
            entry, schedule = min(faster, key=lambda pair: pair[0].seconds)
            note = f"{measured[key].seconds / entry.seconds:.2f} times as fast as by the rules"
            entries[key] = replace(entry, source="tuned", note=note, schedule=schedule.to_text())
    return entries


def _calibrated(
    candidates: Candidates, first: Mapping[str, int], predicted: Mapping[str, Entry], measured: Mapping[str, Entry]
) -> dict[str, Entry]:
    """Scale predictions by the median of measured over predicted among kernels of the same maker and family."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for key, entry in measured.items():
        if math.isfinite(entry.seconds) and math.isfinite(predicted[key].seconds):
            ratios.setdefault(_kind(candidates, first[key]), []).append(entry.seconds / predicted[key].seconds)
    out = {}
    for key, entry in predicted.items():
        known = ratios.get(_kind(candidates, first[key]), [])
        if len(known) < _MIN_CALIBRATION or not math.isfinite(entry.seconds):
            out[key] = entry
            continue
        scale = median(known)
        low, high = min(*known, scale) / scale, max(*known, scale) / scale
        if len(known) < _ENOUGH_TO_SPREAD:  # too few to say how much the family varies: ask the model as well
            low, high = min(low, entry.low / entry.seconds), max(high, entry.high / entry.seconds)
        seconds = entry.seconds * scale
        out[key] = Entry(
            seconds, seconds * low, seconds * high, "calibrated", f"by {len(known)} measured kernels of its family"
        )
    return out


def _kind(candidates: Candidates, i: int) -> tuple[str, str]:
    return candidates.kernels[i].maker, candidates.descs[i].root.family
