"""A lower bound on placements of a load problem, by sets of blocks that one device can run in a given time.

Give every block a value. If the devices cannot earn all values within T, each with the most valuable set whose load is
at most T, then no placement has a largest load of T or less (the dual of covering the blocks by such sets: Dantzig and
Wolfe, 1960). Values are moved inside a box that follows the best ones found (Marsten, Hogan and Blankenship, 1975):

    values ──► each type's most valuable set (passes/load_pricing.cc) ──► a row more ──► values within the box

With `ordered`, sets are those without a path that leaves them and comes back (contiguous). Memory is not looked at, and
of tensors that live long only the most costly are charged, so that few are open at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from tvmhet._passes import passes_func
from tvmhet.solve.contract import Blocks
from tvmhet.solve.loads import LoadProblem
from tvmhet.solve.orders import successors
from tvmhet.solve.pack import as_tensor, pack_lists

_OPEN = 5  # tensors charged at once
_WAITING = 8  # blocks that others must follow, at once
_PASS = 20_000_000  # entries of one pricing, for its memory
_GRAIN = 5e-5  # of T: loads this close are taken for the smaller one
_EXACT = 1_000_000  # entries: where fewer are kept, loads are not rounded
_BOX = 0.001  # first width of the box, relative to the values
_MAX_BOX = 50.0
_TRIES = 60  # boxes for one T
_GOALS = (1 - 9e-7, 1 - 1e-5, 0.999)  # of the known load: tried after these ...
_FIRST = (0.99, 0.993)
_HALVINGS = 3  # ... and then what is left is halved
_MAX_BLOCKS = 1000


def column_bound(
    problem: LoadProblem, blocks: Blocks, value: float, lower: float, max_entries: int, *, ordered: bool
) -> float:
    """Return a lower bound on the largest load of every placement, at least `lower`; `value` is a known one's load.

    Work is counted in entries of the pricing tables: `max_entries` to come within 1 % of the known load, a tenth of it
    to come closer.
    """
    if not math.isfinite(value) or blocks.count > _MAX_BLOCKS or max_entries <= 0:
        return lower
    prices = _fractional(problem, blocks)
    if prices is None:
        return lower
    search = _Columns(problem, blocks, prices, ordered, max_entries)
    for goal, share in zip(_FIRST, (4, 10), strict=True):
        if lower < goal * value and search.refutes(goal * value):
            lower = goal * value
        search.entries_left = min(search.entries_left, max_entries // share)
    above = value
    for goal in _GOALS:
        if search.refutes(goal * value):
            return max(lower, goal * value)
        above = goal * value
    for _ in range(_HALVINGS):
        middle = (lower + above) / 2
        if search.entries_left > 0 and search.refutes(middle):
            lower = middle
        else:
            above = middle
    return lower


def _fractional(problem: LoadProblem, blocks: Blocks) -> NDArray[np.float64] | None:
    """Return the value of each block in the dual of sharing out all blocks, divisible and without transfers."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    unit = float(np.where(np.isfinite(blocks.time_s), blocks.time_s, 0.0).max(initial=0.0)) or 1.0
    value = [solver.NumVar(0.0, solver.infinity(), "") for _ in range(blocks.count)]
    price = [solver.NumVar(0.0, solver.infinity(), "") for _ in problem.types]
    whole = solver.RowConstraint(-solver.infinity(), 1.0, "")
    for x, kind in zip(price, problem.types, strict=True):
        whole.SetCoefficient(x, max(0, kind.num_devices))
    for times, v in zip(blocks.time_s, value, strict=True):
        for t, kind in enumerate(problem.types):
            if kind.num_devices > 0 and math.isfinite(times[t]):
                row = solver.RowConstraint(-solver.infinity(), 0.0, "")
                row.SetCoefficient(v, 1.0)
                row.SetCoefficient(price[t], -float(times[t]) / unit)
        solver.Objective().SetCoefficient(v, 1.0)
    solver.Objective().SetMaximization()
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return None
    return np.array([max(0.0, v.solution_value()) for v in value])


@dataclass(frozen=True, slots=True)
class _Column:
    kind: int
    blocks: tuple[int, ...]
    load: float


@dataclass
class _Columns:
    """The sets found so far and the best values, which sum to the share of the blocks that all devices can earn."""

    problem: LoadProblem
    blocks: Blocks
    values: NDArray[np.float64]
    ordered: bool
    entries_left: int
    columns: list[_Column] = field(default_factory=list)

    def __post_init__(self) -> None:
        pins = [sorted({s, *r}) for s, r in zip(self.blocks.net_src, self.blocks.net_readers, strict=True)]
        before = _reduced(self.blocks) if self.ordered else [[] for _ in range(self.blocks.count)]
        follow = [[u, *vs] for u, vs in enumerate(successors(before)) if vs]
        self._order = narrow_order(self.blocks.count, pins + follow)
        rank = np.empty(self.blocks.count, np.int64)
        rank[self._order] = np.arange(self.blocks.count)
        spans = [sorted(int(rank[v]) for v in p) for p in pins]
        order = _kept([sorted(int(rank[u]) for u in before[v]) for v in self._order])
        self._shape = (*pack_lists(spans), *pack_lists(order))
        self._cost_s = charged(spans, self.blocks.net_cost_s, _OPEN)
        self._devices = [max(0, kind.num_devices) for kind in self.problem.types]
        self._pass_entries = _EXACT  # of the last pricing of all types

    def refutes(self, budget: float) -> bool:
        """Is it shown that no placement has a load of `budget` or less?"""
        self._grain = budget * _GRAIN if self._pass_entries >= _EXACT else 0.0
        share, self.values = self._earned(budget, self.values, [0.0] * len(self._devices))
        box, misses = _BOX, 0
        for _ in range(_TRIES):
            if share > 1 + 1e-7 or self.entries_left <= 0:
                break
            hoped, values, most = self._best_in_box(budget, box)
            if hoped <= 1 + 1e-6:  # not within this box
                if box >= _MAX_BOX:
                    break
                box *= 2
                continue
            found, scaled = self._earned(budget, values, most)
            if found > share:
                box *= 2 if found - share > 0.3 * (hoped - share) else 1
                share, self.values, misses = found, scaled, 0
            elif misses := (misses + 1) % 2:
                box /= 2
        return share > 1 + 1e-7

    def _earned(
        self, budget: float, values: NDArray[np.float64], enough: list[float]
    ) -> tuple[float, NDArray[np.float64]]:
        """Return (all values over what the devices earn at most, values scaled so that they earn 1).

        Sets that earn no more than `enough[t]` on type t are not looked for.
        """
        total, before = 0.0, self.entries_left
        for t, kind in enumerate(self.problem.types):
            if not self._devices[t]:
                continue
            inside = np.zeros(self.blocks.count, np.uint8)
            paid = self._cost_s * kind.transfer_scale
            arrays = (self.blocks.time_s[self._order, t], values[self._order], paid, *self._shape)
            best, load, entries = passes_func("tvmhet.LoadPricing")(
                [as_tensor(a) for a in arrays],
                as_tensor(inside),
                budget,
                enough[t],
                self._grain,
                max(0, min(self.entries_left, _PASS)),
            )
            self.entries_left -= int(entries)
            if best > enough[t]:
                members = tuple(int(self._order[i]) for i in np.flatnonzero(inside))
                self.columns.append(_Column(t, members, float(load)))
            total += self._devices[t] * max(best, enough[t])
        self._pass_entries = before - self.entries_left
        if not 0 < total < math.inf:
            return 0.0, self.values
        return float(values.sum()) / total, values / total

    def _best_in_box(self, budget: float, box: float) -> tuple[float, NDArray[np.float64], list[float]]:
        """Return (the most that values within the box sum to, those values, what each type earns by known sets)."""
        solver = pywraplp.Solver.CreateSolver("GLOP")
        extra = box * float(self.values.mean()) / 10
        value = [solver.NumVar(x * max(0.0, 1 - box), x * (1 + box) + extra, "") for x in self.values.tolist()]
        earns = [solver.NumVar(0.0, solver.infinity(), "") for _ in self._devices]
        whole = solver.RowConstraint(-solver.infinity(), 1.0, "")
        for x, count in zip(earns, self._devices, strict=True):
            whole.SetCoefficient(x, count)
        for c in self.columns:
            if c.load <= budget:
                row = solver.RowConstraint(-solver.infinity(), 0.0, "")
                for b in c.blocks:
                    row.SetCoefficient(value[b], 1.0)
                row.SetCoefficient(earns[c.kind], -1.0)
        for x in value:
            solver.Objective().SetCoefficient(x, 1.0)
        solver.Objective().SetMaximization()
        if solver.Solve() != pywraplp.Solver.OPTIMAL:
            return 0.0, self.values, [0.0] * len(earns)
        values = np.array([max(0.0, x.solution_value()) for x in value])
        return float(values.sum()), values, [max(0.0, x.solution_value()) for x in earns]


def _reduced(blocks: Blocks) -> list[list[int]]:
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


def _kept(before: list[list[int]]) -> list[list[int]]:
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
