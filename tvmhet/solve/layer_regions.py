"""Upper bounds on the flow through layers where links are thin: regions that few tokens leave.

A token that stays in one region is served by that region's nodes alone; each other one leaves the region where it
begins. So with F(R) for a region's own nodes, its links from the source and to the sink,

    flow  <=  sum of F(R)  +  sum of min(links out of R, links from the source to R)

and the same with the links into R and to the sink.

Regions are the parts that links above some capacity connect; every capacity that occurs is tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from tvmhet.solve.layer_problem import LayerProblem

_MAX_CAPACITIES = 64  # tried, evenly over those that occur


def linked(problem: LayerProblem) -> LayerProblem:
    """Return the problem with every node's rates cut to what its links carry in, and out."""
    link = np.array(problem.link)
    room = np.minimum(link.sum(axis=0) + problem.from_source, link.sum(axis=1) + problem.to_sink)
    rate = tuple(tuple(min(x, float(most)) for x in row) for row, most in zip(problem.rate, room, strict=True))
    return replace(problem, rate=rate)


def region_bound(
    problem: LayerProblem, coverage: Callable[[LayerProblem], float]
) -> tuple[float, tuple[tuple[int, ...], ...]]:
    """Return (the least bound over partitions, its regions); `coverage` bounds the flow of a problem without links.

    inf and no region where all nodes are one region at every capacity.
    """
    link = np.array(problem.link)
    np.fill_diagonal(link, 0.0)
    wide = np.maximum(link, link.T)
    levels = np.unique(wide)
    best: float = math.inf
    kept: tuple[tuple[int, ...], ...] = ()
    for level in levels[:: max(1, -(-len(levels) // _MAX_CAPACITIES))]:
        regions = tuple(tuple(sorted(r)) for r in nx.connected_components(nx.from_numpy_array(wide > level)))
        if len(regions) > 1:
            bound = _across(problem, link, regions) + sum(coverage(part(problem, r)) for r in regions)
            best, kept = min((best, kept), (bound, regions))
    return best, kept


def _across(problem: LayerProblem, link: NDArray[np.float64], regions: Sequence[Sequence[int]]) -> float:
    """Return the most tokens that cross: all leave the region where they begin, and enter the one where they end."""
    first = last = 0.0
    for r in map(list, regions):
        inside = link[np.ix_(r, r)].sum()
        first += min(sum(problem.from_source[i] for i in r), link[r].sum() - inside)
        last += min(sum(problem.to_sink[i] for i in r), link[:, r].sum() - inside)
    return max(0.0, float(min(first, last)))


def part(problem: LayerProblem, nodes: Sequence[int]) -> LayerProblem:
    """Return the problem of some of the nodes alone."""
    return replace(
        problem,
        rate=tuple(problem.rate[i] for i in nodes),
        from_source=tuple(problem.from_source[i] for i in nodes),
        to_sink=tuple(problem.to_sink[i] for i in nodes),
        link=tuple(tuple(problem.link[i][j] for j in nodes) for i in nodes),
    )
