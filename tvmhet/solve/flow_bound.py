"""A lower bound on the largest load that lets work flow freely, and knows the lines between regions.

For prices p >= 0 of a second of each group's device and of each wire, all together 1, no plan has a largest load below

    min over assignments of nodes to groups of  sum of p[group] * floor_s[node, group] + sum of p[wire] * seconds on it

With one line between two sides this is a minimum cut of the model: its two sides are the regions, what is cut is what
crosses (ortools' max-flow). A way between the sides that is on no wire costs nothing. Without wires each node takes
its cheapest group. The prices follow the loads of the answer (multiplicative weights).

Memory, whole devices, the order of stages and all overheads but one are left out, so it holds for stages that share
devices too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.graph.python import max_flow

from tvmhet.solve.bounds import fixed_s, pools_of
from tvmhet.solve.problem import Problem, Wire

_ROUNDS = 40  # of the prices
_SCALE = 2**48  # of all prices together, as whole numbers
_HUGE = 2**56  # no limit: more than all finite capacities together


def flow_bound_s(problem: Problem, floor_s: NDArray[np.float64]) -> float:
    """Return a lower bound in seconds. `floor_s` (nodes, groups): no kernel takes less than its nodes together."""
    sides = list(_sides(problem)) or [_Sides((), frozenset(), ())]
    return max(_bound_s(problem, floor_s, s) for s in sides) * (1 - 1e-9)


@dataclass(frozen=True, slots=True)
class _Sides:
    """Groups `here` (and the host, -1) and the others; the wires of each way from here to there, then of each back."""

    there: tuple[tuple[int, ...], ...]
    here: frozenset[int]
    back: tuple[tuple[int, ...], ...]


def _sides(problem: Problem) -> Iterator[_Sides]:
    places = [-1, *(g for g, group in enumerate(problem.groups) if group.num_devices > 0)]
    for here in dict.fromkeys(frozenset(a for a, _ in w.ways) & frozenset(places) for w in problem.wires):
        away = [b for b in places if b not in here]
        there = {_over(problem.wires, a, b) for a in here for b in away}
        back = {_over(problem.wires, b, a) for a in here for b in away}
        if away and here and ((there and () not in there) or (back and () not in back)):
            yield _Sides(tuple(sorted(there)), here, tuple(sorted(back)))


def _over(wires: tuple[Wire, ...], a: int, b: int) -> tuple[int, ...]:
    return tuple(i for i, w in enumerate(wires) if (a, b) in w.ways)


def _bound_s(problem: Problem, floor_s: NDArray[np.float64], sides: _Sides) -> float:
    counts, pool, degree = pools_of(problem)
    groups = len(counts)
    per_byte = np.array([1.0 / w.byte_per_s for w in problem.wires])
    usable = np.concatenate([counts > 0, np.full(len(per_byte), bool(sides.here))])
    many = np.concatenate([counts, np.ones(len(per_byte))])
    share = np.where(usable, 1.0, 0.0) / usable.sum()
    best = 0.0
    for step in range(_ROUNDS if usable.sum() > 1 else 1):
        price = np.where(usable, share / np.maximum(many, 1.0), 0.0)
        price_s = np.concatenate([price[pool] * degree, price[groups:]])
        value, mine = _priced(problem, np.where(counts[pool] > 0, floor_s, np.inf), sides, price_s, per_byte)
        best = max(best, value + fixed_s(problem, price_s))
        load = np.concatenate([np.bincount(pool, degree * mine[:groups], groups), mine[groups:]])
        busy = np.where(usable, load / np.maximum(many, 1.0), 0.0)
        share = share * np.exp((busy - busy[usable].mean()) / max(busy.max(), 1e-300) * (0.7 / (1 + 0.15 * step)))
        share = np.where(usable, share / share.sum(), 0.0)
    return best


def _priced(
    problem: Problem,
    floor_s: NDArray[np.float64],
    sides: _Sides,
    price: NDArray[np.float64],
    per_byte: NDArray[np.float64],
) -> tuple[float, NDArray[np.float64]]:
    """Return (the least price of an assignment, seconds of each group and wire in it)."""
    groups = len(problem.groups)
    known = np.isfinite(floor_s)
    cost = np.where(known, np.where(known, floor_s, 0.0) * price[:groups], np.inf)
    load = np.zeros(len(price))
    if not sides.here:
        value = float(cost.min(axis=1).sum())
        crossing = np.zeros(0)
    else:
        mine = np.array([g in sides.here for g in range(groups)])
        inside = np.where(mine, cost, np.inf).min(axis=1)
        outside = np.where(mine, np.inf, cost).min(axis=1)
        unit = [_unit(ways, price[groups:] * per_byte) for ways in (sides.there, sides.back)]
        value, is_here, crossing = _cut(problem, inside, outside, -1 in sides.here, unit)
        cost = np.where(is_here[:, None] == mine[None, :], cost, np.inf)
    if not math.isfinite(value):
        return 0.0, load
    chosen = cost.argmin(axis=1)
    np.add.at(load, chosen, floor_s[np.arange(len(chosen)), chosen])
    for ways, size in zip((sides.there, sides.back), crossing.tolist(), strict=False):
        cheapest = min(ways, key=lambda over: sum(price[groups + w] * per_byte[w] for w in over), default=())
        for w in cheapest:
            load[groups + w] += size * per_byte[w]
    return value, load


def _unit(ways: tuple[tuple[int, ...], ...], priced: NDArray[np.float64]) -> float:
    """The least price of a byte over any of `ways`; 0 where one of them is on no wire."""
    return float(min((sum(priced[w] for w in over) for over in ways), default=0.0))


def _cut(
    problem: Problem,
    inside: NDArray[np.float64],
    outside: NDArray[np.float64],
    host_is_here: bool,
    unit: list[float],
) -> tuple[float, NDArray[np.bool_], NDArray[np.float64]]:
    """Return (a lower bound on the least price, which nodes are here, bytes that cross there and back).

    Node v pays `inside[v]` here, `outside[v]` there; a tensor pays once for each direction in which it is read.
    """
    n = problem.num_nodes
    host, source, sink = n, n + 1, n + 2
    tails, heads, costs = [], [], []

    def arc(a: int, b: int, cost: float) -> None:
        tails.append(a)
        heads.append(b)
        costs.append(cost)

    for v in range(n):
        arc(source, v, float(outside[v]))
        arc(v, sink, float(inside[v]))
    arc(source, host, math.inf if host_is_here else 0.0)
    arc(host, sink, 0.0 if host_is_here else math.inf)
    extra = sink + 1
    for e in problem.edges:
        maker = e.src if e.src >= 0 else host
        readers = [*dict.fromkeys(e.dsts), *([host] if e.is_output else [])]
        if not readers or e.size_bytes == 0:
            continue
        arc(maker, extra, unit[0] * e.size_bytes)
        arc(extra + 1, maker, unit[1] * e.size_bytes)
        for r in readers:
            arc(extra, r, math.inf)
            arc(r, extra + 1, math.inf)
        extra += 2
    amounts = np.array(costs)
    scale = _SCALE / max(float(amounts[np.isfinite(amounts)].sum()), 1e-300)
    whole = np.where(np.isfinite(amounts), np.floor(np.where(np.isfinite(amounts), amounts, 0.0) * scale), _HUGE)
    flow = max_flow.SimpleMaxFlow()
    flow.add_arcs_with_capacity(np.array(tails, np.int32), np.array(heads, np.int32), whole.astype(np.int64))
    if flow.solve(source, sink) != flow.OPTIMAL or flow.optimal_flow() >= _HUGE:
        return math.inf, np.zeros(n, bool), np.zeros(2)
    here = np.zeros(extra, bool)
    here[np.array(flow.get_source_side_min_cut(), np.int64)] = True
    crossing = np.zeros(2)
    for e in problem.edges:
        maker = here[e.src if e.src >= 0 else host]
        readers = [here[r] for r in (*e.dsts, *([host] if e.is_output else []))]
        if readers and not all(r == maker for r in readers):
            crossing[0 if maker else 1] += e.size_bytes
    return flow.optimal_flow() / scale, here[:n], crossing
