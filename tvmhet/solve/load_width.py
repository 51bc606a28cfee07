"""An order of blocks in which few tensors are open at once, and what is left out where too many still are.

Prices of sets (passes/load_pricing.cc) remember on which sides the blocks of each open tensor lie: time and memory grow
with the number of these.
"""

from __future__ import annotations

from itertools import accumulate

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from tvmhet.solve.contract import Blocks

_WAITING = 8  # blocks that others must follow, at once


def reduced(blocks: Blocks) -> list[list[int]]:
    """Return the order between blocks without what follows from other pairs."""
    graph = nx.DiGraph((u, v) for v, before in enumerate(blocks.preds) for u in before)
    graph.add_nodes_from(range(blocks.count))
    reduced = nx.transitive_reduction(graph)
    return [sorted(reduced.predecessors(v)) for v in range(blocks.count)]


def narrow_order(count: int, pins: list[list[int]]) -> list[int]:
    """Order blocks so that few nets have blocks both placed and to come: always the block that leaves the fewest."""
    nets_of: list[list[int]] = [[] for _ in range(count)]
    for e, vs in enumerate(pins):
        for v in vs:
            nets_of[v].append(e)
    left = [len(vs) for vs in pins]
    opened = [False] * len(pins)
    rest = set(range(count))
    order: list[int] = []

    def key(v: int) -> tuple[int, int, int]:
        opens = sum(not opened[e] and left[e] > 1 for e in nets_of[v])
        closes = sum(opened[e] and left[e] == 1 for e in nets_of[v])
        return opens - closes, -sum(opened[e] for e in nets_of[v]), v

    while rest:
        v = min(rest, key=key)
        rest.remove(v)
        order.append(v)
        for e in nets_of[v]:
            left[e] -= 1
            opened[e] = left[e] > 0
    return order


def kept(before: list[list[int]]) -> list[list[int]]:
    """Return the order without the blocks that wait longest for others, so that few do at once."""
    waits: dict[int, int] = {}  # a block -> the last one placed whose side depends on it
    for v, us in enumerate(before):
        for u in us:
            waits[min(u, v)] = max(waits.get(min(u, v), 0), u, v)
    spans = [[u, last] for u, last in sorted(waits.items())]
    worth = charged(spans, np.array([1.0 / (last - u) for u, last in spans]), _WAITING)
    kept = {u for (u, _), x in zip(spans, worth, strict=True) if x > 0}
    return [[u for u in us if min(u, v) in kept] for v, us in enumerate(before)]


def charged(spans: list[list[int]], cost_s: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    """Return each net's cost, 0 for those that would make more than `most` open at once. `spans`: places, ascending."""
    cost = cost_s.copy()
    opened: list[int] = []
    first = sorted(range(len(spans)), key=lambda e: (spans[e][0], e))
    for e in first:
        opened = [x for x in opened if spans[x][-1] > spans[e][0] and cost[x] > 0] + [e]
        if len(opened) > most:
            cost[min(opened, key=lambda x: (cost[x], x))] = 0.0
    return cost


def widest(spans: list[list[int]], cost_s: NDArray[np.float64]) -> int:
    """Return how many nets with a cost touch one place at most. `spans`: places, ascending."""
    change: dict[int, int] = {}
    for span, cost in zip(spans, cost_s.tolist(), strict=True):
        if cost > 0 and span[0] < span[-1]:
            change[span[0]] = change.get(span[0], 0) + 1
            change[span[-1] + 1] = change.get(span[-1] + 1, 0) - 1
    return max(accumulate(change[place] for place in sorted(change)), default=0)
