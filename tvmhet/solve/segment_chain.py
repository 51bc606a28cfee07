"""Bounds on the latency of one input when a host calls accelerators: the shortest chain of calls through segments.

Every accelerator is called once, so what it holds is contiguous. A *gate* is a node that is ordered with all others: a
call that holds one is a barrier. passes/segment_chain.cc finds the quickest chain of barriers, and of what runs between
them, over a *core* of the graph's nodes: what is ordered with the ends of a heavy path, less the lightest branches of
segments (what lies between two gates) with too many downsets.

    gate       segment       gate
     o───┬──o──o──o──o──o──┬──o       a heavy branch is in the core; a light one counts
         ├──o──o──o────────┤          only for calls that hold both gates
         └────────x────────┘

Against call_chain.py, which tries branches wherever they hang: its core has few downsets in all, here each segment has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from tvmhet._passes import passes_func
from tvmhet.solve.call_graph import CallChain, CallGraph, call_graph, closed, heaviest_path, path_weights
from tvmhet.solve.loads import LoadProblem
from tvmhet.solve.pack import as_tensor, pack_lists

_MAX_NODES = 62  # of a segment: masks are words
_MAX_BRANCHES = 24  # of a segment, heaviest first
_PATIENCE = 4  # branches in a row that make too many downsets


@dataclass(frozen=True)
class _Segment:
    """The nodes between a gate and the next, in topological order. The first segment has gate -1."""

    gate: int
    nodes: tuple[int, ...]

    @property
    def members(self) -> tuple[int, ...]:
        """The gate, if there is one, and the nodes."""
        return (self.gate, *self.nodes) if self.gate >= 0 else self.nodes


def segment_chain(problem: LoadProblem, most: float, *, max_states: int) -> CallChain:
    """Return the chain with the largest bound over three cores whose segments have up to `max_states` downsets.

    `most` is a known makespan in seconds; the bound is no larger.
    """
    graph = call_graph(problem)
    cores = {
        frozenset(_core(graph, heaviest_path(graph, weight), weight, max_states)): None
        for weight in path_weights(problem)
    }
    return max((_chain(graph, core, most) for core in cores), key=lambda c: c.lower)


def _core(graph: CallGraph, path: Sequence[int], weight: Sequence[float], max_states: int) -> set[int]:
    """Return what lies between the path's ends and beyond, less branches of segments that have too many downsets."""
    spine = set(path)
    first, last = path[0], path[-1]
    inside = {
        v
        for v in range(graph.num_nodes)
        if v in spine
        or graph.above[v] >> last & 1
        or graph.below[v] >> first & 1
        or (graph.above[v] >> first & 1 and graph.below[v] >> last & 1)
    }
    while True:
        core = set(spine)
        for segment in _segments(graph, inside):
            core |= _kept(graph, segment, spine, weight, max_states)
        if all(_few(graph, s.nodes, max_states) for s in _segments(graph, core)):
            return core
        inside = core if len(core) < len(inside) else spine  # on the path alone every node is a gate


def _segments(graph: CallGraph, core: Iterable[int]) -> list[_Segment]:
    mask = sum(1 << v for v in core)
    out: list[tuple[int, list[int]]] = [(-1, [])]
    for v in graph.order:
        if not mask >> v & 1:
            continue
        if mask & ~(graph.above[v] | graph.below[v] | 1 << v):
            out[-1][1].append(v)
        else:
            out.append((v, []))
    return [_Segment(gate, tuple(nodes)) for gate, nodes in out]


def _kept(graph: CallGraph, segment: _Segment, spine: set[int], weight: Sequence[float], max_states: int) -> set[int]:
    """Return the segment's gate and nodes; if they have too many downsets, only the heaviest branches off the spine."""
    if _few(graph, segment.nodes, max_states):
        return set(segment.members)
    kept = {v for v in segment.members if v in spine}
    links = nx.Graph()
    links.add_nodes_from(v for v in segment.nodes if v not in spine)
    links.add_edges_from((u, v) for v in links for u in graph.preds[v] if u in links)
    branches = sorted(nx.connected_components(links), key=lambda c: (-sum(weight[v] for v in c), min(c)))
    failed = 0
    for branch in branches[:_MAX_BRANCHES]:
        if _few(graph, [v for v in segment.nodes if v in kept or v in branch], max_states):
            kept |= branch
            failed = 0
        elif (failed := failed + 1) == _PATIENCE:
            break
    return kept


def _few(graph: CallGraph, nodes: Sequence[int], limit: int) -> bool:
    """Have the nodes, if they fit a word, at most `limit` downsets?"""
    if len(nodes) > _MAX_NODES:
        return False
    inside = sum(1 << v for v in nodes)
    needs = [(1 << v, graph.above[v] & inside) for v in nodes]
    layer, count = {0}, 1
    while layer:
        grown: set[int] = set()
        for s in layer:
            grown.update(s | bit for bit, need in needs if not s & bit and not need & ~s)
            if count + len(grown) > limit:
                return False
        layer = grown
        count += len(layer)
    return True


def _chain(graph: CallGraph, core: Iterable[int], most: float) -> CallChain:
    segments = _segments(graph, core)
    nodes = [v for s in segments for v in s.members]
    index = {v: i for i, v in enumerate(nodes)}
    first = np.cumsum([0, *(len(s.members) for s in segments[:-1])]) + [s.gate >= 0 for s in segments]
    seconds, host, size, send = (np.array(graph.arrays[a][nodes], np.float64) for a in range(4))
    skipped_s, skipped_bytes = np.zeros(len(segments)), np.zeros(len(segments))
    for v, owner, i in _outside(graph, segments, index):
        held_s, held_bytes, at = (seconds, size, index[owner]) if owner >= 0 else (skipped_s, skipped_bytes, i)
        held_s[at] += graph.arrays[0][v] if owner >= 0 or math.isfinite(graph.arrays[0][v]) else 0.0
        held_bytes[at] += graph.arrays[2][v]
    preds = [[index[u] for u in graph.preds[v] if u in index] for v in nodes]
    succs: list[list[int]] = [[] for _ in nodes]
    for i, makers in enumerate(preds):
        for u in makers:
            succs[u].append(i)
    mates = [[index[u] for u in graph.mates[v] if u in index] for v in nodes]
    arrays: list[NDArray[Any]] = [seconds, host, size, send, skipped_s, skipped_bytes]
    arrays += [first.astype(np.int32), _above(graph, segments)]
    for lists in (preds, succs, mates):
        arrays += pack_lists(lists)
    lower, calls = passes_func("tvmhet.SegmentChain")(
        [as_tensor(a) for a in arrays], graph.memory_bytes, most, graph.num_calls
    )
    home = np.zeros(graph.num_nodes, np.int32)
    marks = [int(x) for x in calls]
    ends = [_done(segments, i, mask) for i, mask in zip(marks[::2], marks[1::2], strict=True)]
    for d, (start, end) in enumerate(zip(ends[::2], ends[1::2], strict=True), 1):
        home[closed(graph, end & ~start)] = d
    return CallChain(min(float(lower), most) * (1 - 1e-12), home)


def _above(graph: CallGraph, segments: Sequence[_Segment]) -> NDArray[np.uint64]:
    """Return for each node of the core a mask of the nodes of its segment that come before it."""
    out: list[int] = []
    for s in segments:
        out += [0] if s.gate >= 0 else []
        out += [sum(1 << i for i, u in enumerate(s.nodes) if graph.above[v] >> u & 1) for v in s.nodes]
    return np.array(out, np.uint64)


def _outside(graph: CallGraph, segments: Sequence[_Segment], index: dict[int, int]) -> list[tuple[int, int, int]]:
    """Return (node, a node of the core that shares its device or -1, else the segment between whose gates it lies).

    Nodes outside the core that are neither are left out: they cost nothing.
    """
    gates = sum(1 << s.gate for s in segments[1:])
    out = []
    for v in range(graph.num_nodes):
        if v in index:
            continue
        owner = next((u for u in graph.mates[v] if u in index), -1)
        before = (graph.above[v] & gates).bit_count()
        behind = (graph.below[v] & gates).bit_count()
        between = before > 0 and behind > 0 and before + behind == len(segments) - 1
        if owner >= 0 or between:
            out.append((v, owner, before))
    return out


def _done(segments: Sequence[_Segment], i: int, mask: int) -> int:
    """Return the nodes of the core that come before segment i, its gate, and those of the mask."""
    before = sum(1 << v for s in segments[:i] for v in s.members)
    gate = 1 << segments[i].gate if segments[i].gate >= 0 else 0
    return before | gate | sum(1 << v for k, v in enumerate(segments[i].nodes) if mask >> k & 1)
