"""An order of blocks in which few tensors are open at once, and what is left out where too many still are.

Prices of sets (passes/load_pricing.cc) remember on which sides the blocks of each open tensor lie: time and memory grow
with the number of these.
"""

from __future__ import annotations

from collections.abc import Iterator

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
    """Order blocks so that few nets differ at once: always the block that leaves the fewest open, or different.

    Open nets, with blocks both placed and to come, do not differ if the same blocks of them are placed.
    """

    def states(order: list[int]) -> float:
        rank = {v: place for place, v in enumerate(order)}
        spans = [sorted(rank[v] for v in vs) for vs in pins]
        return sum(2.0 ** min(len(groups), 500) for groups in _open(spans, np.ones(len(spans))))

    return min((_greedy(count, pins, alike=alike) for alike in (False, True)), key=states)


def _greedy(count: int, pins: list[list[int]], *, alike: bool) -> list[int]:
    """Place the block next that leaves the fewest nets open, or, of those of open nets, the fewest different ones."""
    nets_of: list[list[int]] = [[] for _ in range(count)]
    for e, vs in enumerate(pins):
        for v in vs if len(vs) > 1 else ():
            nets_of[v].append(e)
    groups: dict[tuple[int, ...], set[int]] = {}  # open nets by their blocks so far
    so_far: list[tuple[int, ...]] = [()] * len(pins)
    rest = set(range(count))
    order: list[int] = []

    def key(v: int) -> tuple[int, int, int, int]:
        mine: dict[tuple[int, ...], int] = {}  # nets of v by their blocks so far, and how many stay open
        ends = 0
        for e in nets_of[v]:
            last = len(so_far[e]) + 1 == len(pins[e])
            ends += last
            mine[so_far[e]] = mine.get(so_far[e], 0) + (not last)
        opened = sum(len(so_far[e]) > 0 for e in nets_of[v])
        if not alike:
            return len(nets_of[v]) - opened - ends, -opened, v, 0
        change = sum(stay > 0 for stay in mine.values())
        change -= sum(1 for x in mine if x and len(groups[x]) == sum(so_far[e] == x for e in nets_of[v]))
        return change, -ends, -opened, v

    while rest:
        near = {v for nets in groups.values() for e in nets for v in pins[e]} & rest if alike else rest
        v = min(near or rest, key=key)
        rest.remove(v)
        order.append(v)
        for e in nets_of[v]:
            if so_far[e]:
                groups[so_far[e]].discard(e)
                if not groups[so_far[e]]:
                    del groups[so_far[e]]
            so_far[e] = (*so_far[e], v)
            if len(so_far[e]) < len(pins[e]):
                groups.setdefault(so_far[e], set()).add(e)
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
    """Return each net's cost, 0 for those that would make more than `most` differ at once. `spans`: places, ascending.

    Open nets with the same places so far do not differ. The cheapest go first.
    """
    cost = cost_s.copy()
    for groups in _open(spans, cost):
        while len(groups) > most:
            worth = {so_far: float(cost[nets].sum()) for so_far, nets in groups.items()}
            least = min(groups, key=lambda so_far: (worth[so_far], so_far))
            cost[groups.pop(least)] = 0.0
    return cost


def widest(spans: list[list[int]], cost_s: NDArray[np.float64]) -> int:
    """Return how many nets with a cost differ at one place at most. `spans`: places, ascending."""
    return max((len(groups) for groups in _open(spans, cost_s)), default=0)


def _open(spans: list[list[int]], cost_s: NDArray[np.float64]) -> Iterator[dict[tuple[int, ...], list[int]]]:
    """For each place, make the nets with a cost that touch it or lie on both sides, by their places so far."""
    begin: dict[int, list[int]] = {}
    for e, span in enumerate(spans):
        if span[0] < span[-1]:
            begin.setdefault(span[0], []).append(e)
    now: list[int] = []
    for place in range(max((span[-1] for span in spans), default=-1) + 1):
        now = [e for e in (*now, *begin.get(place, ())) if spans[e][-1] >= place and cost_s[e] > 0]
        groups: dict[tuple[int, ...], list[int]] = {}
        for e in now:
            groups.setdefault(tuple(v for v in spans[e] if v <= place), []).append(e)
        yield groups
