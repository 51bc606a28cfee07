"""Virtual stages: devices that run several stages, with stages of other devices between them.

    a100 ──► t4 ──► a100        the first and the third stage on the same a100s, in turn

Where all stages of a group fit on one device together, all devices of the group run all of them: loads add up, which is
never worse than dealing the devices out. Candidates are the chains of least price (passes/stage_priced.cc) and the best
plan with devices of its own for each stage; all are improved by local search.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tvmhet.solve.floor import node_floors
from tvmhet.solve.flow_bound import flow_bound_s
from tvmhet.solve.objective import Objective
from tvmhet.solve.pack import StateGraph
from tvmhet.solve.pipeline import Found, StageSearch, crossing_bytes, near_cuts, pick_cuts, progress_s
from tvmhet.solve.problem import Problem

_CUTS = 160  # states at which stages may end: all of a graph that has no more
_ROUNDS = 24


def virtual_plans(
    problem: Problem, graphs: list[StateGraph], time_s: NDArray[np.float64], best: Found | None
) -> Iterator[Found | None]:
    """Yield the best plan with virtual stages over each graph, then among cuts near it."""
    for graph in graphs:
        search = StageSearch(problem, graph, time_s, Objective.THROUGHPUT)
        crossing, progress = crossing_bytes(problem, graph), progress_s(graph, time_s.min(axis=1))
        cuts = pick_cuts(crossing, progress, _CUTS)
        start = best if best and search.holds(best) else None
        if start:
            cuts = np.union1d(cuts, np.array(search.cuts_of(start), np.int32)).astype(np.int32)
        found = search.virtual(cuts, _ROUNDS, start)
        yield found
        if found and len(cuts) < graph.num_states:
            near = near_cuts(search.cuts_of(found), crossing, progress, _CUTS)
            yield search.virtual(near, 0, found)


def virtual_bound_s(problem: Problem, time_s: NDArray[np.float64]) -> float:
    """Return a lower bound on the largest load of every plan, whether stages share devices or not."""
    return flow_bound_s(problem, node_floors(problem, time_s))
