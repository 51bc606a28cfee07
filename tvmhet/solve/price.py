"""Time against price: what a plan costs while it runs, and the best trades.

A plan rents every device it uses for as long as it runs. One input costs

    price of one input = (sum over stages of replicas * usd_per_h) * period / 3600 s,    period = the largest load

so the cheapest input is not always on the cheapest devices. The whole front of period against rent is enumerated once.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvmhet.solve.evaluate import rent_usd_per_h
from tvmhet.solve.infeasible import no_kernel_reason
from tvmhet.solve.objective import Objective
from tvmhet.solve.pack import allowed_times
from tvmhet.solve.pipeline import StageSearch, crossing_bytes, pick_cuts, progress_s
from tvmhet.solve.problem import Problem
from tvmhet.solve.solution import SolvedStage
from tvmhet.solve.splits import without_teams
from tvmhet.solve.state_graphs import all_graphs

_CUTS = 120  # states at which stages may end: all of a graph that has no more
_LABELS = 256  # trades kept per state


@dataclass(frozen=True, slots=True)
class PricedPlan:
    """Stages with the seconds between two results, the rent per hour, and the price of one input."""

    stages: tuple[SolvedStage, ...]
    period_s: float
    usd_per_h: float

    @property
    def usd_per_input(self) -> float:
        """What one input costs when the pipeline is always full."""
        return self.usd_per_h * self.period_s / 3600.0


@dataclass(frozen=True, slots=True)
class PriceFront:
    """Plans that no other plan beats in both period and rent, cheapest rent first.

    `complete` says that the front holds every trade to within `step` of the period, over the cuts that were tried.
    """

    plans: tuple[PricedPlan, ...]
    complete: bool
    reason: str = ""  # why there is no plan

    def cheapest_input(self) -> PricedPlan | None:
        """Return the plan with the least price per input, or None if there is no plan."""
        return min(self.plans, key=lambda p: (p.usd_per_input, p.period_s), default=None)


def price_front(problem: Problem, *, step: float = 1e-3) -> PriceFront:
    """Return the front of period against rent; neighbouring plans differ in period by at least `step` (relative)."""
    if reason := no_kernel_reason(problem):
        return PriceFront((), True, reason)
    time_s = allowed_times(problem)
    plans: list[PricedPlan] = []
    graphs = list(all_graphs(problem))
    complete = bool(graphs)
    for graph in graphs:
        search = StageSearch(problem, graph, time_s, Objective.THROUGHPUT)
        cuts = pick_cuts(crossing_bytes(problem, graph), progress_s(graph, time_s.min(axis=1)), _CUTS)
        found, truncated = search.front(cuts, step, _LABELS)
        complete = complete and graph.full and not truncated and len(cuts) == graph.num_states
        plans += [PricedPlan(f.stages, f.objective_s, rent_usd_per_h(problem, f.stages)) for f in found]
    if (unsplit := without_teams(problem)) is not problem:  # a split that is no use never hurts
        plans += price_front(unsplit, step=step).plans
    kept = _undominated(plans)
    return PriceFront(kept, complete, "" if kept else "no set of devices holds the model; solve() gives the mend")


def _undominated(plans: list[PricedPlan]) -> tuple[PricedPlan, ...]:
    kept: list[PricedPlan] = []
    for p in sorted(plans, key=lambda p: (p.usd_per_h, p.period_s)):
        if not kept or p.period_s < kept[-1].period_s:
            kept.append(p)
    return tuple(kept)
