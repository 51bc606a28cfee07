"""What do a stage and a library kernel cost beyond their arithmetic? Behind `STAGE_OVERHEAD_S` and `LIBRARY_CALL_S`.

A stage: a two-stage program of tiny kernels on two CPU devices, one input at a time; what remains of the latency when
compute and transfers are taken away, per stage. A library kernel: chains of few and of many tanh on eight values; the
slope of their compute time over their length. `python -m benchmarks.stage_overhead`
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics

import torch

import tvmhet
from tvmhet._tvm import TVM_VERSION


def two_stages() -> tuple[tvmhet.HetModule, torch.Tensor]:
    """A perceptron whose layers are pinned to two CPU types."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU()).eval()
    x = torch.randn(1, 64)
    model = tvmhet.from_torch(net, (x,))
    names = [op.name for op in tvmhet.extract_graph(model).operators]
    half = len(names) // 2
    pin = {n: "cpu-x86-64-v2" for n in names[:half]} | {n: "cpu-x86-64-v3" for n in names[half:]}
    cluster = tvmhet.ClusterSpec.of({"cpu-x86-64-v2": 1, "cpu-x86-64-v3": 1})
    return tvmhet.build(model, cluster=cluster, pin=pin, makers=("tvm",)), x


def library_call_s(inputs: int) -> float:
    """Seconds of one library kernel that computes next to nothing."""
    cluster, x, few, many = tvmhet.ClusterSpec.of({"cpu-x86-64-v3": 1}), torch.zeros(8), 4, 68
    compute_s = []
    for length in (few, many):
        net = torch.nn.Sequential(*(torch.nn.Tanh() for _ in range(length)))
        with tvmhet.build(tvmhet.from_torch(net, (x,)), cluster=cluster, makers=("library",)) as lib:
            compute_s.append(lib.benchmark(x, num_inputs=inputs).stages[0].compute.median_s)
    return (compute_s[1] - compute_s[0]) / (many - few)


def main() -> None:
    """Print both overheads, medians over rounds, with the spread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--inputs", type=int, default=200)
    options = parser.parse_args()
    lib, x = two_stages()
    per_stage_s = []
    with lib:
        for _ in range(options.rounds):
            stats = lib.benchmark(x, num_inputs=options.inputs)
            known = sum(s.compute.median_s + s.transfer.median_s for s in stats.stages)
            per_stage_s.append((stats.latency.median_s - known) / len(stats.stages))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}, TVM {TVM_VERSION}, torch {torch.__version__}")
    print(f"{options.rounds} rounds of {options.inputs} inputs after 3 warm-up, one at a time")
    calls_s = [library_call_s(options.inputs) for _ in range(3)]
    for what, seconds in (("overhead of one stage", per_stage_s), ("call of one library kernel", calls_s)):
        low_us, median_us, high_us = (f(seconds) * 1e6 for f in (min, statistics.median, max))
        print(f"{what}: {median_us:.1f} us (rounds {low_us:.1f} to {high_us:.1f} us)")


if __name__ == "__main__":
    main()
