"""How fast is a whole model on several CPU cores: ours by each choice of makers, and torch eager?

    python -m benchmarks.several_cores [--models resnet50,bert_base] [--cores 2] [--batch 1] [--rounds 15]

Ours runs in a worker for a device type of that many cores and of the highest level here, torch in a process of its own
with as many threads, its defaults otherwise. All ways take turns, wall time, the faster of two calls in each round: let
nothing else run. Printed: the median of the rounds, and torch's time over each way's within a round, with quartiles.
First builds, nothing measured before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

import tvmhet
from benchmarks.here import cpu_types
from tvmhet import zoo
from tvmhet.kernel_keys import cpu_model

MODELS = "resnet50,inception_v3,bert_base,gpt2_small,vit_b16,t5_small,convnext_t,mobilenet_v3"
MAKERS: dict[str, tuple[str, ...]] = {"tvm": ("tvm",), "library": ("library",), "both": ("tvm", "library")}
_PAUSE_S = 0.02  # in which the threads of the one way go to sleep


def serve_torch(model: str, batch: int, cores: int) -> None:
    """Run the model once for each line on standard input, and print the seconds that it took."""
    torch.set_num_threads(cores)
    module, inputs = zoo.get(model, batch=batch)
    with torch.no_grad():
        for _ in sys.stdin:
            start = time.perf_counter()
            module(*inputs)
            print(time.perf_counter() - start, flush=True)


def compare(model: str, batch: int, cores: int, rounds: int) -> None:
    """Time all ways in turn, and print a line for each."""
    module, inputs = zoo.get(model, batch=batch)
    mod = tvmhet.from_torch(module, inputs)
    cluster = tvmhet.ClusterSpec.of({f"{cpu_types()[-1]}-{cores}core": 1})
    command = [sys.executable, "-m", "benchmarks.several_cores", "--serve", model]
    command += ["--batch", str(batch), "--cores", str(cores)]
    with ExitStack() as stack:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        child = stack.enter_context(subprocess.Popen(command, **pipes))  # type: ignore[call-overload]
        built = {n: stack.enter_context(tvmhet.build(mod, cluster=cluster, makers=m)) for n, m in MAKERS.items()}

        def torchs() -> float:
            child.stdin.write("\n")
            child.stdin.flush()
            return float(child.stdout.readline())

        def ours(name: str) -> Callable[[], float]:
            def call() -> float:
                start = time.perf_counter()
                built[name](*inputs)
                return time.perf_counter() - start

            return call

        ways = {"torch eager": torchs} | {f"ours, {name}": ours(name) for name in MAKERS}
        for way in ways.values():  # the first call makes pools
            way()
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                time.sleep(_PAUSE_S)
                times[name].append(min(way(), way()))
        child.stdin.close()
    print(f"{model}, batch {batch}")
    for name, own in times.items():
        ratios = sorted(t / o for t, o in zip(times["torch eager"], own, strict=True))
        low, _, high = statistics.quantiles(ratios, n=4)
        median = statistics.median(ratios)
        print(
            f"  {name:14} {1e3 * statistics.median(own):9.2f} ms   {median:.2f}x ({low:.2f} to {high:.2f})", flush=True
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Compare each model on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        serve_torch(args.serve, args.batch, args.cores)
        return
    load = os.getloadavg()[0]
    print(f"{cpu_model()}, {cpu_types()[-1]}, {args.cores} cores, load {load:.1f}; torch {torch.__version__}")
    for model in args.models.split(","):
        compare(model, args.batch, args.cores, args.rounds)


if __name__ == "__main__":
    main()
