"""Time against price of training: what an iteration costs on the devices it rents, and the best trades.

    price of one iteration = (sum over places of devices * usd_per_h) * iteration / 3600 s

The front of iteration time against rent is enumerated once; deadlines and budgets pick from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tvmhet._passes import passes_func
from tvmhet.solve.iteration import IterationProblem
from tvmhet.solve.iteration_candidate import Candidate, judge, linear_schedules
from tvmhet.solve.iteration_mixed import mixed_placings
from tvmhet.solve.iteration_tables import IterationTables, mode_times, modes_of
from tvmhet.solve.pack import as_tensor
from tvmhet.solve.pipeline import crossing_bytes, pick_cuts, progress_s
from tvmhet.solve.schedules import Schedule
from tvmhet.solve.state_graphs import all_graphs

_CUTS = 64
_LABELS = 128
_STEPS = 30_000_000


@dataclass(frozen=True, slots=True)
class PricedIteration:
    """A training plan with the rent of its devices per hour."""

    plan: Candidate
    usd_per_h: float

    @property
    def iteration_s(self) -> float:
        """Seconds of one iteration."""
        return self.plan.value.iteration_s

    @property
    def usd_per_iteration(self) -> float:
        """What one iteration costs."""
        return self.usd_per_h * self.iteration_s / 3600.0


@dataclass(frozen=True, slots=True)
class IterationFront:
    """Plans that no other plan found beats in both time and rent, cheapest rent first."""

    plans: tuple[PricedIteration, ...]

    def cheapest(self, *, max_iteration_s: float = math.inf, max_usd_per_h: float = math.inf) -> PricedIteration | None:
        """Return the plan with the least price per iteration within a deadline and a budget per hour, or None."""
        within = self._within(max_iteration_s, max_usd_per_h)
        return min(within, key=lambda p: (p.usd_per_iteration, p.iteration_s), default=None)

    def fastest(self, *, max_usd_per_h: float = math.inf) -> PricedIteration | None:
        """Return the plan with the shortest iteration within a budget per hour, or None."""
        within = self._within(math.inf, max_usd_per_h)
        return min(within, key=lambda p: (p.iteration_s, p.usd_per_h), default=None)

    def job(
        self, iterations: int, *, deadline_s: float = math.inf, budget_usd: float = math.inf
    ) -> PricedIteration | None:
        """Return the cheapest plan that ends `iterations` by the deadline and within the budget, or None."""
        fits = [
            p for p in self._within(deadline_s / iterations, math.inf) if p.usd_per_iteration * iterations <= budget_usd
        ]
        return min(fits, key=lambda p: (p.usd_per_iteration, p.iteration_s), default=None)

    def _within(self, iteration_s: float, usd_per_h: float) -> list[PricedIteration]:
        return [p for p in self.plans if p.iteration_s <= iteration_s and p.usd_per_h <= usd_per_h]


def iteration_front(problem: IterationProblem, *, step: float = 0.03) -> IterationFront:
    """Return the front of time against rent over micro-batch sizes, stages, devices and recomputation.

    Largest stage loads that are tried differ by at least `step`; fronts of large models are of chosen cuts.
    """
    found: list[Candidate] = []
    for option in range(len(problem.options)):
        found += _staged(problem, option, step)
    return IterationFront(_undominated(problem, found))


def _staged(problem: IterationProblem, option: int, step: float) -> list[Candidate]:
    forward = problem.options[option].forward
    if not (graph := next(all_graphs(forward), None)):
        return []
    both, _ = mode_times(problem.options[option], modes_of(problem, option))
    cuts = pick_cuts(crossing_bytes(forward, graph), progress_s(graph, both.min(axis=1)), _CUTS)
    tables = IterationTables(problem, option, graph, cuts)
    schedules = linear_schedules(problem)
    lists, _ = passes_func("tvmhet.IterationFront")(
        tables.arrays(),
        tables.scalars(),
        forward.overlap_transfers,
        schedules == (Schedule.GPIPE,),
        as_tensor(np.array([g.usd_per_h for g in problem.groups], np.float64)),
        step,
        _LABELS,
        _STEPS,
    )
    plans = [(tables.placings([int(x) for x in flat]), s, "front of stages") for flat in lists for s in schedules]
    if problem.may_mix and Schedule.ONE_F_ONE_B in schedules:
        ends = IterationTables(problem, option, graph, np.array([0, graph.num_states - 1], np.int32))
        plans += [(p, Schedule.ONE_F_ONE_B, "replicas on unlike types") for p in mixed_placings(ends)]
    judged = (judge(problem, option, placings, schedule, name) for placings, schedule, name in plans)
    return [c for c in judged if c]


def _undominated(problem: IterationProblem, found: list[Candidate]) -> tuple[PricedIteration, ...]:
    priced = [
        PricedIteration(c, math.fsum(p.num_replicas * p.degree * problem.groups[p.group].usd_per_h for p in c.placings))
        for c in found
    ]
    kept: list[PricedIteration] = []
    for p in sorted(priced, key=lambda p: (p.usd_per_h, p.iteration_s)):
        if not kept or p.iteration_s < kept[-1].iteration_s:
            kept.append(p)
    return tuple(kept)
