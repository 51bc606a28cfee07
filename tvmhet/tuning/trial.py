"""Try schedules: compile in one process, run in another, compare results with the rule's kernel.

    schedule ─► compiler process (time limit) ─► library ─► timer process on the device's cores, or a server's
                     │ error, timeout                          │ crash, timeout, wrong
                     └────────────► a trial with its status ◄──┘

Both take the way that a plan's stages take, so what is timed here is what a build emits.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import tvm

from tvmhet.cost.measure import KernelJob, KernelTimer, Measurement, TimerLimits
from tvmhet.cost.measure_rpc import RemoteTimer
from tvmhet.emit.compiler import CompilerProcess
from tvmhet.graph.schedule import TunedSchedule
from tvmhet.tuning.workload import Workload

#: Of a trial: short, because most are thrown away. A schedule that runs this long is no use.
TRIAL_LIMITS = TimerLimits(repeats=7, min_total_s=0.003, budget_s=0.2, time_limit_s=20.0)
_COMPILE_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Prepared:
    module: Path
    rules: Path  # the library of the rule's kernel


class TrialRunner:
    """Compiles and runs schedules of workloads of one device type. A context manager."""

    def __init__(self, timer: KernelTimer | RemoteTimer, compiler: CompilerProcess) -> None:
        self._timer, self._compiler = timer, compiler
        self._folder = tempfile.TemporaryDirectory(prefix="tvmhet-tune-")
        self._ready: dict[str, _Prepared | Measurement] = {}
        self._number = 0

    def rules(self, workload: Workload) -> Measurement:
        """Time the kernel as the rules make it."""
        ready = self._prepare(workload)
        return ready if isinstance(ready, Measurement) else self._run(workload, ready.rules, None)

    def try_schedule(self, workload: Workload, schedule: TunedSchedule) -> Measurement:
        """Time a schedule, its results compared with the rule's kernel."""
        return self._try(workload, schedule, rounds=0)[0]

    def compare(self, workload: Workload, schedule: TunedSchedule, rounds: int) -> list[Measurement]:
        """Time the rule's kernel and a schedule in turn: [rules, schedule, rules, ...]; fewer if one fails."""
        return self._try(workload, schedule, rounds)

    def _try(self, workload: Workload, schedule: TunedSchedule, rounds: int) -> list[Measurement]:
        ready = self._prepare(workload)
        if isinstance(ready, Measurement):
            return [ready]
        self._number += 1
        library = Path(self._folder.name) / f"{self._number}.so"
        problem = self._compile(ready.module, workload, library, {schedule.function: schedule.trace})
        if problem is not None:
            return [problem]
        runs: list[Measurement] = []
        ways = ((ready.rules, None), (library, ready.rules)) * rounds or ((library, ready.rules),)
        for way, reference in ways:
            runs.append(self._run(workload, way, reference))
            if runs[-1].status != "ok":
                break
        library.unlink(missing_ok=True)
        return runs

    def close(self) -> None:
        """Remove what was compiled; timer and compiler are the caller's."""
        self._folder.cleanup()

    def __enter__(self) -> TrialRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self, workload: Workload) -> _Prepared | Measurement:
        """Save the workload's module and compile it by the rules, once."""
        key = workload.key.kernel_hash
        if key not in self._ready:
            module = Path(self._folder.name) / f"{key}.json"
            module.write_text(tvm.ir.save_json(workload.module))
            library = module.with_suffix(".so")
            problem = self._compile(module, workload, library, {})
            self._ready[key] = problem or _Prepared(module, library)
        return self._ready[key]

    def _compile(self, module: Path, workload: Workload, library: Path, traces: dict[str, str]) -> Measurement | None:
        answer = self._compiler.compile(
            module, workload.device.target, library, traces=traces, limit_s=_COMPILE_LIMIT_S
        )
        if answer.status == "ok":
            return None
        return Measurement("timeout" if answer.status == "timeout" else "build_error", note=answer.text[:300])

    def _run(self, workload: Workload, library: Path, reference: Path | None) -> Measurement:
        return self._timer.measure(KernelJob(library, workload.args, "k0", reference, workload.tolerance))
