"""How much faster does a team of two devices train (tensor split), and is that what is predicted?

    python -m benchmarks.training_teams [--models bert_base,vit_b16,gpt2_small] [--rounds 7]

Four layers of each at full width, 4 micro-batches of 2 samples, AdamW, on two cores of this machine's highest CPU type,
in turn: one device; a team of two; two replicas; a pipeline of two stages of equal numbers of operators. Let nothing
else run. Printed: predicted and median seconds of a step, how many times as fast as the one device, and what a device
holds. Nothing is profiled.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch

import tvmhet
from benchmarks.here import cpu_types
from tvmhet import zoo
from tvmhet.ir.optimizers import AdamW
from tvmhet.ir.training_step import read_step
from tvmhet.kernel_keys import cpu_model
from tvmhet.solve.schedules import Schedule
from tvmhet.training import HetTrainer
from tvmhet.training_build import build_training
from tvmhet.training_example import example_batch
from tvmhet.training_placement import TrainingPlacement
from tvmhet.training_predict import predict_training

MODELS: dict[str, dict[str, int]] = {
    "bert_base": {"batch": 2, "length": 128, "layers": 4},
    "vit_b16": {"batch": 2, "layers": 4},
    "gpt2_small": {"batch": 2, "length": 128, "layers": 4},
}
MICROBATCHES = 4
ALONE = "one device"


def placements(forward: Sequence[str], devices: Sequence[str]) -> dict[str, TrainingPlacement]:
    """Return the ways to run a step on two devices, and the one device."""
    half, whole = len(forward) // 2, tuple(forward)

    def place(
        stages: Sequence[Sequence[str]], places: Sequence[Sequence[str]], degrees: tuple[int, ...] = ()
    ) -> TrainingPlacement:
        return TrainingPlacement(
            tuple(map(tuple, stages)),
            tuple(map(tuple, places)),
            (False,) * len(stages),
            Schedule.ONE_F_ONE_B,
            MICROBATCHES,
            degrees=degrees,
        )

    return {
        ALONE: place([whole], [devices[:1]]),
        "team of two": place([whole], [devices], (2,)),
        "two replicas": place([whole], [devices]),
        "two stages": place([whole[:half], whole[half:]], [devices[:1], devices[1:]]),
    }


def compare(name: str, rounds: int) -> None:
    """Train a model every way in turn, and print a line for each."""
    torch.manual_seed(0)
    module, inputs = zoo.get(name, **MODELS[name])
    step = tvmhet.from_torch(module.train(), inputs, loss="cross_entropy", optimizer=AdamW(lr=1e-3), mode="training")
    cluster = tvmhet.ClusterSpec.of({cpu_types()[-1]: 2})
    devices = [d for group in cluster.groups() for d in group.device_ids]
    ways = placements(read_step(step).forward, devices)
    size = MICROBATCHES * step.batch_size
    with ExitStack() as stack:
        made: dict[str, HetTrainer] = {
            way: stack.enter_context(build_training(step, cluster=cluster, plan=placement, global_batch=size))
            for way, placement in ways.items()
        }
        batch = [torch.from_numpy(array) for array in example_batch(made[ALONE].batch_specs)]
        losses = {way: trainer.fit([batch] * 2) for way, trainer in made.items()}
        times: dict[str, list[float]] = {way: [] for way in made}
        for _ in range(rounds):
            for way, trainer in made.items():
                trainer.train_step(batch)  # finds the caches as it would
                start_s = time.monotonic()
                trainer.train_step(batch)
                times[way].append(time.monotonic() - start_s)
        off = max(abs(a / b - 1) for own in losses.values() for a, b in zip(own, losses[ALONE], strict=True))
        print(f"{name}: {MODELS[name]}; losses of two steps differ by {off:.1e} at most")
        for way, trainer in made.items():
            ratios = [a / b for a, b in zip(times[ALONE], times[way], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
            predicted_s = predict_training(step, ways[way], cluster=cluster).iteration_s
            held = ", ".join(f"{size / 2**20:.0f}" for size in trainer.memory_bytes().values())
            took_s = statistics.median(times[way])
            print(
                f"  {way:12} predicted {1e3 * predicted_s:6.0f} ms, took {1e3 * took_s:6.0f} ms, "
                f"{middle:.2f} times as fast ({low:.2f} to {high:.2f}); workers took {held} MiB",
                flush=True,
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Compare each model on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args(argv)
    print(
        f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; torch {torch.__version__}"
    )
    for model in args.models.split(","):
        compare(model, args.rounds)


if __name__ == "__main__":
    main()
