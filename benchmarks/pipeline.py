"""Is a pipeline over unlike CPU types as fast as its plan says, and faster than each device alone and an equal split?

    python -m benchmarks.pipeline --profile 150          # measure kernels and compile; nothing else should run
    python -m benchmarks.pipeline --out results.jsonl    # run; nothing else should run

Each model on one core of the lowest and one of the highest x86-64 level of this machine, in four ways: the plan; the
best plan of each type alone; and an equal split, two stages cut where the faster type would be half done, as if the
devices were alike (of the two orders the one that is predicted better). All are built first; then their full
pipelines run in turn, round by round. Printed: predicted and measured inputs per second (median of the rounds, least
and most), and for every stage predicted seconds of its kernels beside those measured in the full pipeline and with
one input at a time. "waited" is the share of its time that the worker which waited most was ready to run and had no
core (Linux's schedstat): 0 on an idle machine; elsewhere measured rates are too low by about as much.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import tvmhet
from benchmarks.here import cpu_types
from tvmhet import zoo
from tvmhet.ir.model import Model
from tvmhet.kernel_keys import cpu_model
from tvmhet.module import HetModule
from tvmhet.plans import Plan
from tvmhet.runtime.stats import RunStats

MODELS = "resnet50,bert_base,mobilenet_v3,gpt2_small"
TYPES = (cpu_types()[0], cpu_types()[-1])
CLUSTER = tvmhet.ClusterSpec.of(dict.fromkeys(TYPES, 1))


@dataclass(frozen=True, slots=True)
class Stage:
    """Seconds of one stage's kernels for one input: predicted, in the full pipeline, and alone; by round."""

    device: str
    predicted_s: float
    streamed_s: tuple[float, ...]
    alone_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run one model; inputs per second, measured once a round."""

    model: str
    way: str
    predicted_per_s: float
    measured_per_s: tuple[float, ...]
    stages: tuple[Stage, ...]
    waited: tuple[float, ...]

    @property
    def median_per_s(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.measured_per_s)


def equal_split(model: Model, alone: Plan) -> Plan:
    """Two stages, cut where `alone`, the plan of one type, is half done; the better order of the types."""
    kernels = [(k.ops, p.time_s) for s in alone.stages for k, p in zip(s.kernels, s.predictions, strict=True)]
    half, done, first = sum(s for _, s in kernels) / 2, 0.0, set()
    for ops, seconds in kernels:
        if done + seconds / 2 < half:
            first |= set(ops)
        done += seconds
    names = [op.name for op in tvmhet.extract_graph(model).operators]
    orders = (TYPES, TYPES[::-1])
    pins = [{n: order[0] if n in first else order[1] for n in names} for order in orders]
    plans = [tvmhet.plan(model, cluster=CLUSTER, pin=pin, ablate="no-recompute") for pin in pins]
    return min(plans, key=lambda plan: plan.period_s)


def plans_of(model: Model) -> dict[str, Plan]:
    """The four ways."""
    plans = {"plan": tvmhet.plan(model, cluster=CLUSTER)}
    for name in TYPES:
        plans[f"{name} alone"] = tvmhet.plan(model, cluster=CLUSTER.with_counts({t: int(t == name) for t in TYPES}))
    plain = tvmhet.plan(model, cluster=CLUSTER.with_counts({TYPES[0]: 0}), ablate="fuse-first")
    return {**plans, "equal split": equal_split(model, plain)}


def built(model: Model, plan: Plan) -> HetModule:
    """Compile a plan, of the cluster or of a part of it."""
    counts = {t: int(any(s.placement.device_type == t for s in plan.stages)) for t in TYPES}
    cluster = CLUSTER if all(counts.values()) else CLUSTER.with_counts(counts)
    return tvmhet.build(model, cluster=cluster, plan=plan)


def run(name: str, num_inputs: int, rounds: int) -> list[Row]:
    """Run the ways of one model in turn."""
    model, inputs = model_of(name)
    plans = plans_of(model)
    measured: dict[str, list[RunStats]] = {way: [] for way in plans}
    waited: dict[str, list[float]] = {way: [] for way in plans}
    with ExitStack() as stack:
        modules = {way: stack.enter_context(built(model, plan)) for way, plan in plans.items()}
        for _ in range(rounds):
            for way, module in modules.items():
                before = scheduled()
                measured[way].append(module.benchmark(*inputs, num_inputs=num_inputs))
                waited[way].append(waited_share(before, scheduled()))
    return [row_of(name, way, plans[way], runs, waited[way]) for way, runs in measured.items()]


def scheduled() -> dict[str, tuple[int, int]]:
    """Nanoseconds that each thread of this process's children has run, and has waited for a core."""
    found = {}
    children = [c for t in Path("/proc/self/task").iterdir() for c in (t / "children").read_text().split()]
    for thread in (t for child in children for t in Path(f"/proc/{child}/task").iterdir()):
        ran, waited, _ = (thread / "schedstat").read_text().split()
        found[thread.name] = int(ran), int(waited)
    return found


def waited_share(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> float:
    """The largest share of its time that a thread which worked (a tenth of the busiest one's time or more) waited."""
    spent = {t: (ran - before.get(t, (0, 0))[0], wait - before.get(t, (0, 0))[1]) for t, (ran, wait) in after.items()}
    most = max(ran for ran, _ in spent.values())
    return max(wait / (ran + wait) for ran, wait in spent.values() if ran * 10 >= most > 0)


def model_of(name: str) -> tuple[Model, tuple[Any, ...]]:
    """A zoo model with random weights, the same in every run."""
    torch.manual_seed(0)
    module, inputs = zoo.get(name)
    return tvmhet.from_torch(module, inputs), tuple(inputs)


def row_of(name: str, way: str, plan: Plan, runs: list[RunStats], waited: list[float]) -> Row:
    """Join a plan with what was measured of it."""
    stages = tuple(
        Stage(
            s.placement.device_type,
            s.compute_s,
            tuple(r.stages_streamed[i].compute.median_s for r in runs),
            tuple(r.stages[i].compute.median_s for r in runs),
        )
        for i, s in enumerate(plan.stages)
    )
    return Row(name, way, plan.throughput_per_s, tuple(r.throughput_per_s for r in runs), stages, tuple(waited))


def print_rows(rows: list[Row]) -> None:
    """The ways of one model, then the stages of those that are pipelines."""
    best = max(row.median_per_s for row in rows if row.way.endswith("alone"))
    for row in rows:
        low, high = min(row.measured_per_s), max(row.measured_per_s)
        ratio = row.median_per_s / row.predicted_per_s
        spread = f"{row.median_per_s:.2f} ({low:.2f} to {high:.2f})"
        print(
            f"| {row.model} | {row.way} | {row.predicted_per_s:.2f} | {spread} | {ratio:.2f} "
            f"| {row.median_per_s / best:.2f} | {statistics.median(row.waited):.0%} |",
            flush=True,
        )
    for row in rows:
        for i, stage in enumerate(row.stages):
            streamed, alone = statistics.median(stage.streamed_s), statistics.median(stage.alone_s)
            figures = f"predicted {stage.predicted_s * 1e3:.2f} ms, in the full pipeline {streamed * 1e3:.2f}"
            print(f"  {row.way}, stage {i} on {stage.device}: {figures}, one input at a time {alone * 1e3:.2f}")


def profile(name: str, budget_s: float) -> None:
    """Measure the kernels of one model, and compile its plans."""
    model, _ = model_of(name)
    print(f"{name}: {tvmhet.profile(model, cluster=CLUSTER, budget_s=budget_s)}", flush=True)
    for plan in plans_of(model).values():
        built(model, plan)


def main() -> int:
    """Print a table of models and ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--inputs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", type=float, default=0.0, metavar="SECONDS", help="of each model; nothing is run")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    print(f"{cpu_model()}, torch {torch.__version__}; {' '.join(sys.argv[1:])}")
    if not given.profile:
        print("| model | way | predicted inputs/s | measured (least to most) | ratio | over the best alone | waited |")
        print("|---|---|---|---|---|---|---|")
    for name in given.models.split(","):
        if given.profile:
            profile(name, given.profile)
            continue
        rows = run(name, given.inputs, given.rounds)
        print_rows(rows)
        if given.out:
            with given.out.open("a") as file:
                file.writelines(json.dumps(_plain(row)) + "\n" for row in rows)
    return 0


def _plain(row: Row) -> Mapping[str, Any]:
    return {"cpu": cpu_model(), **asdict(row)}


if __name__ == "__main__":
    sys.exit(main())
