"""How near to the core's ceilings are generated kernels alone, and how do they compare with torch's?

    python -m benchmarks.kernels_alone [--device cpu-x86-64-v3|cuda] [softmax linear ...]

Each line: a kernel of our CPU rules and the same computation by torch, the least CPU time of 25 interleaved runs of
either, on one core and one thread, caches warm; the rate, and its share of the ceiling: a copy of as many bytes, or a
product of 1024 x 1024 matrices (`kernel_ceiling.py`). `--device` limits both sides to the instruction set of a CPU
type. `--device cuda` is this machine's first GPU: medians of runs without their launches, operands warm in its cache.
`cost_models/generated.yaml` takes its ratios from here.
"""

# ruff: noqa: E402 (thread counts are set before the libraries load)
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TVM_NUM_THREADS"):
    os.environ[_name] = "1"

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import tvm
from tvm import relax

import tvmhet
from benchmarks.as_worker import as_worker
from benchmarks.here import cpu_types, gpu_type, on_gpu
from benchmarks.kernel_ceiling import SIZES, Ceiling, cpu_seconds
from tvmhet._tvm import PrimFunc
from tvmhet.emit.cpu.fast_math import FastMath
from tvmhet.emit.lower import kernel_passes, lower_stage, make_target
from tvmhet.emit.schedule import ScheduleReport, schedule_kernels
from tvmhet.kernel_keys import cpu_model
from tvmhet.runtime.cuda_times import run_times

op = relax.op
Shape = tuple[int, ...]
ROUNDS = 25
LEAST_S = 0.002  # of one timed run: short kernels are called several times in a row


@dataclass(frozen=True, slots=True)
class Case:
    """A family of `generated.yaml`, the kernel in Relax and in torch, its operands' shapes, and its FLOPs."""

    family: str
    name: str
    ours: Callable[..., Any]
    torchs: Callable[..., torch.Tensor]
    shapes: tuple[Shape, ...]
    flop: float = 0.0


def linear(m: int, k: int, n: int, transposed: bool = False) -> Case:
    """A product of matrices."""
    if transposed:
        name = f"{m} x {k} x {n}, transposed"
        return Case("linear", name, lambda x, w: op.matmul(x, op.permute_dims(w)), lambda x, w: x @ w.T,
                    ((m, k), (n, k)), 2.0 * m * k * n)  # fmt: skip
    return Case("linear", f"{m} x {k} x {n}", op.matmul, torch.matmul, ((m, k), (k, n)), 2.0 * m * k * n)


def linear_gelu(rows: Shape, k: int, n: int) -> Case:
    """A product with its bias and its gelu."""
    return Case(
        "linear", f"{'x'.join(map(str, rows))} x {k} x {n}, bias, gelu",
        lambda x, w, b: op.nn.gelu(op.add(op.matmul(x, w), b)), lambda x, w, b: F.gelu(x @ w + b),
        ((*rows, k), (k, n), (n,)), 2.0 * math.prod(rows) * k * n,
    )  # fmt: skip


def matmul(b: int, m: int, k: int, n: int) -> Case:
    """A batched product."""
    return Case(
        "matmul", f"{b} x {m} x {k} x {n}", op.matmul, torch.matmul, ((b, m, k), (b, k, n)), 2.0 * b * m * k * n
    )


def conv(c: int, o: int, side: int, window: int, stride: int = 1, groups: int = 1) -> Case:
    """A convolution with its bias and relu."""
    pad, out = window // 2, (side - 1) // stride + 1
    return Case(
        "conv2d", f"{c} to {o}, {side} pixels, window {window}, stride {stride}, {groups} groups",
        lambda x, w, b: op.nn.relu(op.add(op.nn.conv2d(x, w, strides=stride, padding=pad, groups=groups), b)),
        lambda x, w, b: F.relu(F.conv2d(x, w, b.reshape(-1), stride, pad, 1, groups)),
        ((1, c, side, side), (o, c // groups, window, window), (1, o, 1, 1)),
        2.0 * o * out * out * c // groups * window * window,
    )  # fmt: skip


def depthwise_silu(c: int, side: int, window: int, stride: int = 1) -> Case:
    """A convolution by channel with its bias and silu, as in EfficientNet."""
    plain = conv(c, c, side, window, stride, c)
    pad = window // 2
    return replace(
        plain, name=f"{plain.name}, silu",
        ours=lambda x, w, b: op.nn.silu(op.add(op.nn.conv2d(x, w, strides=stride, padding=pad, groups=c), b)),
        torchs=lambda x, w, b: F.silu(F.conv2d(x, w, b.reshape(-1), stride, pad, 1, c)),
    )  # fmt: skip


def softmax(*shape: int) -> Case:
    """Along the last axis."""
    return Case("softmax", f"{shape}", lambda x: op.nn.softmax(x, -1), lambda x: torch.softmax(x, -1), (shape,))


def layer_norm(rows: int, n: int) -> Case:
    """Of rows."""
    return Case(
        "layer_norm", f"({rows}, {n})", lambda x, g, b: op.nn.layer_norm(x, g, b, axes=-1),
        lambda x, g, b: F.layer_norm(x, (n,), g, b), ((rows, n), (n,), (n,)),
    )  # fmt: skip


def layer_norm_backward(rows: int, n: int) -> Case:
    """The gradient of a layer norm's input from (dy, x, gamma) and the rows' (mean, 1 / deviation)."""

    def ours(dy: Any, x: Any, gamma: Any, mean: Any, rstd: Any) -> Any:
        centred = op.multiply(op.subtract(x, mean), rstd)
        scaled = op.multiply(dy, gamma)
        along = op.multiply(centred, op.mean(op.multiply(scaled, centred), axis=-1, keepdims=True))
        return op.multiply(rstd, op.subtract(op.subtract(scaled, op.mean(scaled, axis=-1, keepdims=True)), along))

    def torchs(dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> Any:
        wanted = [True, False, False]
        return torch.ops.aten.native_layer_norm_backward(dy, x, [n], mean, rstd, gamma, gamma, wanted)[0]

    return Case("layer_norm", f"({rows}, {n}), backward", ours, torchs,
                ((rows, n), (rows, n), (n,), (rows, 1), (rows, 1)))  # fmt: skip


def unary(name: str, ours: Callable[..., Any], torchs: Callable[..., torch.Tensor], *shape: int) -> Case:
    """An element-wise function."""
    return Case("elementwise", f"{name} {shape}", ours, torchs, (shape,))


def added(*shape: int) -> Case:
    """The sum of two tensors, and its relu."""
    return Case("elementwise", f"add, relu {shape}", lambda x, y: op.nn.relu(op.add(x, y)),
                lambda x, y: torch.relu(x + y), (shape, shape))  # fmt: skip


def reduced(axis: int, *shape: int) -> Case:
    """A sum along one axis."""
    return Case(
        "reduction", f"sum {shape}, axis {axis}", lambda x: op.sum(x, axis=axis), lambda x: x.sum(axis), (shape,)
    )


def permuted(axes: Shape, *shape: int) -> Case:
    """A transposition."""
    return Case("movement", f"permute {shape} to {axes}", lambda x: op.permute_dims(x, axes),
                lambda x: x.permute(axes).contiguous(), (shape,))  # fmt: skip


def joined(count: int, rows: int, columns: int) -> Case:
    """A concatenation along the second axis."""
    return Case("movement", f"concat {count} of ({rows}, {columns})", lambda *x: op.concat(list(x), 1),
                lambda *x: torch.cat(x, 1), ((rows, columns),) * count)  # fmt: skip


CASES = (
    added(1, 256, 56, 56), added(1, 512, 28, 28), added(1, 1024, 14, 14), added(16, 1024, 1024),
    unary("relu", op.nn.relu, torch.relu, 16, 1024, 1024), unary("exp", op.exp, torch.exp, 128, 3072),
    unary("gelu", op.nn.gelu, F.gelu, 128, 3072), unary("silu", op.nn.silu, F.silu, 128, 3072),
    reduced(-1, 16384, 1024), reduced(0, 16384, 1024), reduced(-1, 4096, 197),
    softmax(12, 128, 128), softmax(12, 197, 197), layer_norm(128, 768), layer_norm(197, 768), layer_norm(768, 197),
    layer_norm_backward(128, 768), layer_norm_backward(1568, 384),
    permuted((1, 0, 2), 128, 12, 64), permuted((1, 0), 2048, 2048), joined(27, 128, 64),
    linear(1, 2048, 1000), linear(1, 2048, 1000, True), linear(1, 768, 3072), linear(2, 1024, 1000),
    linear(8, 512, 2048), linear(16, 512, 512), linear(128, 768, 768), linear(128, 768, 768, True),
    linear(128, 3072, 768), linear_gelu((197,), 768, 3072), linear_gelu((1, 14, 14), 384, 1536),
    matmul(12, 128, 128, 64), matmul(12, 197, 197, 64), matmul(12, 197, 64, 197),
    conv(3, 64, 224, 7, 2), conv(64, 64, 56, 3), conv(256, 64, 56, 1), conv(64, 256, 56, 1), conv(128, 128, 28, 3),
    conv(256, 256, 14, 3), conv(1024, 256, 14, 1), conv(512, 512, 7, 3), conv(512, 2048, 7, 1),
    conv(480, 480, 14, 5, 1, 480), conv(72, 72, 56, 5, 2, 72), conv(240, 240, 28, 5, 2, 240),
    conv(96, 96, 112, 3, 2, 96), conv(96, 96, 56, 7, 1, 96), conv(384, 384, 14, 7, 1, 384),
    conv(768, 768, 7, 7, 1, 768), conv(1152, 1152, 7, 5, 1, 1152), depthwise_silu(480, 14, 3),
    depthwise_silu(96, 112, 3, 2), conv(3, 64, 224, 11, 4), conv(16, 64, 64, 5, 3),
)  # fmt: skip


#: Products that fill a GPU, beside those of CPUs.
GPU_CASES = (
    *CASES,
    linear(1024, 768, 3072),
    linear(1024, 3072, 768),
    linear(4096, 4096, 4096),
    matmul(96, 128, 128, 64),
)


def in_module(case: Case) -> tvm.IRModule:
    """A stage of one kernel."""
    builder = relax.BlockBuilder()

    def params(stem: str) -> list[relax.Var]:
        return [relax.Var(f"{stem}{i}", relax.TensorType(s, "float32")) for i, s in enumerate(case.shapes)]

    inner, outer = params("x"), params("y")
    with builder.function("fused", inner, attrs={"Primitive": True}, private=True):
        with builder.dataflow():
            made = builder.emit_output(case.ours(*inner))
        builder.emit_func_output(made)
    (gvar,) = builder.get().get_global_vars()
    with builder.function("main", outer):
        with builder.dataflow():
            made = builder.emit_output(relax.Call(gvar, outer))
        builder.emit_func_output(made)
    return builder.finalize()


def compiled(case: Case, device: str) -> Callable[..., Any]:
    """The case as one kernel of ours: a function of its operands and the result."""
    target = make_target(tvmhet.device_type(device).target)
    with target:
        mod = tvm.transform.Sequential(kernel_passes())(in_module(case))
    mod = FastMath()(schedule_kernels(mod, target, ScheduleReport()))
    (func,) = [f for _, f in mod.functions_items() if isinstance(f, PrimFunc)]
    made_kernel: Callable[..., Any] = tvm.compile(func.with_attr("global_symbol", "main"), target=target)["main"]
    return made_kernel


@dataclass(frozen=True, slots=True)
class Result:
    """Least seconds of either side, and the largest difference of their results."""

    ours_s: float
    torchs_s: float
    difference: float


def run(case: Case, device: str) -> Result:
    """Compile and time one case, the two sides in turn."""
    kernel = compiled(case, device)
    rng = np.random.default_rng(0)
    given = [tvm.runtime.tensor(rng.uniform(-1, 1, s).astype("float32")) for s in case.shapes]
    views = [torch.from_dlpack(t) for t in given]
    want = case.torchs(*views)
    out = tvm.runtime.empty(tuple(want.shape), "float32")
    sides = (lambda: kernel(*given, out), lambda: case.torchs(*views))
    counts = [max(1, math.ceil(LEAST_S / max(1e-7, min(cpu_seconds(side) for _ in range(3))))) for side in sides]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for side, count, found in zip(sides, counts, times, strict=True):
            found.append(cpu_seconds(side, count))
    return Result(min(times[0]), min(times[1]), float((torch.from_dlpack(out) - want).abs().max()))


def run_on_gpu(case: Case, device: str) -> Result:
    """Compile and time one case on the first GPU, one side after the other."""
    executable, _ = lower_stage(in_module(case), tvmhet.device_type(device).target)
    kernel = on_gpu(executable)["main"]
    torch.manual_seed(0)
    views = [torch.rand(s, device="cuda") * 2 - 1 for s in case.shapes]
    given = [tvm.runtime.from_dlpack(v) for v in views]
    want = case.torchs(*views)
    off = float((torch.from_dlpack(kernel(*given)) - want).abs().max())
    times = [
        statistics.median(run_times(side, 0, True, ROUNDS, 1.0)[0])
        for side in (lambda: kernel(*given), lambda: case.torchs(*views))
    ]
    return Result(*times, off)


def gpu_ceiling() -> Ceiling:
    """Of the first GPU, by torch: copies of the sizes of a core's, and a product of 8192 x 8192 matrices."""

    def seconds(run: Callable[[], Any]) -> float:
        return min(run_times(run, 0, True, 9, 1.0)[0])

    rates = []
    for size in SIZES:
        source, target = (torch.rand(size // 8, device="cuda") for _ in range(2))
        rates.append(size / seconds(partial(target.copy_, source)))
    square = torch.rand(8192, 8192, device="cuda")
    return Ceiling(tuple(rates), 2 * 8192**3 / seconds(lambda: square @ square))


def line(case: Case, result: Result, ceiling: Ceiling) -> str:
    """One row of the table."""
    shape_out = case.torchs(*[torch.zeros(s) for s in case.shapes]).shape
    moved = 4.0 * (sum(math.prod(s) for s in case.shapes) + math.prod(shape_out))
    rate = (
        f"{case.flop / result.ours_s / 1e9:7.1f} GFLOP/s"
        if case.flop
        else f"{moved / result.ours_s / 1e9:7.1f} GB/s   "
    )
    share = ceiling.least_s(moved, case.flop) / result.ours_s
    ratio = result.ours_s / result.torchs_s
    return (
        f"{case.family:11} {case.name:52} {result.ours_s * 1e6:9.1f} us {rate} {share:5.0%} of the ceiling; "
        f"torch {result.torchs_s * 1e6:9.1f} us, ours / torch {ratio:5.2f}, off {result.difference:.0e}"
    )


def main() -> None:
    """Print one line for each case whose family is among the arguments; without arguments all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("--device", default=cpu_types()[-1])
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    if args.device == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        device, ceiling, cases, run_case = gpu_type(), gpu_ceiling(), GPU_CASES, run_on_gpu
        where = torch.cuda.get_device_name(0)
    else:
        as_worker("benchmarks.kernels_alone", args.device)
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        device, ceiling, cases, run_case = args.device, Ceiling.measure(), CASES, run
        where = f"{cpu_model()}, load {os.getloadavg()[0]:.1f}"
    print(f"{where}, {device}; torch {torch.__version__}; {ceiling}", flush=True)
    ratios: dict[str, list[float]] = {}
    for case in cases:
        if not args.families or case.family in args.families:
            result = run_case(case, device)
            ratios.setdefault(case.family, []).append(result.ours_s / result.torchs_s)
            print(line(case, result, ceiling), flush=True)
    for family, found in ratios.items():
        middle = statistics.median(found)
        print(f"{family}: ours / torch {middle:.2f} (median of {len(found)}), {min(found):.2f} to {max(found):.2f}")


if __name__ == "__main__":
    main()
