"""Two devices and one input: a minimum cut.

With two devices there are two stages at most. Where the graph is connected the second waits for the first, so the
latency is the sum of both and of what moves between them: a cut of the graph.

    source side: the first stage           sink side: the second
    v ──► sink    work on the first        source ──► v    work on the second
    u ──► its tensor ──► readers           the transfer, once
    reader ──► u, never cut                no tensor flows back
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from ortools.graph.python import max_flow

from tvmhet.solve.problem import Problem

_UNITS = 10**9  # integer units in the whole work: capacities are rounded down, so the cut is a bound
_NEVER = 10**15  # no limit: more than the whole work


def two_device_cuts(problem: Problem, weight_s: NDArray[np.float64]) -> tuple[float, list[list[int]]]:
    """Return (a lower bound on the latency in seconds, placements worth trying: node -> device 0 or 1).

    `weight_s`: (groups, nodes), no kernel is quicker than its nodes' weights together. Without exactly two devices, or
    on a graph in pieces, the bound is 0 and there are no placements.
    """
    devices = [g for g, group in enumerate(problem.groups) for _ in range(max(0, min(3, group.num_devices)))]
    if len(devices) != 2 or not _connected(problem):
        return 0.0, []
    lower = min(_alone_s(problem, weight_s, g) for g in devices)
    homes: list[list[int]] = []
    for first in (0, 1):
        if first == 1 and devices[0] == devices[1]:
            break
        value, side = _cut(problem, weight_s, devices[first], devices[1 - first])
        lower = min(lower, value)
        if side and 0 < sum(side) < problem.num_nodes:
            homes.append([first if inside else 1 - first for inside in side])
    return lower, homes


def _connected(problem: Problem) -> bool:
    leader = list(range(problem.num_nodes))

    def find(v: int) -> int:
        while leader[v] != v:
            leader[v] = leader[leader[v]]
            v = leader[v]
        return v

    for e in problem.edges:
        for u, v in pairwise((e.src, *e.dsts) if e.src >= 0 else ()):
            leader[find(u)] = find(v)
    return len({find(v) for v in range(problem.num_nodes)}) == 1


def _alone_s(problem: Problem, weight_s: NDArray[np.float64], g: int) -> float:
    host = math.fsum(
        problem.host_links[g].transfer_s(e.size_bytes)
        for e in problem.edges
        if (e.src < 0 and e.dsts) or (e.src >= 0 and e.is_output)
    )
    return float(weight_s[g].sum()) + problem.groups[g].stage_overhead_s + host


def _cut(problem: Problem, weight_s: NDArray[np.float64], a: int, b: int) -> tuple[float, list[bool]]:
    """Return (the least seconds of a stage on group `a` and then one on `b`, is each node in the first?)."""
    n = problem.num_nodes
    finite = weight_s[[a, b]][np.isfinite(weight_s[[a, b]])]
    link = problem.links[a][b]
    unit = max(float(finite.sum()), 1e-12) / _UNITS
    source, sink, extra = n, n + 1, n + 2
    flow = max_flow.SimpleMaxFlow()

    def arc(u: int, v: int, seconds: float) -> None:
        flow.add_arc_with_capacity(u, v, min(_NEVER, math.floor(seconds / unit)) if seconds < math.inf else _NEVER)

    for v in range(n):
        arc(v, sink, float(weight_s[a, v]))
        arc(source, v, float(weight_s[b, v]))
    for e in problem.edges:
        for d in e.dsts:
            arc(extra, d, math.inf) if e.src >= 0 else arc(d, extra, math.inf)
            if e.src >= 0:
                arc(d, e.src, math.inf)
        if e.src < 0:
            arc(extra, sink, problem.host_links[a].transfer_s(e.size_bytes))
        else:
            arc(e.src, extra, link.transfer_s(e.size_bytes))
            arc(source, e.src, problem.host_links[b].transfer_s(e.size_bytes) if e.is_output else 0.0)
        extra += 1
    if flow.solve(source, sink) != flow.OPTIMAL or flow.optimal_flow() >= _NEVER:
        return math.inf, []
    first = set(flow.get_source_side_min_cut())
    fixed = problem.groups[a].stage_overhead_s + problem.groups[b].stage_overhead_s
    return flow.optimal_flow() * unit * (1 - 1e-9) + fixed, [v in first for v in range(n)]
