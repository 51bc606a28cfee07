"""Problems as plain arrays, the way the C++ in passes/ takes them. Node numbers follow a chosen linear order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import tvm_ffi
from numpy.typing import NDArray

from tvmhet._passes import passes_func
from tvmhet.solve.problem import Link, Problem


def as_tensor(array: NDArray[Any]) -> Any:
    """Return the array as C++ sees it, without a copy where it is already contiguous and writable."""
    return tvm_ffi.from_dlpack(np.require(array, requirements=["C", "W"]))


def pack_lists(lists: Sequence[Sequence[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return (ptr, ids): list i is ids[ptr[i]:ptr[i + 1]]."""
    ptr = np.zeros(len(lists) + 1, np.int32)
    ptr[1:] = np.cumsum([len(x) for x in lists])
    return ptr, np.array([i for x in lists for i in x], np.int32)


def allowed_times(problem: Problem) -> NDArray[np.float64]:
    """Return seconds, shape (kernels, groups): inf where a pin, a device count of 0 or the kernel itself forbids it."""
    time_s = np.array([k.time_s for k in problem.kernels], np.float64).reshape(-1, len(problem.groups))
    time_s[:, [g.num_devices <= 0 for g in problem.groups]] = np.inf
    for i, kernel in enumerate(problem.kernels):
        for node in kernel.nodes:
            if (allowed := problem.pins.get(node)) is not None:
                time_s[i, [g not in allowed for g in range(len(problem.groups))]] = np.inf
    return time_s


def predecessors(problem: Problem) -> list[list[int]]:
    """Return, for each node, the nodes whose results it reads, ascending."""
    preds: list[set[int]] = [set() for _ in range(problem.num_nodes)]
    for e in problem.edges:
        if e.src >= 0:
            for d in e.dsts:
                preds[d].add(e.src)
    return [sorted(p) for p in preds]


_NO_LINK_S = 1e30  # stands for "never" where arithmetic with inf would give NaN


def link_arrays(problem: Problem) -> tuple[NDArray[Any], ...]:
    """Return the arrays of passes/stage_table.h that follow its table: links, host links, overheads, devices."""

    def latency(link: Link) -> float:
        return link.latency_s if link.byte_per_s > 0 else _NO_LINK_S

    def per_byte(link: Link) -> float:
        return 1.0 / link.byte_per_s if link.byte_per_s > 0 else 0.0

    return (
        np.array([[latency(x) for x in row] for row in problem.links], np.float64),
        np.array([[per_byte(x) for x in row] for row in problem.links], np.float64),
        np.array([latency(x) for x in problem.host_links], np.float64),
        np.array([per_byte(x) for x in problem.host_links], np.float64),
        np.array([g.stage_overhead_s for g in problem.groups], np.float64),
        device_rows(problem),
    )


def device_rows(problem: Problem) -> NDArray[np.int64]:
    """Return `Devices` of passes/stage_table.h, [groups, 4]: devices or teams, pool, width, devices of a pool."""
    rows = [
        (max(0, g.num_devices), problem.pool(i), g.degree, max(0, g.num_devices) if g.team_of < 0 else 0)
        for i, g in enumerate(problem.groups)
    ]
    return np.array(rows, np.int64)


def wire_arrays(problem: Problem) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the arrays of passes/stage_table.h for wires: s/byte, and the ways that cross each, host first."""
    side = len(problem.groups) + 1
    ways = np.zeros((len(problem.wires), side, side), np.uint8)
    for i, wire in enumerate(problem.wires):
        for a, b in wire.ways:
            ways[i, a + 1, b + 1] = 1
    return np.array([1.0 / w.byte_per_s for w in problem.wires], np.float64), ways


@dataclass(frozen=True)
class StateGraph:
    """States of the execution (see passes/state_graph.cc) under the node numbering `order` (new number -> node)."""

    order: tuple[int, ...]
    words: NDArray[np.uint64]  # (states, ceil(nodes / 64)), smallest state first
    edges: NDArray[np.int32]  # (edges, 3): from, to, kernel
    full: bool  # every downset is a state
    truncated: bool  # the limit dropped states, so covers may be missing

    @property
    def num_states(self) -> int:
        """How many states there are; 0 if no sequence of kernels runs the whole model."""
        return int(self.words.shape[0])


def state_graph(problem: Problem, order: Sequence[int], *, full: bool, max_states: int) -> StateGraph:
    """Build the state graph; with `full` and more than `max_states` downsets it comes back empty and truncated."""
    rank = np.empty(problem.num_nodes, np.int64)
    rank[np.array(order, np.int64)] = np.arange(problem.num_nodes)
    preds = predecessors(problem)
    before = tuple(tuple(sorted(int(rank[p]) for p in preds[v])) for v in order)
    kernels = tuple(tuple(sorted(int(rank[v]) for v in k.nodes)) for k in problem.kernels)
    return _state_graph(tuple(order), before, kernels, full, max_states)


@lru_cache(maxsize=16)  # one model is solved on many clusters
def _state_graph(
    order: tuple[int, ...],
    before: tuple[tuple[int, ...], ...],
    kernels: tuple[tuple[int, ...], ...],
    full: bool,
    max_states: int,
) -> StateGraph:
    """The graph of a model whose nodes are renumbered: the nodes before each, and the nodes of each kernel."""
    states, edges, truncated = passes_func("tvmhet.StateGraph")(
        len(order), *map(as_tensor, (*pack_lists(before), *pack_lists(kernels))), full, max_states
    )
    words = np.frombuffer(bytes(states), np.uint64).reshape(-1, max(1, (len(order) + 63) // 64)).copy()
    rows = np.frombuffer(bytes(edges), np.int32).reshape(-1, 3).copy()
    return StateGraph(order, words, rows, full, bool(truncated))


@dataclass(frozen=True)
class ModelArrays:
    """The arrays of passes/segment_table.cc for one problem and one state graph, in its order."""

    num_nodes: int
    tensors: tuple[Any, ...]
    keep: tuple[NDArray[Any], ...]  # the memory behind `tensors`


def model_arrays(
    problem: Problem, graph: StateGraph, time_s: NDArray[np.float64], memory: NDArray[np.float64]
) -> ModelArrays:
    """Pack `problem` for SegmentTable. `time_s` and `memory` may differ from the problem's (pins, what-if limits).

    Columns of `time_s` that are not the problem's groups (modes of training) are taken to hold weights whole.
    """
    rank = {v: i for i, v in enumerate(graph.order)}
    own = len(memory) == len(problem.groups)
    kernel_bytes = np.zeros((len(problem.kernels), 2))
    made: dict[int, list[int]] = {}
    for i, e in enumerate(problem.edges):
        made.setdefault(e.src, []).append(i)
    for i, k in enumerate(problem.kernels):
        inside = set(k.nodes)
        for v in k.nodes:
            for x in made.get(v, ()):
                e = problem.edges[x]
                if e.is_output or any(d not in inside for d in e.dsts):
                    kernel_bytes[i, 0] += e.size_bytes
        kernel_bytes[i, 1] = k.workspace_bytes
    reader_ptr, reader_ids = pack_lists([[rank[d] for d in sorted(set(e.dsts))] for e in problem.edges])
    weight_ptr, weight_ids = pack_lists([[rank[v] for v in sorted(set(w.nodes))] for w in problem.weights])
    arrays: tuple[NDArray[Any], ...] = (
        graph.words,
        graph.edges,
        time_s,
        kernel_bytes,
        memory,
        np.array([rank[e.src] if e.src >= 0 else -1 for e in problem.edges], np.int32),
        np.array([e.size_bytes for e in problem.edges], np.float64),
        np.array([e.is_output for e in problem.edges], np.uint8),
        reader_ptr,
        reader_ids,
        np.array([w.size_bytes for w in problem.weights], np.float64),
        weight_ptr,
        weight_ids,
        np.array([1.0 / problem.groups[g].degree if own else 1.0 for g in range(len(memory))], np.float64),
        np.array([w.is_whole for w in problem.weights], np.uint8),
    )
    return ModelArrays(problem.num_nodes, tuple(as_tensor(a) for a in arrays), arrays)
