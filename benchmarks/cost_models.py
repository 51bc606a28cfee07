"""How wrong are predicted kernel times on GPU types and shapes that the models never saw?

    python -m benchmarks.cost_models --data DIR [--section gemm|fp32|llm|calibration|models|outside]... [--out FILE]

Each GPU type is left out in turn: scalars and trees come from the others, and all its rows (bf16 products: the quarter
of the (n, k) pairs that no type showed either) are predicted from its line in devices.yaml. Peers stand in the same
table on the same rows: the spec-sheet roofline, that roofline times the median of measured over roofline of the other
types ("scaled"), and ours with the same kernels measured on the other types ("transfer").
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from io import StringIO
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import TextIO

import numpy as np
import xgboost

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT / "cost_models", ROOT / "benchmarks"):  # scripts, not packages
    sys.path.insert(0, str(folder))
# ruff: noqa: E402

import datasets
import fitting
from datasets import Floats, Sample

from tvmhet.cluster.catalog import device_type
from tvmhet.cost.boosted import LearnedModel
from tvmhet.cost.calibrate import calibrate_group, pick_rows
from tvmhet.cost.likes import likeness
from tvmhet.cost.physics import peaks

#: NeuSight's errors on GPUs it had not seen, from its paper's artefact, by family, %.
NEUSIGHT_PERCENT = {"matmul": 13.8, "linear": 13.9, "elementwise": 19.3, "softmax": 13.9, "layer_norm": 56.7}
#: The bf16 products' errors to beat, by GPU type, %.
GEMM_PERCENT = {"a100-sxm-80gb": 14.8, "h200-sxm-141gb": 16.8, "h100-sxm-80gb": 12.2, "b200": 13.2, "l40s": 26.7}


def spec_sheet_s(sample: Sample, device: str) -> Floats:
    """Launch plus the larger of arithmetic at peak and traffic at the DRAM's rate."""
    kind = device_type(device)
    arithmetic = sample.table.flop / peaks(sample.table, kind)
    return kind.launch_s + np.maximum(arithmetic, sample.table.bytes_moved / kind.dram_byte_per_s)


def percent(predicted: Floats, measured: Floats) -> tuple[float, float, float]:
    """Return mean and median absolute percentage error, and the median bias, %."""
    relative = predicted / measured - 1
    return (
        100 * float(np.mean(np.abs(relative))),
        100 * float(np.median(np.abs(relative))),
        100 * float(np.median(relative)),
    )


def transfer_s(
    group: str, name: str, own: fitting.HeldOut, samples: Mapping[str, Sample], model: LearnedModel
) -> Floats:
    """Return times transferred from the other types' measurements of the same kernels, averaged by likeness."""
    here = samples[name].take(own.rows)
    keys = keys_of(here)
    logs, total = 0.25 * np.log(own.predicted), np.full(len(keys), 0.25)
    fit_dtype = model.groups[group].card.fit_dtype
    for other in sorted(set(samples) - {name}):
        known = {key: i for i, key in enumerate(keys_of(samples[other]))}
        rows = np.array([known.get(key, -1) for key in keys])
        both = np.flatnonzero(rows >= 0)
        if not len(both):
            continue
        found = fitting.predict_rows(other, model.groups[group], samples[other], rows[both], model.dram)
        weight = likeness(device_type(name), device_type(other), fit_dtype)
        logs[both] += weight * (np.log(own.predicted[both]) + np.log(found.ratio))
        total[both] += weight
    return np.exp(logs / total)


def keys_of(sample: Sample) -> list[tuple[object, ...]]:
    table = sample.table
    return [(*row, f, n) for row, f, n in zip(map(tuple, table.sizes.tolist()), table.family, table.name, strict=True)]


class Bench:
    """Samples, fits and left-out predictions of each group, computed once."""

    def __init__(self, data: Path, out: TextIO) -> None:
        self.data, self.out = data, out
        self.dram = fitting.dram_shares(datasets.streams(data))
        self._samples: dict[str, dict[str, Sample]] = {}
        self._left_out: dict[str, list[tuple[fitting.HeldOut, LearnedModel]]] = {}

    def samples(self, group: str) -> dict[str, Sample]:
        """Measured kernels of one group by device type."""
        if group not in self._samples:
            self._samples[group] = datasets.load_group(self.data, group)
        return self._samples[group]

    def left_out(self, group: str, shapes: str) -> list[tuple[fitting.HeldOut, LearnedModel]]:
        """For each type: predictions by a model without it, and that model."""
        if group not in self._left_out:
            samples = self.samples(group)
            fits = {n: fitting.fit_device(s, n) for n, s in samples.items()}
            found = []
            for name in sorted(samples):
                others = {n: s for n, s in samples.items() if n != name}
                known = {n: fits[n] for n in others}
                model = fitting.model_of(group, fitting.train_trees(others, known), known, others)
                rows = np.arange(len(samples[name]))
                if shapes == "held_out":
                    rows = np.flatnonzero(fitting.held_out(samples[name]))
                held = fitting.predict_rows(name, model, samples[name], rows, self.dram)
                found.append((held, fitting.learned(name, model, self.dram)))
            self._left_out[group] = found
        return self._left_out[group]

    def line(self, text: str = "") -> None:
        """Add a line to the report."""
        print(text, file=self.out, flush=True)


def compare(bench: Bench, group: str, shapes: str, published: Mapping[str, float], by_family: bool = False) -> None:
    """Print one row per left-out type (and family): peers and ours on the same rows, coverage and noise."""
    found = bench.left_out(group, shapes)
    samples = bench.samples(group)
    bench.line(f"\n{group}: one GPU type left out in turn; mean / median absolute error, %")
    bench.line(
        f"{'left out':<16}{'family':<12}{'rows':>7}{'roofline':>15}{'scaled':>14}{'ours':>14}{'bias':>7}"
        f"{'transfer':>14}{'in 80 %':>9}{'published':>11}"
    )
    for own, model in found:
        here = samples[own.device].take(own.rows)
        spec = spec_sheet_s(here, own.device)
        ratios = [np.median(samples[o].seconds / spec_sheet_s(samples[o], o)) for o in samples if o != own.device]
        moved = transfer_s(group, own.device, own, samples, model)
        others = [r for r, _ in found if r.device != own.device]
        low, high = fitting.unseen_interval(others).factors(own.launch_share)
        inside = (own.ratio >= low) & (own.ratio <= high)
        for family in sorted(set(here.table.family)) if by_family else ["all"]:
            rows = (here.table.family == family) if by_family else np.ones(len(here), dtype=bool)
            cells = [spec, spec * float(np.median(ratios)), own.predicted, moved]
            numbers = [percent(c[rows], own.measured[rows]) for c in cells]
            text = [f"{mean:7.1f} /{median:5.1f}" for mean, median, _ in numbers]
            goal = published.get(family if by_family else own.device)
            bench.line(
                f"{own.device:<16}{family:<12}{int(rows.sum()):>7}{text[0]:>15}{text[1]:>14}{text[2]:>14}"
                f"{numbers[2][2]:>+7.1f}{text[3]:>14}{100 * inside[rows].mean():>8.0f} {goal if goal else '':>10}"
            )


def gemm(bench: Bench) -> None:
    """bf16 and fp8 products, and how far two measurements of the same product lie apart."""
    compare(bench, "matmul_tensor", "held_out", GEMM_PERCENT)
    compare(bench, "matmul_narrow", "held_out", {})
    noise(bench)


def noise(bench: Bench) -> None:
    """Print the mean distance of other measurements of the same bf16 products: no model can do better on average."""
    bench.line("\nthe same bf16 products in other data sets: mean absolute difference, %")
    base = {(r["m"], r["n"], r["k"]): r for r in _gemm_rows(bench.data, "sglang_0.5.10")}
    for other in ("trtllm_1.3.0rc20", "vllm_0.24.0", "vllm_0.14.0", "trtllm_1.0.0"):
        gaps: dict[str, list[float]] = {}
        for row in _gemm_rows(bench.data, other):
            mine = base.get((row["m"], row["n"], row["k"]))
            for column, device in datasets.AICONFIGURATOR.items():
                if mine is not None and row.get(column) and mine.get(column):
                    gaps.setdefault(device, []).append(abs(float(row[column]) / float(mine[column]) - 1))
        bench.line(f"  {other:<18}" + ", ".join(f"{d} {100 * np.mean(g):.1f}" for d, g in sorted(gaps.items())))


def _gemm_rows(data: Path, version: str) -> list[Mapping[str, str]]:
    path = data / "aiconfigurator" / f"gemm_{version}.csv.gz"
    return [r for r in datasets.read_rows(path) if r["gemm_dtype"] == "bfloat16"]


def fp32(bench: Bench) -> None:
    """The float32 operators of NeuSight: every row of the left-out type."""
    for group in ("batched_vector", "linear_vector", "stream", "softmax", "norm"):
        compare(bench, group, "all", NEUSIGHT_PERCENT, by_family=True)
    compare(bench, "conv", "all", {})


def llm(bench: Bench) -> None:
    """Attention and mixtures of experts."""
    for group in ("attention_prefill", "attention_decode", "moe"):
        compare(bench, group, "held_out", {})
    attention_noise(bench)


def attention_noise(bench: Bench) -> None:
    """Print how far vLLM's attention lies from SGLang's on the same type and shape: the stack is no input."""
    bench.line("\nthe same bf16 attention in vllm_0.14.0 instead of sglang_0.5.10: mean absolute difference, %")
    for kind in ("context", "generation"):
        base, other = (_attention_rows(bench.data, kind, v) for v in ("sglang_0.5.10", "vllm_0.14.0"))
        gaps: dict[str, list[float]] = {}
        for key, row in other.items():
            for column, device in datasets.AICONFIGURATOR.items():
                if key in base and row.get(column) and base[key].get(column):
                    gaps.setdefault(device, []).append(abs(float(row[column]) / float(base[key][column]) - 1))
        bench.line(f"  {kind:<18}" + ", ".join(f"{d} {100 * np.mean(g):.1f}" for d, g in sorted(gaps.items())))


def _attention_rows(data: Path, kind: str, version: str) -> dict[tuple[str, ...], Mapping[str, str]]:
    found = {}
    for row in datasets.read_rows(data / "aiconfigurator" / f"{kind}_attention_perf_{version}.csv.gz"):
        if (row["attn_dtype"], row["kv_cache_dtype"]) == ("bfloat16",) * 2 and not float(row.get("window_size") or 0):
            kv_heads = row["num_key_value_heads"] if row["num_key_value_heads"] != "0" else row["num_heads"]
            found[(*(row[c] for c in ("batch_size", "isl", "num_heads", "head_dim", "step")), kv_heads)] = row
    return found


CALIBRATED = (
    "softmax", "norm", "linear_vector", "batched_vector", "attention_decode", "moe", "matmul_tensor", "conv", "stream",
)  # fmt: skip
COUNTS = (0, 5, 10, 20, 50)


def calibration(bench: Bench, groups: Sequence[str] = CALIBRATED) -> None:
    """Error on each left-out type after a few kernels of it were measured, picked by us and at random."""
    if groups[0] == CALIBRATED[0]:
        bench.line("\ncalibration: mean absolute error, %, on the left-out type after n kernels (picked | random)")
        bench.line(f"{'group':<20}{'left out':<16}" + "".join(f"{n:>15}" for n in COUNTS))
    for group in groups:
        shapes = "held_out" if group in ("matmul_tensor", "attention_decode", "moe") else "all"
        for own, model in bench.left_out(group, shapes):
            sample = bench.samples(group)[own.device]
            pool = fitting.pick(np.flatnonzero(~fitting.held_out(sample)), 3000)
            test = sample.take(np.flatnonzero(fitting.held_out(sample)))
            candidates = sample.take(pool)
            best = pick_rows(model, candidates.table, max(COUNTS))
            chance = np.random.default_rng(fitting.SEED).permutation(len(pool))
            cells = []
            for n in COUNTS:
                pair = [_calibrated_error(model, candidates, np.array(order[:n]), test) for order in (best, chance)]
                cells.append(f"{pair[0]:.1f} | {pair[1]:.1f}" if n else f"{pair[0]:.1f}")
            bench.line(f"{group:<20}{own.device:<16}" + "".join(f"{c:>15}" for c in cells))


def _calibrated_error(model: LearnedModel, pool: Sample, rows: np.ndarray, test: Sample) -> float:
    if len(rows):
        some = pool.take(rows.astype(np.int64))
        model = model.with_calibration({pool.table.group: calibrate_group(model, some.table, some.seconds)})
    return percent(model.predict_group(test.table).seconds, test.seconds)[0]


def models(bench: Bench) -> None:
    """Whole transformer models by the sum of their operators; each type left out in turn."""
    from whole_models import whole_models

    whole_models(bench)


def outside(bench: Bench) -> None:
    """Kernels measured by others, predicted by the shipped models."""
    import outside_rows

    outside_rows.outside(bench)


SECTIONS: Mapping[str, Callable[..., None]] = {
    "gemm": gemm, "fp32": fp32, "llm": llm, "calibration": calibration, "models": models,
    "outside": outside,
}  # fmt: skip

#: What may run side by side, in the order of the report; the sections of one part share what they train.
Call = tuple[str, tuple[str, ...]]
PARTS: Sequence[Sequence[Call]] = (
    (("gemm", ()),),
    (("fp32", ()), ("models", ())),
    (("llm", ()),),
    (("outside", ()),),
    *((("calibration", (group,)),) for group in CALIBRATED),
)


def _commit() -> str:
    run = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return run.stdout.strip() or "unknown"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sections named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--section", action="append", choices=list(SECTIONS))
    parser.add_argument("--out", type=Path, default=Path("/dev/null"))
    parser.add_argument("--jobs", type=int, default=1, help="parts that run side by side; the report is the same")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    chosen = [tuple(call for call in part if call[0] in (options.section or SECTIONS)) for part in PARTS]
    parts = [part for part in chosen if part]
    with options.out.open("w") as out, ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        bench = Bench(options.data, out)
        bench.line(
            f"cost_models at {_commit()}: xgboost {xgboost.__version__}, numpy {np.__version__}, "
            f"python {platform.python_version()}, seed {fitting.SEED}, one thread each, {options.jobs} at a time"
        )
        cpu_s = 0.0
        for text, part_s in pool.map(_report, repeat(options.data), parts):
            bench.line(text.rstrip("\n"))
            print(text, end="", flush=True)
            cpu_s += part_s
        bench.line(f"\n{time.monotonic() - begin:.0f} s on the clock, {cpu_s:.0f} s of CPU")


def _report(data: Path, part: Sequence[Call]) -> tuple[str, float]:
    """Run one part in a process of its own; return its lines and its CPU seconds."""
    begin = time.process_time()
    text = StringIO()
    bench = Bench(data, text)
    for section, groups in part:
        SECTIONS[section](bench, *([groups] if groups else []))
    return text.getvalue(), time.process_time() - begin


if __name__ == "__main__":
    main()
