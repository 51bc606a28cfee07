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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import tvm
from tvm import relax

import tvmhet
from benchmarks.as_worker import as_worker
from benchmarks.here import cpu_types, gpu_type, on_gpu
from benchmarks.kernel_cases import CPU_CASES, GPU_CASES, Case
from benchmarks.kernel_ceiling import SIZES, Ceiling, cpu_seconds
from tvmhet._tvm import PrimFunc
from tvmhet.emit.cpu.fast_math import FastMath
from tvmhet.emit.lower import kernel_passes, lower_stage, make_target
from tvmhet.emit.schedule import ScheduleReport, schedule_kernels
from tvmhet.kernel_keys import cpu_model
from tvmhet.runtime.cuda_times import run_times

ROUNDS = 25
LEAST_S = 0.002  # of one timed run: short kernels are called several times in a row


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
    given = [tvm.runtime.tensor(x) for x in case.operands()]
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
    views = [torch.from_numpy(x).cuda() for x in case.operands()]
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
        device, ceiling, cases, run_case = args.device, Ceiling.measure(), CPU_CASES, run
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
