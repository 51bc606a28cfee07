"""What `cpu_gate.py` prints: gate models, and training models left out, as predicted from kernels of other models.

times.jsonl, operators.jsonl ──► MeasuredKernel of training models ──► LearnedCpu ──► errors of whole models
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu_gate_models import LATER, LATEST
from tvmhet import _tvm
from tvmhet.cluster.catalog import device_type
from tvmhet.cluster.cpu import processor_family, processor_vendor
from tvmhet.cost.columns import Floats
from tvmhet.cost.learned_cpu import LearnedCpu, MeasuredKernel, learn
from tvmhet.cost.model import from_text
from tvmhet.cost.shipped_cpu import write_measured
from tvmhet.kernel_keys import LIBRARY_CALL_S, cpu_model, toolchain

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
_GOAL, _WORST, _PARTS = 0.1, 6, 8


def read_rows(path: Path) -> list[Row]:
    """The JSON lines of a file; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def fastest(folder: Path) -> dict[str, Floats]:
    """Seconds of each kernel of each model that was timed, in the fastest of its runs."""
    found: dict[str, Floats] = {}
    for row in read_rows(folder / "times.jsonl"):
        times = np.array(row["times_s"])
        if row["matched"] and (row["model"] not in found or times.sum() < found[row["model"]].sum()):
            found[row["model"]] = times
    return found


def noise(folder: Path, models: Sequence[str]) -> str:
    """How far the runs of one model are from its fastest: what no prediction can be held to."""
    runs: dict[str, list[float]] = {}
    for row in read_rows(folder / "times.jsonl"):
        if row["matched"] and row["model"] in models:
            runs.setdefault(row["model"], []).append(sum(row["times_s"]))
    beyond = [sorted(taken)[1] / min(taken) - 1 for taken in runs.values() if len(taken) > 1]
    if not beyond:
        return "each model was timed once"
    return (
        f"{len(beyond)} models: the second fastest run takes {np.median(beyond):.1%} (median) longer than the fastest, "
        f"of {np.mean(np.array(beyond) > _GOAL):.0%} over 10% longer"
    )


def kernels_of(row: Row, times_s: Floats) -> list[MeasuredKernel]:
    """What was measured of one model: its distinct kernels, each at the median of its calls."""
    calls: dict[str, list[float]] = {}
    texts = {key: text for key, _, text in row["kernels"]}
    for (key, _, _), seconds in zip(row["kernels"], times_s.tolist(), strict=True):
        calls.setdefault(key, []).append(seconds)
    inside = float(row["model_bytes"])
    return [MeasuredKernel(from_text(texts[key]), float(np.median(seconds)), inside) for key, seconds in calls.items()]


def measured_by_model(folder: Path) -> dict[str, list[MeasuredKernel]]:
    """The measured kernels of each training model."""
    times = fastest(folder)
    return {
        r["model"]: kernels_of(r, times[r["model"]])
        for r in read_rows(folder / "training.jsonl")
        if r["model"] in times
    }


def operators(folder: Path) -> list[MeasuredKernel]:
    """The library's drawn operators, called as a plan calls them."""
    rows = [row for row in read_rows(folder / "operators.jsonl") if row["seconds"] is not None]
    return [MeasuredKernel(from_text(row["kernel"]), row["seconds"] + LIBRARY_CALL_S, 0.0) for row in rows]


def _all(by_model: Mapping[str, Sequence[MeasuredKernel]], folder: Path) -> list[MeasuredKernel]:
    return [kernel for kernels in by_model.values() for kernel in kernels] + operators(folder)


def predicted_s(model: LearnedCpu, row: Row) -> Floats:
    """Seconds of a model's kernels; those of kinds that were never measured as estimated without measurements."""
    descs = tuple(from_text(text) for _, _, text in row["kernels"])
    known = [model.knows(desc) for desc in descs]
    found: Floats = np.where(known, model.predict_s(descs, inside_bytes=row["model_bytes"]), row["sheet_s"])
    return found


def left_out(device: str, folder: Path) -> Iterator[str]:
    """Training models, an eighth at a time, predicted from the others: what features and fit are chosen by."""
    kind, by_model, times = device_type(device), measured_by_model(folder), fastest(folder)
    rows = [row for row in read_rows(folder / "training.jsonl") if row["model"] in times]
    errors = []
    for part in range(_PARTS):
        others = {row["model"]: by_model[row["model"]] for i, row in enumerate(rows) if i % _PARTS != part}
        model = learn(kind, _all(others, folder))
        for row in rows[part::_PARTS]:
            measured_s = times[row["model"]].sum()
            errors.append(predicted_s(model, row).sum() / measured_s - 1)
            yield f"{row['model']:30} {measured_s * 1e3:8.2f} ms  {errors[-1]:+.1%}"
    yield _summary("left out", errors)


def report(device: str, folder: Path) -> Iterator[str]:
    """The table: each gate model's measured time, and the errors of what is learned and of estimates without it.

    Models that were chosen when the others' errors were known are summed up apart.
    """
    by_model, times = measured_by_model(folder), fastest(folder)
    model = learn(device_type(device), _all(by_model, folder))
    errors: dict[str, list[float]] = {"profiled": [], "shipped": [], "data sheet": []}
    chosen: list[str] = []
    yield f"{cpu_model()}, {device}; {model.num_kernels} measured kernels, {len(by_model)} other models"
    for row in read_rows(folder / "gate.jsonl"):
        if row["model"] not in times:
            yield f"{row['model']:22} {row.get('error', 'the calls are not the kernels')}"
            continue
        measured_s = times[row["model"]].sum()
        chosen.append(_chosen(row["model"]))
        for name, value in zip(errors, (predicted_s(model, row), row["shipped_s"], row["sheet_s"]), strict=True):
            errors[name].append(float(np.sum(value)) / measured_s - 1)
        shown = "  ".join(f"{name} {found[-1]:+.1%}" for name, found in errors.items())
        yield f"{row['model']:22} {measured_s * 1e3:8.2f} ms  {shown}"
    for name, found in errors.items():
        yield _summary(name, found)
        for words in dict.fromkeys(chosen) if len(set(chosen)) > 1 else ():
            yield "  " + _summary(words, [e for e, own in zip(found, chosen, strict=True) if own == words])
    yield noise(folder, [row["model"] for row in read_rows(folder / "gate.jsonl")])


def _chosen(model: str) -> str:
    return "chosen last" if model in LATEST else "chosen later" if model in LATER else "looked at before"


def _summary(name: str, errors: Sequence[float]) -> str:
    size = np.abs(errors)
    within = ", ".join(f"within {g:.0%}: {np.mean(size <= g):.0%} ({np.sum(size <= g)})" for g in (_GOAL, 2 * _GOAL))
    return (
        f"{name}: {len(size)} models, {within}, median {np.median(size):.1%}, mean {size.mean():.1%}, "
        f"median with sign {np.median(errors):+.1%}"
    )


def worst_kernels(device: str, folder: Path) -> Iterator[str]:
    """For each gate model that is off by more than 10 %: the kernels that add most to the difference."""
    times = fastest(folder)
    model = learn(device_type(device), _all(measured_by_model(folder), folder))
    for row in read_rows(folder / "gate.jsonl"):
        if row["model"] not in times:
            continue
        measured_s, found_s = times[row["model"]], predicted_s(model, row)
        error = found_s.sum() / measured_s.sum() - 1
        if abs(error) <= _GOAL:
            continue
        yield f"{row['model']}, {measured_s.sum() * 1e3:.2f} ms, {error:+.1%}"
        for i in np.argsort(-np.abs(found_s - measured_s))[:_WORST]:
            desc = from_text(row["kernels"][i][2])
            ops = " + ".join(f"{op.name or op.family} {list(op.sizes)}" for op in desc.ops[:2])
            share = (found_s[i] - measured_s[i]) / measured_s.sum()
            both = f"{measured_s[i] * 1e6:8.1f} us, predicted {found_s[i] * 1e6:8.1f}"
            yield f"  {share:+6.1%}  {both}  {desc.maker} {ops}"


def export(device: str, folder: Path) -> str:
    """Write what was measured of the training models and the operators for `cost_models/train.py`; return the path."""
    kind, by_model = device_type(device), measured_by_model(folder)
    level = str(kind.target["mcpu"]).rpartition("-")[2]
    name = f"cpu_{processor_vendor()}_{processor_family()}_{level}.jsonl.gz"
    path = ROOT / "cost_models" / "measured" / name
    inside = sum(len(kernels) for kernels in by_model.values())
    about = {
        "processor": cpu_model(),
        "device": device,
        "toolchains": f"{toolchain('tvm', kind)}; {toolchain('library', kind)}; TVM {_tvm.TVM_VERSION}",
        "how": f"python -m benchmarks.cpu_gate, CPU time of one thread: {inside} kernels inside {len(by_model)} "
        f"training models and {len(operators(folder))} operators of the library",
    }
    write_measured(path, about, _all(by_model, folder))
    return str(path)
