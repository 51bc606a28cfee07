"""Whole transformer models as sums of their operators: the `models` section of cost_models.py.

NeuSight's traces hold one layer of each model; the operators of that layer count once for each of the model's layers.
Kernels of a model follow one another in a stream, so each pays the device's launch cost, not an eager call's.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import datasets
import numpy as np

from tvmhet.cluster.catalog import device_type
from tvmhet.cost.boosted import LearnedModel
from tvmhet.cost.model import CostModel, KernelDesc, OpDesc
from tvmhet.cost.roofline import SPEC_SHEET, Roofline
from tvmhet.cost.workload import kernel_of

if TYPE_CHECKING:
    from cost_models import Bench

DEVICES = {
    "NVIDIA_A100-PCIE-40GB": "a100-pcie-40gb",
    "Tesla_P100-PCIE-16GB": "p100-pcie-16gb",
    "Tesla_V100-PCIE-32GB": "v100-pcie-32gb",
}
GROUPS = ("batched_vector", "linear_vector", "stream", "softmax", "norm")
#: Mean error of NeuSight over its 80 runs and of Habitat by its paper, %.
PUBLISHED = "NeuSight 8.9 (80 runs), Habitat 11.8 (its paper)"

_LAYER = re.compile(r"(layer|layers|h|block)[._]0[._]")
_ELEMENTWISE = {
    "add": "add", "mul": "multiply", "sub": "subtract", "truediv": "divide", "pow": "power", "tanh": "tanh",
    "relu": "relu", "gelu": "gelu", "where": "where", "masked_fill": "where", "max": "maximum", "to": "copy",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """One model on one device: its kernels, how often each runs, and the measured end-to-end seconds."""

    device: str
    name: str
    kernels: tuple[tuple[KernelDesc, int], ...]
    measured_s: float

    def predicted_s(self, model: CostModel) -> float:
        """Return the sum of the predicted times."""
        times = model.predict([k for k, _ in self.kernels]).seconds
        return float(times @ np.array([n for _, n in self.kernels]))


def read_runs(data: Path) -> list[Run]:
    """Return every run with both a trace and an end-to-end time; compiled (-fusion) runs have no trace of their own."""
    traces: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for row in datasets.read_rows(data / "neusight" / "graph_ops.csv.gz"):
        traces.setdefault((row["device"], row["model"]), []).append(row)
    runs = []
    for label in datasets.read_rows(data / "neusight" / "labels_e2e.csv"):
        rows = traces.get((label["device"], label["model"]))
        if rows:
            kernels = _kernels(rows, int(float(label["num_layer"])), "train" in label["model"])
            runs.append(
                Run(DEVICES[label["device"]], label["model"], tuple(kernels), float(label["e2e_latency"]) * 1e-3)
            )
    return runs


def _kernels(rows: Sequence[Mapping[str, str]], num_layers: int, training: bool) -> list[tuple[KernelDesc, int]]:
    marks = [i for i, r in enumerate(rows) if _LAYER.search(r["target"])]
    heads = [i for i, r in enumerate(rows) if i > marks[-1] and r["op"] == "call_module"]
    first, last = marks[0], (heads[0] if heads else len(rows))
    kernels = []
    for i, row in enumerate(rows):
        op = _operator(row)
        if op is None:
            continue
        times = num_layers if first <= i < last else 1
        kernels.append((kernel_of(op), times))
        if training and op.family != "embedding":
            kernels.append((kernel_of(replace(op, backward=True)), times))
    return kernels


def _operator(row: Mapping[str, str]) -> OpDesc | None:
    """Return the operator of one traced node, or None if it launches no kernel worth counting."""
    shapes = [s for s in ast.literal_eval(row["input_shapes"]) if s]
    out = ast.literal_eval(row["output_shape"]) if row["output_shape"] else ()
    count = math.prod(out)
    if not shapes or count <= 1 or row["op"] in ("placeholder", "get_attr", "output"):
        return None
    if row["op"] == "call_module":
        return _module(row["target"].rsplit(".", 1)[-1].lower(), shapes, out)
    word = re.sub(r"_\d+$", "", row["name"])
    if word in ("addmm", "linear"):
        return OpDesc("linear", (1, count // out[-1], out[-1], shapes[1][-1]), "float32")
    if word in ("matmul", "bmm"):
        return OpDesc("matmul", (math.prod(out[:-2]), out[-2], out[-1], shapes[0][-1]), "float32")
    if word == "softmax":
        return OpDesc("softmax", (count // out[-1], out[-1]), "float32", "softmax")
    if word == "contiguous":
        return OpDesc("movement", (count, count), "float32", "copy")
    if word not in _ELEMENTWISE or (word == "to" and shapes[0] == list(out)):
        return None
    read = sum(math.prod(s) for s in shapes)
    name = _ELEMENTWISE[word]
    binary = name in ("add", "multiply", "subtract", "divide", "power")
    return OpDesc("elementwise", (read, count), "float32", f"{name}_scalar" if binary and read < 1.5 * count else name)


def _module(word: str, shapes: Sequence[Sequence[int]], out: Sequence[int]) -> OpDesc | None:
    count = math.prod(out)
    if "drop" in word:
        return None
    if any(w in word for w in ("emb", "wte", "wpe")):
        return OpDesc("embedding", (count // out[-1], 50257, out[-1]), "float32", "take")
    if "ln" in word or "norm" in word:
        return OpDesc("layer_norm", (count // out[-1], out[-1]), "float32", "layer_norm")
    if "act" in word:
        return OpDesc("elementwise", (count, count), "float32", "gelu")
    return OpDesc("linear", (1, count // out[-1], out[-1], shapes[0][-1]), "float32")


def left_out_model(bench: Bench, device: str) -> LearnedModel:
    """Return the model of `device` whose every group was trained without it."""
    kind = device_type(device)
    found = {}
    for group in GROUPS:
        for own, model in bench.left_out(group, "all"):
            if own.device == device:
                found[group] = model.groups[group]
    base = LearnedModel.load(kind, "queued")
    return replace(base, groups=found, fallback=Roofline(kind, SPEC_SHEET))


def whole_models(bench: Bench) -> None:
    """Print predicted against measured end-to-end time of every run, and how often two runs are put in order."""
    runs = read_runs(bench.data)
    bench.line("\nwhole models (float32, torch eager): the GPU type left out in turn; predicted over measured, %")
    bench.line(f"{'left out':<16}{'model':<26}{'measured s':>12}{'roofline':>11}{'ours':>9}")
    predicted, rooflines = [], []
    for run in runs:
        predicted.append(run.predicted_s(left_out_model(bench, run.device)))
        rooflines.append(run.predicted_s(Roofline(device_type(run.device), SPEC_SHEET)))
        errors = [100 * (p / run.measured_s - 1) for p in (rooflines[-1], predicted[-1])]
        bench.line(f"{run.device:<16}{run.name:<26}{run.measured_s:>12.4f}{errors[0]:>+11.1f}{errors[1]:>+9.1f}")
    measured = np.array([r.measured_s for r in runs])
    for label, values in (("roofline", rooflines), ("ours", predicted)):
        error = np.abs(np.array(values) / measured - 1)
        bench.line(f"{label}: mean {100 * error.mean():.1f} %, median {100 * np.median(error):.1f} %, {len(runs)} runs")
    bench.line(f"published: {PUBLISHED}")
    bench.line(_order(runs, np.array(predicted)))


def _order(runs: Sequence[Run], predicted: np.ndarray) -> str:
    """Say how many pairs of models on one device, and of devices for one model, come out in the measured order."""
    text = []
    for label, same in (("model", "device"), ("device", "name")):
        pairs = [
            (i, j)
            for i, a in enumerate(runs)
            for j, b in enumerate(runs)
            if i < j and getattr(a, same) == getattr(b, same)
        ]
        right = sum((predicted[i] < predicted[j]) == (runs[i].measured_s < runs[j].measured_s) for i, j in pairs)
        text.append(f"{label} pairs in the right order: {right} of {len(pairs)}")
    return "; ".join(text)
