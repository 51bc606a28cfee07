"""One kernel under tuning on one device type: propose, try, store; compare the best with the rule's kernel.

trial (short, noisy) ─► faster than what is known? ─► timed in turn with the rule's kernel ─► kept if faster
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvmhet.cost.measure import Measurement
from tvmhet.cost.measured import KernelKey, MeasuredKernels
from tvmhet.cost.tuning_store import Trial, TuningStore, scheduled_key
from tvmhet.tuning.search import ScheduleSearch
from tvmhet.tuning.trial import TrialRunner
from tvmhet.tuning.workload import NotTunable, Workload

BATCH = 8  # trials of one kernel before the next is chosen
_COMPARISONS = 3  # of a new schedule and the rule's, in turn


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
        self.num_stale = len(bench.store.trials(workload.key)) - len(self._trials)  # of another function
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

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Every trial, of earlier runs too, oldest first."""
        return tuple(self._trials)

    def rules_s(self) -> float:
        """The median seconds of the kernel as the rules make it."""
        return self.curve_s()[0]

    def known_s(self) -> float:
        """The median seconds of the best known form of the kernel."""
        return self.curve_s()[-1]

    def curve_s(self) -> list[float]:
        """Return the best seconds by the rules, and after each batch; see `curve_s`."""
        curve = curve_s(self._bench.database, self.workload.key, self._trials)
        assert curve is not None
        return curve

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
        database, key = self._bench.database, self.workload.key
        tuned = scheduled_key(key, best.schedule)
        runs = self._bench.runner.compare(self.workload, best.schedule, _COMPARISONS)
        if any(run.status != "ok" for run in runs):  # sound once and not now: not a schedule to build on
            return
        for rules, run in zip(runs[::2], runs[1::2], strict=True):
            database.insert(key, rules)
            database.insert(tuned, run)
            self._best_s = min(self._best_s, run.min_s)
        tuned_s = database.median_s(tuned)
        assert tuned_s is not None
        if tuned_s < self.rules_s():
            self._bench.store.keep(key, best.schedule)


def curve_s(database: MeasuredKernels, kernel: KernelKey, trials: Sequence[Trial]) -> list[float] | None:
    """Return the best seconds of a kernel by the rules, then after each batch of its trials; None if never measured.

    The last is the median of the best form that was compared with the rule's kernel.
    """
    rules_s = database.median_s(kernel)
    if rules_s is None:
        return None
    curve = [rules_s]
    for start in range(0, len(trials) - BATCH + 1, BATCH):
        batch = [t.run.min_s for t in trials[start : start + BATCH] if t.run.status == "ok"]
        curve.append(min([curve[-1], *batch]))
    tuned = (database.median_s(scheduled_key(kernel, t.schedule)) for t in trials)
    known_s = min([rules_s, *(s for s in tuned if s is not None)])
    if len(curve) == 1 and known_s < rules_s:
        curve.append(known_s)
    return [max(s, known_s) for s in curve[:-1]] + [known_s]  # a trial's shortest run may be below any median
