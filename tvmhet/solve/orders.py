"""Linear orders of the nodes: which operators lie together decides which stages a linear search can see."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from tvmhet.solve.pack import predecessors
from tvmhet.solve.problem import Problem


def _by_rank(preds: list[list[int]], key: Callable[[int], Any]) -> tuple[int, ...]:
    """Return the topological order that always takes the ready node with the least `key`."""
    waiting = [len(p) for p in preds]
    readers: list[list[int]] = [[] for _ in preds]
    for v, p in enumerate(preds):
        for u in p:
            readers[u].append(v)
    ready = [(key(v), v) for v, w in enumerate(waiting) if w == 0]
    heapify(ready)
    out: list[int] = []
    while ready:
        _, u = heappop(ready)
        out.append(u)
        for v in readers[u]:
            waiting[v] -= 1
            if waiting[v] == 0:
                heappush(ready, (key(v), v))
    return tuple(out)


def _depths(preds: list[list[int]]) -> list[int]:
    depth = [0] * len(preds)
    for v, p in enumerate(preds):
        depth[v] = 1 + max((depth[u] for u in p), default=0)
    return depth


def late_order(problem: Problem) -> tuple[int, ...]:
    """Every node as late as its first reader allows: depth first from the outputs, side inputs just before use."""
    preds = predecessors(problem)
    depth = _depths(preds)
    read = {u for p in preds for u in p}
    done = [False] * problem.num_nodes
    out: list[int] = []
    for root in range(problem.num_nodes):
        stack = [] if root in read else [root]
        while stack:
            v = stack[-1]
            waiting = [u for u in preds[v] if not done[u]]
            if waiting:
                stack.append(max(waiting, key=lambda u: (depth[u], -u)))
                continue
            stack.pop()
            if not done[v]:
                done[v] = True
                out.append(v)
    return tuple(out)


def breadth_order(problem: Problem) -> tuple[int, ...]:
    """Level by level: nodes sorted by their distance from the inputs."""
    preds = predecessors(problem)
    depth = _depths(preds)
    return _by_rank(preds, lambda v: depth[v])


def linear_orders(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Return the distinct orders worth trying, the given one first."""
    given = tuple(range(problem.num_nodes))
    orders = (given, late_order(problem), breadth_order(problem))
    return tuple(dict.fromkeys(orders))
