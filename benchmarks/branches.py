"""Do branches at the same time pay on a CPU device of several cores? Inception-v3, plans with and without.

    python -m benchmarks.branches --database FILE --profile 200 [--image 75] [--cores 2]   measure kernels first
    python -m benchmarks.branches --database FILE [--image 75] [--cores 2] [--rounds 20]   plan, build, run

Plans for the latency of one input on one device of the highest level here. Both run in this process, in turn round by
round, on one pool of threads (TVM_NUM_THREADS is set to the cores); medians and quartiles of wall time: let nothing
else run. Below the table, each concurrent kernel of the plan: its branches, its time, and where that comes from.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import tvmhet
from benchmarks.here import cpu_types
from tvmhet import zoo
from tvmhet.cluster import ClusterSpec
from tvmhet.graph.concurrent import CONCURRENT

_WAYS = {"at the same time where it pays": "", "in turn": "no-concurrent"}
_PER_ROUND = 20


def main() -> int:
    """Print one row per plan, and the concurrent kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", type=Path, required=True)
    parser.add_argument("--image", type=int, default=75)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--profile", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    os.environ["TVM_NUM_THREADS"] = str(args.cores)  # before the first parallel loop
    module, inputs = zoo.get("inception_v3", image=args.image)
    model = tvmhet.from_torch(module, inputs)
    suffix = f"-{args.cores}core" if args.cores > 1 else ""
    cluster = ClusterSpec.of({f"{cpu_types()[-1]}{suffix}": 1})
    if args.profile:
        makers, objective = ("tvm", CONCURRENT), "latency"
        print(tvmhet.profile(
            model, cluster=cluster, budget_s=args.profile, objective=objective, makers=makers, database=args.database
        ))  # fmt: skip
        return 0
    plans, built = {}, {}
    for way, ablate in _WAYS.items():
        plans[way] = tvmhet.plan(
            model,
            cluster=cluster,
            objective="latency",
            database=args.database,
            ablate=ablate,
            makers=("tvm", CONCURRENT),
        )
        built[way] = tvmhet.build(model, cluster=cluster, plan=plans[way], inline=True)
    print(f"\n{args.image} pixels, {args.cores} cores, {len(inputs)} input\n")
    print("| branches | kernels | concurrent | measured by profile | predicted | measured |\n|---|---|---|---|---|---|")
    times: dict[str, list[float]] = {way: [] for way in _WAYS}
    for _ in range(args.rounds):
        for way, lib in built.items():
            lib(*inputs)  # its threads are awake
            for _ in range(_PER_ROUND):
                started = time.perf_counter()
                lib(*inputs)
                times[way].append(time.perf_counter() - started)
    for way, plan in plans.items():
        guesses = [p for s in plan.stages for p in s.predictions]
        kernels = [k for s in plan.stages for k in s.kernels]
        known = sum(p.source == "measured" for p in guesses) / len(guesses)
        low, mid, high = (1e3 * q for q in statistics.quantiles(times[way], n=4))
        num = sum(k.maker == CONCURRENT for k in kernels)
        took = f"{mid:.3f} ms ({low:.3f} to {high:.3f}, least {min(times[way]) * 1e3:.3f})"
        print(f"| {way} | {len(kernels)} | {num} | {known:.0%} | {plan.latency_s * 1e3:.3f} ms | {took} |")
    for stage in next(iter(plans.values())).stages:
        for kernel, guess in zip(stage.kernels, stage.predictions, strict=True):
            if kernel.maker == CONCURRENT:
                counts = [len(b["kernels"]) for b in json.loads(kernel.spec)]
                print(f"{kernel.name}: branches of {counts} kernels, {guess.time_s * 1e6:.0f} us, {guess.source}")
    for lib in built.values():
        lib.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
