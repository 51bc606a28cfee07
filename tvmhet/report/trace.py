"""Timelines as Chrome traces: open them in ui.perfetto.dev or chrome://tracing.

    process "predicted: resnet50"    t4:0      |compute 0|send 0|compute 1| ...
    process "measured: resnet50"     t4:0        |load|compute 0|store| ...

One process per kind of timeline, one track per device, times in microseconds. Events of one track follow each other
or lie within each other, as the format asks; a device that computes and transfers at once gets a track for each.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmhet.report.files import write_text

if TYPE_CHECKING:
    from tvmhet.plans import Plan
    from tvmhet.runtime.stats import RunStats, StageRun

Trace = dict[str, Any]
_PREDICTED, _MEASURED = 1, 2  # process ids
_US = 1e6


@dataclass(frozen=True, slots=True)
class _Span:
    """One interval of one device in seconds; `kind` is compute, receive or send, or load or store of a run."""

    device: str
    stage: int
    input_index: int
    kind: str
    start_s: float
    finish_s: float


def plan_to_trace(plan: Plan) -> Trace:
    """Return the simulated run of `plan`; without events if nothing was predicted."""
    spans = [_Span(e.device, e.stage, e.input_index, e.kind, e.start_s, e.finish_s) for e in plan.timeline]
    return _trace(_process(_PREDICTED, f"predicted: {plan.model}", spans, _devices(plan)), plan)


def run_to_trace(stats: RunStats, plan: Plan | None = None) -> Trace:
    """Return the measured full pipeline, beside the simulated one where `plan` is given.

    Time 0 is the start of the first measured event. A run of a stage is load (inputs to the device), compute, store.
    """
    origin_s = min((run.start_s for run in stats.timeline), default=0.0)
    spans = [span for run in stats.timeline for span in _parts(run, origin_s)]
    name = "measured" if plan is None else f"measured: {plan.model}"
    measured = _process(_MEASURED, name, spans, () if plan is None else _devices(plan))
    predicted = [] if plan is None else plan_to_trace(plan)["traceEvents"]
    return _trace([*predicted, *measured], plan)


def save_trace(trace: Mapping[str, Any], path: str | Path) -> None:
    """Write a trace as JSON; the file appears whole or not at all."""
    write_text(Path(path), json.dumps(trace, indent=1, sort_keys=True) + "\n")


def _parts(run: StageRun, origin_s: float) -> list[_Span]:
    edges = (run.start_s, run.loaded_s, run.computed_s, run.end_s)
    kinds = ("load", "compute", "store")
    return [
        _Span(run.device, run.stage, run.input_index, kind, a - origin_s, b - origin_s)
        for kind, (a, b) in zip(kinds, itertools.pairwise(edges), strict=True)
        if b > a
    ]


def _trace(events: list[Trace], plan: Plan | None) -> Trace:
    other = {} if plan is None else {"model": plan.model, "objective": plan.objective, "module_key": plan.module_key}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _devices(plan: Plan) -> tuple[str, ...]:
    """Device ids in the order of the stages."""
    return tuple(dict.fromkeys(d for s in plan.stages for d in s.placement.devices))


def _process(pid: int, name: str, spans: Sequence[_Span], devices: Sequence[str]) -> list[Trace]:
    """Return the metadata and the events of one process: a track per device, in the order of `devices`."""
    of_device: dict[str, list[_Span]] = {d: [] for d in devices}
    for span in spans:
        of_device.setdefault(span.device, []).append(span)
    tracks: list[tuple[str, list[_Span]]] = []
    for device, mine in of_device.items():
        tracks += _tracks(device, mine)
    events = [_metadata("process_name", pid, 0, name=name), _metadata("process_sort_index", pid, 0, sort_index=pid)]
    for tid, (track, mine) in enumerate(tracks, start=1):
        events.append(_metadata("thread_name", pid, tid, name=track))
        events.append(_metadata("thread_sort_index", pid, tid, sort_index=tid))
        events += [_event(span, pid, tid) for span in sorted(mine, key=lambda s: (s.start_s, s.finish_s))]
    return events


def _tracks(device: str, spans: Sequence[_Span]) -> list[tuple[str, list[_Span]]]:
    """One track, or one per kind where the device does several things at once."""
    if not _overlap(spans):
        return [(device, list(spans))]
    kinds = sorted({s.kind for s in spans})
    return [(f"{device} ({kind})", [s for s in spans if s.kind == kind]) for kind in kinds]


def _overlap(spans: Iterable[_Span]) -> bool:
    ordered = sorted(spans, key=lambda s: (s.start_s, s.finish_s))
    return any(b.start_s < a.finish_s - 1e-12 for a, b in itertools.pairwise(ordered))


def _event(span: _Span, pid: int, tid: int) -> Trace:
    return {
        "name": f"stage {span.stage}, input {span.input_index}" + ("" if span.kind == "compute" else f": {span.kind}"),
        "cat": span.kind,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": span.start_s * _US,
        "dur": (span.finish_s - span.start_s) * _US,
        "args": {"stage": span.stage, "input": span.input_index, "kind": span.kind},
    }


def _metadata(what: str, pid: int, tid: int, **args: str | int) -> Trace:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}
