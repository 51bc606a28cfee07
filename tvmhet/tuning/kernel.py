"""One kernel under tuning on one device type: propose, try, store; compare the best with the rule's kernel.

trial (short, noisy) ─► faster than what is known? ─► timed in turn with the rule's kernel ─► kept if faster
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tvmhet.cost.measure import Measurement
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.cost.tuning_store import Trial, TuningStore, scheduled_key
from tvmhet.tuning.allocate import Curve
from tvmhet.tuning.search import ScheduleSearch
from tvmhet.tuning.trial import TrialRunner
from tvmhet.tuning.workload import NotTunable, Workload

BATCH = 8  # trials of one kernel before the next is chosen
_COMPARISONS = 3


@dataclass(frozen=True, slots=True)
class Bench:
    """What the kernels of one device type share: where trials are kept and run, and the model that ranks them."""

    store: TuningStore
    runner: TrialRunner
    model: Any
    database: MeasuredKernels


class TunedWorkload:
    """A workload, its trials of this and earlier runs, and what is known of its time.

    Raises NotTunable if the kernel cannot be timed as the rules make it.
    """

    def __init__(self, workload: Workload, bench: Bench, seed: int) -> None:
        self.workload, self._bench = workload, bench
        rules = bench.runner.rules(workload)
        bench.database.insert(workload.key, rules)
        if rules.status != "ok":
            raise NotTunable(f"by the rules it ends in {rules.status} {rules.note}")
        self._trials = list(bench.store.trials(workload.key, workload.function_hash))
        self.num_earlier = len(self._trials)
        self.num_new = 0
        self.stale: Counter[str] = bench.store.stale(workload.key, workload.function_hash)
        self._best_s = rules.min_s  # the shortest run of the rule's kernel, or of a schedule that was compared
        kept = bench.store.kept(workload.key).get(workload.key.kernel_hash, ())
        self._compared = {s.digest for s in kept}
        self._search = ScheduleSearch(workload, bench.model, seed + self.num_earlier, self._trials)
        self._compare_best()

    def batch(self, count: int, deadline_s: float) -> list[Measurement]:
        """Try up to `count` new schedules until `deadline_s` (monotonic clock), at least one; none: all are known."""
        proposals = self._search.propose(BATCH)[:count]
        done: list[Trial] = []
        for proposal in proposals:
            if done and time.monotonic() > deadline_s:
                break
            trial = Trial(proposal.schedule, self._bench.runner.try_schedule(self.workload, proposal.schedule))
            self._bench.store.add(self.workload.key, trial)
            done.append(trial)
        self._search.tell(proposals[: len(done)], done)
        self._trials += done
        self.num_new += len(done)
        self._compare_best()
        return [t.run for t in done]

    def rules_s(self) -> float:
        """The median seconds of the kernel as the rules make it."""
        seconds = self._bench.database.median_s(self.workload.key)
        assert seconds is not None
        return seconds

    def known_s(self) -> float:
        """The median seconds of the best known form of the kernel."""
        keys = [scheduled_key(self.workload.key, t.schedule) for t in self._trials]
        tuned = [s for key in keys if (s := self._bench.database.median_s(key)) is not None]
        return min([self.rules_s(), *tuned])

    def curve(self, floor_s: float) -> Curve:
        """The curve that earlier runs have drawn, one point a batch; it ends in what is known now."""
        curve = Curve((self.rules_s(),), floor_s)
        for start in range(0, len(self._trials) - BATCH + 1, BATCH):
            batch = self._trials[start : start + BATCH]
            curve = curve.after([t.run.min_s for t in batch if t.run.status == "ok"])
        return Curve((*curve.best_s[:-1], min(curve.now_s, self.known_s())), floor_s)

    def close(self) -> None:
        """End the search."""
        self._search.close()

    def _compare_best(self) -> None:
        """Time the fastest schedule that was not compared yet in turn with the rule's kernel; keep it if faster."""
        fresh = [t for t in self._trials if t.run.status == "ok" and t.schedule.digest not in self._compared]
        best = min(fresh, key=lambda t: t.run.min_s, default=None)
        if best is None or best.run.min_s >= self._best_s:
            return
        self._compared.add(best.schedule.digest)
        database, runner, key = self._bench.database, self._bench.runner, self.workload.key
        tuned = scheduled_key(key, best.schedule)
        for _ in range(_COMPARISONS):
            rules = runner.rules(self.workload)
            run = runner.try_schedule(self.workload, best.schedule)
            if run.status != "ok":  # sound once and not now: not a schedule to build on
                return
            database.insert(key, rules)
            database.insert(tuned, run)
            self._best_s = min(self._best_s, run.min_s)
        tuned_s = database.median_s(tuned)
        assert tuned_s is not None
        if tuned_s < self.rules_s():
            self._bench.store.keep(key, best.schedule)
