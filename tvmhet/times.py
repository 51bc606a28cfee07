"""The time table of one planning problem: every candidate kernel on every device type, the best known figure of each.

    measured on this kind of device  >  learned or calibrated from other kernels measured there  >  learned or roofline

A prediction for a TVM-generated kernel is the library's time multiplied by what generated kernels of its family are
known to take more (`cost_models/generated.yaml`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from tvmhet.cluster.device import DeviceType
from tvmhet.cost.calibration import model_for
from tvmhet.cost.describe import describe
from tvmhet.cost.epilogues import epilogues, with_epilogues
from tvmhet.cost.generated import generated_s, library_start_s, maker_ratio
from tvmhet.cost.learned_cpu import LearnedCpu
from tvmhet.cost.many_cores import PARALLEL_START_S, cores_ratio
from tvmhet.cost.measure import Measurement
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.cost.model import KernelDesc, OpDesc, Predictions
from tvmhet.cost.roofline import Efficiency, Roofline, supports
from tvmhet.cost.shipped_cpu import shipped_cpu
from tvmhet.cost.table import MEASURED, SOURCES, Entry, TimeTable, measured_entry
from tvmhet.cost.tuning_store import kept_schedules, scheduled_key
from tvmhet.cost.workload import kernel_of
from tvmhet.cpu_times import learned_cpu
from tvmhet.graph.concurrent import shares
from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.kernel_key import kernel_key
from tvmhet.graph.opgraph import OpGraph
from tvmhet.graph.panels import panel_weights
from tvmhet.graph.placement import KernelPlacement
from tvmhet.graph.states import copied_bytes
from tvmhet.kernel_keys import LIBRARY_CALL_S, inside_keys
from tvmhet.kernel_keys import measured_key as measured_key
from tvmhet.library_calls import library_calls

#: Measured kernels of one family before others of it are calibrated by them.
_MIN_CALIBRATION = 1
_ENOUGH_TO_SPREAD = 8


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidate kernels of a graph: legal kernels, their keys, and descriptions for the cost models.

    `names` are those of the graph's operators, which kernels hold by index. `model_bytes` are the parameters that one
    run of the graph reads, 0 where it is not said. `panels` are the weights that are stored in panels where that pays.
    `copied_bytes` are of the states that each kernel renews, and that a GPU then copies; none in a model without.
    """

    kernels: tuple[LegalKernel, ...]
    keys: tuple[str, ...]
    descs: tuple[KernelDesc, ...]
    names: tuple[str, ...]
    model_bytes: float = 0.0
    panels: frozenset[int] = frozenset()
    copied_bytes: tuple[int, ...] = ()

    @staticmethod
    def of(graph: OpGraph, kernels: Sequence[LegalKernel], *, trains: bool = False) -> Candidates:
        """Describe `kernels` of `graph`; equal kernels share one description.

        Of a model that `trains`, weights change from run to run, so that they stay as they are.
        """
        panels = frozenset() if trains else panel_weights(graph)
        read = [frozenset() if k.maker == "library" else panels for k in kernels]
        keys = tuple(kernel_key(graph, k.ops, k.maker, k.branches, r) for k, r in zip(kernels, read, strict=True))
        known: dict[str, KernelDesc] = {}
        for key, kernel, r in zip(keys, kernels, read, strict=True):
            if key not in known:
                known[key] = describe(graph, kernel.ops, "tvm" if kernel.branches else kernel.maker, r)
        names = tuple(op.name for op in graph.operators)
        descs = tuple(known[key] for key in keys)
        copied = tuple(copied_bytes(graph, k.ops) for k in kernels) if graph.num_states else ()
        return Candidates(tuple(kernels), keys, descs, names, _model_bytes(graph), panels, copied)

    def indices(self, kernels: Sequence[KernelPlacement]) -> list[int]:
        """Return where the kernels of a plan stand among the candidates, by their operators and maker."""
        number = {name: i for i, name in enumerate(self.names)}
        place = {(k.ops, k.maker): i for i, k in enumerate(self.kernels)}
        return [place[tuple(sorted(number[op] for op in k.ops)), k.maker] for k in kernels]

    def only(self, chosen: Sequence[int]) -> Candidates:
        """Return some of the candidates."""
        kernels = tuple(self.kernels[i] for i in chosen)
        keys, descs = tuple(self.keys[i] for i in chosen), tuple(self.descs[i] for i in chosen)
        copied = tuple(self.copied_bytes[i] for i in chosen) if self.copied_bytes else ()
        return Candidates(kernels, keys, descs, self.names, self.model_bytes, self.panels, copied)


def _model_bytes(graph: OpGraph) -> float:
    """The parameters that one run of a graph reads: of a table that only `take` reads, what it takes."""
    total = 0.0
    for tensor in graph.tensors:
        if tensor.is_param and tensor.consumers:
            readers = [graph.operators[c] for c in tensor.consumers]
            taken = sum(graph.tensors[t].size_bytes for op in readers for t in op.outputs)
            taken_only = all(op.family == "take" for op in readers)
            total += min(tensor.size_bytes, taken) if taken_only else tensor.size_bytes
    return total


def time_table(
    candidates: Candidates,
    devices: Sequence[DeviceType],
    database: MeasuredKernels | None,
    factors: Mapping[str, float | NDArray[np.float64]] | None = None,
    *,
    tuned: bool = False,
    inside: bool = False,
) -> TimeTable:
    """Return the table of all candidates on `devices`.

    A dtype that a device has no rate for is priced as float32, which is what TVM's code falls back to. `factors` scales
    the times of a device type by name, all alike or each kernel's by its own: what they take inside the model against
    alone. With `tuned` a generated kernel that has a tuned schedule takes its time where that is shorter, and the entry
    holds the schedule: for plans that are built with it.
    """
    efficiency = Efficiency.load()
    table = TimeTable.empty(len(candidates.kernels), [d.name for d in devices])
    every_first = {key: i for i, key in reversed(list(enumerate(candidates.keys)))}
    at_once = {key: i for key, i in every_first.items() if candidates.kernels[i].branches}
    first = {key: i for key, i in every_first.items() if key not in at_once}
    plain = [i for i, kernel in enumerate(candidates.kernels) if not kernel.branches]
    described = [(candidates.keys[i], candidates.kernels[i].ops, candidates.descs[i]) for i in plain]
    generated = {key for key, i in first.items() if candidates.descs[i].maker == "tvm"}
    kinds = {device.is_cpu for device in devices}
    ends = {is_cpu: epilogues(described, in_turn=is_cpu) for is_cpu in kinds}
    if False in ends:  # library kernels on GPUs are sums of their calls
        ends[False] = tuple(end for end in ends[False] if end.whole in generated)
    for device in devices:
        entries = _predicted(candidates, first, device, efficiency)
        measured = _measured(candidates, first, device, database)
        moved = inside and device.name not in (factors or {})
        inside_bytes = max(1.0, candidates.model_bytes) if moved else 0.0
        if (elsewhere := shipped_cpu(device)) is not None:
            entries |= _learned(candidates, first, elsewhere, 0.0 if measured else inside_bytes)
        entries = _on_cores(candidates, first, entries, device)
        entries = _calibrated(candidates, first, entries, measured)
        if tuned and database is not None:
            measured |= _tuned(candidates, first, device, database, measured)
        if (model := learned_cpu(device, database)) is not None:
            entries |= _learned(candidates, first, model, inside_bytes)
            if moved and database is not None:
                tuned_keys = {key for key, entry in measured.items() if entry.source == "tuned"}
                measured = _moved_inside(candidates, first, model, measured)
                known = _measured_inside(candidates, first, device, database)
                measured |= {key: entry for key, entry in known.items() if key not in tuned_keys}
        entries |= measured
        entries = with_epilogues(entries, ends[device.is_cpu], device.launch_s)
        entries |= _at_once(candidates, at_once, device, database)
        entries |= _measured(candidates, at_once, device, database)
        if moved and database is not None:
            entries |= _measured_inside(candidates, at_once, device, database)
        every = {i: entries[key] for i, key in enumerate(candidates.keys)}
        if device.name in (factors or {}):
            by_kernel = np.broadcast_to((factors or {})[device.name], (len(every),)).tolist()
            every = {i: _in_context(entry, factor) for (i, entry), factor in zip(every.items(), by_kernel, strict=True)}
        if candidates.copied_bytes and not device.is_cpu:
            every = _with_copies(every, candidates.copied_bytes, device)
        table = table.with_entries(device.name, every)
    return table


def _with_copies(entries: Mapping[int, Entry], copied_bytes: Sequence[int], device: DeviceType) -> dict[int, Entry]:
    """Add what copying the states takes on a GPU to the kernels that renew them."""
    sizes = sorted(set(copied_bytes) - {0})
    descs = [kernel_of(OpDesc("movement", (n // 4 or 1, n // 4 or 1), "float32", "copy")) for n in sizes]
    copy_of = dict(zip(sizes, gpu_entries(device, descs), strict=True)) if sizes else {}
    return {i: _and_copy(entry, copy_of.get(copied_bytes[i])) for i, entry in entries.items()}


def _and_copy(entry: Entry, copy: Entry | None) -> Entry:
    if copy is None or not math.isfinite(entry.seconds):
        return entry
    seconds, low, high = entry.seconds + copy.seconds, entry.low + copy.low, entry.high + copy.high
    note = "; ".join(
        n for n in (entry.note, f"{copy.seconds * 1e6:.3g} us of it to copy what the next call reads") if n
    )
    return replace(entry, seconds=seconds, low=low, high=high, note=note)


def _in_context(entry: Entry, factor: float) -> Entry:
    if factor == 1.0 or not math.isfinite(entry.seconds):
        return entry
    note = "; ".join(n for n in (entry.note, f"times {factor:.2f} inside this model") if n)
    return replace(_times(entry, factor), note=note)


def _predicted(
    candidates: Candidates, first: Mapping[str, int], device: DeviceType, efficiency: Efficiency
) -> dict[str, Entry]:
    descs = [_computable(device, candidates.descs[i]) for i in first.values()]
    if not device.is_cpu:
        entries = dict(zip(first, gpu_entries(device, descs), strict=True))
        elsewhere = [key for key, i in first.items() if candidates.kernels[i].cpu_only]
        return entries | dict.fromkeys(elsewhere, _nowhere("it is made on CPUs only"))
    predictions = Roofline(device, efficiency).predict(descs)
    entries = {key: _scaled(predictions, j, maker_ratio(device, descs[j])) for j, key in enumerate(first)}
    library = {key for key, desc in zip(first, descs, strict=True) if desc.maker == "library"}
    return {key: _called(entry) if key in library else entry for key, entry in entries.items()}


def gpu_entries(
    device: DeviceType,
    descs: Sequence[KernelDesc],
    calls_of: Callable[[KernelDesc], tuple[KernelDesc, ...]] = library_calls,
) -> list[Entry]:
    """Predict kernels that follow each other in a stream: the library's as its calls, generated ones as one launch."""
    kernels = [calls_of(desc) if desc.maker == "library" else (desc,) for desc in descs]
    found = model_for(device, "queued").predict([call for calls in kernels for call in calls])
    ends = np.cumsum([len(calls) for calls in kernels])
    entries = []
    for desc, end, calls in zip(descs, ends.tolist(), kernels, strict=True):
        parts = slice(end - len(calls), end)
        notes = [] if all(found.in_range[parts]) else ["outside the range the model was fitted on"]
        times = np.array([t[parts].sum() for t in (found.seconds, found.low, found.high)])
        if desc.maker == "library":
            notes += [f"as {len(calls)} calls of the library"] if len(calls) > 1 else []
        else:
            ratio = maker_ratio(device, desc)
            times = generated_s(device, times, ratio, library_start_s(device, [desc.root]))
            notes += [f"assumed at {ratio:g} times the library's work"] if ratio != 1.0 else []
        source = min(found.source[parts], key=SOURCES.index)
        seconds, low, high = times.tolist()
        entries.append(Entry(seconds, low, high, source, "; ".join(notes)))
    return entries


def _called(entry: Entry) -> Entry:
    seconds, low, high = (t + LIBRARY_CALL_S for t in (entry.seconds, entry.low, entry.high))
    return replace(entry, seconds=seconds, low=low, high=high)


def _computable(device: DeviceType, desc: KernelDesc) -> KernelDesc:
    """The kernel itself, or, in a dtype that the device has no rate for, as its float32 units would emulate it."""
    if supports(device, desc):
        return desc
    return replace(desc, dtype="float32", ops=tuple(replace(op, dtype="float32") for op in desc.ops))


def _nowhere(reason: str) -> Entry:
    return Entry(math.inf, math.inf, math.inf, "cannot run", reason)


def _scaled(predictions: Predictions, j: int, ratio: float) -> Entry:
    note = "" if predictions.in_range[j] else "outside the range the model was fitted on"
    if ratio != 1.0:
        note = "; ".join(n for n in (note, f"assumed at {ratio:g} times the library's estimate") if n)
    seconds, low, high = (float(a[j]) * ratio for a in (predictions.seconds, predictions.low, predictions.high))
    return Entry(seconds, low, high, predictions.source[j], note)


def _learned(
    candidates: Candidates, first: Mapping[str, int], model: LearnedCpu, inside_bytes: float
) -> dict[str, Entry]:
    """Predict the kernels of the kinds that the model knows, as they run inside a model of that size or alone."""
    known = {key: candidates.descs[i] for key, i in first.items() if model.knows(candidates.descs[i])}
    known = {key: desc for key, desc in known.items() if supports(model.device, desc)}
    seconds = model.predict_s(list(known.values()), inside_bytes=inside_bytes).tolist()
    where = (
        f"kernels measured on {model.measured_on}" if model.measured_on else "measured kernels of this and other models"
    )
    note = f"by {model.num_kernels} {where}"
    entries = {}
    for (key, desc), s in zip(known.items(), seconds, strict=True):
        low, high = model.interval(desc)
        entries[key] = Entry(s, s * low, s * high, "learned", note)
    return entries


def _on_cores(
    candidates: Candidates, first: Mapping[str, int], entries: Mapping[str, Entry], device: DeviceType
) -> dict[str, Entry]:
    """Scale estimates of generated kernels that cannot use all cores of a CPU device."""
    ratios = {key: cores_ratio(device, candidates.descs[i]) for key, i in first.items()}
    return {key: entry if ratios[key] == 1.0 else _times(entry, ratios[key]) for key, entry in entries.items()}


def _times(entry: Entry, factor: float) -> Entry:
    seconds, low, high = (t * factor for t in (entry.seconds, entry.low, entry.high))
    return replace(entry, seconds=seconds, low=low, high=high)


def _moved_inside(
    candidates: Candidates, first: Mapping[str, int], model: LearnedCpu, measured: Mapping[str, Entry]
) -> dict[str, Entry]:
    """Scale times of kernels alone by what the model expects them to take longer inside these candidates' model."""
    known = [k for k, e in measured.items() if math.isfinite(e.seconds) and model.knows(candidates.descs[first[k]])]
    descs = [candidates.descs[first[key]] for key in known]
    inside = model.predict_s(descs, inside_bytes=max(1.0, candidates.model_bytes))
    ratios = inside / model.predict_s(descs, inside_bytes=0)
    return {**measured, **{k: _in_context(measured[k], float(r)) for k, r in zip(known, ratios, strict=True)}}


def _measured_inside(
    candidates: Candidates, first: Mapping[str, int], device: DeviceType, database: MeasuredKernels
) -> dict[str, Entry]:
    """Kernels that were timed inside other models of about that size: the median of those times."""
    entries = {}
    for key, i in first.items():
        keys = inside_keys(measured_key(key, candidates.kernels[i].maker, device), candidates.model_bytes)
        found = ([r.median_s for r in database.runs(k) if r.status == "ok"] for k in keys)
        if times := next(filter(None, found), None):
            spread = Measurement("ok", tuple(times))
            entries[key] = replace(measured_entry(spread), note="inside other models")
    return entries


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


def _at_once(
    candidates: Candidates, at_once: Mapping[str, int], device: DeviceType, database: MeasuredKernels | None
) -> dict[str, Entry]:
    """Predict kernels whose branches run at the same time: the longest share by one core's times, and its start."""
    if not at_once:
        return {}
    if not device.is_cpu or device.num_sms < 2:
        return dict.fromkeys(at_once, _nowhere("its branches need several cores of a CPU"))
    place = {kernel.ops: i for i, kernel in enumerate(candidates.kernels) if kernel.maker == "tvm"}
    kernels = {key: candidates.kernels[i].branches for key, i in at_once.items()}
    members = sorted({place[ops] for branches in kernels.values() for b in branches for ops in b.kernels})
    core = device.one_core()
    table = time_table(candidates.only(members), [core], database)
    alone = {candidates.kernels[m].ops: table.entry(j, core.name) for j, m in enumerate(members)}
    return {
        key: _longest([[alone[ops] for b in share for ops in branches[b].kernels] for share in parts])
        for key, branches in kernels.items()
        if (parts := shares([b.work for b in branches], device.num_sms))
    }


def _longest(parts: Sequence[Sequence[Entry]]) -> Entry:
    """The largest sum of some entries, each bound apart, with what starting the cores takes."""
    seconds, low, high = (
        max(math.fsum(getattr(entry, bound) for entry in part) for part in parts) + PARALLEL_START_S
        for bound in ("seconds", "low", "high")
    )
    if seconds == math.inf:
        return _nowhere("one of its kernels cannot")
    predicted = {entry.source for part in parts for entry in part} - MEASURED
    source = min(predicted, key=SOURCES.index) if predicted else "calibrated"
    return Entry(seconds, low, high, source, f"the longest of {len(parts)} shares, by times of one core")


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
