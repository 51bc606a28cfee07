"""The plan of an iteration whose simulated run is the shortest, where stages that wait for each other take longer.

    search by closed forms ──► simulate the best few: each while its closed form is below the best run so far
                                     └─► small problems: list every other plan whose closed form is below it, too

A plan counts as the longer of its closed form and its simulated run, so its closed form is a bound on what it counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from tvmhet._passes import passes_func
from tvmhet.solve.iteration import IterationProblem, IterationSolution
from tvmhet.solve.iteration_candidate import Candidate, judge, linear_schedules, solution_of
from tvmhet.solve.iteration_cuts import COARSE
from tvmhet.solve.iteration_graphs import is_plain, is_roomy, state_graphs
from tvmhet.solve.iteration_search import solve_iteration
from tvmhet.solve.iteration_tables import IterationTables
from tvmhet.solve.schedules import Schedule
from tvmhet.solve.simulate_training import simulated_s
from tvmhet.solve.solution import Status

_MOST_PASSES = 48_000  # simulated beyond the first plan, in all
_MOST_PLANS, _MOST_STEPS = 2000, 400_000  # listed for a micro-batch size


def solve_simulated(
    problem: IterationProblem, *, max_steps: int = 60_000_000, time_limit_s: float = 30.0, explain: bool = True
) -> IterationSolution:
    """As `solve_iteration`, with plans compared by what they count. `lower_bound_s` holds for that."""
    return solve_iteration(
        problem, max_steps=max_steps, time_limit_s=time_limit_s, choose=_Choice(problem).of, explain=explain
    )


class _Choice:
    """The best plan by what it counts, as far as it was looked for."""

    def __init__(self, problem: IterationProblem) -> None:
        self.problem = problem
        self.best: Candidate | None = None
        self.counts_s = math.inf
        self.passes = 0
        self.seen: set[tuple[object, ...]] = set()

    def of(self, found: Sequence[Candidate]) -> tuple[Candidate, bool]:
        """Return the best of `found` and of what is listed, and whether no plan counts less."""
        self._look(found)
        listed = {Schedule.ONE_F_ONE_B, Schedule.GPIPE}
        exact = not self.problem.may_mix and set(self.problem.schedules) <= listed
        for option in range(len(self.problem.options)):
            exact = self._list(option) and exact
        assert self.best is not None, "at least one plan was found"
        return self.best, exact

    def _look(self, found: Iterable[Candidate]) -> bool:
        """Simulate, the shortest first; return whether all that could be better were."""
        for c in sorted(found, key=lambda c: c.key):
            if c.value.iteration_s >= self.counts_s * (1 - 1e-9):
                break
            key = (c.option, c.schedule, c.placings)
            if key in self.seen:
                continue
            passes = 2 * len(c.placings) * self.problem.num_microbatches(c.option)
            if self.best is not None:
                if self.passes + passes > _MOST_PASSES:
                    return False
                self.passes += passes
            self.seen.add(key)
            ran_s = simulated_s(self.problem, solution_of(self.problem, c, 0.0, Status.FEASIBLE, 0))
            counts = max(c.value.iteration_s, ran_s)
            if counts < self.counts_s * (1 - 1e-9):
                self.best, self.counts_s = c, counts
        return True

    def _list(self, option: int) -> bool:
        """Look at every plan of a micro-batch size; return whether none that could be better is missing."""
        problem = self.problem
        graph = state_graphs(problem, option)[0]
        if not graph.full or graph.num_states > COARSE.cuts:
            return False
        tables = IterationTables(problem, option, graph, np.arange(graph.num_states, dtype=np.int32))
        schedules = linear_schedules(problem)
        lists, complete, _ = passes_func("tvmhet.IterationPlans")(
            tables.arrays(),
            tables.scalars(),
            tables.micro.forward.overlap_transfers,
            schedules == (Schedule.GPIPE,),
            self.counts_s,
            _MOST_PLANS,
            _MOST_STEPS,
        )
        answers = [[int(x) for x in flat] for flat in lists]
        tables.learn(answers)
        plans = [tables.placings(flat) for flat in answers]
        judged = [judge(problem, option, p, s, "every plan, simulated") for p in plans for s in schedules]
        done = self._look(c for c in judged if c is not None)
        return bool(complete) and done and (is_plain(problem, option) or is_roomy(problem, option))
