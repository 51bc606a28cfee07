"""Does giving trials to the kernels that limit the plan need fewer trials than giving them in turn?

    python -m benchmarks.tuning record MODEL --folder DIR [--trials 24] [--share 0.035]  real trials; goes on
    python -m benchmarks.tuning replay MODEL [--seeds 5] [--objective throughput]        on what was recorded

`record` tunes every kernel of a small model (made by TVM only) that takes a share of the plan of either CPU type, the
same number of trials each, and writes all times to `results/tuning_MODEL.json`. `replay` hands these times out in
batches of 4:

    in turn      to every generated kernel of the plans for the cluster and for each type alone, round and round
    heavy ones   the same, but only to those that were recorded: round robin that knows which kernels are large
    by the sum   to the plan's kernel with the largest expected fall of the sum over its kernels (Ansor's objective)
    by the plan  to the kernel that tvmhet chooses, of all candidates

A kernel that was not recorded stays as the rules made it, and trials given to it are spent. A seed shuffles the trials
of each kernel, the same for all ways. Quality is the planner's objective, planned again with the times found so far.
Reported: trials until it is within 0.5 % of what all recorded trials together reach.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import tvmhet
from tvmhet import zoo
from tvmhet._tvm import TVM_VERSION
from tvmhet.candidates import candidate_kernels
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.cost.table import Entry, TimeTable
from tvmhet.cost.tuning_store import TuningStore, tuning_path
from tvmhet.emit.compiler import CompilerProcess
from tvmhet.ir.prepare import Prepared, prepare
from tvmhet.kernel_keys import measured_key
from tvmhet.known_times import known_times
from tvmhet.planning import make_plan
from tvmhet.plans import Plan
from tvmhet.profiling import Profiler, ProfileReport, local_timer, unmeasured
from tvmhet.solve import IN_SECONDS, Objective
from tvmhet.times import Candidates
from tvmhet.tuning.allocate import Curve, Task, choose
from tvmhet.tuning.allocator import Allocator
from tvmhet.tuning.kernel import BATCH, Bench, TunedWorkload
from tvmhet.tuning.search import ranking_model
from tvmhet.tuning.trial import TRIAL_LIMITS, TrialRunner
from tvmhet.tuning.workload import make_workload

TYPES = ("cpu-x86-64-v2", "cpu-x86-64-v3")
MODELS = {"mobilenet_v3": {"image": 96}, "convnext_t": {"image": 64}}
RESULTS = Path(__file__).parent / "results"
GOOD = 0.005
REPLAY_BATCH = 4


@dataclass(frozen=True)
class Case:
    """A model, its candidate kernels, and the cluster of one device of each type."""

    model: str
    prepared: Prepared
    candidates: Candidates
    cluster: tvmhet.ClusterSpec

    @staticmethod
    def load(model: str) -> Case:
        """A model of the zoo, TVM as the only maker."""
        module, inputs = zoo.get(model, **MODELS[model])
        prepared = prepare(tvmhet.from_torch(module, inputs))
        assert prepared.graph is not None
        candidates = Candidates.of(prepared.graph, candidate_kernels(prepared.graph, ("tvm",)))
        return Case(model, prepared, candidates, tvmhet.ClusterSpec.of(dict.fromkeys(TYPES, 1)))

    @property
    def results(self) -> Path:
        """Where its times are kept."""
        return RESULTS / f"tuning_{self.model}.json"

    def plan(self, table: TimeTable, objective: Objective, cluster: tvmhet.ClusterSpec | None = None) -> Plan:
        """Plan with the times of a table."""
        kernels = self.candidates.kernels
        return make_plan(self.prepared, kernels, table, cluster or self.cluster, objective, {}, 10.0, 0)


def record(model: str, num_trials: int, share: float, folder: Path) -> None:
    """Tune every kernel that matters, a batch each in turn until each has `num_trials`; write all times after each."""
    case, started = Case.load(model), time.monotonic()
    with closing(MeasuredKernels(folder / "measured.db")) as database, ExitStack() as stack:
        plans = _measured_plans(case, database)
        print(f"plans are measured after {time.monotonic() - started:.0f} s", flush=True)
        compiler = stack.enter_context(CompilerProcess())
        kernels: dict[Task, TunedWorkload] = {}
        for name, plan in plans.items():
            device = next(d for d in case.cluster.device_types() if d.name == name)
            timer = local_timer(device, TRIAL_LIMITS)
            stack.callback(timer.close)
            store = stack.enter_context(TuningStore(tuning_path(database.path, name)))
            bench = Bench(store, stack.enter_context(TrialRunner(timer, compiler)), ranking_model(), database)
            for index in _indices(case, plan, share):
                workload = make_workload(case.prepared, case.candidates, index, device)
                kernels[case.candidates.keys[index], name] = TunedWorkload(workload, bench, seed=1)
        print(f"{len(kernels)} kernels after {time.monotonic() - started:.0f} s", flush=True)
        for count in range(BATCH, num_trials + 1, BATCH):
            for kernel in kernels.values():
                while kernel.num_earlier + kernel.num_new < count and kernel.batch(BATCH, float("inf")):
                    pass
            _write(case, database, kernels)
            print(f"{count} trials each after {time.monotonic() - started:.0f} s", flush=True)


def _write(case: Case, database: MeasuredKernels, kernels: Mapping[Task, TunedWorkload]) -> None:
    table = known_times(case.prepared, case.candidates, database, case.cluster, in_context=False, tuned=False)
    seconds = {key: {t: table.entry(i, t).seconds for t in TYPES} for i, key in enumerate(case.candidates.keys)}
    curves = [
        {
            "kernel": key,
            "type": device_type,
            "name": kernel.workload.name,
            "rules_s": kernel.rules_s(),
            "known_s": kernel.known_s(),
            "trials_s": [t.run.min_s if t.run.status == "ok" else None for t in kernel.trials],
        }
        for (key, device_type), kernel in kernels.items()
    ]
    head = {
        "model": f"{case.model} {MODELS[case.model]}",
        "machine": measured_key("0", "tvm", tvmhet.device_type(TYPES[0])).device,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "tvm": TVM_VERSION,
        "date": time.strftime("%Y-%m-%d"),
    }
    case.results.write_text(json.dumps({"head": head, "seconds": seconds, "curves": curves}, indent=0) + "\n")


def _measured_plans(case: Case, database: MeasuredKernels) -> dict[str, Plan]:
    """The best plan of each type alone, once they rest on measurements."""
    devices = {d.name: d for d in case.cluster.device_types()}
    alone = {t: case.cluster.with_counts({u: int(u == t) for u in TYPES}) for t in TYPES}
    with Profiler(case.prepared, case.candidates, database) as profiler:
        while True:
            table = known_times(case.prepared, case.candidates, database, case.cluster, in_context=False, tuned=False)
            plans = {t: case.plan(table, Objective.LATENCY, cluster) for t, cluster in alone.items()}
            every = [*plans.values(), case.plan(table, Objective.THROUGHPUT)]
            wanted = unmeasured(every, case.candidates, devices)
            if not any(wanted.values()):
                return plans
            for name, indices in wanted.items():
                report = ProfileReport()
                profiler.measure(devices[name], indices, float("inf"), report, lambda *_: None)


def _indices(case: Case, plan: Plan, share: float) -> list[int]:
    """Candidates of the plan's kernels that take at least `share` of its time, distinct ones, the slowest first."""
    seconds: dict[str, float] = {}
    first: dict[str, int] = {}
    for stage in plan.stages:
        for i, prediction in zip(case.candidates.indices(stage.kernels), stage.predictions, strict=True):
            key = case.candidates.keys[i]
            first.setdefault(key, i)
            seconds[key] = seconds.get(key, 0.0) + prediction.time_s
    whole = sum(seconds.values())
    return [first[key] for key in sorted(seconds, key=lambda k: -seconds[k]) if seconds[key] >= share * whole]


Snapshot = tuple[int, dict[Task, float]]  # trials given, best seconds by kernel


class Replay:
    """Recorded trials in the order of one seed, handed out in batches."""

    def __init__(self, case: Case, recorded: Mapping[str, Any], seed: int, objective: Objective) -> None:
        self.case, self.objective, self.begun = case, objective, set[Task]()
        self._seconds = recorded["seconds"]
        rng = np.random.default_rng(seed)
        self.rules = {(c["kernel"], c["type"]): float(c["rules_s"]) for c in recorded["curves"]}
        self._trials = {
            (c["kernel"], c["type"]): [c["trials_s"][i] for i in rng.permutation(len(c["trials_s"]))]
            for c in recorded["curves"]
        }
        self.num_trials = max(len(trials) for trials in self._trials.values())
        self.every = {
            task: min([self.rules[task], *(t for t in trials if t is not None)])
            for task, trials in self._trials.items()
        }
        self.best = dict(self.rules)
        self._given: dict[Task, int] = {}
        self.snapshots: list[Snapshot] = [(0, dict(self.best))]

    def batch(self, task: Task) -> bool:
        """Give a kernel one batch. Return whether there was one left."""
        start = self._given.get(task, 0)
        times = self._trials.get(task, [None] * self.num_trials)[start : start + REPLAY_BATCH]
        if not times:
            return False
        self._given[task] = start + len(times)
        self.best[task] = min([self.seconds_of(task), *(t for t in times if t is not None)])
        self.snapshots.append((self.snapshots[-1][0] + len(times), dict(self.best)))
        return True

    def seconds_of(self, task: Task) -> float:
        """The best seconds of any kernel so far."""
        return self.best.get(task, self._seconds[task[0]][task[1]])

    def table(self, best: Mapping[Task, float] | None = None) -> TimeTable:
        """Every candidate by the rules, the recorded ones at their best so far."""
        best = self.best if best is None else best
        keys = self.case.candidates.keys
        table = TimeTable.empty(len(keys), TYPES)
        for name in TYPES:
            seconds = [best.get((key, name), self._seconds[key][name]) for key in keys]
            table = table.with_entries(name, {i: Entry(s, s, s, "measured") for i, s in enumerate(seconds)})
        return table

    def make(self, table: TimeTable) -> Plan:
        """Plan with a table."""
        return self.case.plan(table, self.objective)

    def trials_until(self, objective_s: float) -> int | None:
        """Return after how many trials the plan was as good as `objective_s`, by bisection: it never gets worse."""
        if self.make(self.table(self.snapshots[-1][1])).objective_value > objective_s:
            return None
        low, high = 0, len(self.snapshots) - 1
        while low < high:
            middle = (low + high) // 2
            good = self.make(self.table(self.snapshots[middle][1])).objective_value <= objective_s
            low, high = (low, middle) if good else (middle + 1, high)
        return self.snapshots[low][0]


def in_turn(replay: Replay) -> None:
    """A batch to each kernel of the plans, round and round."""
    alone = [replay.case.cluster.with_counts({u: int(u == t) for u in TYPES}) for t in TYPES]
    plans = [replay.case.plan(replay.table(), replay.objective, c) for c in (replay.case.cluster, *alone)]
    tasks = list(dict.fromkeys([*(task for plan in plans for task in _used(replay, plan)), *replay.rules]))
    while any([replay.batch(task) for task in tasks]):
        pass


def heavy_ones(replay: Replay) -> None:
    """A batch to each recorded kernel, round and round."""
    while any([replay.batch(task) for task in replay.rules]):
        pass


def by_the_plan(replay: Replay) -> None:
    """What `tvmhet tune` does."""
    types = {d.name: d for d in replay.case.cluster.device_types()}
    allocator = Allocator(replay.case.candidates, types, replay.table, replay.make)
    while (task := allocator.next()) is not None:
        before_s = replay.seconds_of(task)
        if task not in replay.begun:
            allocator.begin(task, [before_s])
            replay.begun.add(task)
        if replay.batch(task):
            allocator.observe(task, replay.seconds_of(task))
        else:
            allocator.drop(task)


def by_the_sum(replay: Replay) -> None:
    """The same curves and hopes, weighed by how often the plan has the kernel, wherever it runs."""
    curves: dict[Task, Curve] = {}
    done: set[Task] = set()
    while True:
        weights = Counter(_used(replay, replay.make(replay.table())))
        curves |= {task: Curve((replay.seconds_of(task),)) for task in weights if task not in curves}
        for _ in range(8):
            chosen = choose({t: c for t, c in curves.items() if t not in done}, weights, 0.0)
            if chosen is None:
                return
            if not replay.batch(chosen):
                done.add(chosen)
                continue
            curves[chosen] = curves[chosen].after([replay.seconds_of(chosen)])


def _used(replay: Replay, plan: Plan) -> list[Task]:
    candidates = replay.case.candidates
    return [
        (candidates.keys[i], stage.placement.device_type)
        for stage in plan.stages
        for i in candidates.indices(stage.kernels)
    ]


WAYS: dict[str, Callable[[Replay], None]] = {
    "in turn": in_turn,
    "heavy ones": heavy_ones,
    "by the sum": by_the_sum,
    "by the plan": by_the_plan,
}


def replay(model: str, num_seeds: int, objective: Objective) -> None:
    """Print, for each seed, the trials that each way needs."""
    case = Case.load(model)
    recorded = json.loads(case.results.read_text())
    print(f"{recorded['head']}; {len(recorded['curves'])} kernels; {objective.value}")
    print("| seed | before | all trials | " + " | ".join(f"trials {way}" for way in WAYS) + " | fewer than in turn |")
    print("|---" * (len(WAYS) + 4) + "|")
    fewer = []
    for seed in range(num_seeds):
        runs = {way: Replay(case, recorded, seed, objective) for way in WAYS}
        for way, give in WAYS.items():
            give(runs[way])
        first = runs["in turn"]
        before_s, end_s = (first.make(first.table(best)).objective_value for best in (first.rules, first.every))
        counts = {way: run.trials_until(end_s * (1 + GOOD)) for way, run in runs.items()}
        needed, ours = counts["in turn"], counts["by the plan"]
        assert needed is not None
        fewer.append(-1.0 if ours is None else 1 - ours / needed)
        cells = " | ".join("not reached" if n is None else str(n) for n in counts.values())
        print(f"| {seed} | {before_s * 1e6:.0f} us | {end_s * 1e6:.0f} us | {cells} | {fewer[-1]:.0%} |", flush=True)
    print(f"\nfewer trials than in turn: median {median(fewer):.0%}, {min(fewer):.0%} to {max(fewer):.0%}")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("--folder", type=Path, required=True, help="of the databases")
    recording.add_argument("--trials", type=int, default=24)
    recording.add_argument("--share", type=float, default=0.035, help="of a plan's time, of the kernels to record")
    replaying = commands.add_parser("replay")
    replaying.add_argument("--seeds", type=int, default=5)
    replaying.add_argument("--objective", choices=[o.value for o in IN_SECONDS], default="throughput")
    for command in (recording, replaying):
        command.add_argument("model", choices=MODELS)
    args = parser.parse_args()
    if args.command == "record":
        record(args.model, args.trials, args.share, args.folder)
    else:
        replay(args.model, args.seeds, Objective(args.objective))


if __name__ == "__main__":
    main()
