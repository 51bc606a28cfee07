"""What one core reaches, and how near to it the kernels of a compiled stage come.

Ceilings: a copy of as many bytes as a kernel moves (so a kernel whose data fits a cache is held to that cache's speed),
and a product of 1024 x 1024 float32 matrices by torch. A kernel's least time is the larger of its bytes at the one rate
and its FLOPs at the other. Kernels are timed inside the model, call by call, by an instrument of the VM.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import tvm
from tvm import relax

from tvmhet._functions import is_kernel_call
from tvmhet.cost.describe import describe
from tvmhet.graph.opgraph import OpGraph
from tvmhet.ir.prepare import prepare
from tvmhet.ir.rewritten import rewritten

SIZES = tuple(1 << n for n in range(14, 29, 2))  # bytes read and written by a copy: 16 KiB to 256 MiB


if TYPE_CHECKING:
    from tvmhet.graph.placement import KernelPlacement
    from tvmhet.ir.model import Model
    from tvmhet.module import HetModule


def cpu_seconds(run: Callable[[], Any], times: int = 1) -> float:
    """CPU time of one call, the mean of `times` calls in a row."""
    begin = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - begin) / times


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Bytes read and written per second by copies of `SIZES` bytes, and float32 FLOPs per second by a product."""

    byte_per_s: tuple[float, ...]
    flop_per_s: float

    @staticmethod
    def measure() -> Ceiling:
        """Best of nine each."""
        square = torch.rand(1024, 1024)
        product_s = min(cpu_seconds(lambda: square @ square) for _ in range(9))
        return Ceiling(tuple(_copy_rate(size) for size in SIZES), 2 * 1024**3 / product_s)

    def rate(self, size_bytes: float) -> float:
        """The copy rate of the smallest measured size that is no smaller."""
        return self.byte_per_s[min(bisect_left(SIZES, size_bytes), len(SIZES) - 1)]

    def least_s(self, size_bytes: float, flop: float) -> float:
        """The shortest possible time of a kernel that moves `size_bytes` and computes `flop`."""
        return max(size_bytes / self.rate(size_bytes), flop / self.flop_per_s)

    def __str__(self) -> str:
        shown = {"256 KiB": 1 << 18, "4 MiB": 1 << 22, "256 MiB": 1 << 28}
        copies = ", ".join(f"{self.rate(size) / 1e9:.0f} GB/s at {name}" for name, size in shown.items())
        return f"copy {copies}; product {self.flop_per_s / 1e9:.0f} GFLOP/s"


def _copy_rate(size_bytes: int) -> float:
    source = np.ones(size_bytes // 8, "float32")
    target = np.empty_like(source)
    times = max(1, (1 << 24) // size_bytes)
    return size_bytes / min(cpu_seconds(lambda: np.copyto(target, source), times) for _ in range(9))


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel of a plan inside the model: the median of its calls in seconds, and its share of the ceiling."""

    name: str
    maker: str
    seconds: float
    byte_per_s: float
    flop_per_s: float
    share: float


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The kernels of a stage in order, and the bytes that the VM allocates for what lies between them."""

    kernels: tuple[KernelTime, ...]
    storage_bytes: int


class Instrument:
    """Notes the CPU seconds of each kernel call, by its position, and the bytes of storage of the first run."""

    def __init__(self) -> None:
        self.calls: list[list[float]] = []
        self.storage_bytes = 0
        self._begin = 0.0
        self._position = self._runs = 0

    def start(self) -> None:
        """A run of `main` begins."""
        self._position, self._runs = 0, self._runs + 1

    def __call__(self, _func: Any, name: str, before: bool, _result: Any, *values: Any) -> int:
        """What the VM calls before and after each call of `main`."""
        if name == "vm.builtin.alloc_storage" and before and self._runs == 1:
            self.storage_bytes += math.prod(int(d) for d in values[1])
        if not is_kernel_call(name):
            return 0
        if before:
            self._begin = time.process_time()
            return 0
        seconds = time.process_time() - self._begin
        if self._position == len(self.calls):
            self.calls.append([])
        self.calls[self._position].append(seconds)
        self._position += 1
        return 0


def kernel_times(
    lib: HetModule, model: Model, inputs: Sequence[np.ndarray], ceiling: Ceiling, rounds: int
) -> StageTimes:
    """Run a module of one stage on this core `rounds` times; return its kernels' times and the VM's storage.

    Raises RuntimeError if the VM's calls are not the plan's kernels, one to one.
    """
    (stage,) = lib.program.stages
    given = dict(zip(lib.program.inputs, inputs, strict=True))
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(stage.library)), tvm.cpu())
    args = [tvm.runtime.tensor(given[n]) for n in stage.inputs]
    args += [tvm.runtime.tensor(lib.program.params[n]) for n in stage.params]
    instrument = Instrument()
    machine.set_instrument(instrument)
    for _ in range(rounds):
        instrument.start()
        machine["main"](*args)
    kernels = lib.plan.stages[0].kernels
    if len(kernels) != len(instrument.calls):
        raise RuntimeError(f"the VM made {len(instrument.calls)} calls for {len(kernels)} kernels")
    graph = rewritten(prepare(model), lib.plan.rewrites).graph
    assert graph is not None  # a plan of kernels has one
    times = [
        _kernel_time(graph, kernel, statistics.median(calls), ceiling)
        for kernel, calls in zip(kernels, instrument.calls, strict=True)
    ]
    return StageTimes(tuple(times), instrument.storage_bytes)


def _kernel_time(graph: OpGraph, kernel: KernelPlacement, seconds: float, ceiling: Ceiling) -> KernelTime:
    desc = describe(graph, sorted(graph.index(op) for op in kernel.ops), kernel.maker)
    moved = desc.read_bytes + desc.write_bytes
    share = ceiling.least_s(moved, desc.flop) / seconds
    return KernelTime(kernel.name, kernel.maker, seconds, moved / seconds, desc.flop / seconds, share)
