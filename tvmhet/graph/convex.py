"""Sets of operators that can run as one: convex sets, and partitions whose parts can be put in an order.

a ──► b ──► c      {a, c} is not convex: b lies on a path that leaves the set and comes back.
                   {a, c} and {b} wait for each other: the quotient has a cycle.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

from tvmhet.errors import BadGraph
from tvmhet.graph.opgraph import OpGraph


def is_convex(graph: OpGraph, ops: Collection[int]) -> bool:
    """Return whether every path between two operators of `ops` stays inside. O(operators between the outermost)."""
    return not convex_closure(graph, ops) - set(ops)


def convex_closure(graph: OpGraph, ops: Collection[int]) -> frozenset[int]:
    """Return the smallest convex set that holds `ops`: `ops` and every operator on a path between two of them."""
    if not ops:
        return frozenset()
    inside, first, last = set(ops), min(ops), max(ops)
    below = _reached(graph, inside, range(first, last + 1))
    closure = set(inside)
    for op in range(last, first - 1, -1):  # an operator leads back if one of its readers is in the closure
        if op in below and any(s in closure for s in graph.successors(op)):
            closure.add(op)
    return frozenset(closure)


def _reached(graph: OpGraph, start: set[int], window: range) -> set[int]:
    """Return the operators of `window` that read, directly or through others, from `start`; and `start`."""
    reached = set(start)
    for op in window:
        if any(p in reached for p in graph.predecessors(op)):
            reached.add(op)
    return reached


def quotient_order(graph: OpGraph, parts: Sequence[Collection[int]]) -> tuple[int, ...]:
    """Return the parts' indices in an execution order; of those that are ready the lowest index comes first.

    `parts` are disjoint sets of operators and need not cover the graph, but dependencies through operators in no part
    count. BadGraph if two parts share an operator or no order exists, with the names of operators that wait.
    """
    owner = _owners(graph, parts)
    reads: list[set[int]] = [set() for _ in range(max(owner, default=-1) + 1)]
    for op in range(len(graph.operators)):
        reads[owner[op]].update(owner[p] for p in graph.predecessors(op) if owner[p] != owner[op])
    waits = [len(r) for r in reads]
    readers: list[list[int]] = [[] for _ in reads]
    for part, producers in enumerate(reads):
        for p in producers:
            readers[p].append(part)
    ready = [p for p, n in enumerate(waits) if n == 0]
    heapify(ready)
    order = []
    while ready:
        order.append(part := heappop(ready))
        for r in readers[part]:
            waits[r] -= 1
            if waits[r] == 0:
                heappush(ready, r)
    if len(order) < len(reads):
        stuck = next(p for p, n in enumerate(waits) if n and p < len(parts))
        names = [graph.operators[o].name for o in sorted(parts[stuck])][:4]
        raise BadGraph(
            f"part {stuck} (operators {', '.join(names)}, ...) waits for a part that waits for it",
            "make every part convex, and no two parts wait for each other",
        )
    return tuple(p for p in order if p < len(parts))


def is_acyclic_quotient(graph: OpGraph, parts: Sequence[Collection[int]]) -> bool:
    """Return whether disjoint `parts` can be run one after another. BadGraph if they share an operator."""
    _owners(graph, parts)
    try:
        quotient_order(graph, parts)
    except BadGraph:
        return False
    return True


def _owners(graph: OpGraph, parts: Sequence[Collection[int]]) -> list[int]:
    """Return each operator's part; an operator in none is a part of its own, numbered after the others."""
    owner = [-1] * len(graph.operators)
    for i, part in enumerate(parts):
        for op in part:
            if owner[op] >= 0:
                raise BadGraph(
                    f"operator {graph.operators[op].name!r} is in parts {owner[op]} and {i}", "parts must be disjoint"
                )
            owner[op] = i
    free = len(parts)
    for op, part_of in enumerate(owner):
        if part_of < 0:
            owner[op] = free
            free += 1
    return owner
