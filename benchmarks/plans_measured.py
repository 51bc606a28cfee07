"""Is the plan that is predicted best the best one measured, and how far are predicted times from measured ones?

    python -m benchmarks.plans_measured --prepare --models ...     # profile and compile; nothing else should run
    python -m benchmarks.plans_measured --out FILE --models ...    # run; nothing else should run

Twenty different plans of each model on one core of the lowest and one of the highest x86-64 level here: the plan;
each ablation (fusion decided first, placement decided first, no fusion, no library, ...); each type alone; and
pipelines of two stages cut at every tenth of the model's time, in both orders of the types. What they use and nobody
had measured is measured first. Then each runs as a full pipeline, round by round, with workers of its own, in another
order each round, as a machine may be slower for seconds; after two rounds the plan and what may still be the fastest.
`--prepare` keeps the plans in the cache folder (`--plans`), so that a run spends its quiet minutes on nothing else.

Printed of each model: how much slower the plan that is chosen is than the best measured one, the median error of the
plans' and of their stages' predicted seconds, and the lesser searches' measured time over the plan's ("no-race": the
plan that is predicted best, had `profile` not run it against others).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import tvmhet
from benchmarks.pipeline import CLUSTER, TYPES, built
from tvmhet import zoo
from tvmhet._data import default_cache_dir
from tvmhet.arguments import ABLATIONS
from tvmhet.candidates import MAKERS, candidate_kernels
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.deploy import compile_plans
from tvmhet.emit.cache import StageCache
from tvmhet.errors import Infeasible
from tvmhet.ir.model import Model
from tvmhet.ir.prepare import prepare
from tvmhet.ir.rewritten import rewritten
from tvmhet.kernel_keys import cpu_model
from tvmhet.module import HetModule
from tvmhet.plans import Plan
from tvmhet.profiling import Profiler, ProfileReport, unmeasured
from tvmhet.times import Candidates

NUM_PLANS = 20
CLOSE = 1.03
MODELS: dict[str, dict[str, object]] = {
    "resnet50": {"image": 96},
    "mobilenet_v3": {"image": 128},
    "inception_v3": {"image": 149},
    "bert_base": {"layers": 3, "length": 64},
    "gpt2_small": {"layers": 3, "length": 64, "vocab": 5000},
    "vit_b16": {"layers": 3, "image": 112},
    "t5_small": {"layers": 2},
    "convnext_t": {"image": 96},
    "moe": {"layers": 2},
    "dlrm": {},
}
_ALL_ROUNDS, _NEAR = 2, 1.15  # rounds of all plans; afterwards of those so near to the best
_STREAM_S = 1.0  # seconds of one measured pipeline
_WAYS = "ways.json"  # in a folder of plans: how each came about


@dataclass(frozen=True, slots=True)
class Row:
    """One plan: seconds per input of its full pipeline by round, and of its stages' kernels, predicted and measured."""

    model: str
    way: str
    predicted_s: float
    measured_s: tuple[float, ...]
    stages: tuple[tuple[float, float], ...]

    @property
    def seconds(self) -> float:
        """The median of the rounds: on a shared machine single ones are slower than the rest, and faster, too."""
        return statistics.median(self.measured_s)


def plans_of(model: Model) -> dict[str, Plan]:
    """Different plans by how they came about; at most `NUM_PLANS`."""
    found: dict[str, Plan] = {}
    for way, plan in _every_plan(model):
        if len(found) < NUM_PLANS and not any(_same(plan, other) for other in found.values()):
            found[way] = plan
    return found


def _every_plan(model: Model) -> Iterator[tuple[str, Plan]]:
    yield "plan", tvmhet.plan(model, cluster=CLUSTER)
    for name in sorted(ABLATIONS, key=lambda name: name != "no-race"):  # first, so that no lesser search stands for it
        yield name, tvmhet.plan(model, cluster=CLUSTER, ablate=name)
    alone = {t: tvmhet.plan(model, cluster=CLUSTER.with_counts({o: int(o == t) for o in TYPES})) for t in TYPES}
    yield from alone.items()
    names = [op.name for op in tvmhet.extract_graph(model).operators]
    plain = tvmhet.plan(model, cluster=CLUSTER.with_counts({TYPES[0]: 0}), ablate="fuse-first")
    for tenth in (5, 8, 9, 7, 6, 4, 3, 2, 1):
        first = _first_part(plain, tenth / 10)
        for a, b in (TYPES, TYPES[::-1]):
            pin = {name: a if name in first else b for name in names}
            with suppress(Infeasible):  # the cut crosses branches, so that each stage would wait for the other
                yield f"{tenth}/10 on {a}", tvmhet.plan(model, cluster=CLUSTER, pin=pin, ablate="no-recompute")


def _first_part(plan: Plan, share: float) -> frozenset[str]:
    """The operators of the kernels that take the first `share` of a plan's time."""
    kernels = [(k.ops, p.time_s) for s in plan.stages for k, p in zip(s.kernels, s.predictions, strict=True)]
    total, done, first = sum(s for _, s in kernels), 0.0, set()
    for ops, seconds in kernels:
        done += seconds
        if done - seconds / 2 < share * total:
            first |= set(ops)
    return frozenset(first)


def _same(one: Plan, other: Plan) -> bool:
    return one.rewrites == other.rewrites and [s.placement for s in one.stages] == [s.placement for s in other.stages]


def prepare_model(name: str, budget_s: float, folder: Path) -> None:
    """Profile, measure what else the plans use, compile them, and keep the plans in a folder."""
    model = model_of(name)
    print(f"{name} {MODELS[name]}: {tvmhet.profile(model, cluster=CLUSTER, budget_s=budget_s)}", flush=True)
    stop_s = time.monotonic() + budget_s
    plans = plans_of(model)
    while measure_missing(model, list(plans.values()), stop_s):
        plans = plans_of(model)
        if time.monotonic() > stop_s:
            break
    compile_plans(prepare(model), list(plans.values()), CLUSTER, StageCache(default_cache_dir()))
    folder.mkdir(parents=True, exist_ok=True)
    for i, plan in enumerate(plans.values()):
        plan.save(folder / f"{i}.json")
    (folder / _WAYS).write_text(json.dumps(list(plans)))


def kept_plans(folder: Path) -> dict[str, Plan]:
    """The plans that `prepare_model` left in a folder, in their order."""
    if not (folder / _WAYS).is_file():
        raise SystemExit(f"no plans in {folder}: run with --prepare first")
    return {way: Plan.load(folder / f"{i}.json") for i, way in enumerate(json.loads((folder / _WAYS).read_text()))}


def measure_missing(model: Model, plans: Sequence[Plan], stop_s: float) -> int:
    """Measure the kernels that some plan uses on the word of a model, of rewritten operators too; return how many."""
    types = {d.name: d for d in CLUSTER.device_types()}
    missing = 0
    for rewrites in dict.fromkeys(p.rewrites for p in plans):
        prepared = rewritten(prepare(model), rewrites)
        graph = prepared.operator_graph
        candidates = Candidates.of(graph, candidate_kernels(graph, MAKERS))
        wanted = unmeasured([p for p in plans if p.rewrites == rewrites], candidates, types)
        with closing(MeasuredKernels()) as database, Profiler(prepared, candidates, database) as profiler:
            for device, indices in wanted.items():
                profiler.measure(types[device], indices, stop_s, ProfileReport(), lambda *_: None)
        missing += sum(map(len, wanted.values()))
    return missing


def model_of(name: str) -> Model:
    """A zoo model of the size given above, with random weights, the same in every run."""
    torch.manual_seed(0)
    module, inputs = zoo.get(name, **MODELS[name])
    return tvmhet.from_torch(module, inputs)


def run(name: str, rounds: int, folder: Path) -> list[Row]:
    """Run every plan of a model, in turn."""
    model = model_of(name)
    torch.manual_seed(0)
    inputs = zoo.get(name, **MODELS[name])[1]
    plans = kept_plans(folder)
    modules = {way: built(model, plan) for way, plan in plans.items()}
    seconds: dict[str, list[float]] = {way: [] for way in plans}
    stages: dict[str, list[list[float]]] = {way: [] for way in plans}
    for turn in range(rounds):
        for way in _order(turn, seconds):
            module = modules[way]
            num_inputs = max(8, int(_STREAM_S / plans[way].period_s))
            with HetModule(module.plan, module.program) as workers:
                stats = workers.benchmark(*inputs, num_inputs=num_inputs)
            seconds[way].append(1 / stats.throughput_per_s)
            stages[way].append([s.compute.median_s for s in stats.stages_streamed])
    return [
        Row(
            name,
            way,
            plan.period_s,
            tuple(seconds[way]),
            tuple(
                (s.compute_s, statistics.median(found[i] for found in stages[way])) for i, s in enumerate(plan.stages)
            ),
        )
        for way, plan in plans.items()
    ]


def _order(turn: int, seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """The plans of one round: all, later the plan and those that were near the best of all so far."""
    ways = list(seconds)
    if turn >= _ALL_ROUNDS:
        best_s = min(map(min, seconds.values()))
        ways = [way for way in ways if way == "plan" or min(seconds[way]) <= _NEAR * best_s]
    random.Random(turn).shuffle(ways)
    return ways


def print_model(rows: Sequence[Row]) -> None:
    """One line of the table, then the lesser searches."""
    chosen, best = next(r for r in rows if r.way == "plan"), min(rows, key=lambda r: r.seconds)
    lost = chosen.seconds / best.seconds
    plans = statistics.median(abs(r.predicted_s / r.seconds - 1) for r in rows)
    pairs = [pair for r in rows for pair in r.stages]
    stages = statistics.median(abs(p / m - 1) for p, m in pairs)
    close = "yes" if lost <= CLOSE else "no"
    print(
        f"| {rows[0].model} | {len(rows)} | {chosen.way} | {best.way} | {lost:.3f} | {close} "
        f"| {chosen.predicted_s / chosen.seconds:.2f} | {plans:.1%} | {stages:.1%} |",
        flush=True,
    )


def print_searches(rows: Sequence[Row]) -> str:
    """Measured seconds of the lesser searches and of each type alone over the plan's; "same" where the plan is."""
    by_way = {r.way: r.seconds for r in rows}
    names = [*ABLATIONS, *TYPES]
    figures = [f"{by_way[n] / by_way['plan']:.3f}" if n in by_way else "same" for n in names]
    return f"| {rows[0].model} | {' | '.join(figures)} |"


def main() -> int:
    """Print a table of models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prepare", action="store_true", help="profile and compile; nothing is run")
    parser.add_argument("--budget", type=float, default=180.0, help="seconds of profiling a model, at most")
    parser.add_argument(
        "--plans", type=Path, default=default_cache_dir() / "plans_measured", help="where they are kept"
    )
    parser.add_argument("--out", type=Path, help="a file to append every plan's row to")
    parser.add_argument("--read", type=Path, nargs="*", help="print the tables of files written before; run nothing")
    given = parser.parse_args()
    rows: list[list[Row]] = read_rows(given.read) if given.read else []
    if not given.read:
        print(f"{cpu_model()}, torch {torch.__version__}; {' '.join(sys.argv[1:])}", flush=True)
    for name in [] if given.read else given.models.split(","):
        if given.prepare:
            prepare_model(name, given.budget, given.plans / name)
            continue
        rows.append(run(name, given.rounds, given.plans / name))
        if given.out:
            with given.out.open("a") as file:
                file.writelines(json.dumps({"cpu": cpu_model(), **asdict(row)}) + "\n" for row in rows[-1])
    if rows:
        print_tables(rows)
    return 0


def read_rows(files: Sequence[Path]) -> list[list[Row]]:
    """The rows of files, by model; of a model that was run twice all rounds together."""
    found: dict[str, dict[str, Row]] = {}
    for line in (line for file in files for line in file.read_text().splitlines()):
        row = _row_of(json.loads(line))
        ways = found.setdefault(row.model, {})
        ways[row.way] = _joined(ways[row.way], row) if row.way in ways else row
    return [list(ways.values()) for ways in found.values()]


def _row_of(data: Mapping[str, object]) -> Row:
    values = {name: data[name] for name in ("model", "way", "predicted_s", "measured_s", "stages")}
    return Row(**values)  # type: ignore[arg-type]


def _joined(one: Row, other: Row) -> Row:
    """One plan that was run twice: all rounds, and the mean of what its stages took."""
    stages = tuple((p, (a + b) / 2) for (p, a), (_, b) in zip(one.stages, other.stages, strict=True))
    return replace(one, measured_s=(*one.measured_s, *other.measured_s), stages=stages)


def print_tables(models: Sequence[Sequence[Row]]) -> None:
    """Both tables."""
    print("\n| model | plans | chosen | measured best | slower by | within 3 % | predicted / measured of it "
          "| error of plans | of stages |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for rows in models:
        print_model(rows)
    print(f"\n| model | {' | '.join([*ABLATIONS, *TYPES])} |")
    print("|---|" + "---|" * (len(ABLATIONS) + len(TYPES)))
    for rows in models:
        print(print_searches(rows))


if __name__ == "__main__":
    sys.exit(main())
