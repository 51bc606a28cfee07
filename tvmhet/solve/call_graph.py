"""The graph of a load problem as chains of calls need it: sets of nodes are integers, bit v for node v."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmhet.errors import BadGraph
from tvmhet.solve.loads import LoadProblem
from tvmhet.solve.orders import order_by, successors
from tvmhet.solve.pack import pack_lists


@dataclass(frozen=True)
class CallChain:
    """`lower`: no placement is quicker. `home`: the chain's accelerator of each node, 0 for the host."""

    lower: float
    home: NDArray[np.int32]


@dataclass(frozen=True)
class CallGraph:
    """A load problem packed for passes/call_chain.cc and passes/segment_chain.cc."""

    num_nodes: int
    order: tuple[int, ...]
    preds: list[list[int]]
    above: list[int]  # all that must come before each node
    below: list[int]
    mates: list[list[int]]  # nodes that share each node's device
    arrays: list[NDArray[np.float64] | NDArray[np.int32]]
    num_calls: int
    memory_bytes: float


def call_graph(problem: LoadProblem) -> CallGraph:
    """Return the problem packed. Raises BadGraph if the graph has a cycle."""
    n = problem.num_nodes
    before: list[set[int]] = [set() for _ in range(n)]
    for u, v in problem.edges:
        before[v].add(u)
    preds = [sorted(p) for p in before]
    succs = successors(preds)
    order = order_by(preds, lambda v: v)
    if len(order) < n:
        raise BadGraph("the graph has a cycle", "a cycle has no latency; remove it")
    above, below = [0] * n, [0] * n
    for v in order:
        for u in preds[v]:
            above[v] |= above[u] | 1 << u
    for v in reversed(order):
        for u in succs[v]:
            below[v] |= below[u] | 1 << u
    together: dict[int, list[int]] = {}
    for v, g in enumerate(problem.group):
        if g >= 0:
            together.setdefault(g, []).append(v)
    mates: list[list[int]] = [[] for _ in range(n)]
    for vs in together.values():
        for v in vs:
            mates[v] = [u for u in vs if u != v]
    arrays: list[NDArray[np.float64] | NDArray[np.int32]] = [
        *(np.array(x, np.float64) for x in zip(*problem.time_s, strict=True)),
        np.array(problem.memory_bytes, np.float64),
        np.array(problem.send_s, np.float64),
        *pack_lists(preds),
        *pack_lists(succs),
        *pack_lists(mates),
        np.array(order, np.int32),
    ]
    accelerators = problem.types[0]
    count = min(max(0, accelerators.num_devices), n)
    return CallGraph(n, order, preds, above, below, mates, arrays, count, accelerators.memory_bytes)


def heaviest_path(graph: CallGraph, weight: Sequence[float]) -> list[int]:
    """Return the nodes of a path with the largest sum of weights, first to last."""
    total = [0.0] * graph.num_nodes
    back = [-1] * graph.num_nodes
    for v in graph.order:
        back[v] = max(graph.preds[v], key=lambda u: (total[u], -u), default=-1)
        total[v] = weight[v] + (total[back[v]] if back[v] >= 0 else 0.0)
    path = [max(graph.order, key=lambda v: (total[v], -v))]
    while back[path[-1]] >= 0:
        path.append(back[path[-1]])
    return path[::-1]


def path_weights(problem: LoadProblem) -> tuple[list[float], ...]:
    """Return weights of nodes by which a heaviest path is worth a chain: at best, on the host, sent from the host."""
    host = [t[1] for t in problem.time_s]
    return (
        [min(t) for t in problem.time_s],
        [h if math.isfinite(h) else t[0] for h, t in zip(host, problem.time_s, strict=True)],
        [(h if math.isfinite(h) else 0.0) + s for h, s in zip(host, problem.send_s, strict=True)],
    )


def closed(graph: CallGraph, held: int) -> list[int]:
    """Return the nodes of `held` with all that lies between them and all that shares their device."""
    while True:
        above = below = more = 0
        members = [v for v in range(graph.num_nodes) if held >> v & 1]
        for v in members:
            above |= graph.above[v]
            below |= graph.below[v]
            for u in graph.mates[v]:
                more |= 1 << u
        if not (above & below | more) & ~held:
            return members
        held |= above & below | more
