"""The main job on one screen: ResNet-50 over two unlike CPU device types, planned, compiled, run and measured.

Run by `make demo`. Then the same model is planned and compiled, not run, for 2 x V100 + 4 x T4 + 1 x A100.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
import tvm
from tvm import relax

import tvmhet
from tvmhet import zoo
from tvmhet.ir.model import Model
from tvmhet.profiling import local_types

NUM_INPUTS = 20


def two_cpu_types() -> tvmhet.ClusterSpec:
    """x86-64-v2 and the best level that this processor runs, one core each."""
    levels = [tvmhet.device_type(f"cpu-x86-64-v{level}") for level in (2, 3, 4)]
    here = [device.name for device in local_types(levels)]
    if not here:
        raise SystemExit("the demo runs x86-64 code, which this processor does not")
    return tvmhet.ClusterSpec.of({here[0]: 1, here[-1]: 1} if len(here) > 1 else {here[0]: 2})


def plain_tvm(model: Model, target: dict[str, str], x: np.ndarray) -> np.ndarray:
    """The unplaced model by plain `tvm.compile`: the reference for the numbers."""
    executable = tvm.compile(model.mod, target=tvm.target.Target(target))
    vm = relax.VirtualMachine(executable, tvm.cpu())
    return vm["main"](tvm.runtime.tensor(x), *model.params.values()).numpy()


def best_single_device(model: Model, cluster: tvmhet.ClusterSpec, x: np.ndarray) -> tuple[str, float]:
    """Measured inputs per second of the best plan on each device type alone; return the faster."""
    measured = {}
    for name in cluster.counts():
        alone = cluster.with_counts({other: int(other == name) for other in cluster.counts()})
        with tvmhet.build(model, cluster=alone) as lib:
            measured[name] = lib.benchmark(x, num_inputs=NUM_INPUTS).throughput_per_s
            print(f"  {name:16} alone: {measured[name]:6.2f} inputs/s")
    best = max(measured, key=lambda name: measured[name])
    return best, measured[best]


def main() -> None:
    """Print the whole story."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile-budget-s", type=float, default=150.0, help="seconds to measure kernels at most")
    budget_s = parser.parse_args().profile_budget_s
    torch.manual_seed(0)
    module, example = zoo.get("resnet50")
    model = tvmhet.from_torch(module, example)
    x = example[0].numpy()
    cluster = two_cpu_types()
    print(f"ResNet-50, random weights, over {cluster.counts()}\n")

    print("1. Measure the kernels that decide the plan")
    print(tvmhet.profile(model, cluster=cluster, budget_s=budget_s, progress=True), "\n")

    print("2. Plan and build")
    started = time.monotonic()
    lib = tvmhet.build(model, cluster=cluster, progress=True)
    print(f"built in {time.monotonic() - started:.1f} s; again, from the cache: ", end="")
    started = time.monotonic()
    tvmhet.build(model, cluster=cluster)
    print(f"{time.monotonic() - started:.1f} s\n\n{lib.plan}\n")

    print(f"3. Run {NUM_INPUTS} inputs")
    with lib:
        results = list(lib.map([x] * NUM_INPUTS))
        stats = lib.benchmark(x, num_inputs=NUM_INPUTS)
        print(lib.report(stats), "\n")
    target = dict(cluster.device_types()[-1].target)
    reference = plain_tvm(model, target, x)
    with tvmhet.build(model, cluster=cluster, makers=("tvm",)) as generated:
        same_kernels = float(np.abs(generated(x) - reference).max())
    difference = max(float(np.abs(y - reference).max()) for y in results)
    print(f"largest difference from plain TVM: {difference:.1e} (outputs up to {np.abs(reference).max():.2f})")
    print(f"  with TVM-generated kernels only: {same_kernels:.1e}\n")

    print("4. Against the best single device")
    best, alone = best_single_device(model, cluster, x)
    print(
        f"  both together:           {stats.throughput_per_s:6.2f} inputs/s, "
        f"{stats.throughput_per_s / alone:.2f} x {best}\n"
    )

    print("5. The same model for 2 x V100 + 4 x T4 + 1 x A100, compiled without a GPU")
    gpus = tvmhet.ClusterSpec.of({"v100-sxm2-16gb": 2, "t4": 4, "a100-sxm-40gb": 1})
    started = time.monotonic()
    placed = tvmhet.build(model, cluster=gpus, progress=True)
    print(f"planned and compiled in {time.monotonic() - started:.1f} s\n\n{placed.plan}")


if __name__ == "__main__":
    main()
