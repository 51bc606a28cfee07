"""Bounds on the latency of one input when a host calls accelerators: the shortest chain of calls through segments.

Every accelerator is called once, so what it holds is contiguous. A *gate* is a node that is ordered with all others: a
call that holds one is a barrier. passes/segment_chain.cc finds the quickest chain of barriers, and of what runs between
them, over a *core* of the graph's nodes. The core is the graph, less what hangs on it (tensors that are not computed)
and, in segments between gates with too many downsets, less their lightest branches:

    gate       segment       gate
     o───┬──o──o──o──o──o──┬──o       a heavy branch is in the core; a light one only counts
         ├──o──o──o────────┤          for calls that hold both gates
         └────────x────────┘
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np

from tvmhet._passes import passes_func
from tvmhet.solve.call_chain import CallChain, _closed, _graph, _Graph, _heaviest_path
from tvmhet.solve.loads import LoadProblem
from tvmhet.solve.pack import as_tensor, pack_lists

_MAX_NODES = 62  # of a segment: masks are words


def segment_chain(problem: LoadProblem, most: float, max_states: int) -> CallChain | None:
    """Return the chain over the largest core whose segments have up to `max_states` downsets; `most`: a known makespan."""
    graph = _graph(problem)
    host = [t[1] for t in problem.time_s]
    weight = [min(t) for t in problem.time_s]
    path = _heaviest_path(graph, weight)
    core = _core(graph, path, weight, max_states)
    return _chain(graph, core, most)


def _core(graph: _Graph, path: Sequence[int], weight: Sequence[float], max_states: int) -> set[int]:
    """All between the path's ends, less branches of segments that have too many downsets."""
    first, last = path[0], path[-1]
    inside = set(path)
    inside.update(v for v in range(graph.num_nodes) if graph.above[v] >> first & 1 and graph.below[v] >> last & 1)
    spine = set(path)
    while True:
        core: set[int] = set(spine)
        for _, segment in _segments(graph, inside):
            core.update(_kept(graph, segment, spine, weight, max_states))
        if all(
            len(s) <= _MAX_NODES and (set(s) <= spine or _few(graph, s, max_states)) for _, s in _segments(graph, core)
        ):
            return core
        inside = core if len(core) < len(inside) else spine


def _gates(graph: _Graph, core: Iterable[int]) -> list[int]:
    mask = sum(1 << v for v in core)
    return [v for v in graph.order if mask >> v & 1 and not mask & ~(graph.above[v] | graph.below[v] | 1 << v)]


def _segments(graph: _Graph, core: set[int]) -> list[tuple[int, list[int]]]:
    """Return (gate, nodes behind it), in order; the first gate is -1."""
    gates = set(_gates(graph, core))
    out: list[tuple[int, list[int]]] = [(-1, [])]
    for v in graph.order:
        if v in gates:
            out.append((v, []))
        elif v in core:
            out[-1][1].append(v)
    return out


def _kept(
    graph: _Graph, segment: list[int], spine: set[int], weight: Sequence[float], max_states: int
) -> set[int]:
    """Return the segment's nodes of the spine with its heaviest branches, while downsets are few."""
    kept = {v for v in segment if v in spine}
    if len(segment) <= _MAX_NODES and _few(graph, segment, max_states):
        return set(segment)
    links = nx.Graph()
    links.add_nodes_from(v for v in segment if v not in spine)
    links.add_edges_from((u, v) for v in links for u in graph.preds[v] if u in links)
    branches = sorted(nx.connected_components(links), key=lambda c: (-sum(weight[v] for v in c), min(c)))
    for branch in branches:
        grown = [v for v in graph.order if v in kept or v in branch]
        if len(grown) <= _MAX_NODES and _few(graph, grown, max_states):
            kept.update(branch)
    return kept


def _few(graph: _Graph, nodes: Sequence[int], limit: int) -> bool:
    """Have the nodes at most `limit` downsets?"""
    inside = sum(1 << v for v in nodes)
    needs = [(1 << v, graph.above[v] & inside) for v in nodes]
    layer, count = {0}, 1
    while layer:
        layer = {s | bit for s in layer for bit, need in needs if not s & bit and not need & ~s}
        count += len(layer)
        if count > limit:
            return False
    return True


def _chain(graph: _Graph, core: set[int], most: float) -> CallChain:
    segments = _segments(graph, core)
    nodes = [v for gate, rest in segments for v in ([gate] if gate >= 0 else []) + rest]
    index = {v: i for i, v in enumerate(nodes)}
    first = np.cumsum([0] + [len(rest) + 1 for _, rest in segments[:-1]]).astype(np.int32)
    first[1:] += 0
    starts, at = [], 0
    for gate, rest in segments:
        at += gate >= 0
        starts.append(at)
        at += len(rest)
    accelerator, host, memory, send = (np.array([a[v] for v in nodes], np.float64) for a in graph.arrays[:4])
    skipped = _skipped(graph, core, segments)
    for v, owner in _owners(graph, core):
        accelerator[index[owner]] += graph.arrays[0][v]
        memory[index[owner]] += graph.arrays[2][v]
    above = np.zeros(len(nodes), np.uint64)
    for (_, rest), start in zip(segments, starts, strict=True):
        for v in rest:
            above[index[v]] = sum(1 << (index[u] - start) for u in rest if graph.above[v] >> u & 1)
    preds = [[index[u] for u in graph.preds[v] if u in index] for v in nodes]
    succs: list[list[int]] = [[] for _ in nodes]
    for i, us in enumerate(preds):
        for u in us:
            succs[u].append(i)
    mates = [[index[u] for u in graph.mates[v] if u in index] for v in nodes]
    arrays = [accelerator, host, memory, send, *skipped, np.array(starts, np.int32), above]
    for lists in (preds, succs, mates):
        arrays += pack_lists(lists)
    lower, flat = passes_func("tvmhet.SegmentChain")(
        [as_tensor(a) for a in arrays], graph.memory_bytes, most, graph.num_calls
    )
    home = np.zeros(graph.num_nodes, np.int32)
    marks = [int(x) for x in flat]
    for d, (i, a, j, b) in enumerate(zip(*(marks[k::4] for k in range(4)), strict=True), 1):
        done = [_done(segments, starts, index, s, mask) for s, mask in ((i, a), (j, b))]
        home[_closed(graph, sum(1 << v for v in done[1] - done[0]))] = d
    return CallChain(min(float(lower), most) * (1 - 1e-12), home)


def _done(segments, starts, index, i: int, mask: int) -> set[int]:
    out = {v for gate, rest in segments[:i] for v in (gate, *rest)} | {segments[i][0]}
    return (out | {v for v in segments[i][1] if mask >> (index[v] - starts[i]) & 1}) - {-1}


def _skipped(graph, core, segments):
    """Seconds and bytes of nodes outside the core between each segment's gates."""
    seconds, size = np.zeros(len(segments)), np.zeros(len(segments))
    owned = {v for v, _ in _owners(graph, core)}
    outside = [v for v in range(graph.num_nodes) if v not in core and v not in owned]
    for i in range(1, len(segments) - 1):
        gate, after = segments[i][0], segments[i + 1][0]
        for v in outside:
            if graph.above[v] >> gate & 1 and graph.below[v] >> after & 1:
                seconds[i] += graph.arrays[0][v]
                size[i] += graph.arrays[2][v]
    return seconds, size


def _owners(graph: _Graph, core: set[int]) -> list[tuple[int, int]]:
    """Nodes outside the core with a node of the core whose device they share."""
    out = []
    for v in range(graph.num_nodes):
        if v not in core:
            mates = [u for u in graph.mates[v] if u in core]
            if mates:
                out.append((v, mates[0]))
    return out
