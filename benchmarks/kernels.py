"""How fast is a whole model on one CPU core: ours, torch eager, torch.compile, `tvm.compile`?

    python benchmarks/kernels.py [--models resnet50,bert_base] [--batch 1] [--rounds 9] [--quick]

Every way runs in one process held to one core and one thread, in turn, the order rotating each round; ratios are taken
within each round against torch eager, by CPU time of the process, which other work on the machine disturbs least.
"ours, tvm" has generated kernels only; "ours" has whichever maker the plan prefers. `tvm.compile` is the default
pipeline, which schedules nothing on CPUs: it is run once, and only if `--cap` seconds are likely to be enough.

Below each model: its slowest kernels against the core's ceilings, measured first (a copy of 64 MiB for bytes, a product
of 512 x 512 matrices for FLOPs): the ten that reach the smallest share of theirs.
"""

# ruff: noqa: E402 (thread counts are set before the libraries load)
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TVM_NUM_THREADS"):
    os.environ[_name] = "1"

import argparse
import math
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import tvm
from tvm import relax

import tvmhet
from tvmhet import zoo
from tvmhet.cluster.cpu import read_cpu
from tvmhet.cost.describe import describe
from tvmhet.cost.model import KernelDesc
from tvmhet.ir.model import Model
from tvmhet.times import cpu_model

MODELS = (
    "resnet50", "inception_v3", "bert_base", "gpt2_small", "vit_b16", "t5_small", "convnext_t", "mobilenet_v3", "dlrm",
    "lstm",
)  # fmt: skip
QUICK = ("mobilenet_v3", "dlrm")
WORST = 10
Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the model: a call that runs one input, or the reason why there is none."""

    name: str
    run: Run | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What one core reaches: bytes read and written per second by a copy, FLOPs per second by a matrix product."""

    byte_per_s: float
    flop_per_s: float

    @staticmethod
    def measure() -> Ceiling:
        """Best of nine."""
        source, side = np.ones(1 << 24, "float32"), 512
        target, square = np.empty_like(source), torch.rand(side, side)
        copy_s = min(cpu_seconds(lambda: np.copyto(target, source)) for _ in range(9))
        product_s = min(cpu_seconds(lambda: square @ square) for _ in range(9))
        return Ceiling(2 * source.nbytes / copy_s, 2 * side**3 / product_s)

    def least_s(self, desc: KernelDesc) -> float:
        """The shortest possible time of a kernel."""
        return max((desc.read_bytes + desc.write_bytes) / self.byte_per_s, desc.flop / self.flop_per_s)


def cpu_seconds(run: Run) -> float:
    """CPU time of one call."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def batched(example: tuple[Any, ...], batch: int) -> tuple[Any, ...]:
    """The example inputs `batch` times over along their first axis."""
    return tuple(torch.cat([x] * batch) if batch > 1 else x for x in example)


def eager(module: torch.nn.Module, example: tuple[Any, ...]) -> Way:
    """Torch as it is."""
    return Way("torch eager", lambda: module(*example))


def compiled(module: torch.nn.Module, example: tuple[Any, ...]) -> Way:
    """torch.compile, which needs a C++ compiler on CPUs."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        return Way("torch.compile", None, "no C++ compiler on this machine")
    fast = torch.compile(module)
    try:
        fast(*example)
    except Exception as error:
        return Way("torch.compile", None, f"{type(error).__name__}: {str(error).splitlines()[0][:80]}")
    return Way("torch.compile", lambda: fast(*example))


def ours(name: str, model: Model, device: str, example: tuple[Any, ...], makers: tuple[str, ...]) -> tuple[Way, Any]:
    """`tvmhet.build` on one device, in this process, and its plan."""
    lib = tvmhet.build(model, cluster=tvmhet.ClusterSpec.of({device: 1}), makers=makers, inline=True)
    inputs = [x.numpy() for x in example]
    return Way(name, lambda: lib(*inputs)), lib.plan


def plain(model: Model, device: str, example: tuple[Any, ...], eager_s: float, cap_s: float) -> Way:
    """`tvm.compile` by default. It has no schedules for CPUs: tens to hundreds of times slower than torch."""
    if 300 * eager_s > cap_s:
        return Way("tvm.compile", None, f"not run: it may take {300 * eager_s:.0f} s, the cap is {cap_s:.0f} s (--cap)")
    target = tvm.target.Target(dict(tvmhet.device_type(device).target))
    with target:
        machine = relax.VirtualMachine(tvm.compile(model.mod, target=target), tvm.cpu())
    values = [*(tvm.runtime.tensor(x.numpy()) for x in example), *model.params.values()]
    return Way("tvm.compile", lambda: machine["main"](*values))


def first_tensor(result: Any) -> np.ndarray:
    """The first tensor of a result."""
    if isinstance(result, tuple | list):
        return first_tensor(result[0])
    return np.asarray(result.detach() if isinstance(result, torch.Tensor) else result)


def interleaved(ways: Sequence[Way], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each way, one a round, the order rotating."""
    times: dict[str, list[float]] = {w.name: [] for w in ways}
    for i in range(rounds):
        for way in (*ways[i % len(ways) :], *ways[: i % len(ways)]):
            assert way.run is not None
            times[way.name].append(cpu_seconds(way.run))
    return times


def kernel_shares(model: Model, plan: Any, ceiling: Ceiling) -> Iterator[tuple[float, float, str]]:
    """Yield (share of the ceiling, seconds, kernel) for the kernels of a plan that were measured (`--profile`)."""
    graph = tvmhet.extract_graph(model)
    index = {op.name: i for i, op in enumerate(graph.operators)}
    for stage in plan.stages:
        for kernel, prediction in zip(stage.kernels, stage.predictions, strict=True):
            if prediction.source == "measured" and math.isfinite(prediction.time_s):
                desc = describe(graph, tuple(sorted(index[o] for o in kernel.ops)), kernel.maker)
                yield ceiling.least_s(desc) / prediction.time_s, prediction.time_s, f"{kernel.name} ({kernel.maker})"


def report(name: str, batch: int, device: str, ceiling: Ceiling, args: argparse.Namespace) -> dict[str, float]:
    """Print one model's table; return the ratio of each way to torch eager."""
    module, example = zoo.get(name)
    module, example = module.eval(), batched(example, batch)
    model = tvmhet.from_torch(module, example)
    base = eager(module, example)
    if args.profile:
        tvmhet.profile(model, cluster=tvmhet.ClusterSpec.of({device: 1}), budget_s=args.profile)
    generated, _ = ours("ours, tvm", model, device, example, ("tvm",))
    mixed, plan = ours("ours", model, device, example, ("tvm", "library"))
    eager_s = min(cpu_seconds(lambda: module(*example)) for _ in range(3))
    every = [base, generated, mixed, compiled(module, example), plain(model, device, example, eager_s, args.cap)]
    ways = [w for w in every if w.run is not None and w.name != "tvm.compile"]
    want = first_tensor(module(*example))
    off = {w.name: float(np.abs(first_tensor(w.run()) - want).max()) for w in ways if w.run is not None}
    times = interleaved(ways, args.rounds)
    print(f"\n{name}, batch {batch}, {args.rounds} rounds; outputs up to {np.abs(want).max():.3g}")
    print(f"  {'':14}{'median':>11}  {'times torch eager (quartiles)':32}{'difference':>11}")
    ratios = {}
    for way in every:
        if way.name in times:
            low, ratio, high = statistics.quantiles(
                [e / t for t, e in zip(times[way.name], times[base.name], strict=True)], n=4
            )
            ratios[way.name] = ratio
            spread = f"{ratio:.2f}x as fast ({low:.2f} … {high:.2f})"
            median_ms = statistics.median(times[way.name]) * 1e3
            print(f"  {way.name:14}{median_ms:>8.2f} ms  {spread:32}{off[way.name]:>11.1e}")
        elif way.run is not None:
            once_s = cpu_seconds(way.run)
            print(f"  {way.name:14}{once_s * 1e3:>8.2f} ms  {eager_s / once_s:.3f}x as fast (one run)")
        else:
            print(f"  {way.name:14}{way.note}")
    worst = sorted(kernel_shares(model, plan, ceiling))[:WORST]
    for share, seconds, kernel in worst:
        print(f"    {share:6.1%} of the ceiling, {seconds * 1e6:9.1f} us: {kernel}")
    return ratios


def main() -> None:
    """Print all tables and the geometric means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9, help="at least 2")
    parser.add_argument("--cap", type=float, default=20.0, help="seconds that one run of tvm.compile may take")
    parser.add_argument("--profile", type=float, default=0.0, help="seconds for measuring kernels of each model first")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}, 5 rounds")
    args = parser.parse_args()
    if args.quick:
        args.models, args.rounds = ",".join(QUICK), 5
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    device, ceiling = f"cpu-{read_cpu().levels[-1]}", Ceiling.measure()
    print(f"{cpu_model()}, one core, {device}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"Python {platform.python_version()}, torch {torch.__version__}, TVM {tvm.__version__}; CPU time")
    print(f"ceilings: copy {ceiling.byte_per_s / 1e9:.1f} GB/s, product {ceiling.flop_per_s / 1e9:.0f} GFLOP/s")
    found: dict[str, list[float]] = {}
    for name in args.models.split(","):
        try:
            for way, ratio in report(name, args.batch, device, ceiling, args).items():
                found.setdefault(way, []).append(ratio)
        except tvmhet.HetError as error:
            print(f"\n{name}: {error}")
    for way, ratios in found.items():
        print(f"geometric mean over {len(ratios)} models: {way} {statistics.geometric_mean(ratios):.2f}x torch eager")


if __name__ == "__main__":
    main()
