"""MetaSchedule's evolutionary search over the schedules of one function, ranked by TVM's XGBModel.

    past trials ─► database, cost model ─► propose: 16 schedules ─► (measured elsewhere) ─► tell ─► propose: ...

The model's score is relative: it orders the schedules of one function and is never taken for a time. One model is
shared by all functions of a device type; it guesses at random until it has seen `WARMUP_TRIALS`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm

from tvmhet import _tvm
from tvmhet.cost.tuning_store import Trial
from tvmhet.emit.lower import make_target
from tvmhet.emit.tuned import function_hash
from tvmhet.graph.schedule import TunedSchedule
from tvmhet.tuning.workload import Workload

#: Trials of a device type before the model's order is believed; XGBModel's own default, 100, is for larger budgets.
WARMUP_TRIALS = 32
# Small against TVM's 512 and 4: a population is scored on one core here, 1 to 2 CPU s instead of 20.
_POPULATION, _GENERATIONS = 64, 2


def ranking_model() -> Any:
    """Return a new XGBModel over per-store features, for all functions of one device type."""
    return _tvm.meta_schedule.cost_model.XGBModel(num_warmup_samples=WARMUP_TRIALS, num_tuning_cores=1)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A schedule to try, and TVM's own object for it."""

    schedule: TunedSchedule
    candidate: Any


class ScheduleSearch:
    """The search of one workload. `past` are its earlier trials: they seed the population and teach the model."""

    def __init__(self, workload: Workload, model: Any, seed: int, past: Sequence[Trial]) -> None:
        self._function = function_hash(workload.function)
        self._mod = tvm.IRModule({"main": workload.function.with_attr("global_symbol", "main")})
        self._target = make_target(workload.device.target)
        self._model, self._seed = model, seed
        self._known = {t.schedule.digest for t in past}
        self._database = _tvm.meta_schedule.database.MemoryDatabase()
        self._context = _tvm.tune_context(
            self._mod, self._target, seed=seed, population=_POPULATION, generations=_GENERATIONS
        )
        self._spaces = self._context.generate_design_space()
        self._started = False
        proposals = [Proposal(t.schedule, self._candidate(t.schedule)) for t in past]
        self._learn(proposals, [_seconds(t) for t in past])

    def propose(self, count: int) -> list[Proposal]:
        """Return up to `count` schedules that were not tried; none when the space is exhausted."""
        if not self._started:
            self._context.pre_tuning(1 << 30, count, self._spaces, self._database, self._model)
            self._started = True
        with _seeded(self._seed + len(self._known)):
            found = self._context.generate_measure_candidates() or []
        proposals = [Proposal(self._schedule(c.sch.trace), c) for c in found]
        fresh = {p.schedule.digest: p for p in proposals if p.schedule.digest not in self._known}
        if stale := [p for p in proposals if p.schedule.digest in self._known]:  # the search must hear of each
            self._notify(stale, [None] * len(stale))
        return list(fresh.values())

    def tell(self, proposals: Sequence[Proposal], trials: Sequence[Trial]) -> None:
        """Report what became of proposals."""
        seconds = [_seconds(t) for t in trials]
        self._notify(proposals, seconds)
        self._learn(proposals, seconds)
        self._known |= {p.schedule.digest for p in proposals}

    def close(self) -> None:
        """End the search."""
        if self._started:
            self._context.post_tuning()
            self._started = False

    def _notify(self, proposals: Sequence[Proposal], seconds: Sequence[float | None]) -> None:
        self._context.notify_runner_results([p.candidate for p in proposals], [_result(s) for s in seconds])

    def _learn(self, proposals: Sequence[Proposal], seconds: Sequence[float | None]) -> None:
        if not proposals:
            return
        workload = self._database.commit_workload(self._mod)
        record = _tvm.meta_schedule.database.TuningRecord
        for p, s in zip(proposals, seconds, strict=True):
            if s is not None:
                c = p.candidate
                self._database.commit_tuning_record(record(c.sch.trace, workload, [s], self._target, c.args_info))
        self._model.update(self._context, [p.candidate for p in proposals], [_result(s) for s in seconds])

    def _schedule(self, trace: Any) -> TunedSchedule:
        return TunedSchedule(self._function, _tvm.trace_json(trace))

    def _candidate(self, schedule: TunedSchedule) -> Any:
        return _tvm.measure_candidate(self._mod, json.loads(schedule.trace))


def _seconds(trial: Trial) -> float | None:
    """The shortest run: what disturbs a run only makes it longer."""
    return trial.run.min_s if trial.run.status == "ok" else None


def _result(seconds: float | None) -> Any:
    runner_result = _tvm.meta_schedule.runner.RunnerResult
    return runner_result(None, "failed") if seconds is None else runner_result([seconds], None)


class _seeded:  # noqa: N801  (used as a function)
    """Draw from numpy's global generator, as XGBModel does before it is warm, from a seed of ours; then put it back."""

    def __init__(self, seed: int) -> None:
        self._seed = seed % (1 << 32)

    def __enter__(self) -> None:
        self._state = np.random.get_state()
        np.random.seed(self._seed)

    def __exit__(self, *_: object) -> None:
        np.random.set_state(self._state)
