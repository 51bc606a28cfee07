"""The tuning run: plan, find the kernels that limit the plan, try schedules of the most telling one, again.

    times ─► best plan, of rewritten operators too ─► sensitivity ─► choose a kernel ─► try a batch of its schedules
      ▲                                                                                  │
      └────────── the best one, if it is faster than the rule's kernel ◄─────────────────┘

What is tuned is the model as the best plan rewrites it; when no kernel of it is worth a trial, all is planned again.
Every trial is stored when it is done, so a run that ends or is killed is continued by the next one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from tvmhet.campaign import Campaign
from tvmhet.cost.table import TimeTable
from tvmhet.cost.tuning_store import TuningStore, tuning_path
from tvmhet.emit.compiler import CompilerProcess
from tvmhet.graph.rewrites import in_words
from tvmhet.ir.prepare import Prepared
from tvmhet.kernel_keys import measured_key
from tvmhet.known_times import known_times
from tvmhet.planning import make_plan
from tvmhet.plans import Plan
from tvmhet.profiling import Profiler, ProfileReport, local_timer, local_types, unmeasured
from tvmhet.progress import Report, progress_bar
from tvmhet.proposing import KINDS, Variant
from tvmhet.rewriting import Planner, Wanted
from tvmhet.solve import Objective
from tvmhet.times import Candidates
from tvmhet.tuning.allocate import Task
from tvmhet.tuning.allocator import Allocator
from tvmhet.tuning.kernel import BATCH, Bench, TunedWorkload, curve_s
from tvmhet.tuning.report import TunedKernel, TuningReport
from tvmhet.tuning.search import ranking_model
from tvmhet.tuning.trial import TRIAL_LIMITS, TrialRunner
from tvmhet.tuning.workload import NotTunable, make_workload

_PLAN_LIMIT_S = 10.0  # of one of the many plans of a run
_MAX_VARIANTS = 4  # ways to rewrite the model that are tuned in one run
_SETTLE_SHARE = 0.4  # of the budget at most, for measuring what the plan uses before anything is tuned


@dataclass(frozen=True, slots=True)
class Budget:
    """When a run ends: at `deadline_s` of the monotonic clock, or after `max_trials`."""

    seconds: float
    deadline_s: float
    max_trials: int | None

    def spent(self, num_trials: int) -> str:
        """Return why no further trial is run; "" while there is time and a trial left."""
        if self.max_trials is not None and num_trials >= self.max_trials:
            return "the trials are spent"
        return "the time is spent" if time.monotonic() > self.deadline_s else ""

    def batch(self, num_trials: int) -> int:
        """Return how many trials the next batch has."""
        return BATCH if self.max_trials is None else min(BATCH, self.max_trials - num_trials)


class Tuner:
    """Tunes the generated kernels of one model for one cluster. Use it once."""

    def __init__(self, campaign: Campaign, pin: Mapping[str, str] | None = None, seed: int = 0) -> None:
        self._campaign, self._database = campaign, campaign.database
        self._pin, self._seed = pin or {}, seed
        every = campaign.cluster.device_types()
        local = local_types([d for d in every if d.is_cpu and d.name not in campaign.remote])
        self._types = {d.name: d for d in every if d.name in campaign.remote or d in local}
        away = sorted({d.name for d in every} - self._types.keys())
        self._report = TuningReport(objective=campaign.objective.value, unreachable=tuple(away))
        self._kernels: dict[Task, TunedWorkload] = {}
        self._recalled: set[Task] = set()  # whose earlier trials are counted
        self._dropped: set[Task] = set()

    def run(self, budget_s: float, max_trials: int | None = None) -> TuningReport:
        """Tune until `budget_s` of wall time or `max_trials` are spent, or no kernel is worth a trial."""
        report, started = self._report, time.monotonic()
        if budget_s <= 0 or max_trials == 0:
            report.ended = "the budget is 0, so nothing was tuned"
            return report
        if not self._types:
            report.ended = "none of the cluster's device types can be measured, so nothing was tuned"
            return report
        plan, variant = self._settle(started + _SETTLE_SHARE * budget_s)
        report.before = plan.objective_value
        budget = Budget(budget_s, started + budget_s, max_trials)
        with ExitStack() as stack, progress_bar("tune", self._campaign.progress) as tell:
            compiler = stack.enter_context(CompilerProcess())
            compiler.start()
            benches = {name: self._bench(name, stack, compiler) for name in self._types}
            for _ in range(_MAX_VARIANTS):
                report.rewrites = in_words(variant.rewrites)
                self._tune(variant, benches, budget, tell)
                before, (plan, variant) = variant, self._best()
                if budget.spent(report.num_trials) or variant.rewrites == before.rewrites:
                    break
            report.ended = budget.spent(report.num_trials) or "no kernel is expected to lower the objective noticeably"
            self._write_kernels()
        report.after = plan.objective_value
        report.seconds = time.monotonic() - started
        return report

    def _tune(self, variant: Variant, benches: Mapping[str, Bench], budget: Budget, tell: Report) -> None:
        """Give batches to the kernels of one variant until the budget is spent or none is worth one."""
        c, prepared, candidates = self._campaign, variant.prepared, variant.candidates

        def make(table: TimeTable) -> Plan:
            kernels = candidates.kernels
            return make_plan(prepared, kernels, table, c.cluster, c.objective, self._pin, _PLAN_LIMIT_S, self._seed)

        allocator = Allocator(candidates, self._types, lambda: self._price(prepared, candidates), make)
        for name, bench in benches.items():
            self._recall(allocator, variant, name, bench)
        while not budget.spent(self._report.num_trials) and (task := allocator.next()) is not None:
            self._batch(allocator, variant, benches[task[1]], task, budget)
            left_s = budget.deadline_s - time.monotonic()
            tell(int(min(budget.seconds, budget.seconds - left_s)), int(budget.seconds), "")

    def _recall(self, allocator: Allocator, variant: Variant, device_type: str, bench: Bench) -> None:
        """Tell the allocator what earlier trials found, and what is not worth another; count those of earlier runs."""
        place = measured_key("0", "tvm", self._types[device_type])
        for key in sorted(set(bench.store.tried(place)) & set(variant.candidates.keys)):
            task, kernel = (key, device_type), measured_key(key, "tvm", self._types[device_type])
            trials = bench.store.trials(kernel)
            if task not in self._recalled and task not in self._kernels:
                self._recalled.add(task)
                self._report.earlier += len(trials)
            if (curve := curve_s(self._database, kernel, trials)) is not None:
                allocator.begin(task, curve)
        for task in self._dropped:
            allocator.drop(task)

    def _settle(self, deadline_s: float) -> tuple[Plan, Variant]:
        """Measure what the best plan uses, until it rests on measurements; return it with the variant that it is of."""
        c = self._campaign
        plan, variant = self._best()
        with Profiler(c.prepared, c.candidates, self._database, c.remote) as profiler:
            while time.monotonic() < deadline_s:
                wanted = unmeasured([plan], variant.candidates, self._types)
                if not any(wanted.values()):
                    break
                of_variant = profiler.on(variant.prepared, variant.candidates)
                of_variant.measure(self._types, wanted, deadline_s, ProfileReport(), c.progress)
                plan, variant = self._best()
        return plan, variant

    def _best(self) -> tuple[Plan, Variant]:
        """Return the best plan by what is known now, and the model that it is of: as it is, or rewritten."""
        c = self._campaign
        kinds = KINDS if c.makers else frozenset()
        wanted = Wanted(c.objective, c.makers, self._pin, kinds, _PLAN_LIMIT_S, self._seed)
        first = Variant(c.prepared, c.candidates, self._price(c.prepared, c.candidates))
        return Planner(c.cluster, self._price, wanted).best(first)

    def _bench(self, device_type: str, stack: ExitStack, compiler: CompilerProcess) -> Bench:
        store = stack.enter_context(TuningStore(tuning_path(self._database.path, device_type)))
        self._report.stale += store.stale(measured_key("0", "tvm", self._types[device_type]))
        timer = self._campaign.remote.get(device_type) or local_timer(self._types[device_type], TRIAL_LIMITS)
        stack.callback(timer.close)
        runner = stack.enter_context(TrialRunner(timer, compiler))
        return Bench(store, runner, ranking_model(), self._database)

    def _batch(self, allocator: Allocator, variant: Variant, bench: Bench, task: Task, budget: Budget) -> None:
        """Give one batch to a kernel; one that cannot be tuned, or has nothing left to try, is dropped."""
        kernel = self._kernels.get(task) or self._open(allocator, variant, bench, task)
        count = budget.batch(self._report.num_trials)
        runs = kernel.batch(count, budget.deadline_s) if kernel is not None else []
        if kernel is None or not runs:
            self._dropped.add(task)
            allocator.drop(task)
            return
        for run in runs:
            self._report.trials[run.status] += 1
            self._report.busy += run.busy
            if run.status != "ok":
                self._report.failed.append(f"{kernel.workload.name} on {task[1]}: {run.status} {run.note}")
        allocator.observe(task, kernel.known_s())

    def _open(self, allocator: Allocator, variant: Variant, bench: Bench, task: Task) -> TunedWorkload | None:
        """Begin with a kernel, where earlier runs ended."""
        index = allocator.index(task)
        try:
            workload = make_workload(variant.prepared, variant.candidates, index, self._types[task[1]])
            kernel = TunedWorkload(workload, bench, self._seed + 1)
        except NotTunable as why:
            name = "+".join(variant.graph.operators[o].name for o in variant.candidates.kernels[index].ops)
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

    def _price(self, prepared: Prepared, candidates: Candidates) -> TimeTable:
        c = self._campaign
        together = c.objective is Objective.THROUGHPUT
        return known_times(prepared, candidates, self._database, c.cluster, in_context=True, together=together)
