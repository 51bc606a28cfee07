"""The most valuable set of blocks that one device can run in a given time (passes/load_pricing.cc).

Blocks are taken in an order in which few tensors are open at once; where too many still are, the cheap ones are charged
in part (passes/net_shares.h). So a set's true load may be more than asked for, its value is never less than that of the
best one.
With `ordered`, sets are those without a path that leaves them and comes back (contiguous). Memory is not looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmhet._passes import passes_func
from tvmhet.solve.contract import Blocks
from tvmhet.solve.load_width import charged, kept, narrow_order, reduced, widest
from tvmhet.solve.loads import LoadProblem
from tvmhet.solve.orders import successors
from tvmhet.solve.pack import as_tensor, pack_lists

MOST_ENTRIES = 20_000_000  # of one pricing, for its memory
ROUGH = 2e-4  # of the time: loads this close are taken for the smaller one, where a placement is sought
_OPEN = (9, 7, 5)  # tensors charged at once: the first with which one pricing keeps no more entries than ...
_QUICK = 2_000_000  # ... of them
_FIRST = (9, 7, 11, 13)  # tensors charged at once first, where more are charged then
_SLOTS = 63  # of a state (passes/load_pricing.cc)


@dataclass(frozen=True, slots=True)
class PricedSet:
    """A set of blocks. `value` is -inf where no set is worth more than asked, inf where there are too many entries."""

    value: float
    load: float
    blocks: tuple[int, ...]
    entries: int


class SetPricer:
    """Prices sets of one problem; what does not depend on values and times is made once."""

    def __init__(self, problem: LoadProblem, blocks: Blocks, *, ordered: bool) -> None:
        self.problem, self.blocks = problem, blocks
        nets: dict[tuple[int, ...], float] = {}  # who pays does not depend on which of its blocks makes a tensor
        for src, readers, cost in zip(blocks.net_src, blocks.net_readers, blocks.net_cost_s.tolist(), strict=True):
            ends = tuple(sorted({src, *readers}))
            nets[ends] = nets.get(ends, 0.0) + cost
        before = reduced(blocks) if ordered else [[] for _ in range(blocks.count)]
        follow = [[u, *vs] for u, vs in enumerate(successors(before)) if vs]
        self._order = np.array(narrow_order(blocks.count, [*map(list, nets), *follow]), np.int64)
        rank = np.empty(blocks.count, np.int64)
        rank[self._order] = np.arange(blocks.count)
        self._spans = [sorted(int(rank[v]) for v in ends) for ends in nets]
        order = kept([sorted(int(rank[u]) for u in before[v]) for v in self._order])
        self._shape = (*pack_lists(self._spans), *pack_lists(order))
        waits = [[min(u, v), max(u, v)] for v, us in enumerate(order) for u in us]
        self._waits = widest(waits, np.ones(len(waits)))  # blocks that others must follow, at once, at most
        self._net_cost_s = np.array(list(nets.values()), np.float64)
        self._cost_s = charged(self._spans, self._net_cost_s, _OPEN[0])
        self._widened = False
        self._wide: dict[int, NDArray[np.float64]] = {}

    def widen(self, kind: int, budget: float, values: NDArray[np.float64]) -> None:
        """Charge as many tensors at once as keep one pricing quick; once."""
        for most in () if self._widened else _OPEN:
            self.charge(most)
            tried = self.best(
                kind, budget, values, self.blocks.time_s[:, kind], grain=budget * ROUGH, max_entries=_QUICK
            )
            if math.isfinite(tried.value):
                break

    def stage(
        self, kind: int, budget: float, values: NDArray[np.float64], enough: float, open_most: int, max_entries: int
    ) -> tuple[bool, int]:
        """Choose how many tensors to charge first when `open_most` are charged at once. Return (is one pricing possible
        within `max_entries`, entries of these trials).
        """
        cost: dict[int, int] = {}
        spent, now = 0, self._cost_s
        for most in _FIRST:
            self.charge(most)
            found = self.best(
                kind,
                budget,
                values,
                self.blocks.time_s[:, kind],
                enough=enough,
                grain=budget * ROUGH,
                max_entries=min([max_entries, *cost.values()]),
                open_most=open_most,
            )
            spent += found.entries
            if found.value < math.inf:
                cost[most] = found.entries
        self._cost_s = now
        if cost:
            self.charge(min(cost, key=lambda most: (cost[most], most)))
        return bool(cost), spent

    def charge(self, most: int) -> None:
        """Charge up to `most` tensors at once."""
        self._cost_s = charged(self._spans, self._net_cost_s, most)
        self._widened = True

    def best(
        self,
        kind: int,
        budget: float,
        values: NDArray[np.float64],
        time_s: NDArray[np.float64],
        *,
        enough: float = 0.0,
        grain: float = 0.0,
        max_entries: int = MOST_ENTRIES,
        open_most: int = 0,
    ) -> PricedSet:
        """Return the most valuable set that a device of type `kind` runs within `budget`, if worth more than `enough`.

        Blocks with `time_s` inf stay outside. Loads closer than `grain` may be taken for the smaller of them. With
        `open_most`, so many tensors are charged at once, and the fewer of `widen` bound what a set can still earn.
        """
        inside = np.zeros(self.blocks.count, np.uint8)
        level = np.where(self._cost_s > 0, 2, 0)
        if open_most:
            level = np.where(self._wider(open_most) > 0, np.maximum(level, 1), 0)
        cost_s = self._net_cost_s * self.problem.types[kind].transfer_scale
        arrays = (time_s[self._order], values[self._order], cost_s, *self._shape, level.astype(np.int32))
        best, load, entries = passes_func("tvmhet.LoadPricing")(
            [as_tensor(a) for a in arrays], as_tensor(inside), budget, enough, grain, max_entries
        )
        members = tuple(int(self._order[i]) for i in np.flatnonzero(inside))
        return PricedSet(float(best), float(load), members, int(entries))

    def charges_more(self, most: int, now: int) -> bool:
        """Are more costs charged with up to `most` tensors open at once than with `now` (0: those of `widen`)?"""
        charges = self._wider(now) if now else self._cost_s
        return float(self._wider(most).sum()) > float(charges.sum()) * (1 + 1e-6)

    def _wider(self, most: int) -> NDArray[np.float64]:
        """Return the costs with up to `most` tensors charged at once; those of `widen` where states hold no more."""
        if most not in self._wide:
            cost_s = charged(self._spans, self._net_cost_s, most)
            self._wide[most] = cost_s if self._waits + widest(self._spans, cost_s) <= _SLOTS else self._cost_s
        return self._wide[most]

    def load(self, kind: int, blocks: tuple[int, ...]) -> float:
        """Return the load of a device of type `kind` with these blocks."""
        inside = np.zeros(self.blocks.count, bool)
        inside[list(blocks)] = True
        sides = [inside[self._order[span]] for span in self._spans]
        cut = np.array([bool(s.any() and not s.all()) for s in sides])
        scale = self.problem.types[kind].transfer_scale
        return float(self.blocks.time_s[inside, kind].sum() + (self._net_cost_s[cut].sum() * scale if scale else 0.0))
