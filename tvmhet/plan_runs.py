"""Run the best plan as it is, every call of it timed, until what its kernels took there no longer changes the plan.

    the best plan where kernels that never ran so are as fast as can be hoped ─► run it ─► again, until it has run
    the best plan                                                             ─► run it ─► again, until it has run

Kernels alone are no word on kernels in a plan: their weights come from memory or, in a short stage, from the cache, and
other devices work beside them (`tvmhet.context`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.context import beside, company, keep_run
from tvmhet.cost.measure import Measurement
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.cost.table import MEASURED, TimeTable
from tvmhet.deploy import deploy
from tvmhet.emit.cache import StageCache, default_cache_dir
from tvmhet.ir.prepare import Prepared
from tvmhet.plans import Plan
from tvmhet.profiling import Profiler, ProfileReport
from tvmhet.proposing import Variant
from tvmhet.runtime.program import PipelineProgram
from tvmhet.whole_runs import CompiledStage, run_together

_MAX_RUNS = 8

Best = Callable[[bool], tuple[Plan, Variant]]  # the best plan; if true, by what can be hoped of kernels that never ran


@dataclass(frozen=True, slots=True)
class PlanRuns:
    """Runs plans of one model for one cluster on the CPU types in `here`: all stages at once, or one by one."""

    prepared: Prepared
    cluster: ClusterSpec
    database: MeasuredKernels
    profiler: Profiler
    here: Sequence[DeviceType]
    together: bool

    def run(self, best: Best, alone: Callable[[Variant], TimeTable], deadline_s: float, report: ProfileReport) -> None:
        """Run plans and keep what their kernels took, beside what `alone` says, until `deadline_s` (monotonic clock).

        One plan is run in any case.
        """
        ran: set[Hashable] = set()
        for _ in range(_MAX_RUNS):
            new = next(((p, v) for p, v in map(best, (True, False)) if _stages_of(p) not in ran), None)
            if new is None or (ran and time.monotonic() > deadline_s):
                return
            ran.add(_stages_of(new[0]))
            report.plans_run += self._run(*new, alone(new[1]), report)

    def _run(self, plan: Plan, variant: Variant, alone: TimeTable, report: ProfileReport) -> bool:
        """Run one plan and keep what it took. Return whether every stage ran as it is meant to, call by call."""
        types = {device.name: device for device in self.here}
        program = deploy(self.prepared, plan, self.cluster, StageCache(default_cache_dir()))
        assert isinstance(program, PipelineProgram)
        stages = [
            CompiledStage(types[s.placement.device_type], s, program)
            for s in plan.stages
            if s.placement.device_type in types
        ]
        runs, kept = self._time(stages), 0
        for stage, run in runs:
            if run.status != "ok":
                report.failed.append(f"a stage on {stage.device.name}: {run.status} {run.note}".strip())
            elif len(run.times_s) == len(stage.stage.kernels):
                self._keep(stage, run, variant, alone)
                kept += 1
        return 0 < kept == len(runs)

    def _time(self, stages: Sequence[CompiledStage]) -> list[tuple[CompiledStage, Measurement]]:
        """Every call of each stage; nothing where the plan does not keep all devices at work, one stage each."""
        if not self._part:
            return [(stage, self.profiler.time(stage.device, stage.job)) for stage in stages]
        each = [stage for stage in stages for _ in stage.stage.placement.devices]
        devices = Counter(name for stage in stages for name in stage.stage.placement.devices)
        if beside(len(each) - 1) != self._part or any(count > 1 for count in devices.values()):
            return []
        found = run_together(each, [stage.stage.compute_s for stage in each], calls=True)
        return list(zip(each, found, strict=True)) if found is not None else []

    @property
    def _part(self) -> str:
        return company(self.cluster) if self.together else ""

    def _keep(self, stage: CompiledStage, run: Measurement, variant: Variant, alone: TimeTable) -> None:
        """Keep what the kernels of a stage took, beside what they take alone, of those of which that is measured."""
        indices = variant.candidates.indices(stage.stage.kernels)
        found = [(i, alone.entry(i, stage.device.name), took_s) for i, took_s in zip(indices, run.times_s, strict=True)]
        known = [
            (variant.candidates.keys[i], took_s, entry.seconds)
            for i, entry, took_s in found
            if entry.source in MEASURED
        ]
        if known:
            keys, inside_s, alone_s = zip(*known, strict=True)
            keep_run(self.database, self.prepared.key, stage.device, keys, inside_s, alone_s, self._part)


def _stages_of(plan: Plan) -> Hashable:
    """What makes two plans the same to run."""
    return plan.rewrites, tuple(stage.placement for stage in plan.stages)
