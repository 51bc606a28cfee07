"""A lower bound on the largest load where some links are so slow that a good plan cannot use them.

A tensor over link (a, b) loads each device of these groups with at least  transfer_s / (number of devices).  So in a
plan of load T a link that loads them with more is not used, and a model that hangs together stays on one *side*:
groups that the other links join.

    links by the T from which they can be used:   ── fast ──┬─────────── 66 us: between regions ─────────► T
    sides, and the least bound of any of them:              {0} {1} {2}: 71 us > 66 us      all: 23 us
                                                                                    ──► no plan is below 66 us
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tvmhet.solve.problem import Problem
from tvmhet.solve.splits import with_devices

_MOST_SIDES = 8  # sides whose own bound is sought ...
_MOST_STEPS = 4  # ... for so many loads
_BEYOND = 1 + 1e-5  # of a load, which a bound by bisection would else stay just below


def apart_bound_s(
    problem: Problem, lower_s: float, upper_s: float, bound_s: Callable[[Problem, float, float], float]
) -> float:
    """Return a lower bound in seconds, no less than `lower_s`, a bound already known, and no more than `upper_s`.

    `bound_s(problem, lower_s, upper_s)` bounds the load of plans on the groups that still have devices. Teams are on
    the side of their devices.
    """
    used = [g for g, group in enumerate(problem.groups) if group.num_devices > 0 and group.team_of < 0]
    sizes = [e.size_bytes for e in problem.edges if e.src >= 0 and e.dsts]
    if len(used) < 2 or not sizes or not _hangs_together(problem):
        return lower_s
    from_s = {(a, b): _usable_from_s(problem, a, b, min(sizes)) for a in used for b in used if a < b}
    thresholds = sorted({s for s in from_s.values() if lower_s < s < upper_s})
    for next_s in [*thresholds, upper_s][:_MOST_STEPS]:
        sides = _components(used, [pair for pair, s in from_s.items() if s <= lower_s])
        if not 1 < len(sides) <= _MOST_SIDES:
            return lower_s
        least_s = min(bound_s(_only(problem, side), lower_s, next_s * _BEYOND) for side in sides)
        if least_s < next_s:
            return max(lower_s, least_s)
        lower_s = next_s
    return lower_s


def _usable_from_s(problem: Problem, a: int, b: int, size_bytes: float) -> float:
    """The least load of a plan in which some tensor passes between groups a and b, either way."""
    way = min(problem.links[a][b].transfer_s(size_bytes), problem.links[b][a].transfer_s(size_bytes))
    return way / min(problem.groups[a].num_devices, problem.groups[b].num_devices)


def _hangs_together(problem: Problem) -> bool:
    """Does every cut of the nodes in two cut a tensor?"""
    pairs = [(e.src, d) for e in problem.edges if e.src >= 0 for d in e.dsts]
    return len(_components(range(problem.num_nodes), pairs)) == 1


def _components(nodes: Iterable[int], pairs: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
    import networkx as nx  # 0.2 s, only where a plan is far from its bound

    graph = nx.Graph(pairs)
    graph.add_nodes_from(nodes)
    return sorted(tuple(sorted(part)) for part in nx.connected_components(graph))


def _only(problem: Problem, side: tuple[int, ...]) -> Problem:
    return with_devices(problem, [g.num_devices if i in side else 0 for i, g in enumerate(problem.groups)])
