"""Fifty steps of training on placed devices: is each loss torch's?

    python -m benchmarks.training_losses --out results.json

The models and cases of `benchmarks.training`, on other data in each step, AdamW. The reference is torch in double
precision from the same start, with the same micro-batches. Each row: the largest relative distance of a loss from the
reference's over all steps, ours, and torch's own in single precision, in which the steps are taken too.
"""

from __future__ import annotations

import argparse
import copy
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import tvmhet
from benchmarks.training import CASES, MICROBATCHES, MODELS, cluster_for, keep_rows, place
from tvmhet import zoo
from tvmhet.ir.optimizers import AdamW
from tvmhet.kernel_keys import cpu_model
from tvmhet.runtime.program import ValueSpec
from tvmhet.training_build import build_training

_LR = 1e-3
_CLASSES = 10  # targets and tokens are drawn below it: every table has so many rows
_FEWER = {"bert_base": 2}  # whose table of segments has two


@dataclass(frozen=True, slots=True)
class Row:
    """One case of one model: first and last loss, and the largest relative distances from the reference's losses."""

    model: str
    case: str
    first: float
    last: float
    ours: float
    torch_float32: float


def batches(specs: Sequence[ValueSpec], steps: int, classes: int = _CLASSES) -> list[list[torch.Tensor]]:
    """Random global batches, the same in every run; inputs of floats stay what they are in single precision."""
    g = torch.Generator().manual_seed(0)
    return [
        [
            torch.randn(s.shape, generator=g)
            if s.dtype.startswith("float")
            else torch.randint(0, classes, s.shape, generator=g)
            for s in specs
        ]
        for _ in range(steps)
    ]


def torch_losses(model: nn.Module, data: Sequence[Sequence[torch.Tensor]]) -> list[float]:
    """Train `model` on `data`; return the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)
    kind = next(model.parameters()).dtype
    losses = []
    for batch in data:
        optimizer.zero_grad()
        total = 0.0
        for *inputs, target in zip(*(x.chunk(MICROBATCHES) for x in batch), strict=True):
            y = model(*(x.to(kind) if x.is_floating_point() else x for x in inputs))
            loss = nn.functional.cross_entropy(y.reshape(-1, y.shape[-1]), target.reshape(-1)) / MICROBATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def distance(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative distance."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def run_model(name: str, cases: Sequence[int], steps: int) -> Iterator[Row]:
    """Run the cases of one model, one after the other."""
    torch.manual_seed(0)
    module, inputs = zoo.get(name, **MODELS[name])
    module.train()
    step = tvmhet.from_torch(module, inputs, loss="cross_entropy", optimizer=AdamW(lr=_LR), mode="training")
    reference: list[float] = []
    single = 0.0
    for case in (CASES[i] for i in cases):
        cluster = cluster_for(case)
        size = MICROBATCHES * step.batch_size
        placement = place(step, case, cluster)
        with build_training(step, cluster=cluster, plan=placement, global_batch=size) as trainer:
            data = batches(trainer.batch_specs, steps, _FEWER.get(name, _CLASSES))
            if not reference:
                reference = torch_losses(copy.deepcopy(module).double(), data)
                single = distance(torch_losses(copy.deepcopy(module), data), reference)
            losses = trainer.fit(data)
        row = Row(name, case.name, losses[0], losses[-1], distance(losses, reference), single)
        print(
            f"{name:12} {case.name:24} loss {row.first:.4f} to {row.last:.4f}  ours {row.ours:.1e}  "
            f"torch in float32 {single:.1e}",
            flush=True,
        )
        yield row


def main() -> None:
    """Run the cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--cases", nargs="*", type=int, default=list(range(len(CASES))))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{cpu_model()}, {platform.platform()}, torch {torch.__version__}; {' '.join(sys.argv[1:])}", flush=True)
    rows = (row for name in given.models for row in run_model(name, given.cases, given.steps))
    keep_rows(rows, given.out)


if __name__ == "__main__":
    main()
