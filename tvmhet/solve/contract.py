"""Contraction of a load problem: what must stay together becomes one block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from tvmhet.solve.loads import LoadProblem


@dataclass(frozen=True)
class Blocks:
    """`nodes[b]` are the nodes of block b. A net: all tensors with the same maker and reader blocks."""

    nodes: tuple[tuple[int, ...], ...]
    preds: tuple[tuple[int, ...], ...]  # the order that contiguous stages must respect
    neighbours: tuple[tuple[int, int], ...]  # every edge between two blocks
    time_s: NDArray[np.float64]  # (blocks, types)
    memory_bytes: NDArray[np.float64]
    net_src: tuple[int, ...]
    net_readers: tuple[tuple[int, ...], ...]
    net_cost_s: NDArray[np.float64]

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return len(self.nodes)


def contract(problem: LoadProblem, *, contiguous: bool) -> Blocks:
    """Join nodes of one group; with `contiguous`, also blocks on a common cycle of forward edges."""
    merged = nx.utils.UnionFind(range(problem.num_nodes))
    leader: dict[int, int] = {}
    for v, g in enumerate(problem.group):
        if g >= 0:
            merged.union(leader.setdefault(g, v), v)
    if contiguous:
        graph = nx.DiGraph()
        graph.add_nodes_from(merged[v] for v in range(problem.num_nodes))
        graph.add_edges_from((merged[u], merged[v]) for u, v in _order_edges(problem) if merged[u] != merged[v])
        for component in nx.strongly_connected_components(graph):
            merged.union(*component)
    groups: dict[int, list[int]] = {}
    for v in range(problem.num_nodes):
        groups.setdefault(merged[v], []).append(v)
    nodes = tuple(tuple(vs) for vs in sorted(groups.values()))
    home = {v: b for b, vs in enumerate(nodes) for v in vs}
    preds: list[set[int]] = [set() for _ in nodes]
    for u, v in _order_edges(problem):
        if home[u] != home[v]:
            preds[home[v]].add(home[u])
    return _measure(problem, nodes, home, tuple(tuple(sorted(p)) for p in preds))


def _order_edges(problem: LoadProblem) -> Iterable[tuple[int, int]]:
    ahead = problem.forward or (True,) * problem.num_nodes
    return ((u, v) for u, v in problem.edges if ahead[u] and ahead[v])


def _measure(
    problem: LoadProblem, nodes: tuple[tuple[int, ...], ...], home: dict[int, int], preds: tuple[tuple[int, ...], ...]
) -> Blocks:
    readers: list[set[int]] = [set() for _ in range(problem.num_nodes)]
    for u, v in problem.edges:
        readers[u].add(home[v])
    nets: dict[tuple[int, tuple[int, ...]], float] = {}
    for v in range(problem.num_nodes):
        outside = tuple(sorted(readers[v] - {home[v]}))
        if outside and problem.send_s[v] > 0:
            nets[home[v], outside] = nets.get((home[v], outside), 0.0) + problem.send_s[v]
    time_s = np.array(problem.time_s, np.float64).reshape(-1, len(problem.types))
    memory = np.array(problem.memory_bytes, np.float64)
    return Blocks(
        nodes,
        preds,
        tuple(sorted({(home[u], home[v]) for u, v in problem.edges if home[u] != home[v]})),
        np.array([time_s[list(vs)].sum(axis=0) for vs in nodes]).reshape(-1, len(problem.types)),
        np.array([memory[list(vs)].sum() for vs in nodes]),
        tuple(src for src, _ in nets),
        tuple(to for _, to in nets),
        np.array(list(nets.values()), np.float64),
    )
