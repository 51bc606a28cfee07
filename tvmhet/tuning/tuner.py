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

from tvmhet.campaign import Campaign, known_times
from tvmhet.cost.table import TimeTable
from tvmhet.cost.tuning_store import TuningStore, tuning_path
from tvmhet.emit.compiler import CompilerProcess
from tvmhet.kernel_keys import measured_key
from tvmhet.planning import make_plan
from tvmhet.plans import Plan
from tvmhet.profiling import Profiler, ProfileReport, local_timer, local_types, unmeasured
from tvmhet.progress import progress_bar
from tvmhet.tuning.allocate import Task
from tvmhet.tuning.allocator import Allocator
from tvmhet.tuning.kernel import BATCH, Bench, TunedWorkload, curve_s
from tvmhet.tuning.report import TunedKernel, TuningReport
from tvmhet.tuning.search import ranking_model
from tvmhet.tuning.trial import TRIAL_LIMITS, TrialRunner
from tvmhet.tuning.workload import NotTunable, make_workload

_PLAN_LIMIT_S = 10.0
_SETTLE_SHARE = 0.4  # of the budget at most, for measuring what the plan uses before anything is tuned


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
        away = sorted({d.name for d in every} - self._types.keys())
        self._report = TuningReport(objective=campaign.objective.value, unreachable=tuple(away))
        self._kernels: dict[Task, TunedWorkload] = {}

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
            allocator = Allocator(self._graph, self._candidates, self._types, self._table, self._make)
            for name, bench in benches.items():
                self._recall(allocator, name, bench)
            while not (why := self._why_end(started + budget_s, max_trials)):
                task = allocator.next()
                report.before = report.before or allocator.plan().objective_value
                if task is None:
                    why = "no kernel is expected to lower the objective noticeably"
                    break
                self._batch(allocator, benches[task[1]], task, started + budget_s, max_trials)
                tell(min(int(time.monotonic() - started), int(budget_s)), int(budget_s), "")
            report.ended = why
            self._write_kernels()
        report.after = self._make(self._table()).objective_value
        report.seconds = time.monotonic() - started
        return report

    def _recall(self, allocator: Allocator, device_type: str, bench: Bench) -> None:
        """Tell the allocator what earlier runs found; count what they left."""
        place = measured_key("0", "tvm", self._types[device_type])
        self._report.stale += bench.store.stale(place)
        for key in sorted(set(bench.store.tried(place)) & set(self._candidates.keys)):
            kernel = measured_key(key, "tvm", self._types[device_type])
            trials = bench.store.trials(kernel)
            self._report.earlier += len(trials)
            if (curve := curve_s(self._database, kernel, trials)) is not None:
                allocator.begin((key, device_type), curve)

    def _why_end(self, deadline_s: float, max_trials: int | None) -> str:
        if max_trials is not None and sum(self._report.trials.values()) >= max_trials:
            return "the trials are spent"
        return "the time is spent" if time.monotonic() > deadline_s else ""

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

    def _batch(self, allocator: Allocator, bench: Bench, task: Task, deadline_s: float, max_trials: int | None) -> None:
        """Give one batch to a kernel; one that cannot be tuned, or has nothing left to try, is dropped."""
        kernel = self._kernels.get(task) or self._open(allocator, bench, task)
        left = BATCH if max_trials is None else min(BATCH, max_trials - sum(self._report.trials.values()))
        runs = kernel.batch(left, deadline_s) if kernel is not None else []
        if kernel is None or not runs:
            allocator.drop(task)
            return
        for run in runs:
            self._report.trials[run.status] += 1
            self._report.busy += run.busy
            if run.status != "ok":
                self._report.failed.append(f"{kernel.workload.name} on {task[1]}: {run.status} {run.note}")
        allocator.observe(task, kernel.known_s())

    def _open(self, allocator: Allocator, bench: Bench, task: Task) -> TunedWorkload | None:
        """Begin with a kernel, where earlier runs ended."""
        index = allocator.index(task)
        try:
            workload = make_workload(self._campaign.prepared, self._candidates, index, self._types[task[1]])
            kernel = TunedWorkload(workload, bench, self._seed + 1)
        except NotTunable as why:
            name = "+".join(self._graph.operators[o].name for o in self._candidates.kernels[index].ops)
            self._report.refused.append(f"{name} on {task[1]}: {why}")
            return None
        if kernel.num_stale:
            self._report.stale["another function"] += kernel.num_stale
        self._kernels[task] = kernel
        allocator.begin(task, kernel.curve_s())
        return kernel

    def _write_kernels(self) -> None:
        for (_, device_type), kernel in self._kernels.items():
            kernel.close()
            row = TunedKernel(kernel.workload.name, device_type, kernel.num_new, kernel.rules_s(), kernel.known_s())
            self._report.kernels.append(row)

    def _table(self) -> TimeTable:
        c = self._campaign
        return known_times(c.prepared, self._candidates, self._database, c.cluster, in_context=True)

    def _make(self, table: TimeTable) -> Plan:
        c, kernels = self._campaign, self._candidates.kernels
        return make_plan(c.prepared, kernels, table, c.cluster, c.objective, self._pin, _PLAN_LIMIT_S, self._seed)
