"""Training on unlike CPU types: measured seconds of a step against the simulator's, and against torch on one device.

    python -m benchmarks.training --compile            # profile and compile everything; the machine may be busy
    python -m benchmarks.training --out results.json   # measure; nothing else should run

Cases: two and three stages on one-core devices of the two highest x86-64 levels here, each schedule, replicas,
recomputation. Devices that share a core of this machine (where it has fewer than the case asks for) take turns on it,
in the simulator too. Each row: predicted and measured seconds of a step (median of three starts of the trainer, the
quartiles' distance within one as a part of it, the slowest start over the fastest), the prediction before `profile` ran
the placement as it is, and torch's median on one core at its highest instruction set, same model, same micro-batches,
eager.
Steps in which a worker was ready and had no core for more than 2 % of the time, as other processes had it, are not
counted where every device has cores of its own; how many were is shown, and what all steps would have taken without
such waiting. Below it, what the passes of each stage took, apart from waiting.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import tvmhet
from benchmarks.here import cpu_types
from tvmhet import zoo
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.ir.optimizers import AdamW
from tvmhet.ir.training_model import TrainingModel
from tvmhet.ir.training_step import read_step
from tvmhet.kernel_keys import cpu_model
from tvmhet.runtime.training_engine import PassTime
from tvmhet.runtime.training_program import Action, TrainingProgram
from tvmhet.solve.schedules import Schedule
from tvmhet.training import HetTrainer
from tvmhet.training_build import build_training
from tvmhet.training_example import example_batch
from tvmhet.training_placement import TrainingPlacement
from tvmhet.training_predict import PredictedStep, predict_training
from tvmhet.training_times import step_graph

MICROBATCHES = 4
STARTS = 3  # trainers of each case: steps of one build differ between them by up to a tenth, and more
MODELS: dict[str, dict[str, int | Sequence[int]]] = {
    "gpt2_small": {"batch": 4, "length": 64, "layers": 2, "dim": 256, "heads": 4, "vocab": 2000},
    "bert_base": {"batch": 4, "length": 64, "layers": 2, "dim": 256, "heads": 4, "vocab": 2000},
    "resnet50": {"batch": 4, "image": 96, "blocks": (1, 1, 1, 1), "base_width": 16, "num_classes": 10},
    "moe": {"batch": 4, "length": 32, "layers": 2, "dim": 128, "heads": 4, "hidden": 256, "experts": 4},
}


@dataclass(frozen=True, slots=True)
class Case:
    """How a step is placed: stages (chunks of them per device if interleaved), replicas of each, what else."""

    name: str
    stages: int
    schedule: Schedule = Schedule.ONE_F_ONE_B
    replicas: int = 1
    recompute: bool = False
    chunks: int = 1


CASES = (
    Case("one device", 1),
    Case("2 stages, 1F1B", 2),
    Case("2 stages, GPipe", 2, Schedule.GPIPE),
    Case("2 stages, recomputed", 2, recompute=True),
    Case("2 stages, interleaved", 2, Schedule.INTERLEAVED, chunks=2),
    Case("2 stages of 2 replicas", 2, replicas=2),
    Case("3 stages, 1F1B", 3),
    Case("3 stages, wavelet", 3, Schedule.WAVELET),
)
_FEWEST = 3
_CALM = 0.02  # of a step, that a worker may have waited for a core


@dataclass(frozen=True, slots=True)
class Part:
    """Median seconds of one kind of pass of one stage, or of a device's update: by the simulator and measured."""

    name: str
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One case of one model; seconds of a step."""

    model: str
    case: str
    predicted_s: float  # after `profile` ran the placement as it is
    unseen_s: float  # before
    measured_s: float
    spread: float
    between: float  # the slowest start over the fastest, less 1
    shares_cores: bool
    unhindered_s: float  # see `step_s`; as measured where devices share cores
    calm_steps: int
    steps: int
    torch_s: float
    parts: tuple[Part, ...]

    @property
    def error(self) -> float:
        """Relative distance of the prediction from the measurement."""
        return self.predicted_s / self.measured_s - 1


def cluster_for(case: Case) -> ClusterSpec:
    """One machine with the devices of a case: half of them, rounded down, of the lesser type."""
    lesser = case.stages // 2 * case.replicas
    lower, highest = cpu_types()[-2:]
    counts = {lower: lesser, highest: case.stages * case.replicas - lesser}
    return ClusterSpec.from_dict({"nodes": [{"devices": {name: n for name, n in counts.items() if n}}]})


def place(model: TrainingModel, case: Case, cluster: ClusterSpec) -> TrainingPlacement:
    """Cut the step where the predicted seconds of its stages, each on its own devices, are even."""
    _, graph = step_graph(model, cluster.device_types(), None, ("tvm", "library"))
    type_of = {d: group.device.name for group in cluster.groups() for d in group.device_ids}
    ids = list(type_of)
    names = [op.name for op in graph.graph.operators]
    order = [tuple(ids[k * case.replicas : (k + 1) * case.replicas]) for k in range(case.stages)]
    places = [order[i % case.stages] for i in range(case.stages * case.chunks)]
    columns = [graph.forward.column(type_of[devices[0]]) for devices in places]
    both_s = graph.forward.seconds + graph.backward
    seconds = np.zeros((len(names), both_s.shape[1]))
    for i, kernel in enumerate(graph.candidates.kernels):
        if len(kernel.ops) == 1:
            seconds[kernel.ops[0]] = both_s[i]
    ends = even_cuts(seconds[:, columns])
    return TrainingPlacement(
        tuple(tuple(names[a:b]) for a, b in itertools.pairwise([0, *ends])),
        tuple(places),
        (case.recompute,) * len(places),
        case.schedule,
        MICROBATCHES,
    )


def even_cuts(seconds: NDArray[np.float64]) -> list[int]:
    """Return where each stage ends, so that the longest is shortest; `seconds[i, k]` is operator i in stage k."""
    done = np.concatenate([np.zeros((1, seconds.shape[1])), seconds.cumsum(axis=0)])

    def ends(most: float) -> list[int]:
        found = [0]
        for k in range(seconds.shape[1]):
            found.append(int(np.searchsorted(done[:, k], done[found[-1], k] + most, side="right")) - 1)
        return found[1:]

    low, high = 0.0, float(done[-1].max())
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if ends(middle)[-1] == len(seconds) else (middle, high)
    return ends(high)


def torch_step_s(model: nn.Module, batch: Sequence[torch.Tensor], steps: int) -> float:
    """Median CPU seconds of torch's eager step with the same micro-batches, on one thread."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        for *inputs, target in zip(*(x.chunk(MICROBATCHES) for x in batch), strict=True):
            y = model(*inputs)
            loss = nn.functional.cross_entropy(y.reshape(-1, y.shape[-1]), target.reshape(-1))
            (loss / MICROBATCHES).backward()
        optimizer.step()

    taken = []
    for i in range(steps + 2):
        start = time.process_time()
        step()
        if i >= 2:
            taken.append(time.process_time() - start)
    return statistics.median(taken)


@dataclass(frozen=True, slots=True)
class Start:
    """The steps of one trainer, but those to warm up: whether each was calm, its seconds, and without waiting."""

    steps: tuple[tuple[bool, float, float], ...]
    passes: tuple[PassTime, ...]
    shares_cores: bool


def _run(trainer: HetTrainer, batch: Sequence[torch.Tensor], steps: int) -> Start:
    shares = any(b.shared_cores for b in trainer.program.bindings.values())
    every: list[tuple[bool, float, float]] = []
    passes: list[PassTime] = []
    for i in range(steps + 2):
        start = time.perf_counter()
        trainer.train_step(batch)
        seconds = time.perf_counter() - start
        if i >= 2:
            times = trainer.times()
            passes += times
            every.append((shares or _calm(times), seconds, seconds if shares else step_s(trainer.program, times)))
    return Start(tuple(every), tuple(passes), shares)


def _figures(starts: Sequence[Start]) -> tuple[float, float, float, bool, float, int, int]:
    """Fields of `Row` from its measured seconds: medians over starts of medians over their calm steps.

    Over all steps of a start if fewer than three were calm. The spread is of the steps of one start, the median one.
    """
    middles, spreads = [], []
    for start in starts:
        calm = [s for ok, s, _ in start.steps if ok]
        low, middle, high = statistics.quantiles(calm if len(calm) >= _FEWEST else [s for _, s, _ in start.steps], n=4)
        middles.append(middle)
        spreads.append((high - low) / middle)
    unhindered_s = statistics.median(statistics.median(s for _, _, s in start.steps) for start in starts)
    every = [step for start in starts for step in start.steps]
    between = max(middles) / min(middles) - 1
    calm_steps = sum(ok for ok, _, _ in every)
    middle_s, spread = statistics.median(middles), statistics.median(spreads)
    return middle_s, spread, between, starts[0].shares_cores, unhindered_s, calm_steps, len(every)


def main() -> None:
    """Run the cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compile", action="store_true", help="only profile kernels and compile")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--cases", nargs="*", type=int, default=list(range(len(CASES))))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{cpu_model()}, {platform.platform()}, torch {torch.__version__}; {' '.join(sys.argv[1:])}", flush=True)
    cases = [CASES[i] for i in given.cases]
    rows = (r for name in given.models for r in run_model(name, cases, given.steps, only_compile=given.compile))
    keep_rows(rows, given.out)


def keep_rows(rows: Iterable[Any], out: Path | None) -> None:
    """Write the rows (dataclasses) to `out`, anew after each: what was measured stays when a later case fails."""
    done: list[Any] = []
    for row in rows:
        done.append(asdict(row))
        if out:
            out.write_text(json.dumps({"cpu": cpu_model(), "rows": done}, indent=1) + "\n")


def run_model(name: str, cases: Sequence[Case], steps: int, *, only_compile: bool) -> Iterator[Row]:
    """Run the cases of one model, one after the other."""
    module, inputs = zoo.get(name, **MODELS[name])
    module.train()
    step = tvmhet.from_torch(module, inputs, loss="cross_entropy", optimizer=AdamW(lr=1e-3), mode="training")
    print(f"{name}: {len(read_step(step).forward)} forward operators, {MODELS[name]}", flush=True)
    clusters = {max(2, c.stages * c.replicas): cluster_for(c if c.stages > 1 else CASES[1]) for c in cases}
    for cluster in clusters.values():
        print(tvmhet.profile(step, cluster=cluster, budget_s=3600.0 if only_compile else 0.0), flush=True)
    torch_s = 0.0
    for case in cases:
        cluster = cluster_for(case)
        placement = place(step, case, cluster)
        size = MICROBATCHES * step.batch_size
        unseen_s = predict_training(step, placement, cluster=cluster).iteration_s
        if only_compile:
            build_training(step, cluster=cluster, plan=placement, global_batch=size).close()
            continue
        tvmhet.profile(step, cluster=cluster, budget_s=0.0, plan=placement)
        predicted = predict_training(step, placement, cluster=cluster)
        starts = []
        for _ in range(STARTS):
            with build_training(step, cluster=cluster, plan=placement, global_batch=size) as trainer:
                batch = [torch.from_numpy(a) for a in example_batch(trainer.batch_specs)]
                torch_s = torch_s or torch_step_s(module, batch, steps)
                starts.append(_run(trainer, batch, steps))
        parts = parts_of(predicted, [p for start in starts for p in start.passes], placement)
        row = Row(name, case.name, predicted.iteration_s, unseen_s, *_figures(starts), torch_s, parts)
        print(_line(row), flush=True)
        for part in parts:
            ratio = part.predicted_s / part.measured_s
            print(f"  {part.name:32} {1e3 * part.predicted_s:8.2f} ms  {1e3 * part.measured_s:8.2f} ms  {ratio:.2f}")
        yield row


def _calm(times: Sequence[PassTime]) -> bool:
    """Did no worker wait for a core in this step?"""
    waited: dict[str, float] = {}
    for t in times:
        waited[t.device] = waited.get(t.device, 0.0) + t.waited_s
    took = max(t.end_s for t in times) - min(t.start_s for t in times)
    return max(waited.values()) <= _CALM * took


def step_s(program: TrainingProgram, times: Sequence[PassTime]) -> float:
    """Seconds from the first pass of a step to the end of its last update, had no worker waited for a core.

    Each pass takes what it worked, and begins as long after what it waits for as it did, less its waiting for a core.
    """
    ended = {t.action: t.end_s for t in times if t.action}
    began = min(t.start_s for t in times)
    done: dict[Action, float] = {}  # when passes end without waiting, from the first one's start
    free: dict[str, tuple[float, float]] = {}  # device -> the same of its last pass, and when that ended
    left = {d: [t for t in times if t.device == d] for d in program.devices}
    while any(left.values()):
        for device, todo in left.items():
            while todo:
                t = todo[0]
                before = program.waits_for(t.action) if t.action else ()
                if not done.keys() >= set(before):
                    break
                ready, really = free.get(device, (0.0, began))
                ready, really = max([ready, *(done[a] for a in before)]), max([really, *(ended[a] for a in before)])
                end = ready + max(0.0, t.start_s - really - t.waited_before_s) + t.worked_s
                free[device] = end, t.end_s
                if t.action:
                    done[t.action] = end
                del todo[0]
    return max(end for end, _ in free.values())


def parts_of(predicted: PredictedStep, passes: Sequence[PassTime], placement: TrainingPlacement) -> tuple[Part, ...]:
    """What the passes of each stage and the updates took, beside the simulator's figures."""
    ours: dict[str, list[float]] = {}
    updates: dict[tuple[int, int], float] = {}  # of a device, which has one for each of its stages
    for e in predicted.timeline.events:
        if e.kind in ("forward", "backward"):
            ours.setdefault(_part(e.kind, e.stage, e.place), []).append(e.finish_s - e.start_s)
        elif e.kind == "update":
            updates[e.place, e.replica] = updates.get((e.place, e.replica), 0.0) + e.finish_s - e.start_s
    for (at, _), seconds in updates.items():
        ours.setdefault(_part("update", 0, at), []).append(seconds)
    places = list(dict.fromkeys(placement.devices))
    place_of = {device: i for i, devices in enumerate(places) for device in devices}
    real: dict[str, list[float]] = {}
    for t in passes:
        kind = "update" if t.action is None else ("backward" if t.action.backward else "forward")
        stage = 0 if t.action is None else t.action.stage
        real.setdefault(_part(kind, stage, place_of[t.device]), []).append(t.worked_s)
    both = sorted(ours.keys() & real.keys())
    return tuple(Part(name, statistics.median(ours[name]), statistics.median(real[name])) for name in both)


def _part(kind: str, stage: int, place: int) -> str:
    return f"update, place {place}" if kind == "update" else f"stage {stage}, {kind}"


def _line(row: Row) -> str:
    return (
        f"{row.model:12} {row.case:24} predicted {1e3 * row.predicted_s:8.2f} ms  measured "
        f"{1e3 * row.measured_s:8.2f} ms (+-{row.spread:.0%}, starts {row.between:.0%})  {row.error:+.1%}  "
        f"(before it was run {row.unseen_s / row.measured_s - 1:+.0%})  torch {1e3 * row.torch_s:8.2f} ms  "
        f"{'(devices share cores)' if row.shares_cores else _unhindered(row)}"
    )


def _unhindered(row: Row) -> str:
    return (
        f"{row.calm_steps} of {row.steps} steps calm  without waits {1e3 * row.unhindered_s:8.2f} ms  "
        f"{row.predicted_s / row.unhindered_s - 1:+.0%}"
    )


if __name__ == "__main__":
    main()
