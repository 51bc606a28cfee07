"""How many kernels does a plan need where TVM's FuseOps needs n, and is it as fast?

    python -m benchmarks.kernel_counts [--models bert_base,...] [--rounds 7] [--profile SECONDS]

Each model on one core of this machine: FuseOps' groups, all made by TVM with our schedules; the plan without rewrites
(no recomputation, no merged products); the plan; and the plan with every possible product merged, whether that is
predicted to pay or not. FuseOps' groups are built a second time, with weights of their own, so that their two rows
show what the place of tensors in memory alone does. All run in one process, in a worker's environment, each round in an
order of its own; CPU seconds of a call, median and quartiles, and the ratio to FuseOps' within each round (of both
builds, their mean). Kernels that only give a tensor another shape run no code and are not counted. Without `--profile`
plans rest on estimates; with it, on kernels measured first, this long at most a model.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import tvmhet
from benchmarks.as_worker import as_worker
from benchmarks.here import cpu_types
from tvmhet import zoo
from tvmhet.campaign import Campaign
from tvmhet.candidates import MAKERS, candidate_kernels
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.cost.table import TimeTable
from tvmhet.deploy import deploy
from tvmhet.emit.cache import StageCache
from tvmhet.graph.fusion import fuse_ops_groups
from tvmhet.graph.merges import find_merges
from tvmhet.graph.rewrites import in_words
from tvmhet.ir.model import Model
from tvmhet.ir.prepare import Prepared, prepare
from tvmhet.known_times import known_times
from tvmhet.module import HetModule
from tvmhet.planning import make_plan
from tvmhet.plans import Plan
from tvmhet.proposing import Variant, variant_of
from tvmhet.rewriting import Planner, Wanted
from tvmhet.solve import Objective
from tvmhet.times import Candidates, time_table

_MODELS = "bert_base,moe,t5_small,mobilenet_v3,inception_v3,resnet50,gpt2_small,vit_b16,convnext_t,dlrm"
_DEVICE = cpu_types()[-1]
_VIEWS = frozenset({"reshape", "flatten", "squeeze", "expand_dims"})
COUNTS_HEAD = """
| model | cluster | type | FuseOps' kernels | the plan's | FuseOps ms | the plan ms | rewrites |
|---|---|---|---|---|---|---|---|"""


def num_run(kernels: list[tuple[str, ...]], families: Mapping[str, str]) -> int:
    """How many kernels do more than give a tensor another shape. Operators that `families` lacks are new ones."""
    return sum(any(families.get(op, "") not in _VIEWS for op in ops) for ops in kernels)


def print_counts(model: Model, name: str, cluster: str, spec: tvmhet.ClusterSpec) -> None:
    """For each type of a cluster: predicted, FuseOps' groups each by the faster maker, against the best plan."""
    prepared = prepare(model)
    assert prepared.graph is not None
    operators = prepared.graph.operators
    groups = {k.ops for k in fuse_ops_groups(prepared.graph)}
    kernels = [k for k in candidate_kernels(prepared.graph, MAKERS) if k.ops in groups]
    table = time_table(Candidates.of(prepared.graph, kernels), spec.device_types(), None, inside=True)
    families = {op.name: op.family for op in operators}
    theirs = num_run([tuple(operators[i].name for i in ops) for ops in groups], families)
    for device in spec.device_types():
        best: dict[tuple[int, ...], float] = {}
        for k, t in zip(kernels, table.seconds[:, table.column(device.name)], strict=True):
            best[k.ops] = min(best.get(k.ops, math.inf), float(t))
        one = spec.with_counts({t: int(t == device.name) for t in spec.counts()})
        plan = tvmhet.plan(model, cluster=one, objective=Objective.LATENCY.value)
        ours = num_run([k.ops for s in plan.stages for k in s.kernels], families)
        times = f"{sum(best.values()) * 1e3:.3f} | {sum(s.compute_s for s in plan.stages) * 1e3:.3f}"
        words = "; ".join(in_words(plan.rewrites))
        print(f"| {name} | {cluster} | {device.name} | {theirs} | {ours} | {times} | {words} |", flush=True)


def plans_of(
    prepared: Prepared, cluster: tvmhet.ClusterSpec, database: MeasuredKernels | None
) -> dict[str, tuple[Plan, Prepared]]:
    """The plans that are compared, by name; all rest on the same times."""

    def price(of: Prepared, candidates: Candidates) -> TimeTable:
        if database is None:
            return time_table(candidates, cluster.device_types(), None)
        return known_times(of, candidates, database, cluster, in_context=True, tuned=False)

    graph = prepared.operator_graph
    wanted = Wanted(Objective.LATENCY, MAKERS, {})
    planner = Planner(cluster, price, wanted)
    first = variant_of(prepared, MAKERS, price)
    fused = Candidates.of(graph, fuse_ops_groups(graph))
    alone = Variant(prepared, fused, price(prepared, fused))
    found = {
        "FuseOps": make_plan(prepared, fused.kernels, alone.table, cluster, Objective.LATENCY, {}, 30.0, 0),
        "no rewrites": Planner(cluster, price, replace(wanted, kinds=frozenset())).plan(first),
        "plan": planner.best(first)[0],
    }
    if levels := find_merges(graph):
        merged = variant_of(prepared, MAKERS, price, [levels[0]])
        found["all merged"] = planner.plan(merged)
    found["FuseOps again"] = found["FuseOps"]
    return {name: (plan, prepared) for name, plan in found.items()}


def all_candidates(prepared: Prepared) -> Candidates:
    """All candidate kernels of a model as it is."""
    assert prepared.graph is not None
    return Candidates.of(prepared.graph, candidate_kernels(prepared.graph, MAKERS))


def time_in_turn(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of `rounds` calls of each way, after one that does not count; each round in an order of its own."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    order = random.Random(0)
    for _ in range(rounds + 1):
        for way in order.sample(list(ways), len(ways)):
            started = time.process_time()
            ways[way]()
            seconds[way].append(time.process_time() - started)
    return {way: taken[1:] for way, taken in seconds.items()}


def run_model(name: str, rounds: int, profile_s: float, path: Path | None = None) -> None:
    """Build and run one model in all ways; print a line for each. `path` is a database to use and to add to."""
    module, inputs = zoo.get(name)
    model = tvmhet.from_torch(module, inputs)
    cluster = tvmhet.ClusterSpec.from_dict({"nodes": [{"devices": {_DEVICE: 1}}]})
    prepared = prepare(model)
    assert prepared.graph is not None
    families = {op.name: op.family for op in prepared.graph.operators}
    with TemporaryDirectory() as folder, closing(MeasuredKernels(path or Path(folder) / "kernels.db")) as database:
        if profile_s:
            campaign = (prepared, all_candidates(prepared), database, cluster, Objective.LATENCY)
            print(str(Campaign(*campaign, makers=MAKERS).run(profile_s)).splitlines()[0], file=sys.stderr, flush=True)
        built = {}
        for way, (plan, of) in plans_of(prepared, cluster, database).items():
            program = deploy(of, plan, cluster, StageCache(Path(folder)))
            built[way] = plan, HetModule(plan, program, inline=True)
        seconds = time_in_turn({way: partial(runs, *inputs) for way, (_, runs) in built.items()}, rounds)
        fused = [(a + b) / 2 for a, b in zip(seconds["FuseOps"], seconds["FuseOps again"], strict=True)]
        for way, (plan, runs) in built.items():
            taken = seconds[way]
            low, middle, high = statistics.quantiles(taken, n=4)
            ratio = statistics.median(t / f for t, f in zip(taken, fused, strict=True))
            count = num_run([k.ops for s in plan.stages for k in s.kernels], families)
            spread = f"{middle * 1e3:.2f} ({low * 1e3:.2f} to {high * 1e3:.2f})"
            print(f"| {name} | {way} | {count} | {plan.latency_s * 1e3:.2f} | {spread} | {ratio:.3f} |", flush=True)
            runs.close()


def main() -> int:
    """Print a table of models and ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=_MODELS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--database", type=Path, help="measured kernels to use, and to add to; a new one by default")
    given = parser.parse_args()
    as_worker("benchmarks.kernel_counts", _DEVICE)
    torch.set_num_threads(1)
    print("| model | way | kernels | predicted ms | CPU ms a call (quartiles) | over FuseOps' |")
    print("|---|---|---|---|---|---|")
    for name in given.models.split(","):
        run_model(name, given.rounds, given.profile, given.database)
    return 0


if __name__ == "__main__":
    sys.exit(main())
