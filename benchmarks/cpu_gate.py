"""Predicted against measured time of whole models that the cost model never saw, on one CPU type of this machine.

    python -m benchmarks.cpu_gate build training --folder DIR    plan and compile the zoo and models made of dice
    python -m benchmarks.cpu_gate time training --folder DIR     time their kernels inside them: what is learned from
    python -m benchmarks.cpu_gate operators --folder DIR         time drawn operators of the library as well
    python -m benchmarks.cpu_gate build gate --folder DIR        plan torchvision's, timm's and transformers' models
    python -m benchmarks.cpu_gate time gate --folder DIR         time them
    python -m benchmarks.cpu_gate report --folder DIR            the table
    python -m benchmarks.cpu_gate kernels --folder DIR           which kernels make models come out off by over 10 %
    python -m benchmarks.cpu_gate export --folder DIR            what cost_models/train.py teaches other machines from

Everything is kept in DIR as JSON lines and a database of measured kernels; steps go on where they ended. Results of
gate models are compared with torch's. Times are CPU time of one thread (medians), so others on the machine disturb
them through shared caches only. Needs `pip install tvmhet[gate]`.
"""

# ruff: noqa: E402 (thread counts are set before the libraries load)
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TVM_NUM_THREADS"):
    os.environ[_name] = "1"

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import tvmhet
from benchmarks import cpu_gate_models, cpu_gate_parts, cpu_gate_training
from tvmhet import _tvm, zoo
from tvmhet.calibrating import OpTimer
from tvmhet.campaign import known_times
from tvmhet.candidates import candidate_kernels
from tvmhet.cluster.catalog import device_type
from tvmhet.cluster.cpu import processor_vendor
from tvmhet.cost.calibration import MeasuredOps, stored_path
from tvmhet.cost.cpu_pool import drawn
from tvmhet.cost.learned_cpu import LearnedCpu
from tvmhet.cost.measure import ArgSpec, KernelJob, KernelTimer, Measurement
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.cost.model import from_text, to_text
from tvmhet.cost.record import record_of
from tvmhet.cost.shipped_cpu import write_measured
from tvmhet.cpu_times import learned_cpu, measured_kernels
from tvmhet.deploy import isa_level
from tvmhet.ir.prepare import prepare
from tvmhet.kernel_keys import cpu_model, inside_key, measured_key, toolchain
from tvmhet.planning import make_plan
from tvmhet.profiling import LIMITS
from tvmhet.runtime.cores import CpuDevice, assign_cores, worker_environment
from tvmhet.solve import Objective
from tvmhet.times import Candidates, time_table

#: NAME, NAME?SEED or NAME?{sizes}, and after @ the only maker.
TRAINING = (
    "cnn?1", "transformer?1", "cnn?2@tvm", "transformer?2@tvm", "cnn?3@library", "cnn?4", "transformer?4",
    "convnext_t", "mobilenet_v3", "resnet50", "resnet50@library", "cnn?5@tvm", "cnn?6", "transformer?5",
    'vit_b16?{"layers": 3}', "cnn?7", "cnn?8", "cnn?8@library", "cnn?9@tvm", 'gpt2_small?{"layers": 2}', "cnn?10",
    "transformer?7", "inception_v3", 'bert_base?{"layers": 2}', "cnn?11", "transformer?8@tvm", "cnn?12@tvm", "cnn?13",
    't5_small?{"layers": 2}', "transformer?9", "cnn?15", "dlrm", "cnn?16", "transformer?10", "cnn?17",
    "mobile?1", "mobile?2", "mobile?3", "mobile?4", "mobile?5", "mobile?6", "mobile?7@tvm", "mobile?8@library",
    "pyramid?1", "pyramid?2", "pyramid?3", "pyramid?4", "pyramid?5@tvm", "pyramid?7", "recurrent?1", "recurrent?2",
    "recurrent?3", "recurrent?4", "recurrent?6", "mixer?1", "mixer?2", "mixer?3", "mixer?4", "mixer?5@tvm",
    "mixer?6", "mixer?7", "mixer?8", "decoder?1", "decoder?2", "decoder?3", "decoder?4@tvm", "decoder?5",
    "decoder?6", "decoder?7", "decoder?8",
)  # fmt: skip
NUM_OPERATORS = 900
_GOAL, _WORST = 0.1, 6
_DRAWN = cpu_gate_training.MODELS | cpu_gate_parts.MODELS
ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The JSON lines of a file; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, row: Row) -> None:
    """Add one JSON line."""
    with path.open("a") as out:
        out.write(json.dumps(row) + "\n")


def _made(which: str, spec: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    name, _, options = spec.partition("@")[0].partition("?")
    if which == "gate":
        return cpu_gate_models.get(name)
    if name in _DRAWN:
        return _DRAWN[name](int(options))
    return zoo.get(name, **(json.loads(options) if options else {}))


def build(which: str, specs: list[str], device: str, folder: Path) -> None:
    """Plan and compile models; keep where they lie, what their kernels are, and how far results are from torch's."""
    jobs = folder / f"{which}.jsonl"
    known = {row["model"] for row in read_rows(jobs)}
    for spec in specs:
        if spec in known:
            continue
        row: Row = {"model": spec, "device": device}
        begin = time.process_time()
        try:
            row |= _built(which, spec, device, folder)
        except Exception as error:  # whatever stops a model is its result
            row["error"] = f"{type(error).__name__}: {str(error)[:400]}"
        row["cpu_s"] = time.process_time() - begin
        append(jobs, row)
        print(spec, row.get("error", f"off {row.get('difference', 0):.1e} of {row.get('largest', 0):.2g}"), flush=True)


def _built(which: str, spec: str, device: str, folder: Path) -> Row:
    module, example = _made(which, spec)
    cluster = tvmhet.ClusterSpec.of({device: 1})
    model = tvmhet.from_torch(module, example)
    makers = tuple(filter(None, (spec.partition("@")[2],))) or ("tvm", "library")
    prepared = prepare(model)
    assert prepared.graph is not None
    candidates = Candidates.of(prepared.graph, candidate_kernels(prepared.graph, makers))
    with MeasuredKernels(folder / "measured.db") as database:
        table = known_times(prepared, candidates, database, cluster, in_context=True, tuned=False)
    plan = make_plan(prepared, candidates.kernels, table, cluster, Objective.LATENCY, {}, 30.0, 0)
    lib = tvmhet.build(model, cluster=cluster, plan=plan, inline=True)
    got, want = _first(lib(*[x.numpy() for x in example])), _first(module(*example))
    (stage,), (placed,) = lib.program.stages, plan.stages
    values = [(lib.program.values[n].shape, lib.program.values[n].dtype) for n in stage.inputs]
    values += [(lib.program.params[n].shape, lib.program.params[n].dtype.name) for n in stage.params]
    place = {(k.ops, k.maker): i for i, k in enumerate(candidates.kernels)}
    used = [place[tuple(sorted(map(prepared.graph.index, k.ops))), k.maker] for k in placed.kernels]
    plain = time_table(candidates, cluster.device_types(), None)
    return {
        "library": str(stage.library), "function": stage.function, "args": [[list(s), d] for s, d in values],
        "kernels": [[candidates.keys[i], candidates.kernels[i].maker, to_text(candidates.descs[i])] for i in used],
        "model_bytes": candidates.model_bytes, "planned_s": placed.compute_s,
        "estimated_s": [plain.entry(i, device).seconds for i in used],
        "difference": float(np.abs(got - want).max()), "largest": float(np.abs(want).max()),
    }  # fmt: skip


def _first(result: Any) -> np.ndarray:
    while isinstance(result, tuple | list):
        result = result[0]
    return np.asarray(result)


def time_models(which: str, folder: Path) -> None:
    """Time every kernel of the built models inside them; training models' go to the database."""
    out = folder / f"{which}_times.jsonl"
    known = {row["model"] for row in read_rows(out)}
    rows = [r for r in read_rows(folder / f"{which}.jsonl") if "library" in r and r["model"] not in known]
    if not rows:
        return
    device = device_type(rows[0]["device"])
    binding = assign_cores([CpuDevice(device.name, device.num_sms, isa_level(device.target))])[device.name]
    with (
        MeasuredKernels(folder / "measured.db") as database,
        KernelTimer(binding.cores, worker_environment(binding, {}), ("tvmhet.emit.library",), LIMITS) as timer,
    ):
        for row in rows:
            args = tuple(ArgSpec(tuple(shape), dtype) for shape, dtype in row["args"])
            run = timer.measure(KernelJob(Path(row["library"]), args, row["function"], calls=True))
            matched = run.status == "ok" and len(run.times_s) == len(row["kernels"])
            if matched and which == "training":
                _keep(database, device, row, run.times_s)
            kept = {"status": run.status, "whole_s": sum(run.times_s), "matched": matched, "times_s": run.times_s}
            append(out, {"model": row["model"]} | kept)
            print(f"{row['model']} {run.status} {sum(run.times_s) * 1e3:.2f} ms {run.note}", flush=True)


def _keep(database: MeasuredKernels, device: Any, row: Row, times_s: tuple[float, ...]) -> None:
    found: dict[tuple[str, str, str], list[float]] = {}
    for kernel, seconds in zip(row["kernels"], times_s, strict=True):
        found.setdefault((kernel[0], kernel[1], kernel[2]), []).append(seconds)
    for (key, maker, text), seconds_s in found.items():
        name = inside_key(measured_key(key, maker, device), row["model_bytes"])
        database.insert(name, Measurement("ok", tuple(seconds_s)))
        database.describe(key, text)


def time_operators(device: str) -> None:
    """Time drawn operators of the library where `tvmhet calibrate` keeps its own, in TVMHET_CACHE_DIR."""
    kind, kernels, seconds = device_type(device), [], []
    with OpTimer.start(kind) as timer:
        for desc in drawn(NUM_OPERATORS):
            if times := timer.time(record_of(desc))["times_s"]:
                kernels.append(desc)
                seconds.append(median(times))
    MeasuredOps(device, tuple(kernels), tuple(seconds), cpu_model()).write(stored_path(kind))


def export(device: str, folder: Path) -> str:
    """Write what was measured of the training models and the operators for `cost_models/train.py`; return the path."""
    kind = device_type(device)
    path = ROOT / "cost_models" / "measured" / f"cpu_{processor_vendor()}.jsonl.gz"
    about = {
        "processor": cpu_model(),
        "device": device,
        "toolchains": f"{toolchain('tvm', kind)}; {toolchain('library', kind)}; TVM {_tvm.TVM_VERSION}",
        "how": "python -m benchmarks.cpu_gate, CPU time of one thread",
    }
    with MeasuredKernels(folder / "measured.db") as database:
        write_measured(path, about, measured_kernels(kind, database))
    return str(path)


def worst_kernels(device: str, folder: Path) -> Iterator[str]:
    """For each gate model that is off by more than 10 %: the kernels that add most to the difference."""
    kind = device_type(device)
    times = {r["model"]: np.array(r["times_s"]) for r in read_rows(folder / "gate_times.jsonl") if r["matched"]}
    with MeasuredKernels(folder / "measured.db") as database:
        model = learned_cpu(kind, database)
    assert model is not None
    for row in read_rows(folder / "gate.jsonl"):
        if row["model"] not in times:
            continue
        measured, predicted = times[row["model"]], predicted_s(model, row)
        error = predicted.sum() / measured.sum() - 1
        if abs(error) <= _GOAL:
            continue
        yield f"{row['model']}, {measured.sum() * 1e3:.2f} ms, {error:+.1%}"
        for i in np.argsort(-np.abs(predicted - measured))[:_WORST]:
            desc = from_text(row["kernels"][i][2])
            ops = " + ".join(f"{op.name or op.family} {list(op.sizes)}" for op in desc.ops[:2])
            share = (predicted[i] - measured[i]) / measured.sum()
            both = f"{measured[i] * 1e6:8.1f} us, predicted {predicted[i] * 1e6:8.1f}"
            yield f"  {share:+6.1%}  {both}  {desc.maker} {ops}"


def predicted_s(model: LearnedCpu, row: Row) -> np.ndarray:
    """Seconds of a gate model's kernels; those of kinds that were never measured as estimated without measurements."""
    descs = tuple(from_text(text) for _, _, text in row["kernels"])
    known = [model.knows(desc) for desc in descs]
    return np.where(known, model.predict_s(descs, inside_bytes=row["model_bytes"]), row["estimated_s"])


def report(device: str, folder: Path) -> Iterator[str]:
    """The table: each gate model's measured time, and the errors of what is learned and of the estimate without it."""
    kind = device_type(device)
    times = {r["model"]: r["whole_s"] for r in read_rows(folder / "gate_times.jsonl") if r["matched"]}
    errors: dict[str, list[float]] = {"profiled": [], "not profiled": []}
    with MeasuredKernels(folder / "measured.db") as database:
        model = learned_cpu(kind, database)
        assert model is not None
        yield f"{cpu_model()}, {device}; {model.num_kernels} measured kernels of other models"
        for row in read_rows(folder / "gate.jsonl"):
            if row["model"] not in times:
                yield f"{row['model']:22} {row.get('error', 'the calls are not the kernels')}"
                continue
            own, plain = predicted_s(model, row).sum(), sum(row["estimated_s"])
            for name, value in (("profiled", own), ("not profiled", plain)):
                errors[name].append(value / times[row["model"]] - 1)
            shown = "  ".join(f"{name} {found[-1]:+.1%}" for name, found in errors.items())
            yield f"{row['model']:22} {times[row['model']] * 1e3:8.2f} ms  {shown}"
    for name, found in errors.items():
        size = np.abs(found)
        yield (
            f"{name}: {len(size)} models, within 10 %: {np.mean(size <= 0.1):.0%}, within 20 %: "
            f"{np.mean(size <= 0.2):.0%}, median {np.median(size):.1%}, mean {size.mean():.1%}"
        )


def main() -> None:
    """Do one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("build", "time", "operators", "report", "kernels", "export"))
    parser.add_argument("which", nargs="?", choices=("training", "gate"), default="gate")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cpu-x86-64-v4")
    parser.add_argument("--models", default="", help="only these, separated by commas")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.step == "build":
        every = list(TRAINING if args.which == "training" else cpu_gate_models.NAMES)
        build(args.which, args.models.split(",") if args.models else every, args.device, args.folder)
    elif args.step == "time":
        time_models(args.which, args.folder)
    elif args.step == "operators":
        time_operators(args.device)
    elif args.step == "export":
        print(export(args.device, args.folder))
    else:
        for line in (worst_kernels if args.step == "kernels" else report)(args.device, args.folder):
            print(line)


if __name__ == "__main__":
    sys.exit(main())
