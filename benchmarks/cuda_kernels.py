"""Does every CUDA kernel of the zoo compile, and what does ptxas give it: registers, spills, shared memory?

    python -m benchmarks.cuda_kernels [--models resnet50,bert_base] [--devices a100,p100-pcie-16gb] [--worst 5]

Needs no GPU: each model is planned on one device of each type with generated kernels only, lowered, and its source
compiled by NVRTC (`pip install tvmhet[nvrtc]`). A line per model and type: kernels, how many spill, the least
occupancy, CPU seconds of NVRTC; below it the kernels that spill most, and what does not compile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch

import tvmhet
from tvmhet import zoo
from tvmhet.deploy import stage_sources
from tvmhet.emit.lower import lower_stage
from tvmhet.emit.nvrtc import KernelResources, compile_cubin, cuda_sources
from tvmhet.ir.prepare import prepare
from tvmhet.ir.rewritten import rewritten

DEVICES = ("p100-pcie-16gb", "v100-pcie-32gb", "t4", "a100", "l4", "h100", "b200")


def lines(model: str, device: str, worst: int) -> Iterator[str]:
    """Plan, lower and compile a model on one device; yield what came of it."""
    module, example = zoo.get(model)
    imported = tvmhet.from_torch(module.eval(), example)
    cluster = tvmhet.ClusterSpec.of({device: 1})
    plan = tvmhet.plan(imported, cluster=cluster, makers=("tvm",))
    kind, failed, begin, spent_s = tvmhet.device_type(device), [], time.process_time(), 0.0
    found: list[KernelResources] = []
    for source in stage_sources(rewritten(prepare(imported), plan.rewrites), plan, cluster):
        executable, report = lower_stage(source.module, source.target)
        if report.raised or report.unscheduled:
            yield f"    rules: {report}"
        begin = time.process_time()
        for text in cuda_sources(executable.mod):
            try:
                found += compile_cubin(text, str(source.target["arch"])).kernels
            except tvmhet.HetError as error:
                failed.append(error.problem)
        spent_s += time.process_time() - begin
    spilling = sorted((k for k in found if k.spill_bytes), key=lambda k: -k.spill_bytes)
    least = min((k.occupancy(kind) for k in found), default=0.0)
    yield (
        f"{model:14} {device:16} {kind.target['arch']:7} {len(found):4} kernels, {len(spilling):3} spill, "
        f"least occupancy {least:4.0%}, {spent_s:5.1f} s" + (", DOES NOT COMPILE" if failed else "")
    )
    for kernel in spilling[:worst]:
        yield (
            f"    {kernel.spill_bytes:6} bytes spilled, {kernel.registers:3} registers, {kernel.threads:4} threads, "
            f"{kernel.shared_bytes:6} bytes shared  {kernel.name}"
        )
    yield from (f"    {problem}" for problem in failed)


def main() -> None:
    """Print the lines of every model on every device type."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(zoo.MODELS))
    parser.add_argument("--devices", default=",".join(DEVICES))
    parser.add_argument("--worst", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for device in args.devices.split(","):
        for model in args.models.split(","):
            for line in lines(model, device, args.worst):
                print(line, flush=True)


if __name__ == "__main__":
    main()
