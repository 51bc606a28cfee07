"""Linear orders of a DAG: which nodes lie together decides which stages a linear search can see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

Preds = Sequence[Sequence[int]]  # for each node, the nodes that must come before it


def order_by(preds: Preds, key: Callable[[int], Any]) -> tuple[int, ...]:
    """Return the topological order that always takes the ready node with the least `key`.

    Nodes on a cycle, and what follows them, are missing from the result.
    """
    waiting = [len(p) for p in preds]
    readers = successors(preds)
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


def successors(preds: Preds) -> list[list[int]]:
    """Return, for each node, the nodes that wait for it."""
    readers: list[list[int]] = [[] for _ in preds]
    for v, p in enumerate(preds):
        for u in p:
            readers[u].append(v)
    return readers


def depths(preds: Preds) -> list[int]:
    """Return each node's number of nodes on the longest chain that ends in it."""
    depth = [0] * len(preds)
    for v in order_by(preds, lambda v: v):
        depth[v] = 1 + max((depth[u] for u in preds[v]), default=0)
    return depth


def late_order(preds: Preds) -> tuple[int, ...]:
    """Every node as late as its first reader allows: depth first from the outputs, side inputs just before use."""
    depth = depths(preds)
    read = {u for p in preds for u in p}
    done = [False] * len(preds)
    out: list[int] = []
    for root in range(len(preds)):
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


def breadth_order(preds: Preds) -> tuple[int, ...]:
    """Level by level: nodes sorted by their distance from the inputs."""
    depth = depths(preds)
    return order_by(preds, lambda v: depth[v])


def first_order(preds: Preds) -> tuple[int, ...]:
    """Return the given numbering, as far as it is topological."""
    return order_by(preds, lambda v: v)


def linear_orders(preds: Preds) -> Iterator[tuple[int, ...]]:
    """Yield the distinct orders worth trying, each made when it is asked for: `first_order` before the others."""
    tried: set[tuple[int, ...]] = set()
    for make in (first_order, late_order, breadth_order):
        order = make(preds)
        if order not in tried:
            tried.add(order)
            yield order


def closed_sets(needs: Preds, limit: int) -> list[frozenset[int]]:
    """Return every set of nodes that holds what its nodes need, small ones first; empty if there are over `limit`."""
    readers = successors(needs)
    layer = {frozenset[int](): frozenset(v for v, p in enumerate(needs) if not p)}  # a set -> what may join it
    known: dict[frozenset[int], None] = {}
    while layer:
        known |= dict.fromkeys(layer)
        if len(known) > limit:
            return []
        grown: dict[frozenset[int], frozenset[int]] = {}
        for s, ready in layer.items():
            for v in sorted(ready):
                if (larger := s | {v}) not in grown:
                    freed = {w for w in readers[v] if larger.issuperset(needs[w])}
                    grown[larger] = (ready - {v}) | freed
        layer = grown
    return list(known)
