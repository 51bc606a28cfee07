"""A measuring campaign: which kernels to measure, in what order, and when no further one can change the plan.

    plan with the best estimates ─► measure what the plans use ─► again, until they rest on measurements
    the same for plans whose operators are rewritten (`tvmhet.rewriting`)
    plan with every unmeasured kernel at its lowest estimate ─► measure what that plan hopes most of ─► again, until
    that plan is not better by 0.1 %
    run the model as a whole on each CPU type, then the best plans as they are (`tvmhet.plan_runs`), then plans one
    against the other (`tvmhet.racing`): for these a part of the budget is kept

When the last loop ends, even if every candidate that was never measured took its lowest estimated time, no plan that
the search finds would be better by 0.1 %: they were skipped safely, as far as the estimates' intervals hold. That is
said of the model's own operators; of rewritten ones, what the best estimates choose is measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tvmhet.candidates import candidate_kernels, makers_on
from tvmhet.choosing import takes_races
from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.context import beside, company, context_factor, keep_context, keep_operators, keep_run
from tvmhet.cost.measure_rpc import RemoteTimer
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.cost.table import MEASURED, TimeTable
from tvmhet.deploy import compile_plans, deploy
from tvmhet.emit.cache import StageCache, default_cache_dir
from tvmhet.ir.prepare import Prepared
from tvmhet.known_times import known_times
from tvmhet.plan_runs import PlanRuns
from tvmhet.planning import make_plan
from tvmhet.plans import Plan
from tvmhet.profiling import Profiler, ProfileReport, local_types, unmeasured
from tvmhet.proposing import Variant, variant_of
from tvmhet.racing import Race
from tvmhet.rewriting import Planner, Wanted
from tvmhet.runtime.program import PipelineProgram
from tvmhet.solve import Objective
from tvmhet.times import Candidates
from tvmhet.whole_runs import CompiledStage, by_type, run_together

_MAX_ROUNDS = 12  # of each loop
_MAX_LOWEST_ROUNDS = 48  # each measures only a part of what the optimistic plan uses
_MIN_GAIN = 1e-3  # what the plan can still gain by less is not looked for
_SHARE = 0.5  # of the hope that an optimistic plan rests on: measured before it is drawn up again; at first
_WHOLE_ROUND = 24  # from this round on all of it
_PLAN_LIMIT_S = 10.0  # of one of the many plans of a run
_KERNELS, _RUNS = 0.55, 0.7  # parts of the budget: for kernels alone; with that, for plans timed call by call


@dataclass(frozen=True, slots=True)
class Campaign:
    """Measures the kernels that decide the plan of one model for one cluster, on this machine and on `remote`."""

    prepared: Prepared
    candidates: Candidates
    database: MeasuredKernels
    cluster: ClusterSpec
    objective: Objective
    progress: bool = False
    remote: Mapping[str, RemoteTimer] = field(default_factory=dict)  # by device type: measured there, not here
    makers: Sequence[str] = ()  # of kernels of rewritten operators; none: plans without rewrites are what is measured

    @classmethod
    def of(
        cls,
        prepared: Prepared,
        cluster: ClusterSpec,
        database: MeasuredKernels,
        objective: Objective,
        makers: Sequence[str],
        progress: bool = False,
        remote: Mapping[str, RemoteTimer] | None = None,
    ) -> Campaign:
        """Return the campaign over all candidate kernels of `makers`. Raises NotSupported for a model without graph."""
        makers = makers_on(makers, cluster.device_types())
        candidates = Candidates.of(prepared.operator_graph, candidate_kernels(prepared.operator_graph, makers))
        return cls(prepared, candidates, database, cluster, objective, progress, remote or {}, makers)

    def run(self, budget_s: float) -> ProfileReport:
        """Measure until no unmeasured candidate can change the plan, or until `budget_s` of wall time is spent."""
        started = time.monotonic()
        types = self.cluster.device_types()
        here = {d.name: d for d in local_types([d for d in types if d.name not in self.remote])}
        here |= {d.name: d for d in types if d.name in self.remote}
        away = tuple(sorted({d.name for d in types} - here.keys()))
        report = ProfileReport(candidates=len(set(self.candidates.keys)), unreachable=away)
        alone = {name: self.cluster.with_counts({t: int(t == name) for t in self.cluster.counts()}) for name in here}
        kernels_s, runs_s, all_s = (started + share * budget_s for share in self._shares(here))
        with Profiler(self.prepared, self.candidates, self.database, self.remote) as profiler:
            every = (self.cluster, *alone.values())
            report.complete = self._loop(profiler, here, every, kernels_s, report)
            if report.complete and self.makers:
                report.complete = self._loop_rewritten(profiler, here, every, kernels_s, report)
            if report.complete:
                report.proved = self._loop_lowest(profiler, here, kernels_s, report)
            if report.complete or time.monotonic() < all_s:
                self._measure_context(profiler, here, alone, report)
            if report.complete or time.monotonic() < all_s:
                self._run_plans(profiler, here, runs_s, report)
        if self._may_race(here) and time.monotonic() < all_s:
            race = Race(self.prepared, self.cluster, self.database, self._wanted, self.progress)
            race.run(all_s, report)
        report.skipped = {name: self._num_unmeasured(name) for name in here}
        report.seconds = time.monotonic() - started
        return report

    def _may_race(self, here: Mapping[str, DeviceType]) -> bool:
        """Whether plans can be run as they are: the cluster is one machine, and has the types that this one has.

        What devices of several machines hand over would not cross a network here.
        """
        is_one = sum(node.count for node in self.cluster.nodes if node.num_devices) == 1
        is_here = is_one and not self.remote and len(here) == len(self.cluster.device_types())
        return is_here and bool(self.makers) and takes_races(self._wanted)

    @property
    def _wanted(self) -> Wanted:
        return Wanted(self.objective, self.makers, {}, time_limit_s=_PLAN_LIMIT_S)

    def _shares(self, here: Mapping[str, DeviceType]) -> tuple[float, float, float]:
        """The parts of the budget after which no more kernels are measured, no plans timed call by call, none raced."""
        return (_KERNELS, _RUNS, 1.0) if self._may_race(here) else (1.0, 1.0, 1.0)

    def _loop(
        self,
        profiler: Profiler,
        here: Mapping[str, DeviceType],
        clusters: tuple[ClusterSpec, ...],
        deadline_s: float,
        report: ProfileReport,
    ) -> bool:
        """Plan and measure in turn. Return whether the last plans rest on measurements only."""
        for _ in range(_MAX_ROUNDS):
            if time.monotonic() > deadline_s:
                return False
            plans = [self._plan(c, self.objective) for c in clusters]
            wanted = unmeasured(plans, self.candidates, here)
            if not any(wanted.values()):
                return True
            self._measure(profiler, here, wanted, deadline_s, report)
        return False

    def _loop_lowest(
        self, profiler: Profiler, here: Mapping[str, DeviceType], deadline_s: float, report: ProfileReport
    ) -> bool:
        """Plan at the lowest times and measure what those plans hope most of, in turn, as long as one is better than
        the plan of measurements. Return whether none is.
        """
        for turn in range(_MAX_LOWEST_ROUNDS):
            if time.monotonic() > deadline_s:
                return False
            known = self._plan(self.cluster, self.objective)  # may change with what was measured
            wanted = unmeasured([known], self.candidates, here)
            if not any(wanted.values()):
                lowest = self._plan(self.cluster, self.objective, lowest=True)
                if lowest.objective_value > known.objective_value * (1 - _MIN_GAIN):
                    return True
                share = min(1.0, _SHARE + (1 - _SHARE) * turn / _WHOLE_ROUND)
                wanted = self._hopes(unmeasured([lowest], self.candidates, here), share)
                if not any(wanted.values()):
                    return True
            self._measure(profiler, here, wanted, deadline_s, report)
        return False

    def _hopes(self, wanted: Mapping[str, list[int]], share: float) -> dict[str, list[int]]:
        """Those of some kernels that hold a share of the hope: the seconds from their estimate to its lowest value."""
        table = known_times(self.prepared, self.candidates, self.database, self.cluster, in_context=True)
        hope = {
            (name, i): table.entry(i, name).seconds - table.entry(i, name).low
            for name, ks in wanted.items()
            for i in ks
        }
        left = share * math.fsum(hope.values())
        chosen: dict[str, list[int]] = {name: [] for name in wanted}
        for name, i in sorted(hope, key=lambda pair: (-hope[pair], pair)):
            if share < 1.0 and left <= 0 and any(chosen.values()):
                break
            chosen[name].append(i)
            left -= hope[name, i]
        return chosen

    def _measure(
        self,
        profiler: Profiler,
        here: Mapping[str, DeviceType],
        wanted: Mapping[str, list[int]],
        deadline_s: float,
        report: ProfileReport,
    ) -> None:
        """Measure candidates by device type, and count a round."""
        report.rounds += 1
        profiler.measure(here, wanted, deadline_s, report, self.progress)

    def _loop_rewritten(
        self,
        profiler: Profiler,
        here: Mapping[str, DeviceType],
        clusters: tuple[ClusterSpec, ...],
        deadline_s: float,
        report: ProfileReport,
    ) -> bool:
        """Plan with rewrites and measure in turn. Return whether the last such plans rest on measurements only."""
        for _ in range(_MAX_ROUNDS):
            done = True
            for cluster in clusters:
                if time.monotonic() > deadline_s:
                    return False
                if self._measure_missing(profiler, here, *self._rewritten(cluster), deadline_s, report):
                    done = False
            if done:
                return True
            report.rounds += 1
        return False

    def _rewritten(self, cluster: ClusterSpec, hopeful: bool = False) -> tuple[Plan, Variant]:
        """The best plan for a cluster where operators may be rewritten, and the model it rewrites to."""
        together = self.objective is Objective.THROUGHPUT
        price = partial(
            known_times, database=self.database, cluster=cluster, in_context=True, together=together, hopeful=hopeful
        )
        return Planner(cluster, price, self._wanted).best(variant_of(self.prepared, self.makers, price))

    def _measure_missing(
        self,
        profiler: Profiler,
        here: Mapping[str, DeviceType],
        plan: Plan,
        variant: Variant,
        deadline_s: float,
        report: ProfileReport,
    ) -> bool:
        """Measure what a plan uses on the word of a model. Return whether there was anything."""
        missing = unmeasured([plan], variant.candidates, here)
        of_variant = profiler.on(variant.prepared, variant.candidates)
        of_variant.measure(here, missing, deadline_s, report, self.progress)
        return any(missing.values())

    def _run_plans(
        self, profiler: Profiler, here: Mapping[str, DeviceType], deadline_s: float, report: ProfileReport
    ) -> None:
        """Run the best plans as they are on the CPU types of this machine that the model was run on as a whole."""
        cpus = [here[name] for name in report.factors]
        if not self.makers or not cpus:
            return

        def best(hopeful: bool) -> tuple[Plan, Variant]:
            found = self._rewritten(self.cluster, hopeful)
            if self._measure_missing(profiler, here, *found, deadline_s, report):
                found = self._rewritten(self.cluster, hopeful)
            return found

        def alone(variant: Variant) -> TimeTable:
            return known_times(variant.prepared, variant.candidates, self.database, self.cluster, in_context=False)

        together = self.objective is Objective.THROUGHPUT
        runs = PlanRuns(self.prepared, self.cluster, self.database, profiler, cpus, together)
        runs.run(best, alone, deadline_s, report)

    def _plan(
        self, cluster: ClusterSpec, objective: Objective, *, lowest: bool = False, in_context: bool = True
    ) -> Plan:
        together = objective is Objective.THROUGHPUT
        table = known_times(
            self.prepared, self.candidates, self.database, cluster, in_context=in_context, together=together
        )
        table = table.lowest() if lowest else table
        return make_plan(self.prepared, self.candidates.kernels, table, cluster, objective, {}, _PLAN_LIMIT_S, 0)

    def _measure_context(
        self,
        profiler: Profiler,
        here: Mapping[str, DeviceType],
        alone: Mapping[str, ClusterSpec],
        report: ProfileReport,
    ) -> None:
        """Run the best plan of each type as one stage, alone and then all devices of the cluster at once."""
        cpus = {name: device for name, device in here.items() if device.is_cpu and name not in self.remote}
        models = self._whole_models(cpus, alone)
        found = {name: self._run_alone(profiler, model, report) for name, model in models.items()}
        alone_s = {name: seconds for name, seconds in found.items() if seconds is not None}
        together = [m for name, count in self.cluster.counts().items() if (m := models.get(name)) for _ in range(count)]
        if beside(len(together) - 1) == company(self.cluster) and all(m.device.name in alone_s for m in together):
            self._run_together(together, [alone_s[m.device.name] for m in together], report)

    def _whole_models(
        self, types: Mapping[str, DeviceType], alone: Mapping[str, ClusterSpec]
    ) -> dict[str, CompiledStage]:
        """The best plan of each type by itself, compiled, where it is one stage."""
        plans = {name: self._plan(alone[name], Objective.LATENCY, in_context=False) for name in types}
        whole = {name: plan for name, plan in plans.items() if len(plan.stages) == 1}
        cache, compiled = StageCache(default_cache_dir()), {}
        compile_plans(self.prepared, list(whole.values()), self.cluster, cache)
        for name, plan in whole.items():
            program = deploy(self.prepared, plan, alone[name], cache)
            assert isinstance(program, PipelineProgram)
            compiled[name] = CompiledStage(types[name], plan.stages[0], program)
        return compiled

    def _run_alone(self, profiler: Profiler, model: CompiledStage, report: ProfileReport) -> float | None:
        """Keep what all kernels take inside the model, and each of them; return the sum in seconds."""
        device, kernels = model.device, model.stage.kernels
        run = profiler.time(device, model.job)
        if run.status != "ok":
            report.failed.append(f"the whole model on {device.name}: {run.status} {run.note}".strip())
            return None
        keep_context(self.database, self.prepared.key, device, (sum(run.times_s),), model.stage.compute_s)
        report.factors[device.name] = context_factor(self.database, self.prepared.key, device)
        if len(kernels) == len(run.times_s):
            alone_s = [p.time_s for p in model.stage.predictions]
            ops = [k.ops for k in kernels]
            keep_operators(self.database, self.prepared.key, device, ops, run.times_s, alone_s)
            wanted = self.candidates.indices(kernels)
            keys = [self.candidates.keys[i] for i in wanted]
            keep_run(self.database, self.prepared.key, device, keys, run.times_s, alone_s)
            profiler.keep_inside(device, wanted, run.times_s)
        return sum(run.times_s)

    def _run_together(self, models: Sequence[CompiledStage], alone_s: Sequence[float], report: ProfileReport) -> None:
        runs = run_together(models, alone_s)
        if runs is None:
            return
        if failed := [
            f"{m.device.name}: {r.status} {r.note}" for m, r in zip(models, runs, strict=True) if not r.times_s
        ]:
            report.failed.append(f"the whole model on all devices at once: {failed[0]}".strip())
            return
        part = company(self.cluster)
        stage_of = {m.device.name: m for m in models}
        for name, whole_s in by_type(models, runs).items():
            device, sum_s = stage_of[name].device, stage_of[name].stage.compute_s
            keep_context(self.database, self.prepared.key, device, whole_s, sum_s, part)
            report.together[name] = context_factor(self.database, self.prepared.key, device, part)

    def _num_unmeasured(self, device_type: str) -> int:
        table = known_times(self.prepared, self.candidates, self.database, self.cluster, in_context=False)
        distinct = {key: i for i, key in enumerate(self.candidates.keys)}
        return sum(table.entry(i, device_type).source not in MEASURED for i in distinct.values())
