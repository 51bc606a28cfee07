"""The tuning run: plan, find the kernels that limit the plan, try schedules of the most telling one, again.

    times ─► plan ─► sensitivity ─► choose a kernel ─► try a batch of its schedules ─► store
      ▲                                                                                  │
      └────────── the best one, if it is faster than the rule's kernel ◄─────────────────┘

Every trial is stored when it is done, so a run that ends or is killed is continued by the next one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np

from tvmhet.campaign import Campaign, known_times
from tvmhet.context import context_factor
from tvmhet.cost.roofline import SPEC_SHEET, Roofline, supports
from tvmhet.cost.table import TimeTable
from tvmhet.cost.tuning_store import TuningStore, tuning_path
from tvmhet.emit.compiler import CompilerProcess
from tvmhet.planning import make_plan
from tvmhet.plans import Plan
from tvmhet.profiling import Profiler, ProfileReport, local_timer, local_types, unmeasured
from tvmhet.progress import progress_bar
from tvmhet.tuning.allocate import Curve, Task, choose
from tvmhet.tuning.kernel import BATCH, Bench, TunedWorkload
from tvmhet.tuning.report import TunedKernel, TuningReport
from tvmhet.tuning.search import ranking_model
from tvmhet.tuning.sensitivity import analyse, scaled
from tvmhet.tuning.trial import TRIAL_LIMITS, TrialRunner
from tvmhet.tuning.workload import NotTunable, make_workload

_PLAN_LIMIT_S = 10.0
_SETTLE_SHARE = 0.4  # of the budget at most, for measuring what the plan uses before anything is tuned
_REPLAN_BATCHES = 8
_REPLAN_GAIN = 0.05  # a change of one kernel's time that makes the weights out of date


class Tuner:
    """Tunes the generated kernels of one model for one cluster. Use it once."""

    def __init__(self, campaign: Campaign, pin: Mapping[str, str] | None = None, seed: int = 0) -> None:
        assert campaign.prepared.graph is not None
        self._campaign, self._graph = campaign, campaign.prepared.graph
        self._pin, self._seed = pin or {}, seed
        self._candidates, self._database = campaign.candidates, campaign.database
        every = campaign.cluster.device_types()
        local = local_types([d for d in every if d.name not in campaign.remote])
        self._types = {d.name: d for d in every if d.name in campaign.remote or d in local}
        self._index = {key: i for i, key in reversed(list(enumerate(self._candidates.keys)))}
        self._floors = {name: self._floors_of(name) for name in self._types}
        self._report = TuningReport(
            objective=campaign.objective.value, unreachable=tuple(sorted({d.name for d in every} - self._types.keys()))
        )
        self._kernels: dict[Task, TunedWorkload] = {}
        self._curves: dict[Task, Curve] = {}
        self._done: set[Task] = set()  # refused, or every schedule was tried

    def run(self, budget_s: float, max_trials: int | None = None) -> TuningReport:
        """Tune until `budget_s` of wall time or `max_trials` are spent, or no kernel is worth a trial."""
        report, started = self._report, time.monotonic()
        if budget_s <= 0 or max_trials == 0:
            report.ended = "the budget is 0, so nothing was tuned"
            return report
        if not self._types:
            report.ended = "none of the cluster's device types can be measured, so nothing was tuned"
            return report
        self._settle(started + _SETTLE_SHARE * budget_s)
        with ExitStack() as stack, progress_bar("tune", self._campaign.progress) as tell:
            compiler = stack.enter_context(CompilerProcess())
            compiler.start()
            benches = {name: self._bench(name, stack, compiler) for name in self._types}
            while not report.ended:
                self._plan_and_tune(benches, started + budget_s, max_trials)
                tell(min(int(time.monotonic() - started), int(budget_s)), int(budget_s), "")
            for kernel in self._kernels.values():
                kernel.close()
            self._write_kernels()
        report.after = self._make(self._table()).objective_value
        report.seconds = time.monotonic() - started
        return report

    def _settle(self, deadline_s: float) -> None:
        """Measure what the best plan uses, until it rests on measurements."""
        c = self._campaign
        with Profiler(c.prepared, self._candidates, self._database, c.remote) as profiler:
            while time.monotonic() < deadline_s:
                wanted = unmeasured([self._make(self._table())], self._graph, self._candidates, self._types)
                if not any(wanted.values()):
                    return
                for name, indices in wanted.items():
                    with progress_bar(f"measure on {name}", c.progress) as tell:
                        profiler.measure(self._types[name], indices, deadline_s, ProfileReport(), tell)

    def _bench(self, device_type: str, stack: ExitStack, compiler: CompilerProcess) -> Bench:
        store = stack.enter_context(TuningStore(tuning_path(self._database.path, device_type)))
        timer = self._campaign.remote.get(device_type) or local_timer(self._types[device_type], TRIAL_LIMITS)
        stack.callback(timer.close)
        runner = stack.enter_context(TrialRunner(timer, compiler))
        return Bench(store, runner, ranking_model(), self._database)

    def _plan_and_tune(self, benches: Mapping[str, Bench], deadline_s: float, max_trials: int | None) -> None:
        """Weigh the kernels, then give batches until the weights are out of date or the run is over."""
        report, table = self._report, self._table()
        found = analyse(self._make, table, self._hoped, self._graph, self._candidates, frozenset(self._types))
        report.before = report.before or found.plan.objective_value
        key = self._campaign.prepared.key
        factors = {name: context_factor(self._database, key, d) for name, d in self._types.items()}
        weights = {task: weight * factors[task[1]] for task, weight in found.weights.items()}
        for _ in range(_REPLAN_BATCHES):
            left = BATCH if max_trials is None else min(BATCH, max_trials - sum(report.trials.values()))
            if time.monotonic() > deadline_s or left <= 0:
                report.ended = "the trials are spent" if left <= 0 else "the time is spent"
                return
            curves = {task: self._curve(task, table) for task in weights if task not in self._done}
            task = choose(curves, weights, found.plan.objective_value)
            if task is None:
                report.ended = "no kernel is expected to lower the objective noticeably"
                return
            self._batch(benches[task[1]], task, left, deadline_s)
            if abs(self._curve(task, table).now_s / curves[task].now_s - 1) > _REPLAN_GAIN:
                return

    def _batch(self, bench: Bench, task: Task, count: int, deadline_s: float) -> None:
        """Give one batch to a kernel; a kernel that cannot be tuned, or has nothing left to try, is done."""
        kernel = self._kernels.get(task) or self._open(bench, task)
        if kernel is None:
            self._done.add(task)
            return
        runs = kernel.batch(count, deadline_s)
        if not runs:
            self._done.add(task)
            return
        for run in runs:
            self._report.trials[run.status] += 1
            self._report.busy += run.busy
            if run.status != "ok":
                self._report.failed.append(f"{kernel.workload.name} on {task[1]}: {run.status} {run.note}")
        self._curves[task] = self._curves[task].after([kernel.known_s()])

    def _open(self, bench: Bench, task: Task) -> TunedWorkload | None:
        """Begin with a kernel, where earlier runs ended."""
        index = self._index[task[0]]
        try:
            workload = make_workload(self._campaign.prepared, self._candidates, index, self._types[task[1]])
            kernel = TunedWorkload(workload, bench, self._seed + 1)
        except NotTunable as why:
            name = "+".join(self._graph.operators[o].name for o in self._candidates.kernels[index].ops)
            self._report.refused.append(f"{name} on {task[1]}: {why}")
            return None
        self._report.stale += kernel.stale
        self._report.earlier += kernel.num_earlier
        self._kernels[task] = kernel
        self._curves[task] = kernel.curve(self._floors[task[1]][index])
        return kernel

    def _write_kernels(self) -> None:
        for (_, device_type), kernel in self._kernels.items():
            row = TunedKernel(kernel.workload.name, device_type, kernel.num_new, kernel.rules_s(), kernel.known_s())
            self._report.kernels.append(row)

    def _table(self) -> TimeTable:
        c = self._campaign
        return known_times(c.prepared, self._candidates, self._database, c.cluster, in_context=True)

    def _make(self, table: TimeTable) -> Plan:
        c, kernels = self._campaign, self._candidates.kernels
        return make_plan(c.prepared, kernels, table, c.cluster, c.objective, self._pin, _PLAN_LIMIT_S, self._seed)

    def _hoped(self, table: TimeTable) -> TimeTable:
        """The table with every generated kernel at the time that tuning may still reach."""
        for name in self._types:
            factors = {}
            for i, (kernel, key) in enumerate(zip(self._candidates.kernels, self._candidates.keys, strict=True)):
                task = key, name
                if kernel.maker == "tvm" and task not in self._done and np.isfinite(table.entry(i, name).seconds):
                    curve = self._curve(task, table)
                    factors[i] = curve.eventual_s() / curve.now_s
            table = scaled(table, name, factors)
        return table

    def _curve(self, task: Task, table: TimeTable) -> Curve:
        """The curve of a kernel; of one that was not begun, its time in the table."""
        if task in self._curves:
            return self._curves[task]
        index = self._index[task[0]]
        return Curve((table.entry(index, task[1]).seconds,), self._floors[task[1]][index])

    def _floors_of(self, device_type: str) -> tuple[float, ...]:
        """By candidate, what no schedule can go below: the data sheet's roofline; 0 where it has no rate."""
        device, descs = self._types[device_type], self._candidates.descs
        known = [i for i, desc in enumerate(descs) if supports(device, desc)]
        seconds = Roofline(device, SPEC_SHEET).predict([descs[i] for i in known]).seconds
        floors = dict(zip(known, map(float, seconds), strict=True))
        return tuple(floors.get(i, 0.0) for i in range(len(descs)))
