"""How fast is a whole model on one CPU core, or one GPU: ours, torch eager, torch.compile, `tvm.compile`?

    python -m benchmarks.kernels [--models resnet50,bert_base] [--batch 1,8] [--makers tvm,library,both]
                                 [--against torch.compile,tvm.compile] [--seconds 15] [--profile 0]
                                 [--patience 240] [--out FILE] [--table FILE] [--device cuda|cpu-x86-64-v3]

Each model and batch size has a process of its own (`kernel_run.py`), held to one core and one thread; with `--device
cuda` it times the first GPU from the host to the host (several such runs may go on at once: they time in turn). With a
CPU type all ways, torch's too, run in the environment of a worker for it: its instruction set, glibc's pool. What it
finds is printed and appended to `--out` (JSON lines) as it comes, so a run that is stopped leaves what it has; models
that are complete in the file are not run again. A way that takes longer than `--patience` seconds to its next result is
given up, and the table says so: plain `tvm.compile` schedules nothing on CPUs and needs minutes for most models.

`--table FILE` only prints the tables of a file. Ratios are torch eager's time over the way's, within each round, with
quartiles. Peak memory is parameters and what lies between kernels: for ours the storage that the VM plans, for torch
the tensors that are alive at once after any operator. Neither counts the inside of a library call.
"""

# ruff: noqa: E402 (thread counts are set before the libraries load)
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TVM_NUM_THREADS"):
    os.environ[_name] = "1"

import argparse
import json
import platform
import select
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.as_worker import as_worker

MODELS = (
    "resnet50", "inception_v3", "bert_base", "gpt2_small", "vit_b16", "t5_small", "convnext_t", "mobilenet_v3", "dlrm",
    "lstm",
)  # fmt: skip
LONGEST = 4  # of a GPU's kernels, in a table
QUICK = ("mobilenet_v3", "dlrm")
Row = dict[str, Any]


def results_of(model: str, batch: int, ceiling: str, args: argparse.Namespace) -> Iterator[Row]:
    """Run one model in its process; yield its results as they come, and why it ended before its last, if it did."""
    command = [sys.executable, "-m", "benchmarks.kernel_run", model, str(batch), "--makers", args.makers]
    command += ["--against", args.against, "--seconds", str(args.seconds), "--profile", str(args.profile)]
    command += ["--ceiling", ceiling, "--device", args.device]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stderr is not None
        ways: set[str | None] = set()
        line = "nothing yet"
        while select.select([child.stdout], [], [], args.patience + args.profile)[0]:
            line = child.stdout.readline()
            if not line:
                break
            row = json.loads(line)
            ways.add(row.get("way"))
            yield row
        ended = child.poll() is not None or not line
        child.kill()
        words = child.stderr.read().strip().splitlines()[-1:] if ended else []
    reason = words[0][:120] if words else f"not done within {args.patience:.0f} s"
    missing = [way for way in wanted(args) if way not in ways]
    for i, way in enumerate(missing):
        yield {"kind": "none", "way": way, "reason": reason if i == 0 else f"not tried after {missing[0]}"}


def wanted(args: argparse.Namespace) -> list[str]:
    """The ways that are asked for, by name."""
    return [*(f"ours, {m}" for m in args.makers.split(",")), *filter(None, args.against.split(","))]


def gpu_machine() -> Row:
    """What the figures depend on, on a GPU."""
    import torch
    import tvm

    from benchmarks.gpu import driver

    return {
        "kind": "machine", "gpu": torch.cuda.get_device_name(0), "driver": driver(), "cuda": torch.version.cuda,
        "python": platform.python_version(), "torch": torch.__version__, "tvm": tvm.__version__,
    }  # fmt: skip


def machine(device: str) -> Row:
    """What the figures depend on, on a core."""
    import torch
    import tvm

    from benchmarks.kernel_ceiling import Ceiling
    from tvmhet.cluster.cpu import read_cpu
    from tvmhet.kernel_keys import cpu_model

    torch.set_num_threads(1)
    ceiling = Ceiling.measure()
    level = read_cpu().levels[-1] if device == "cpu" else device.removeprefix("cpu-")
    return {
        "kind": "machine", "cpu": cpu_model(), "level": level, "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1), "python": platform.python_version(), "torch": torch.__version__,
        "tvm": tvm.__version__, "ceiling": [list(ceiling.byte_per_s), ceiling.flop_per_s], "ceilings": str(ceiling),
    }  # fmt: skip


def read_rows(path: Path) -> list[Row]:
    """The results of a file; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_complete(rows: Sequence[Row], model: str, batch: int, ways: Sequence[str]) -> bool:
    """Whether a file has all ways of a model and batch size, or why there are none."""
    return {r.get("way") for r in rows if (r.get("model"), r.get("batch")) == (model, batch)} >= set(ways)


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of all tables: whole models, memory, kernels, means."""
    for row in rows:
        if row["kind"] == "machine" and "gpu" in row:
            yield (
                f"{row['gpu']}, driver {row['driver']}, CUDA {row['cuda']}; Python {row['python']}, "
                f"torch {row['torch']}, TVM {row['tvm']}; wall time from the host to the host, float32 without TF32"
            )
        elif row["kind"] == "machine":
            yield (
                f"{row['cpu']}, {row['level']}, one of {row['cores']} cores, load {row['load']}; "
                f"Python {row['python']}, torch {row['torch']}, TVM {row['tvm']}; CPU time. {row['ceilings']}"
            )
    runs = dict.fromkeys((r["model"], r["batch"]) for r in rows if "model" in r)
    for model, batch in runs:
        own = [r for r in rows if (r.get("model"), r.get("batch")) == (model, batch)]
        yield f"\n{model}, batch {batch}; load {own[0]['load']}"
        memory = {r["way"]: (r["storage_bytes"] + r["param_bytes"]) / 2**20 for r in own if r["kind"] == "memory"}
        for row in own:
            yield from _line(row, memory)
    yield from _means(rows)


def _line(row: Row, memory: dict[str, float]) -> Iterator[str]:
    if row["kind"] == "none":
        yield f"  {row['way']:14} {row['reason']}"
    elif row["kind"] == "plan":
        plans = [(way, row[way]) for way in ("tvm", "library", "both") if way in row]
        yield "    planned: " + ", ".join(f"{way} {s * 1e3:.2f} ms in {n} kernels" for way, (s, n) in plans)
    elif row["kind"] == "gpu kernels":
        longest = ", ".join(f"{name.split('(')[0][:40]} {s * 1e6:.0f} us" for name, s, _ in row["longest"][:LONGEST])
        yield f"    {row['way']}: GPU busy for {row['busy_s'] * 1e3:.2f} ms in {row['num']:.0f} runs; {longest}"
    elif row["kind"] == "way":
        spread = f"({row['low']:.2f} to {row['high']:.2f})" if row["low"] is not None else "(one run)"
        held = memory.get(row["way"].removeprefix("ours, "))
        room = "" if held is None else f"{held:8.1f} MiB"
        off = "" if row["difference"] is None else f"   off {row['difference']:.0e} of {row['largest']:.2g}"
        yield f"  {row['way']:14} {row['median_s'] * 1e3:9.2f} ms  {row['ratio']:6.3f}x {spread:16} {room}{off}"
    elif row["kind"] == "kernels":
        near = ", ".join(f"{maker} {share:.0%}" for maker, share in row["near"].items())
        total_ms = row["total_s"] * 1e3
        yield f"    {row['num']} kernels of {row['way']}, {total_ms:.2f} ms; of their ceiling: {near}; worst:"
        for k in row["worst"]:
            rates = f"{k['byte_per_s'] / 1e9:6.1f} GB/s {k['flop_per_s'] / 1e9:6.1f} GFLOP/s"
            yield f"      {k['share']:6.1%} {k['seconds'] * 1e6:9.1f} us {rates}  {k['name']} ({k['maker']})"


def _means(rows: Sequence[Row]) -> Iterator[str]:
    found: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        if row["kind"] == "way" and row["way"] != "torch eager":
            found.setdefault((row["batch"], row["way"]), []).append(row["ratio"])
    yield ""
    for (batch, way), ratios in sorted(found.items()):
        mean = statistics.geometric_mean(ratios)
        yield f"batch {batch}: {way} {mean:.2f}x torch eager, {min(ratios):.2f} at worst, {len(ratios)} models"


def main() -> None:
    """Run what is missing in the file, then print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batch", default="1,8", help="batch sizes")
    parser.add_argument("--makers", default="tvm,library,both", help="which of ours to run")
    parser.add_argument(
        "--against", default="torch.compile,tvm.compile", help="slow ways to run after ours; may be none"
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="of rounds for each model; at least 5 rounds")
    parser.add_argument("--profile", type=float, default=0.0, help="seconds for measuring kernels of each model first")
    parser.add_argument("--patience", type=float, default=240.0, help="seconds to wait for the next result of a model")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)} at batch 1")
    parser.add_argument("--out", type=Path, default=Path("kernels.jsonl"), help="file that results are appended to")
    parser.add_argument("--device", default="cpu", help="cpu: this machine's; a CPU type; cuda: its first GPU")
    parser.add_argument("--table", type=Path, help="print the tables of this file and end")
    args = parser.parse_args()
    if args.table:
        print("\n".join(tables(read_rows(args.table))))
        return
    if args.device not in ("cpu", "cuda"):
        as_worker("benchmarks.kernels", args.device)
    names, batches = args.models.split(","), [int(b) for b in args.batch.split(",")]
    if args.quick:
        names, batches = list(QUICK), [1]
    here = gpu_machine() if args.device == "cuda" else machine(args.device)
    rows = read_rows(args.out)
    with args.out.open("a") as out:
        for row in _all(names, batches, rows, here, args):
            out.write(json.dumps(row) + "\n")
            out.flush()
    print("\n".join(tables(read_rows(args.out))))


def _all(
    names: Sequence[str], batches: Sequence[int], known: Sequence[Row], here: Row, args: argparse.Namespace
) -> Iterator[Row]:
    """Yield the machine, then the results of every model and batch size that the file does not have whole."""
    if not any(r["kind"] == "machine" for r in known):
        yield here
    for batch in batches:
        for name in names:
            if is_complete(known, name, batch, wanted(args)):
                continue
            for row in results_of(name, batch, json.dumps(here.get("ceiling", [[], 0])), args):
                row |= {"model": name, "batch": batch, "load": round(os.getloadavg()[0], 1)}
                for line in _line(row, {}):
                    print(f"{name} {batch}:{line}", flush=True)
                yield row


if __name__ == "__main__":
    main()
