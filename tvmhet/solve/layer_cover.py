"""An upper bound on the flow through layers: shares that the nodes of every layer must add up to.

A flow F crosses every layer inside nodes that hold it, so the rates of those nodes sum to at least F. Give each rate r
a *share* u(r) so that any nodes whose rates sum to F have shares that sum to 1, as dual feasible functions do for bin
packing. Then a node that holds k layers contributes k * u(rate(k)), and

    F is out of reach if     sum over nodes of  max over k of  k * u(rate(k))   <   number of layers

For example u = 1 from F upwards and 1/2 below: a node slower than F needs at least one more. The best shares are found
by linear programming with cuts: solve, find the cheapest set of rates that sums to F, add it, repeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

_MAX_CUTS = 80  # added to the program
_MAX_LABELS = 1024  # partial sums kept apart; beyond, rates are rounded up, which keeps the bound valid
_GRID = 1 << 14  # to multiples of flow / _GRID
_MARGIN = 1e-6  # a value is called the best when this much more is out of reach

Kinds = Mapping[tuple[float, ...], int]  # rates of a node by the number of layers held -> number of such nodes


def flow_bound(rates: Sequence[tuple[float, ...]], num_layers: int, value: float, upper: float) -> float:
    """Return an upper bound on the flow between `value`, which a layout reaches, and `upper`, which none exceeds."""
    kinds: dict[tuple[float, ...], int] = {}
    for r in rates:
        held = r[:num_layers]
        kinds[held] = kinds.get(held, 0) + 1
    low, high = value, upper
    if high <= low * (1 + _MARGIN) or out_of_reach(kinds, num_layers, low * (1 + _MARGIN)):
        return min(upper, low * (1 + _MARGIN))
    while high - low > 3e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if out_of_reach(kinds, num_layers, middle) else (middle, high)
    return high


def out_of_reach(kinds: Kinds, num_layers: int, flow: float) -> bool:
    """Do some shares prove that no layout carries `flow`?"""
    rates = np.array(sorted({min(r, flow) for row in kinds for r in row if r > 0}))
    if not len(rates):
        return True
    cuts: list[NDArray[np.int64]] = []
    for _ in range(_MAX_CUTS):
        share = _shares(kinds, rates, flow, cuts)
        cover, cost = _cheapest_cover(rates, share, flow)
        if cost > 0 and _held(kinds, rates, share, flow) / cost < num_layers * (1 - 1e-9):
            return True
        if cost >= 1 - 1e-9 or _held(kinds, rates, share, flow) >= num_layers:
            return False  # these are the best shares, or the best are no better than these
        cuts.append(cover)
    return False


def _held(kinds: Kinds, rates: NDArray[np.float64], share: NDArray[np.float64], flow: float) -> float:
    """The most layers that nodes can hold, counted in shares."""
    of = dict(zip(rates.tolist(), share.tolist(), strict=True))
    return sum(
        count * max((k * of[min(r, flow)] for k, r in enumerate(row, 1) if r > 0), default=0.0)
        for row, count in kinds.items()
    )


def _shares(
    kinds: Kinds, rates: NDArray[np.float64], flow: float, cuts: Sequence[NDArray[np.int64]]
) -> NDArray[np.float64]:
    """Return the shares, rising with the rate, that make the nodes hold the least, under the covers found so far."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    share = [solver.NumVar(0.0, 1.0, "") for _ in rates]
    of = dict(zip(rates.tolist(), share, strict=True))
    for a, b in pairwise(share):
        solver.Add(a <= b)
    total = solver.Objective()
    for row, count in kinds.items():
        most = solver.NumVar(0.0, solver.infinity(), "")
        total.SetCoefficient(most, float(count))
        for k, r in enumerate(row, 1):
            if r > 0:
                solver.Add(k * of[min(r, flow)] <= most)
    for cover in cuts:
        solver.Add(sum(int(n) * x for n, x in zip(cover, share, strict=True) if n) >= 1)
    total.SetMinimization()
    solver.Solve()
    return np.array([max(0.0, x.solution_value()) for x in share])


def _cheapest_cover(
    rates: NDArray[np.float64], share: NDArray[np.float64], flow: float
) -> tuple[NDArray[np.int64], float]:
    """Return (how many of each rate, their shares): the least shares of rates that sum to `flow`."""
    sums, costs = np.zeros(1), np.zeros(1)
    counts = np.zeros((1, len(rates)), np.int64)
    best, best_cost = counts[0], np.inf
    while len(sums):
        reach = (sums[:, None] + rates[None, :]).ravel()
        price = (costs[:, None] + share[None, :]).ravel()
        parent, item = np.divmod(np.arange(len(reach)), len(rates))
        full = np.flatnonzero(reach >= flow * (1 - 1e-12))
        if len(full) and price[i := full[price[full].argmin()]] < best_cost:
            best_cost = float(price[i])
            best = counts[parent[i]].copy()
            best[item[i]] += 1
        rest = np.flatnonzero((reach < flow * (1 - 1e-12)) & (price < best_cost))
        if len(rest) > _MAX_LABELS:
            return _rounded_cover(rates, share, flow)
        rest = rest[np.lexsort((price[rest], -reach[rest]))]
        cheapest = np.minimum.accumulate(np.append(np.inf, price[rest]))[:-1]
        rest = rest[price[rest] < cheapest]  # a label with a smaller sum must be cheaper
        sums, costs = reach[rest], price[rest]
        counts = counts[parent[rest]]
        counts[np.arange(len(rest)), item[rest]] += 1
    return best, best_cost


def _rounded_cover(
    rates: NDArray[np.float64], share: NDArray[np.float64], flow: float
) -> tuple[NDArray[np.int64], float]:
    """`_cheapest_cover` for rates rounded up to a grid: an unbounded knapsack, one rate after the other."""
    size = np.minimum(np.ceil(rates / flow * _GRID * (1 - 1e-12)).astype(np.int64), _GRID)
    cost, last = np.full(_GRID, np.inf), np.full(_GRID, -1, np.int64)
    cost[0] = 0.0
    for i, (step, price) in enumerate(zip(size.tolist(), share.tolist(), strict=True)):
        for low in range(step, _GRID, step):
            high = min(low + step, _GRID)
            more = cost[low - step : high - step] + price
            better = more < cost[low:high]
            cost[low:high][better] = more[better]
            last[low:high][better] = i
    ends = [_GRID - step + int(cost[_GRID - step :].argmin()) for step in size.tolist()]
    final = int((cost[ends] + share).argmin())
    at, counts = ends[final], np.zeros(len(rates), np.int64)
    counts[final] += 1
    while at:
        counts[last[at]] += 1
        at -= int(size[last[at]])
    return counts, float(cost[ends[final]] + share[final])
