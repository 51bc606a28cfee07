"""Library operators of many shapes, timed on this machine's first GPU, and what was predicted of them.

    python -m benchmarks.gpu_rows measure OUT.jsonl.gz [--seconds 60] [--rows 2000]
    python -m benchmarks.gpu_rows compare FILE.jsonl.gz [--device NAME]
    python -m benchmarks.gpu_rows calibrate FILE.jsonl.gz [--device NAME]

`compare` prints errors of predictions, `calibrate` those of the published models, to which the type is new, after a few
kernels of it: picked as `tvmhet calibrate` does, and at random; a quarter of the rows is for errors only.
Shapes are drawn evenly on a logarithmic scale (seed 0), in an order in which every beginning is a fair sample. A
line is an operator as `tvmhet predict` takes it, with the median seconds of three ways to time it: `queued_s` in a CUDA
graph of many of them, without launches; `called_s` between two events of its own, as published tables are made: the
host's work counts where it is longer; and `kernels_s`, what the profiler says of the kernels alone, with the name of
the longest one (`kernel`), for as many as the time allows. Operands are warm; no TF32.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]
#: No operator is drawn that needs more at least: seconds of arithmetic at the peak, bytes of memory.
_LONGEST_S, _MOST_BYTES = 0.02, 4e9
_PEAK = {"float32": 5e13, "bfloat16": 8e14}  # about what an H100 reaches
_CALLS, _PROFILED = 10, 3
_PROFILE_SHARE = 0.25  # of the time
_NAMES = ("add", "multiply", "divide", "power", "relu", "gelu", "tanh")


def draw(count: int) -> list[Row]:
    """Draw operators, families in turn by how many learned models lean on them."""
    dice = random.Random(0)
    makers = [make for make, weight in _FAMILIES for _ in range(weight)]
    dice.shuffle(makers)
    rows: list[Row] = []
    while len(rows) < count:
        row = makers[len(rows) % len(makers)](dice)
        if row is not None:
            rows.append({**row, "dtype": row.get("dtype", "float32")})
    return rows


def _size(dice: random.Random, low: int, high: int) -> int:
    """A size between two, even on a logarithmic scale; every other one a multiple of 8 where that is large enough."""
    size = round(math.exp(dice.uniform(math.log(low), math.log(high))))
    return size // 8 * 8 if size >= 16 and dice.random() < 0.5 else size


def _product(dtype: str, row: Row) -> Row | None:
    """The row, None for a product that takes too long or too much memory."""
    b, m, n, k = (row[s] for s in "bmnk")
    weights = n * k * (b if row["op"] == "matmul" else 1)
    if 2 * b * m * n * k > _PEAK[dtype] * _LONGEST_S or 4 * (b * m * k + weights + b * m * n) > _MOST_BYTES:
        return None
    return row


def _matmul(dice: random.Random) -> Row | None:
    m, n, k = (_size(dice, 16, 2048) for _ in range(3))
    return _product("float32", {"op": "matmul", "b": _size(dice, 1, 1024), "m": m, "n": n, "k": k})


def _linear(dice: random.Random, dtype: str = "float32") -> Row | None:
    n, k = (_size(dice, 64, 32768) for _ in range(2))
    return _product(dtype, {"op": "linear", "b": 1, "m": _size(dice, 1, 8192), "n": n, "k": k, "dtype": dtype})


def _linear_bf16(dice: random.Random) -> Row | None:
    return _linear(dice, "bfloat16")


def _conv(dice: random.Random, dtype: str = "float32") -> Row | None:
    n, c, oc, side = (_size(dice, *b) for b in ((1, 64), (3, 1024), (16, 1024), (7, 224)))
    kh, kw = dice.choice(((1, 1), (3, 3), (3, 3), (3, 3), (5, 5), (7, 7), (1, 7), (7, 1)))
    groups = 1
    if dice.random() < 0.15:
        oc = groups = c
    stride = dice.choice((1, 1, 1, 2))
    pad = [kh // 2, kw // 2]
    out = (side + 2 * pad[0] - kh) // stride + 1
    flop, moved = 2 * n * oc * (c // groups) * kh * kw * out**2, 4 * n * (c * side**2 + oc * out**2)
    if flop > _PEAK[dtype] * _LONGEST_S / 4 or moved > _MOST_BYTES:
        return None
    return {"op": "conv2d", "n": n, "c": c, "h": side, "w": side, "oc": oc, "kh": kh, "kw": kw,
            "stride": [stride] * 2, "padding": pad, "dilation": [1, 1], "groups": groups, "dtype": dtype}  # fmt: skip


def _conv_bf16(dice: random.Random) -> Row | None:
    return _conv(dice, "bfloat16")


def _elementwise(dice: random.Random) -> Row | None:
    dtype = dice.choice(("float32", "float32", "bfloat16"))
    return {"op": "elementwise", "name": dice.choice(_NAMES), "shape": [_size(dice, 10**4, 2 * 10**8)], "dtype": dtype}


def _of_rows(op: str) -> Callable[[random.Random], Row | None]:
    def make(dice: random.Random) -> Row | None:
        rows, cols = _size(dice, 4, 65536), _size(dice, 16, 16384)
        return {"op": op, "rows": rows, "cols": cols} if 8 * rows * cols < _MOST_BYTES else None

    return make


def _attention(dice: random.Random) -> Row | None:
    length, heads, batch = _size(dice, 64, 4096), _size(dice, 4, 32), _size(dice, 1, 16)
    dtype = dice.choice(("float32", "bfloat16"))
    if 4 * batch * heads * length**2 * 64 > _PEAK[dtype] * _LONGEST_S / 4:
        return None
    return {"op": "attention_prefill", "batch": batch, "heads": heads, "q_len": length, "head_dim": 64,
            "causal": dice.random() < 0.5, "dtype": dtype}  # fmt: skip


def _pooling(dice: random.Random) -> Row | None:
    n, c, side = _size(dice, 1, 64), _size(dice, 16, 512), _size(dice, 7, 112)
    window = dice.choice((2, 3, 3, side))
    pad = 1 if window == 3 else 0
    return {"op": "pooling", "n": n, "c": c, "h": side, "w": side, "kh": window, "kw": window,
            "stride": [min(window, dice.choice((1, 2)))] * 2, "padding": [pad] * 2}  # fmt: skip


def _embedding(dice: random.Random) -> Row | None:
    return {"op": "embedding", "tokens": _size(dice, 16, 65536), "vocab": 32000, "dim": _size(dice, 64, 4096)}


#: What draws an operator, and how many of these come in each round.
_FAMILIES: tuple[tuple[Callable[[random.Random], Row | None], int], ...] = (
    (_matmul, 8), (_linear, 8), (_conv, 8), (_elementwise, 6), (_of_rows("softmax"), 4), (_of_rows("layer_norm"), 4),
    (_linear_bf16, 2), (_conv_bf16, 2), (_attention, 4), (_of_rows("reduction"), 2), (_pooling, 2), (_embedding, 1),
)  # fmt: skip


def measure(out: Path, count: int, seconds: float) -> None:
    """Time operators until the time is up and write them."""
    import torch

    from tvmhet.emit.library_worker import alone
    from tvmhet.runtime.cuda_times import run_times

    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    about = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "cuda": torch.version.cuda,
             "cudnn": torch.backends.cudnn.version(), "date": time.strftime("%Y-%m-%d")}  # fmt: skip
    lines: list[Row] = []
    begin = time.monotonic()
    with torch.no_grad():
        for row in draw(count):
            if time.monotonic() - begin > seconds * (1 - _PROFILE_SHARE):
                break
            try:
                run = alone(torch, row, "cuda:0")
                times_s, note = run_times(run, 0, True, 9, 0.3)
                lines.append({**row, "queued_s": _short(median(times_s)), "called_s": _short(_called_s(torch, run))})
                if note:
                    lines[-1]["note"] = note[:100]
            except Exception as error:  # whatever torch raises becomes a line
                lines.append({**row, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"})
                torch.cuda.synchronize()
        left_s = seconds - (time.monotonic() - begin)
        try:
            _profile(torch, alone, [line for line in lines if "error" not in line], left_s)
        except Exception as error:  # the profiler needs rights that not every machine gives
            print(f"not profiled: {error}")
    with gzip.GzipFile(out, "wb", mtime=0) as file:
        file.write("".join(json.dumps(line) + "\n" for line in (about, *lines)).encode())
    print(f"{about}: {len(lines)} operators, {sum('error' in line for line in lines)} failed, "
          f"{sum('kernel' in line for line in lines)} profiled, {time.monotonic() - begin:.0f} s")  # fmt: skip


def _short(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _called_s(torch: Any, run: Callable[[], Any]) -> float:
    """The median seconds of single calls, each between two events and waited for."""
    times = []
    for _ in range(_CALLS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return median(times)


def _profile(torch: Any, alone: Callable[..., Any], lines: list[Row], seconds: float) -> None:
    """Add what the profiler says of kernels, to as many lines as the time allows; half of it is for reading."""
    from torch.profiler import ProfilerActivity, profile, record_function

    begin, done = time.monotonic(), 0
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for i, line in enumerate(lines):
            if time.monotonic() - begin > seconds / 2:
                break
            run = alone(torch, line, "cuda:0")
            run()
            torch.cuda.synchronize()
            for _ in range(_PROFILED):
                with record_function(f"row {i}"):
                    run()
            torch.cuda.synchronize()
            done = i + 1
    found: dict[str, list[list[Any]]] = defaultdict(list)
    for event in profiler.events():
        if event.name.startswith("row ") and event.device_type == torch.autograd.DeviceType.CPU:
            found[event.name].append(list(_kernels(event)))
    for i in range(done):
        runs = [kernels for kernels in found[f"row {i}"] if kernels]
        if runs:
            longest = max(runs[0], key=lambda kernel: kernel.duration)
            kernels_s = median(sum(kernel.duration for kernel in kernels) for kernels in runs) * 1e-6
            lines[i] |= {"kernels_s": _short(kernels_s), "kernel": longest.name[:80], "num_kernels": len(runs[0])}


def _kernels(event: Any) -> Iterator[Any]:
    yield from event.kernels
    for child in event.cpu_children:
        yield from _kernels(child)


def read(path: Path) -> tuple[Row, list[Row]]:
    """Return what a file of measured operators is about, and its operators that ran."""
    about, *rows = map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
    return about, [row for row in rows if "error" not in row]


_MEASURED = ("queued_s", "called_s", "kernels_s", "kernel", "num_kernels", "note")


def compare(path: Path, device: str) -> None:
    """Print errors of predictions by family, dtype and way of timing."""
    import tvmhet
    from tvmhet.cost.calibration import model_for

    about, rows = read(path)
    print(f"{about}; predicted as {device}")
    descs = [parse_row(row) for row in rows]
    kind = tvmhet.device_type(device)
    errors: dict[tuple[str, str, str], list[tuple[float, bool]]] = defaultdict(list)
    for way, made in (("called_s", None), ("queued_s", "queued")):
        found = (model_for(kind, made) if made else model_for(kind)).predict(descs)
        for i, (row, desc) in enumerate(zip(rows, descs, strict=True)):
            inside = bool(found.low[i] <= row[way] <= found.high[i])
            errors[way, _family(row), desc.dtype].append((float(found.seconds[i]) / row[way] - 1, inside))
    print(f"{'timed':<10}{'family':<22}{'dtype':<10}{'rows':>5}{'mean':>8}{'median':>8}{'bias':>8}{'inside':>8}")
    for (way, family, dtype), pairs in sorted(errors.items()):
        off = [error for error, _ in pairs]
        mean, middle = sum(map(abs, off)) / len(off), median(map(abs, off))
        inside = sum(held for _, held in pairs) / len(pairs)
        print(
            f"{way:<10}{family:<22}{dtype:<10}{len(off):>5}{mean:>8.1%}{middle:>8.1%}{median(off):>+8.1%}{inside:>8.0%}"
        )


#: How many kernels calibrate a group, and which operators show what is left.
COUNTS, CALIBRATED = (0, 5, 10, 20, 50), ("matmul", "linear", "conv2d", "elementwise", "softmax", "layer_norm")


def calibrate(path: Path, device: str) -> None:
    """Print mean and median errors of queued float32 kernels after a few of them were measured."""
    import numpy as np

    import tvmhet
    from tvmhet._data import data_path
    from tvmhet.cost.boosted import LearnedModel, load_groups
    from tvmhet.cost.calibrate import calibrate as calibrated
    from tvmhet.cost.calibrate import pick

    about, rows = read(path)
    known = LearnedModel.load(tvmhet.device_type(device), "queued")
    base = dataclasses.replace(known, groups=load_groups(data_path("trained")), queued={})
    print(f"{about}; mean / median errors, %, on {device} after n kernels: picked | at random")
    print(f"{'operator':<14}{'rows':>5}" + "".join(f"{n:>26}" for n in COUNTS))
    for family in CALIBRATED:
        own = [r for r in rows if (r["op"], r["dtype"]) == (family, "float32") and r.get("groups", 1) == 1]
        descs, seconds = [parse_row(r) for r in own], np.array([r["queued_s"] for r in own])
        test = np.arange(len(own)) % 4 == 0
        pool = np.flatnonzero(~test)
        best = pool[list(pick(base, [descs[i] for i in pool], max(COUNTS)))]
        cells = []
        for count in COUNTS:
            errors = []
            for order in (best, np.random.default_rng(0).permutation(pool)):
                some = [descs[i] for i in order[:count]]
                model = calibrated(base, some, seconds[order[:count]].tolist()) if count else base
                off = np.abs(model.predict([descs[i] for i in np.flatnonzero(test)]).seconds / seconds[test] - 1)
                errors.append(f"{np.mean(off):.1%} / {np.median(off):.1%}")
            cells.append(" | ".join(errors) if count else errors[0])
        print(f"{family:<14}{int(test.sum()):>5}" + "".join(f"{c:>26}" for c in cells), flush=True)


def parse_row(row: Row) -> Any:
    """Return the kernel of a row."""
    from tvmhet.cost.operators import parse

    return parse({k: v for k, v in row.items() if k not in _MEASURED})


def _family(row: Row) -> str:
    return f"{row['op']} by channel" if row.get("groups", 1) > 1 else str(row["op"])


def main() -> None:
    """Measure, compare or calibrate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("measure", "compare", "calibrate"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="to measure for")
    parser.add_argument("--rows", type=int, default=2000, help="operators at most")
    parser.add_argument("--device", default="h200-sxm-141gb", help="the type to predict for")
    args = parser.parse_args()
    if args.what == "measure":
        measure(args.file, args.rows, args.seconds)
    else:
        (compare if args.what == "compare" else calibrate)(args.file, args.device)


if __name__ == "__main__":
    main()
