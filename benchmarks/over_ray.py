"""What does it cost that the machines of a plan are nodes of a Ray cluster, and not devices of one machine?

    python -m benchmarks.over_ray [--models resnet50,bert_base,mobilenet_v3] [--rounds 5] [--num-inputs 15]

Two nodes on this machine, each on a core of its own, and the plan for a CPU type on each. The same build runs without
Ray and over it, in turn: let nothing else run. Printed: medians of the rounds, and the throughput over Ray as a part of
the other one, round by round. Ray's daemons, its actors and this process have the same two cores as the stages, which
machines of their own would not ask of them; and nothing crosses a network.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence

import torch

import tvmhet
from benchmarks.here import cpu_types
from benchmarks.ray_machines import MACHINES, two_machines
from tvmhet import zoo
from tvmhet.kernel_keys import cpu_model
from tvmhet.module import HetModule
from tvmhet.runtime.stats import RunStats


def cluster() -> tvmhet.ClusterSpec:
    """Return a machine with the highest CPU type of this one, and another with the lowest."""
    types = (cpu_types()[-1], cpu_types()[0])
    nodes = [{"name": m, "devices": {t: 1}} for m, t in zip(MACHINES, types, strict=True)]
    return tvmhet.ClusterSpec.from_dict({"nodes": nodes, "network": {"bandwidth": "10 Gbit/s", "latency": "50 us"}})


def compare(model: str, address: str, rounds: int, num_inputs: int) -> None:
    """Run a model both ways in turn, and print a line for each."""
    import ray

    module, inputs = zoo.get(model)
    with tvmhet.build(tvmhet.from_torch(module, inputs), cluster=cluster()) as here, here.on_ray(address) as over:
        ways: dict[str, HetModule] = {"one machine": here, "over Ray": over}
        stats: dict[str, list[RunStats]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, lib in ways.items():
                stats[way].append(lib.benchmark(*inputs, num_inputs=num_inputs))
    crossing = sum(here.program.values[v].size_bytes for s in here.program.stages[1:] for v in s.inputs)
    print(f"{model}, {len(here.plan.stages)} stages, {crossing / 1e3:.0f} kB between them; ray {ray.__version__}")
    for way, own in stats.items():
        latency = statistics.median(s.latency.median_s for s in own)
        rate = statistics.median(s.throughput_per_s for s in own)
        hops = [stage.hop.median_s for s in own for stage in s.stages if stage.hop]
        hop = f"hand-over {1e3 * statistics.median(hops):6.2f} ms" if hops else "no hand-over"
        print(f"  {way:12} {1e3 * latency:8.1f} ms alone   {hop}   {rate:7.2f} inputs/s")
    ratios = [o.throughput_per_s / h.throughput_per_s for h, o in zip(*stats.values(), strict=True)]
    print("  throughput over Ray / on one machine, by round:", " ".join(f"{r:.2f}" for r in ratios), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare each model on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet50,bert_base,mobilenet_v3")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-inputs", type=int, default=15)
    args = parser.parse_args(argv)
    print(
        f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; torch {torch.__version__}"
    )
    with two_machines() as address:
        for model in args.models.split(","):
            compare(model, address, args.rounds, args.num_inputs)


if __name__ == "__main__":
    main()
