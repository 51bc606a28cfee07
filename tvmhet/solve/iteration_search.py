"""`solve_iteration`: micro-batch size, schedule, stages, devices, replicas and recomputation for one iteration.

    each micro-batch size: coarse search ──► the best sizes: fine search, cuts refined ──► interleaved chunks, two waves
                                                      └─► closed forms ──► best, with its bound

Tiny problems are also searched exhaustively (iteration_exact.py), so that the answer is proved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import numpy as np

from tvmhet.solve.infeasible import no_kernel_reason
from tvmhet.solve.iteration import IterationProblem, IterationSolution
from tvmhet.solve.iteration_bound import iteration_bound_s
from tvmhet.solve.iteration_candidate import Candidate, Choose, infeasible, solution_of
from tvmhet.solve.iteration_chunks import chunk_placings
from tvmhet.solve.iteration_cuts import COARSE, StageSearch
from tvmhet.solve.iteration_exact import all_placings, few_plans
from tvmhet.solve.iteration_mend import training_reason
from tvmhet.solve.iteration_mixed import mixed_placings, whole_placings
from tvmhet.solve.iteration_option_bound import least_work_s, option_bound_s
from tvmhet.solve.iteration_tables import IterationTables
from tvmhet.solve.iteration_value import passes_s
from tvmhet.solve.iteration_waves import wave_placings
from tvmhet.solve.iteration_ways import KernelWays, TooManyWays
from tvmhet.solve.schedules import Schedule
from tvmhet.solve.solution import Status

_LISTED = 12_000  # up to so many plans per micro-batch size are all tried ...
_LISTED_INTERLEAVED = 100_000  # ... and in all, with those of several stages on a device
_PROVED = 1e-6
_NO_PLAN = "memory and device counts together: the model and its training state do not fit"
_NO_RING = (
    "schedule: no interleaved plan exists: it takes two or more devices, micro-batches that they divide evenly, "
    "two stages on each, and memory for their stashes; allow the schedule 1f1b too"
)
_FINE_OPTIONS = 2  # micro-batch sizes that get the fine search
_SHIFTED = 4  # plans whose cuts are moved
_RAISED = 3  # micro-batch sizes whose bound is raised by linear programs ...
_FAR = 0.02  # ... where it is at least so far from the best plan


def solve_iteration(
    problem: IterationProblem,
    *,
    max_steps: int = 60_000_000,
    time_limit_s: float = 30.0,
    choose: Choose | None = None,
    explain: bool = True,
) -> IterationSolution:
    """Return the best plan found for one iteration, its lower bound and its status.

    Work is counted in steps, so that the answer does not depend on the machine; `time_limit_s` is the second limit,
    checked between searches. Infeasible problems come back with the binding constraint and a mend as `reason`. The best
    is that with the shortest closed form, or what `choose` says. Without `explain` no mend is sought.
    """
    if reason := no_kernel_reason(problem.options[0].forward):
        return infeasible(reason)
    stages = StageSearch(problem, max_steps, time.monotonic() + time_limit_s)
    search = _Search(problem, stages)
    best = search.run()
    if best is None and problem.schedules == (Schedule.INTERLEAVED,):
        plain = replace(problem, schedules=(Schedule.ONE_F_ONE_B,))
        if StageSearch(plain, max_steps, math.inf).any():
            return infeasible(_NO_RING)
    if best is None and not explain:
        return infeasible(_NO_PLAN)
    if best is None:
        return infeasible(
            training_reason(problem, lambda changed: bool(StageSearch(changed, max_steps, math.inf).any()))
        )
    if explain:
        search.raise_bound(best)
    least_s = search.lower_s
    if choose is not None:
        best, chosen_of_all = choose([best, *stages.found])
        least_s = math.inf if chosen_of_all else least_s
    lower = min(least_s, best.value.iteration_s)
    proved = best.value.iteration_s - lower <= _PROVED * best.value.iteration_s
    return solution_of(problem, best, lower, Status.OPTIMAL if proved else Status.FEASIBLE, stages.steps)


class _Search:
    """One run over one problem; keeps the bound."""

    def __init__(self, problem: IterationProblem, stages: StageSearch) -> None:
        self.problem, self.stages = problem, stages
        self.lower_s = 0.0
        self._bounds: list[float] = []  # of each option; none where all plans were listed

    def run(self) -> Candidate | None:
        problem = self.problem
        bounds = [option_bound_s(problem, o, self.stages.graphs(o)) for o in range(len(problem.options))]
        found: dict[int, Candidate] = {}
        best = min(self._mixed(), key=lambda c: c.key, default=None)
        for option in sorted(range(len(bounds)), key=lambda o: (bounds[o], o)):
            if (best and bounds[option] >= best.value.iteration_s) or (found and self.stages.spent()):
                continue  # one size at least is searched, whatever the limits
            for graph in self.stages.graphs(option)[:1]:
                upper = best.value.iteration_s * 1.2 if best else math.inf
                better = self.stages.coarse(option, graph, upper)
                if better:
                    found[option] = better
                    best = min((c for c in (best, better) if c), key=lambda c: c.key)
        for option in sorted(found, key=lambda o: found[o].key)[:_FINE_OPTIONS]:
            for mix in (True, False)[: 1 + problem.may_mix]:
                for candidate in self.stages.fine(option, best.value.iteration_s if best else math.inf, mix):
                    best = min(best or candidate, candidate, key=lambda c: c.key)
        for candidate in self.stages.shifted(_SHIFTED):
            best = min(best or candidate, candidate, key=lambda c: c.key)
        for candidate in self._interleaved(best):
            best = min(best or candidate, candidate, key=lambda c: c.key)
        for candidate in self._two_waves(best):
            best = min(best or candidate, candidate, key=lambda c: c.key)
        exact = self._exhaustive(best)
        if exact is not None:
            self.lower_s = exact.value.iteration_s
            return exact
        self._bounds = [max(b, self.stages.exact.get(o, 0.0)) for o, b in enumerate(bounds)]
        self.lower_s = min(self._bounds)
        return best

    def raise_bound(self, best: Candidate) -> None:
        """Raise the bounds of the micro-batch sizes that hold the whole bound down, by linear programs.

        Of one size at least, whatever the limits; after the time limit only by quick ones.
        """
        upper_s = best.value.iteration_s
        tried: set[int] = set()
        while self._bounds and len(tried) < _RAISED and not (tried and self.stages.spent()):
            option = min(range(len(self._bounds)), key=lambda o: (self._bounds[o], o))
            if option in tried or self._bounds[option] > (1 - _FAR) * upper_s:
                break
            tried.add(option)
            work_s, late = least_work_s(self.problem, option), self.stages.late()
            raised = iteration_bound_s(self.problem, option, work_s, upper_s, quick=late)
            self._bounds[option] = max(self._bounds[option], raised)
            self.lower_s = max(self.lower_s, min(self._bounds))

    def _interleaved(self, best: Candidate | None) -> Iterator[Candidate]:
        """Plans with several chunks per device, on the state graph's cuts, for the sizes near the best."""
        problem = self.problem
        if Schedule.INTERLEAVED not in problem.schedules or problem.most_chunks < 2:
            return
        near = range(len(problem.options)) if best is None else sorted(
            range(len(problem.options)), key=lambda o: (abs(o - best.option), o))[:3]  # fmt: skip
        for option in near:
            for graph in self.stages.graphs(option)[:1]:
                if self.stages.spent():
                    return
                tables = self.stages.tables(option, graph, COARSE)
                upper_s = best.value.iteration_s if best else math.inf
                for placings in chunk_placings(tables, best.placings if best else (), upper_s):
                    self.stages.steps += len(tables.cuts) * len(placings)
                    if best and passes_s(problem, option, placings, Schedule.INTERLEAVED) > best.value.iteration_s:
                        continue
                    if c := self.stages.judge(option, placings, Schedule.INTERLEAVED, "interleaved chunks"):
                        yield c

    def _two_waves(self, best: Candidate | None) -> Iterator[Candidate]:
        """Plans of three stages or more with two waves, where they could be faster than `best`: memory binds there."""
        problem = self.problem
        for option in range(len(problem.options)) if Schedule.WAVELET in problem.schedules else ():
            for graph in self.stages.graphs(option)[:1]:
                if self.stages.spent():
                    return
                tables = self.stages.tables(option, graph, COARSE)
                upper_s = best.value.iteration_s if best else math.inf
                for placings in wave_placings(tables, best.placings if best else (), upper_s):
                    self.stages.steps += len(tables.cuts) * len(placings)
                    if c := self.stages.judge(option, placings, Schedule.WAVELET, "two waves"):
                        best = min(best or c, c, key=lambda x: x.key)
                        yield c

    def _mixed(self) -> Iterator[Candidate]:
        """The whole model on one group, or on unlike groups with unlike shares of the micro-batches."""
        if Schedule.ONE_F_ONE_B not in self.problem.schedules:
            return
        least_s = [math.inf]  # of those found so far
        for option in range(len(self.problem.options)):
            for graph in self.stages.graphs(option)[:1]:
                tables = self.stages.whole(option, graph)
                unlike = mixed_placings(tables, lambda: least_s[0]) if self.problem.may_mix else iter(())
                for placings in chain(whole_placings(tables), unlike):
                    self.stages.steps += len(placings)
                    name = "replicas on unlike types" if len(placings) > 1 else "replicas of the whole model"
                    if c := self.stages.judge(option, placings, Schedule.ONE_F_ONE_B, name):
                        least_s[0] = min(least_s[0], c.value.iteration_s)
                        yield c

    def _exhaustive(self, best: Candidate | None) -> Candidate | None:
        """Return the best of all plans, proved, where they are few enough to be listed; else None."""
        problem = self.problem
        for option in range(len(problem.options)):
            if any(not g.full or g.num_states > 40 for g in self.stages.graphs(option)):
                return None
        every = [
            KernelWays(IterationTables(problem, option, graph, np.arange(graph.num_states, dtype=np.int32)))
            for option in range(len(problem.options))
            for graph in self.stages.graphs(option)
        ]
        try:
            if not all(few_plans(ways, _LISTED) for ways in every):
                return None
            plans = ((ways.tables.option, *plan) for ways in every for plan in all_placings(ways))
            for number, (option, schedule, placings) in enumerate(plans):
                self.stages.steps += 1
                if number >= _LISTED_INTERLEAVED or self.stages.spent():
                    return None
                if best and passes_s(problem, option, placings, schedule) > best.value.iteration_s:
                    continue
                c = self.stages.judge(option, placings, schedule, "exhaustive")
                if c and (best is None or c.key < best.key):
                    best = c
        except TooManyWays:
            return None
        return best
