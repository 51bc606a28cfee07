"""A lower bound on placements of a load problem, by sets of blocks that one device can run in a given time.

Give every block a value. If the devices cannot earn all values within T, each with the most valuable set whose load is
at most T, then no placement has a largest load of T or less (the dual of covering the blocks by such sets: Dantzig and
Wolfe, 1960). Values are moved inside a box that follows the best ones found (Marsten, Hogan and Blankenship, 1975):

    values ──► each type's most valuable set ──► a row more ──► values within the box

Sets are those of `load_sets`: contiguous ones with `ordered`, memory is not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from tvmhet.solve.contract import Blocks
from tvmhet.solve.load_sets import MOST_ENTRIES, ROUGH, SetPricer
from tvmhet.solve.loads import LoadProblem

_GRAIN = 5e-5  # of T: loads this close are taken for the smaller one
_LONG = 4_000_000  # entries of one pricing: beyond, loads this close are those of `ROUGH`
_EXACT = 1_000_000  # entries: where fewer are kept, loads are not rounded
_BOX = 0.001  # first width of the box, relative to the values
_MAX_BOX = 50.0  # beyond, no wider one is tried
_TRIES = 60  # boxes for one T
_NEAR = 0.9905  # of the known load: tried first
_CLOSER = 10  # the share of the work to come closer
_EQUAL = 1 - 9e-7  # then this
_FIRST, _NEXT = 0.45, 0.8  # of the work that is left, for the first goal (all where no set is known) and each other
_STUCK = 3  # pricings in a row that need too many entries
_PATIENCE = 3  # goals in a row that were missed
_FINE = 5e-4  # a gap that is not worth one
_MAX_BLOCKS = 1000  # beyond, no bound by sets
_ROUNDS = 2  # how far neighbours are compared
_WIDE = (62, 24, 13)  # tensors charged at once where few leave a gap: the most with which a pricing is possible
_OVER = (1.1, 1.05, 1.02, 1.005, 1.0)  # of what is known: sets worth so much are looked for first
_WORTH = 8  # pricings that must be affordable for that
_TOO_LITTLE = 0.98  # of the values: if the devices earn no more, nothing else needs to be known


def columns_of(problem: LoadProblem, blocks: Blocks, *, ordered: bool) -> Columns | None:
    """Return the search for sets of one device, or None where there are too many blocks or one that cannot run."""
    if blocks.count > _MAX_BLOCKS:
        return None
    values = _fractional(problem, blocks)
    return None if values is None else Columns(problem, blocks, values, ordered)


def column_bound(
    problem: LoadProblem,
    blocks: Blocks,
    value: float,
    lower: float,
    max_entries: int,
    *,
    ordered: bool,
) -> float:
    """Return a lower bound on the largest load of every placement, at least `lower`; `value` is a known one's load."""
    columns = columns_of(problem, blocks, ordered=ordered)
    if columns is None:
        return lower
    return columns.raised(value, lower, max_entries)


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


def _alike(blocks: Blocks) -> NDArray[np.int64]:
    """Return a number per block, the same for blocks with equal times and equal tensors to alike neighbours.

    Neighbours are compared twice (Weisfeiler and Leman, 1968): layers of one kind get the same values.
    """
    label = np.unique(blocks.time_s, axis=0, return_inverse=True)[1].reshape(-1)
    for _ in range(_ROUNDS):
        seen: list[list[tuple[float, bool, int]]] = [[] for _ in range(blocks.count)]
        for src, readers, cost in zip(blocks.net_src, blocks.net_readers, blocks.net_cost_s.tolist(), strict=True):
            for r in readers:
                seen[src].append((cost, True, int(label[r])))
                seen[r].append((cost, False, int(label[src])))
        keys = [(int(own), tuple(sorted(near))) for own, near in zip(label, seen, strict=True)]
        number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        label = np.array([number[key] for key in keys], np.int64)
    return label


@dataclass(frozen=True, slots=True)
class _Column:
    kind: int
    blocks: tuple[int, ...]
    load: float


@dataclass
class Columns:
    """The sets found so far and the best values, which sum to the share of the blocks that all devices can earn."""

    problem: LoadProblem
    blocks: Blocks
    values: NDArray[np.float64]
    ordered: bool
    entries_left: int = 0
    columns: list[_Column] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pricer = SetPricer(self.problem, self.blocks, ordered=self.ordered)
        self._devices = [max(0, kind.num_devices) for kind in self.problem.types]
        self._pass_entries = _EXACT  # of the last pricing of all types
        self._alike = _alike(self.blocks)
        self._wide = list(_WIDE)
        self.open_most = 0  # tensors charged at once; 0: as few as keep one pricing quick

    def raised(self, value: float, lower: float, max_entries: int, closer: int | None = None) -> float:
        """Return a lower bound on the largest load of every placement, at least `lower`; `value` is a known one's.

        Work is counted in entries of the pricing tables: `max_entries` to come within 1 % of the known load, `closer`
        (a tenth of it if not given) to come closer.
        """
        if not math.isfinite(value) or max_entries <= 0:
            return lower
        self.entries_left = max_entries
        self.pricer.widen(self._first_kind(), value, self.values)
        return self._climbed(value, lower, max_entries // _CLOSER if closer is None else closer)

    def _first_kind(self) -> int:
        return next(t for t, count in enumerate(self._devices) if count)

    def _climbed(self, value: float, lower: float, closer: int) -> float:
        """Return a higher bound, by ever closer goals: first 1 % from `value`, or half of the way."""
        low, above, missed, first = lower, value, 0, True
        while missed < _PATIENCE and self.entries_left > 0 and above > low * (1 + _FINE):
            near = _NEAR * value
            share = 1.0 if not self.columns else _FIRST if first else _NEXT
            goal, entries = (low + above) / 2, int(self.entries_left * share)
            if low >= near and above >= value:
                self.entries_left = entries = min(self.entries_left, closer)
                goal = _EQUAL * value
            elif low < near and (first or goal > near):
                goal = near
            first = False
            if self._reaches(goal, entries):
                low, missed = goal, 0
            elif self.entries_left > _WORTH * self._pass_entries and self._widened(goal):
                first = True
            else:
                above, missed = goal, missed + 1
        return low

    def _widened(self, budget: float) -> bool:
        """Charge more tensors at once from now on; False where no more can be. Known sets get their true loads."""
        kind = self._first_kind()
        while self._wide:
            most = self._wide.pop(0)
            if most <= self.open_most or not self.pricer.charges_more(most, self.open_most):
                continue
            enough = self._known(budget)[kind]
            room = min(MOST_ENTRIES, self.entries_left // _WORTH)
            possible, entries = self.pricer.stage(kind, budget, self.values, enough, most, room)
            self.entries_left -= entries
            if possible:
                self.open_most, self._wide = most, []
                self.columns = [replace(c, load=self.pricer.load(c.kind, c.blocks)) for c in self.columns]
                return True
        return False

    def _reaches(self, goal: float, entries: int) -> bool:
        """Is `goal` refuted with so many entries? If not, the values stay as they were."""
        kept, values = self.entries_left - entries, self.values
        self.entries_left = entries
        done = self.refutes(goal)
        self.entries_left = max(0, self.entries_left) + kept
        if not done:
            self.values = values
        return done

    def refutes(self, budget: float) -> bool:
        """Is it shown that no placement has a load of `budget` or less?"""
        self._grain = budget * self._coarse() if self._pass_entries >= _EXACT else 0.0
        share, self.values = self._earned(budget, self.values, self._known(budget))
        if share == 0.0 and self._grain == 0.0:
            self._grain = budget * _GRAIN
            share, self.values = self._earned(budget, self.values, self._known(budget))
        box, misses, stuck = _BOX, 0, 0
        for _ in range(_TRIES):
            if share > 1 + 1e-7 or stuck == _STUCK or self.entries_left <= 0:
                break
            hoped, values, most = self._best_in_box(budget, box)
            if hoped <= 1 + 1e-6:  # not within this box
                if box >= _MAX_BOX:
                    break
                box *= 2
                continue
            found, scaled = self._earned(budget, values, most)
            stuck = stuck + 1 if found == 0.0 else 0
            if found == 0.0:
                box /= 4
            elif found > share:
                box *= 2 if found - share > 0.3 * (hoped - share) else 1
                share, self.values, misses = found, scaled, 0
            elif misses := (misses + 1) % 2:
                box /= 2
        return share > 1 + 1e-7

    def _coarse(self) -> float:
        """Return which loads are close, as a share of the time: where pricing takes long, coarser ones."""
        return ROUGH if self.open_most or self._pass_entries > _LONG else _GRAIN

    def dive(self, budget: float, slots: Sequence[int]) -> NDArray[np.int32] | None:
        """Return a device per block: one device after another takes the most valuable set of what is left.

        A set's load is at most `budget`, except for the last device of the first type, which takes the rest. None
        if that needs too many entries.
        """
        time_s = self.blocks.time_s.copy()
        home = np.full(self.blocks.count, -1, np.int32)
        devices = sorted(range(len(slots)), key=lambda d: (slots[d], d))
        last = max(d for d in devices if slots[d] == slots[devices[0]])
        for d in devices:
            if d != last:
                found = self.pricer.best(slots[d], budget, self.values, time_s[:, slots[d]], grain=budget * ROUGH)
                if found.value == math.inf:
                    return None
                home[list(found.blocks)] = d
                time_s[list(found.blocks)] = math.inf
        for b in np.flatnonzero(home < 0):
            able = [d for d in (last, *devices) if math.isfinite(self.blocks.time_s[b, slots[d]])]
            home[b] = able[0] if able else last
        return home

    def _known(self, budget: float) -> list[float]:
        """Return what a device of each type earns at least, or need not be known exactly: the most valuable known set,
        or what is too little for the devices to earn all values.
        """
        rates = [
            max((float(v / s) for v, s in zip(self.values, self.blocks.time_s[:, t], strict=True) if 0 < s < math.inf),
                default=0.0)
            for t in range(len(self._devices))
        ]  # fmt: skip
        all_rates = math.fsum(r * count for r, count in zip(rates, self._devices, strict=True)) or 1.0
        earns = [_TOO_LITTLE * float(self.values.sum()) * r / all_rates for r in rates]
        for c in self.columns:
            if c.load <= budget:
                earns[c.kind] = max(earns[c.kind], float(self.values[list(c.blocks)].sum()))
        return earns

    def _earned(
        self, budget: float, values: NDArray[np.float64], enough: list[float]
    ) -> tuple[float, NDArray[np.float64]]:
        """Return (all values over what the devices earn at most, values scaled so that they earn 1).

        Sets that earn no more than `enough[t]` on type t are not looked for.
        """
        total, before = 0.0, self.entries_left
        for t in range(len(self._devices)):
            if not self._devices[t]:
                continue
            earns, column = self._priced(t, budget, values, enough[t])
            if column:
                self.columns.append(column)
            total += self._devices[t] * earns
        if math.isfinite(total):
            self._pass_entries = before - self.entries_left
        if not 0 < total < math.inf:
            return 0.0, self.values
        return float(values.sum()) / total, values / total

    def _priced(
        self, kind: int, budget: float, values: NDArray[np.float64], enough: float
    ) -> tuple[float, _Column | None]:
        """Return (what a device of type `kind` earns at most, or `enough` if that is more; its set, if found)."""
        earns = math.inf
        for over in _OVER if self.open_most else (1.0,):
            room = max(0, min(self.entries_left, MOST_ENTRIES if self._grain else 2 * _EXACT))
            found = self.pricer.best(
                kind,
                budget,
                values,
                self.blocks.time_s[:, kind],
                enough=over * enough,
                grain=self._grain,
                max_entries=room,
                open_most=self.open_most,
            )
            self.entries_left -= found.entries
            if found.value == math.inf:
                break
            if found.value > over * enough:
                return found.value, _Column(kind, found.blocks, found.load)
            earns = over * enough
        return earns, None

    def _best_in_box(self, budget: float, box: float) -> tuple[float, NDArray[np.float64], list[float]]:
        """Return (the most that values within the box sum to, those values, what each type earns by known sets)."""
        solver = pywraplp.Solver.CreateSolver("GLOP")
        count = np.bincount(self._alike)
        now = np.bincount(self._alike, self.values) / count
        extra = box * float(self.values.mean()) / 10
        value = [solver.NumVar(x * max(0.0, 1 - box), x * (1 + box) + extra, "") for x in now.tolist()]
        earns = [solver.NumVar(0.0, solver.infinity(), "") for _ in self._devices]
        whole = solver.RowConstraint(-solver.infinity(), 1.0, "")
        for x, devices in zip(earns, self._devices, strict=True):
            whole.SetCoefficient(x, devices)
        for c in self.columns:
            if c.load <= budget:
                row = solver.RowConstraint(-solver.infinity(), 0.0, "")
                for kind, members in enumerate(np.bincount(self._alike[list(c.blocks)]).tolist()):
                    if members:
                        row.SetCoefficient(value[kind], members)
                row.SetCoefficient(earns[c.kind], -1.0)
        for x, members in zip(value, count.tolist(), strict=True):
            solver.Objective().SetCoefficient(x, members)
        solver.Objective().SetMaximization()
        if solver.Solve() != pywraplp.Solver.OPTIMAL:
            return 0.0, self.values, [0.0] * len(earns)
        values = np.array([max(0.0, x.solution_value()) for x in value])[self._alike]
        return float(values.sum()), values, [max(0.0, x.solution_value()) for x in earns]
