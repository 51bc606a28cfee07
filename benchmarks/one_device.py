"""On one CPU device, is `tvmhet.build` as fast as plain `tvm.compile`?

    python benchmarks/one_device.py [--models small,resnet50] [--seconds 60]

The same imported module is built four ways, all held to one core and one thread in one process, and run in turn:
each round runs every way once, in an order that rotates, so that a slow moment of the machine hits all of them.
Ratios are taken within each round against `tvm.compile`, by wall clock and by CPU time of the process, which other
processes disturb less; one thread that never waits has the same for both on an idle machine. The goal is a median
ratio of CPU times of at most 1.02.

`tvm.compile` by default does not fuse operators for CPUs; `tvm.compile, fused` passes TVM's default pipeline, which
does. `tvmhet, tvm only` has the same maker of kernels as these. `tvmhet` may also use library kernels. Plans rest on
the measured kernels in the cache, as far as there are any, and on estimates for the rest.
"""

# ruff: noqa: E402 (thread counts are set before the libraries load)
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TVM_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch, numpy and tvm are imported

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import tvm
from tvm import relax

import tvmhet
from benchmarks.here import cpu_types
from tvmhet import zoo
from tvmhet.cluster.cpu import read_cpu
from tvmhet.ir.model import Model

GOAL = 1.02
MODELS: dict[str, dict[str, Any]] = {
    "small": {"image": 64, "blocks": (1, 1, 1, 1), "base_width": 16},  # the zoo's ResNet at these sizes
    "resnet50": {},
}
Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one call: by the wall clock, and of CPU."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Way:
    """One way to build: its name, a call that runs one input, and the call that frees it."""

    name: str
    run: Run
    close: Callable[[], None] = lambda: None


def plain(name: str, model: Model, target: tvm.target.Target, x: np.ndarray, fused: bool) -> Way:
    """Plain `tvm.compile` of the imported module, with its own pipeline or with the one that fuses."""
    options = {"relax_pipeline": relax.get_default_pipeline(target)} if fused else {}
    with target:
        machine = relax.VirtualMachine(tvm.compile(model.mod, target=target, **options), tvm.cpu())
    values = [tvm.runtime.tensor(x), *model.params.values()]
    return Way(name, lambda: machine["main"](*values).numpy())


def placed(name: str, model: Model, cluster: tvmhet.ClusterSpec, x: np.ndarray, makers: tuple[str, ...]) -> Way:
    """`tvmhet.build` on one device, run in this process."""
    lib = tvmhet.build(model, cluster=cluster, makers=makers, inline=True)
    return Way(name, lambda: lib(x), lib.close)


def timed(run: Run) -> Times:
    """Run once."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    run()
    return Times(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def interleaved(ways: list[Way], budget_s: float, max_rounds: int = 300) -> dict[str, list[Times]]:
    """Times of each way, one per round: at least 5 rounds, then until `budget_s` is spent."""
    for way in ways:
        way.run()
    times: dict[str, list[Times]] = {way.name: [] for way in ways}
    begin = time.perf_counter()
    for i in range(max_rounds):
        if i >= 5 and time.perf_counter() - begin > budget_s:
            break
        for way in ways[i % len(ways) :] + ways[: i % len(ways)]:
            times[way.name].append(timed(way.run))
    return times


def measure(name: str, device: str, budget_s: float) -> bool:
    """Print the table of one model; return whether both of tvmhet's ways meet the goal."""
    module, example = zoo.get("resnet50", **MODELS[name])
    model, x = tvmhet.from_torch(module, example), example[0].numpy()
    cluster = tvmhet.ClusterSpec.of({device: 1})
    target = tvm.target.Target(dict(tvmhet.device_type(device).target))
    ways = [
        plain("tvm.compile", model, target, x, fused=False),
        plain("tvm.compile, fused", model, target, x, fused=True),
        placed("tvmhet, tvm only", model, cluster, x, ("tvm",)),
        placed("tvmhet", model, cluster, x, ("tvm", "library")),
    ]
    reference = ways[0].run()
    differences = {way.name: float(np.abs(way.run() - reference).max()) for way in ways}
    times = interleaved(ways, budget_s)
    for way in ways:
        way.close()
    rounds = len(times[ways[0].name])
    print(
        f"\n{name}, input {'x'.join(map(str, x.shape))}, {rounds} rounds; outputs up to {np.abs(reference).max():.3g}"
    )
    print(f"  {'':19}{'wall':>11} {'ratio, quartiles':21}{'CPU':>11} {'ratio, quartiles':21}{'difference':>11}")
    return all([report(way.name, times, ways[0].name, differences[way.name]) for way in ways][2:])


def report(name: str, times: dict[str, list[Times]], reference: str, difference: float) -> bool:
    """Print one row of medians with the quartiles of the ratios; return whether the median CPU ratio meets the goal."""
    text, medians = f"  {name:19}", []
    for clock in ("wall_s", "cpu_s"):
        mine, base = ([getattr(t, clock) for t in times[way]] for way in (name, reference))
        low, ratio, high = statistics.quantiles([a / b for a, b in zip(mine, base, strict=True)], n=4)
        text += f"{statistics.median(mine) * 1e3:>8.2f} ms {f'{ratio:.3f} ({low:.3f}…{high:.3f})':21}"
        medians.append(ratio)
    print(f"{text}{difference:>11.1e}")
    return medians[1] <= GOAL


def main() -> None:
    """Print the tables; end with status 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="small,resnet50", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--seconds", type=float, default=60.0, help="to measure each model, at most (but 5 rounds)")
    options = parser.parse_args()
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    cpu, device = read_cpu(), cpu_types()[-1]
    print(f"{cpu.model}, core {core} of {os.cpu_count()}, one thread, load average {os.getloadavg()[0]:.1f}; {device}")
    print(f"tvmhet {tvmhet.__version__}, TVM {tvm.__version__}, torch {torch.__version__}, numpy {np.__version__}")
    print(f"command: python {shlex.join(sys.argv)}")
    met = [measure(name, device, options.seconds) for name in options.models.split(",")]
    print(f"\ngoal: tvmhet takes at most {GOAL} of tvm.compile's CPU time: {'met' if all(met) else 'MISSED'}")
    sys.exit(not all(met))


if __name__ == "__main__":
    main()
