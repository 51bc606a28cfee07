"""Does a training step take the memory that its placement is said to take, in every schedule, kept or recomputed?

    python -m benchmarks.training_memory [--models moe] [--out benchmarks/results/training_memory.json]

Each model is cut into stages of equal numbers of operators on two CPU devices (interleaved: two each) and run for
two steps of four micro-batches with AdamW on TVM's kernels. Said is what `memory_of_placement` says of a device before
anything is compiled; taken is what its worker holds at the end beyond an idle one: memory of its own and what it has
touched of the shared one. Neither is a time, so the machine may be busy. With --out, rows of other models stay.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import tvmhet
from tvmhet import zoo
from tvmhet._tvm import TVM_VERSION
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.ir.training_model import TrainingModel
from tvmhet.ir.training_step import read_step
from tvmhet.kernel_keys import cpu_model
from tvmhet.solve.schedules import Schedule
from tvmhet.training_build import build_training
from tvmhet.training_example import example_batch
from tvmhet.training_memory import memory_of_placement
from tvmhet.training_placement import TrainingPlacement

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "bert": ("bert_base", {"batch": 4, "length": 64, "layers": 4, "dim": 256, "heads": 4, "vocab": 4000}),
    "gpt2": ("gpt2_small", {"batch": 4, "length": 64, "layers": 4, "dim": 256, "heads": 4, "vocab": 4000}),
    "moe": ("moe", {"batch": 4, "length": 64, "layers": 2, "dim": 256, "heads": 4, "hidden": 512}),
    "resnet": ("resnet50", {"batch": 8, "image": 64, "blocks": (1, 1, 1, 1), "base_width": 32, "num_classes": 100}),
}
COUNT, LIMIT = 4, 0.05
MAKERS = ("tvm",)


@dataclass(frozen=True, slots=True)
class Row:
    """One device of one placement, in bytes."""

    model: str
    schedule: str
    recompute: bool
    device: int
    said: int
    taken: int

    @property
    def error(self) -> float:
        """Said over taken, less one."""
        return self.said / self.taken - 1.0


def measured(name: str) -> Iterator[Row]:
    """Run a model in every schedule."""
    zoo_name, sizes = MODELS[name]
    module, inputs = zoo.get(zoo_name, **sizes)
    loss = "mse" if name == "moe" else "cross_entropy"
    step = tvmhet.from_torch(module, inputs, loss=loss, optimizer="adamw", mode="training")
    cluster = ClusterSpec.from_dict({"nodes": [{"devices": {"cpu-x86-64-v3": 2}}]})
    for schedule in Schedule:
        for recompute in (False, True):
            placement = _placed(step, cluster, schedule, recompute)
            said = memory_of_placement(read_step(step), placement, cluster=cluster, makers=MAKERS)
            size = COUNT * step.batch_size
            with build_training(step, cluster=cluster, plan=placement, global_batch=size, makers=MAKERS) as trainer:
                batch = example_batch(trainer.batch_specs)
                for _ in range(2):
                    trainer.train_step(batch)
                taken = trainer.memory_bytes()
            for i, device in enumerate(said):
                yield Row(name, schedule.value, recompute, i, said[device].total_bytes, taken[device])


def _placed(step: TrainingModel, cluster: ClusterSpec, schedule: Schedule, recompute: bool) -> TrainingPlacement:
    (devices,) = [group.device_ids for group in cluster.groups()]
    num = 4 if schedule is Schedule.INTERLEAVED else 2
    forward = read_step(step).forward
    cuts = [len(forward) * k // num for k in range(num + 1)]
    stages = tuple(forward[cuts[k] : cuts[k + 1]] for k in range(num))
    places = tuple((devices[k % 2],) for k in range(num))
    return TrainingPlacement(stages, places, (recompute,) * num, schedule, COUNT)


def main() -> None:
    """Print a row per device of a placement; write them with the machine and the versions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(f"{'model':8} {'schedule':12} {'stash':10} device  said MiB  taken MiB   error")
    rows: list[Row] = []
    for name in args.models.split(","):
        for r in measured(name):
            rows.append(r)
            stash = "recomputed" if r.recompute else "kept"
            sizes = f"{r.said / 2**20:9.1f}  {r.taken / 2**20:9.1f}  {r.error:6.1%}"
            print(f"{r.model:8} {r.schedule:12} {stash:10} {r.device:6} {sizes}", flush=True)
    worst = max(rows, key=lambda r: abs(r.error))
    beyond = sum(abs(r.error) > LIMIT for r in rows)
    print(f"{len(rows)} devices, {beyond} beyond {LIMIT:.0%}, worst {worst.error:.1%}")
    if args.out:
        _keep(args.out, rows)


def _keep(out: Path, rows: list[Row]) -> None:
    names = {r.model for r in rows}
    others = json.loads(out.read_text())["rows"] if out.exists() else []
    head = {"machine": cpu_model(), "python": platform.python_version(), "torch": torch.__version__, "tvm": TVM_VERSION}
    kept = [r for r in others if r["model"] not in names] + [asdict(r) for r in rows]
    out.write_text(json.dumps({**head, "rows": kept}, indent=1) + "\n")


if __name__ == "__main__":
    main()
