"""Predicted against measured time of whole models that the cost model never saw, on one CPU type of this machine.

    python -m benchmarks.cpu_gate build training --folder DIR    plan and compile the zoo and models made of dice
    python -m benchmarks.cpu_gate build gate --folder DIR        plan torchvision's, timm's and transformers' models
    python -m benchmarks.cpu_gate time --folder DIR              time the kernels of all of them inside them
    python -m benchmarks.cpu_gate operators --folder DIR         time drawn operators of the library as well
    python -m benchmarks.cpu_gate left-out --folder DIR          training models predicted from other training models
    python -m benchmarks.cpu_gate report --folder DIR            the table
    python -m benchmarks.cpu_gate kernels --folder DIR           which kernels make models come out off by over 10 %
    python -m benchmarks.cpu_gate export --folder DIR            what cost_models/train.py teaches other machines from

Training and gate models are planned by what comes with tvmhet and timed in one shuffled order, ten times, so that
neither a machine that drifts nor what a planner picks sets them apart; of each model the fastest run counts. Gate
models are predicted from training models and operators only, and their results are compared with torch's. Everything is
kept in DIR as JSON lines; steps go on where they ended. Times are CPU time of one thread (medians), so others on the
machine disturb them through shared caches only. Needs `pip install tvmhet[gate]`.
"""

# ruff: noqa: E402 (thread counts are set before the libraries load)
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TVM_NUM_THREADS"):
    os.environ[_name] = "1"

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import tvmhet
from benchmarks import cpu_gate_kinds, cpu_gate_models, cpu_gate_parts, cpu_gate_training
from benchmarks.cpu_gate_figures import Row, export, left_out, read_rows, report, worst_kernels
from tvmhet import zoo
from tvmhet.calibrating import OpTimer
from tvmhet.candidates import candidate_kernels
from tvmhet.cluster.catalog import device_type
from tvmhet.cost.cpu_pool import drawn
from tvmhet.cost.measure import ArgSpec, KernelJob
from tvmhet.cost.model import to_text
from tvmhet.cost.record import record_of
from tvmhet.cost.table import TimeTable
from tvmhet.ir.prepare import prepare
from tvmhet.planning import make_plan
from tvmhet.profiling import LIMITS, local_timer
from tvmhet.solve import Objective
from tvmhet.times import Candidates, time_table

#: After @: every operator a kernel of its own, generated. A planner's choices alone never tell what it passes over (the
#: transposition of a table of words, 20 ms in T5).
APART = "apart"
#: After @: weights stay as they are, as while a model trains.
UNPACKED = "unpacked"
#: After @: kernels that only CPUs have (attention, a gate before a convolution) wherever there are any, however dear
#: they are said to be, with as much of what surrounds them as dice say.
FUSED = "fused"
#: NAME, NAME?SEED or NAME?{sizes}, and after @ the only maker, `APART`, `UNPACKED` or `FUSED`.
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
    "chains?1", "chains?2", "chains?3", "chains?4", "chains?5@tvm", "chains?6", "pooled?1", "pooled?2", "pooled?3",
    "pooled?4", "pooled?5", "pooled?6", "stem?1", "stem?2", "stem?3", "stem?4@tvm", "stem?5@library", "stem?6",
    "words?1", "words?2", "words?3", "words?4@tvm", "words?5@library", "words?6", "cells?1", "cells?2", "cells?3",
    "cells?4", "cells?5", "cells?6", "steps?1", "steps?2", "steps?3", "steps?4", "steps?5", "steps?6@tvm",
    "cnn?18", "cnn?19", "cnn?20", "cnn?21", "cnn?22@tvm", "cnn?23@library", "cnn?24", "cnn?25", "cnn?26", "cnn?27",
    "cnn?28@tvm", "cnn?29@library", "mobile?9", "mobile?10", "mobile?11", "mobile?12", "mobile?13@tvm",
    "mobile?14@library", "mobile?15", "mobile?16", "mobile?17", "mobile?18", "mobile?19@tvm", "mobile?20@library",
    "stem?7", "stem?8", "stem?9", "stem?10", "stem?11@tvm", "stem?12@library", "stem?13", "pyramid?8", "pyramid?9",
    "pyramid?10", "pyramid?11@tvm", "pyramid?12", "decoder?9", "decoder?10", "decoder?11", "decoder?12",
    "mixer?9@tvm", "mixer?10", "mixer?11", "mixer?12", "words?7", "words?8", "words?9@tvm", "chains?7", "chains?8",
    "chains?9", "chains?10", "chains?11", "cells?7@tvm", "cells?8", "cells?9", "recurrent?7", "recurrent?8",
    "pooled?7", "pooled?8@tvm", "pooled?9", "pooled?10", "transformer?11", "transformer?12", "transformer?13",
    "transformer?14@tvm", "transformer?15",
    "dense?1", "dense?2", "dense?3", "dense?4", "dense?5", "dense?6", "dense?7", "dense?8", "padded?1", "padded?2",
    "padded?3", "padded?4", "padded?5", "padded?6", "padded?7@tvm", "padded?8", "wide?1", "wide?2", "wide?3",
    "wide?4", "wide?5@library", "wide?6", "wide?7", "wide?8", "cells?10", "cells?11", "cells?12", "cells?13",
    "cells?14", "cells?15", "recurrent?9", "recurrent?10", "steps?7", "steps?8", "steps?9", "mobile?21",
    "mobile?22",
    't5_small?{"layers": 2}@apart', 'gpt2_small?{"layers": 2}@apart', 'bert_base?{"layers": 2}@apart',
    'vit_b16?{"layers": 3}@apart', "mobilenet_v3@apart", "dlrm@apart", "convnext_t@apart", "inception_v3@apart",
    "words?1@apart", "words?2@apart", "words?3@apart", "words?6@apart", "transformer?2@apart", "decoder?2@apart",
    "mixer?2@apart", "pyramid?2@apart", "dense?2@apart", "recurrent?2@apart",
    't5_small?{"layers": 2}@unpacked', 'gpt2_small?{"layers": 2}@unpacked', 'bert_base?{"layers": 2}@unpacked',
    'vit_b16?{"layers": 3}@unpacked', "dlrm@unpacked", "convnext_t@unpacked", "transformer?1@unpacked",
    "transformer?4@unpacked", "transformer?7@unpacked", "decoder?1@unpacked", "decoder?3@unpacked",
    "mixer?1@unpacked", "mixer?3@unpacked", "words?2@unpacked", "recurrent?1@unpacked", "chains?2@unpacked",
    "thin?1", "thin?2", "thin?3", "thin?4", "thin?5", "thin?6", "thin?7", "thin?8", "thin?9@tvm", "thin?10",
    "thin?11", "thin?12", "mobile?23", "mobile?24", "steps?10", "steps?11", "dense?9", "dense?10", "dense?11",
    "dense?12", "dense?13", "dense?14",
    'vit_b16?{"layers": 2, "image": 384}@library', 'vit_b16?{"layers": 2, "image": 384}@tvm',
    'bert_base?{"layers": 2, "length": 512}@library', 'bert_base?{"layers": 2, "length": 512}@tvm',
    'gpt2_small?{"layers": 1, "length": 512}@library', "transformer?11@library", "mixer?2@library",
    'bert_base?{"layers": 2}@fused', 'gpt2_small?{"layers": 2}@fused', 'vit_b16?{"layers": 3}@fused',
    't5_small?{"layers": 2}@fused', 'vit_b16?{"layers": 2, "image": 384}@fused',
    'bert_base?{"layers": 2, "length": 512}@fused', 'gpt2_small?{"layers": 1, "length": 512}@fused',
    'bert_base?{"layers": 3, "length": 64}@fused', 'bert_base?{"layers": 3, "length": 32}@fused',
    "transformer?1@fused", "transformer?2@fused", "transformer?4@fused", "transformer?5@fused", "transformer?7@fused",
    "transformer?8@fused", "transformer?9@fused", "transformer?10@fused", "transformer?11@fused",
    "transformer?12@fused", "transformer?13@fused", "transformer?14@fused", "decoder?1@fused", "decoder?2@fused",
    "decoder?4@fused", "decoder?6@fused", "decoder?9@fused", "decoder?11@fused", "mixer?1@fused", "mixer?2@fused",
    "mixer?4@fused", "mixer?6@fused", "mixer?8@fused", "mixer?10@fused", "mixer?12@fused", "words?1@fused",
    "words?2@fused", "words?4@fused", "words?6@fused", "words?8@fused", "mobile?1@fused", "mobile?3@fused",
    "mobile?5@fused", "mobile?7@fused", "mobile?9@fused", "mobile?11@fused", "mobile?13@fused", "mobile?15@fused",
    "mobile?17@fused", "mobile?21@fused", "mobile?23@fused", "mobilenet_v3@fused", "cnn?2@fused", "cnn?4@fused",
    "cnn?6@fused", "cnn?10@fused", "cnn?13@fused", "cnn?18@fused", "cnn?24@fused", "thin?1@fused", "thin?3@fused",
    "thin?5@fused", "before?1", "before?2", "before?3", "before?4", "before?1@fused", "before?2@fused",
    "before?3@fused", "before?4@fused", "before?5@fused", "before?6@fused",
)  # fmt: skip
NUM_OPERATORS = 900
ROUNDS = 10
_ROUND_LIMITS = replace(LIMITS, time_limit_s=60.0)  # the weights of the largest models are made in that time
_DRAWN = cpu_gate_training.MODELS | cpu_gate_parts.MODELS | cpu_gate_kinds.MODELS


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
            row |= _built(which, spec, device)
        except Exception as error:  # whatever stops a model is its result
            row["error"] = f"{type(error).__name__}: {str(error)[:400]}"
        row["cpu_s"] = time.process_time() - begin
        append(jobs, row)
        print(spec, row.get("error", f"off {row.get('difference', 0):.1e} of {row.get('largest', 0):.2g}"), flush=True)


def _built(which: str, spec: str, device: str) -> Row:
    module, example = _made(which, spec)
    cluster = tvmhet.ClusterSpec.of({device: 1})
    model = tvmhet.from_torch(module, example)
    only = spec.partition("@")[2]
    both = ("tvm", "library")
    makers = {"": both, APART: ("tvm",), UNPACKED: ("tvm",), FUSED: both}.get(only, (only,))
    prepared = prepare(model)
    assert prepared.graph is not None
    kernels = [k for k in candidate_kernels(prepared.graph, makers) if only != APART or len(k.ops) == 1]
    candidates = Candidates.of(prepared.graph, kernels, trains=only == UNPACKED)
    table = time_table(candidates, cluster.device_types(), None, inside=True)
    wanted = _fused_wanted(spec, candidates, table) if only == FUSED else table
    plan = make_plan(prepared, candidates.kernels, wanted, cluster, Objective.LATENCY, {}, 30.0, 0)
    with patch("tvmhet.deploy.plan_panels", lambda graph, plan, cluster: {}) if only == UNPACKED else nullcontext():
        lib = tvmhet.build(model, cluster=cluster, plan=plan, inline=True)
    got, want = _first(lib(*[x.numpy() for x in example])), _first(module(*example))
    (stage,), (placed,) = lib.program.stages, plan.stages
    values = [(lib.program.values[n].shape, lib.program.values[n].dtype) for n in stage.inputs]
    values += [(lib.program.params[n].shape, lib.program.params[n].dtype.name) for n in stage.params]
    used = candidates.indices(placed.kernels)
    with _processor_of(""):
        sheet = time_table(candidates.only(used), cluster.device_types(), None, inside=True)
    return {
        "library": str(stage.library), "function": stage.function, "args": [[list(s), d] for s, d in values],
        "kernels": [[candidates.keys[i], candidates.kernels[i].maker, to_text(candidates.descs[i])] for i in used],
        "model_bytes": candidates.model_bytes, "planned_s": placed.compute_s,
        "shipped_s": [table.entry(i, device).seconds for i in used],
        "sheet_s": [sheet.entry(i, device).seconds for i in range(len(used))],
        "difference": float(np.abs(got - want).max()), "largest": float(np.abs(want).max()),
    }  # fmt: skip


def _fused_wanted(spec: str, candidates: Candidates, table: TimeTable) -> TimeTable:
    """The table, with next to no time for every other of the kernels that only CPUs have."""
    dice = random.Random(spec)
    (device,) = table.device_types
    entries = {}
    for i, kernel in enumerate(candidates.kernels):
        factor = 0.01 if kernel.cpu_only and dice.random() < 0.5 else 1.0
        entry = table.entry(i, device)
        entries[i] = replace(entry, seconds=entry.seconds * factor, low=entry.low * factor)
    return table.with_entries(device, entries)


@contextmanager
def _processor_of(vendor: str) -> Iterator[None]:
    """Estimate as on a machine with a processor of `vendor`; "": one of which nothing was measured."""
    before = os.environ.get("TVMHET_CPU_VENDOR")
    os.environ["TVMHET_CPU_VENDOR"] = vendor
    try:
        yield
    finally:
        del os.environ["TVMHET_CPU_VENDOR"]
        if before is not None:
            os.environ["TVMHET_CPU_VENDOR"] = before


def _first(result: Any) -> np.ndarray:
    while isinstance(result, tuple | list):
        result = result[0]
    return np.asarray(result)


def time_models(folder: Path) -> None:
    """Time every kernel of the built models inside them, `ROUNDS` times, each in a shuffled order of its own."""
    out = folder / "times.jsonl"
    known = {(row["model"], row["round"]) for row in read_rows(out)}
    rows = [row | {"which": which} for which in ("training", "gate") for row in read_rows(folder / f"{which}.jsonl")]
    todo = []
    for turn in range(ROUNDS):
        order = sorted((r for r in rows if "library" in r), key=lambda r: str(r["model"]))
        random.Random(turn).shuffle(order)
        todo += [(turn, row) for row in order if (row["model"], turn) not in known]
    if not todo:
        return
    with local_timer(device_type(rows[0]["device"]), _ROUND_LIMITS) as timer:
        for turn, row in todo:
            args = tuple(ArgSpec(tuple(shape), dtype) for shape, dtype in row["args"])
            run = timer.measure(KernelJob(Path(row["library"]), args, row["function"], calls=True))
            matched = run.status == "ok" and len(run.times_s) == len(row["kernels"])
            kept = {"status": run.status, "matched": matched, "times_s": run.times_s, "at_s": time.time()}
            append(out, {"model": row["model"], "which": row["which"], "round": turn} | kept)
            print(f"{turn} {row['model']} {run.status} {sum(run.times_s) * 1e3:.2f} ms {run.note}", flush=True)


def time_operators(device: str, folder: Path) -> None:
    """Time drawn operators of the library, each alone."""
    out = folder / "operators.jsonl"
    known = len(read_rows(out))
    with OpTimer.start(device_type(device)) as timer:
        for desc in drawn(NUM_OPERATORS)[known:]:
            times = timer.time(record_of(desc))["times_s"]
            append(out, {"kernel": to_text(desc), "seconds": median(times) if times else None})


def main() -> None:
    """Do one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("build", "time", "operators", "left-out", "report", "kernels", "export"))
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
        time_models(args.folder)
    elif args.step == "operators":
        time_operators(args.device, args.folder)
    elif args.step == "export":
        print(export(args.device, args.folder))
    else:
        tables = {"left-out": left_out, "kernels": worst_kernels, "report": report}
        for line in tables[args.step](args.device, args.folder):
            print(line)


if __name__ == "__main__":
    sys.exit(main())
