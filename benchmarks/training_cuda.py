"""Does a full-size training step import, plan and compile for three GPU types, without a GPU, and in what time?

    python -m benchmarks.training_cuda --models resnet50 --out benchmarks/results/training_cuda.json

Each model is imported with AdamW, planned for 4 x A100, 8 x V100 and 16 x T4, and every distinct function of the plan
(forward and backward of each stage, all-reduce and update of each replica, generated kernels only) is lowered to CUDA
source and compiled by NVRTC for its architecture (`pip install tvmhet[nvrtc]`). CPU seconds of this process, one core;
wall seconds beside them, which mean something on an idle machine only. With --out, rows of other models stay.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import tvmhet
from tvmhet import zoo
from tvmhet._tvm import TVM_VERSION, structural_hash
from tvmhet.emit.build import StageSource
from tvmhet.emit.lower import lower_stage
from tvmhet.emit.nvrtc import KernelResources, compile_cubin, cuda_sources
from tvmhet.ir.training_model import TrainingModel
from tvmhet.ir.training_step import read_step
from tvmhet.kernel_keys import cpu_model
from tvmhet.plans import Plan
from tvmhet.training_deploy import function_sources, stage_functions
from tvmhet.training_placement import TrainingPlacement

CLUSTER = {"a100": 4, "v100-pcie-32gb": 8, "t4": 16}
#: Samples of a micro-batch and their size, and the global batch.
MODELS: dict[str, tuple[dict[str, int], int]] = {
    "resnet50": ({"batch": 32, "image": 224}, 1024),
    "bert_base": ({"batch": 8, "length": 128}, 256),
    "gpt2_small": ({"batch": 4, "length": 1024}, 128),
}
MAKERS = ("tvm",)


@dataclass
class Row:
    """One model; seconds are (CPU, wall)."""

    model: str
    micro_batch: dict[str, int]
    global_batch: int
    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)
    schedule: str = ""
    stages: list[str] = field(default_factory=list)
    iteration_s: float = 0.0
    lower_bound_s: float = 0.0
    functions: int = 0
    kernels: int = 0
    spilling: int = 0
    spilled_bytes: int = 0  # of the kernel that spills most
    rules: dict[str, int] = field(default_factory=dict)  # kernels by the rule that scheduled them
    raised: dict[str, int] = field(default_factory=dict)  # rules that failed on a kernel which another one took
    refused: list[str] = field(default_factory=list)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add what the body takes to the seconds of `what`."""
        cpu, wall = time.process_time(), time.monotonic()
        yield
        before = self.seconds.get(what, (0.0, 0.0))
        self.seconds[what] = before[0] + time.process_time() - cpu, before[1] + time.monotonic() - wall


def measured(name: str) -> Row:
    """Import, plan and compile a model."""
    size, global_batch = MODELS[name]
    row = Row(name, size, global_batch)
    cluster = tvmhet.ClusterSpec.of(CLUSTER)
    module, inputs = zoo.get(name, **size)
    with row.timed("import"):
        step = tvmhet.from_torch(module, inputs, loss="cross_entropy", optimizer="adamw", mode="training")
    with row.timed("plan"):
        plan = tvmhet.plan(step, cluster=cluster, mode="training", global_batch=global_batch, makers=MAKERS)
    assert plan.training is not None
    row.schedule, row.iteration_s, row.lower_bound_s = plan.training.schedule, plan.objective_value, plan.lower_bound
    row.stages = [f"{len(s.placement.devices)} x {s.placement.device_type}" for s in plan.stages]
    with row.timed("cut"):
        sources = _distinct(step, plan, cluster)
    row.functions = len(sources)
    for source in sources:
        _compile(row, source)
    return row


def _distinct(step: TrainingModel, plan: Plan, cluster: tvmhet.ClusterSpec) -> list[StageSource]:
    """The functions of a plan; those of equal code for one architecture once, as the cache has it."""
    placement = TrainingPlacement.of_plan(plan)
    _, made = stage_functions(read_step(step), placement, None)
    found = {
        (structural_hash(source.module), str(source.target["arch"])): source
        for source, _ in function_sources(made, placement, cluster, MAKERS).values()
    }
    return list(found.values())


def _compile(row: Row, source: StageSource) -> None:
    with row.timed("lower"):
        executable, report = lower_stage(source.module, source.target)
    for counts, kept in ((report.applied, row.rules), (report.raised, row.raised)):
        for rule, count in counts.items():
            kept[rule] = kept.get(rule, 0) + count
    kernels: list[KernelResources] = []
    with row.timed("nvrtc"):
        for text in cuda_sources(executable.mod):
            try:
                kernels += compile_cubin(text, str(source.target["arch"])).kernels
            except tvmhet.HetError as error:
                row.refused.append(f"{source.name}: {error.problem}")
    row.kernels += len(kernels)
    row.spilling += sum(k.spill_bytes > 0 for k in kernels)
    row.spilled_bytes = max([row.spilled_bytes, *(k.spill_bytes for k in kernels)])


def main() -> None:
    """Print a row per model; write them with the machine and the versions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.models.split(","):
        row = measured(name)
        seconds = ", ".join(f"{what} {cpu:.1f} ({wall:.1f})" for what, (cpu, wall) in row.seconds.items())
        print(f"{name}: {seconds} CPU s (wall)")
        took = f"{row.iteration_s * 1e3:.0f} ms, at least {row.lower_bound_s * 1e3:.0f}"
        print(f"    {row.schedule} over {', '.join(row.stages)}: {took}")
        print(f"    {row.functions} functions, {row.kernels} kernels, {row.spilling} spill")
        print(f"    {row.rules}; raised {row.raised}", *row.refused, sep="\n    ", flush=True)
        if args.out:
            _keep(args.out, row)


def _keep(out: Path, row: Row) -> None:
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    rows = [r for r in rows if r["model"] != row.model] + [asdict(row)]
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    head = {"machine": cpu_model(), "python": platform.python_version(), "torch": torch.__version__, "tvm": TVM_VERSION}
    text = json.dumps({**head, "cluster": CLUSTER, "peak_gib_of_last": round(most, 2), "rows": rows}, indent=1)
    out.write_text(text + "\n")


if __name__ == "__main__":
    main()
