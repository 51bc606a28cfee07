"""Free placements: a contiguous one improved in several ways, and a lower bound on all of them.

    contiguous ──► anneal without the order ──► sets of one device ──► pairs of devices cut anew ──► bound ──► CP-SAT

Each way starts from the best so far; work that a bound has made needless is left out.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass

from tvmhet.solve.contract import Blocks, contract
from tvmhet.solve.load_anneal import HOT, Effort, anneal
from tvmhet.solve.load_chain import Placement, valued
from tvmhet.solve.load_columns import Columns, columns_of
from tvmhet.solve.load_cpsat import polish
from tvmhet.solve.load_recut import recut
from tvmhet.solve.load_start import CLOSE, MOST_MORE, NEAR, PROVED, chains, is_proved, packed, translated
from tvmhet.solve.loads import LoadProblem, device_slots

_HEATS = (HOT, 0.015)  # first temperatures of annealing, in turn
_WARM = 0.1  # from sets of one device
_COOL = 0.003  # after pairs of devices were cut anew
_DIVES = (0.2, 0.4, 0.6, 0.8)  # loads of sets, of the way from the bound to the known load
_KEPT = 2  # of them are annealed
_FEW = 500  # blocks times devices: up to here CP-SAT is tried on smaller gaps too
_WORTH_DIVING = 0.002  # a gap from which sets are taken once more
_MOST_DIVES = 2  # by the values of the bound; a second one if the first found something better
_RECUT = 8  # the share of the pricing work for cutting pairs anew


def free_placement(
    problem: LoadProblem, blocks: Blocks, lower: float, effort: Effort
) -> tuple[Placement | None, float, str]:
    """Return (the best placement found, a lower bound on all of them, name of the algorithm)."""
    chained = contract(problem, contiguous=True)
    chain = chains(problem, chained, effort)[0]
    start = translated(problem, chained, blocks, chain) if chain else None
    if start is None:
        start, none_fits = packed(problem, blocks)
        lower = math.inf if none_fits else lower
    if start is None:
        return None, lower, "none"
    columns = columns_of(problem, blocks, ordered=False)
    search = _Search(problem, blocks, effort, columns, start, lower)
    with suppress(KeyboardInterrupt):  # the best so far
        search.run()
    return search.best, search.lower, search.name


@dataclass
class _Search:
    """The best placement and the bound so far."""

    problem: LoadProblem
    blocks: Blocks
    effort: Effort
    columns: Columns | None
    best: Placement
    lower: float
    name: str = "contiguous"

    def run(self) -> None:
        """Improve the placement and raise the bound until they are close, or the effort is spent."""
        start, effort, columns = self.best, self.effort, self.columns
        idle = 0  # seeds in a row that found nothing better
        for s in range(effort.seeds):
            if is_proved(self.best, self.lower) or idle == len(_HEATS):
                break
            origin = start if s % 2 else self.best
            better = self._offer(self._annealed(origin, s, _HEATS[s % len(_HEATS)]), "annealing")
            idle = 0 if better else idle + 1
            if s == 0 and columns:
                # where a proof is quick, that is all
                self.lower = columns.raised(self.best.value, self.lower, effort.max_entries // 10)
                self._dive(columns, 0)
            if self._near():
                break
        if columns and not is_proved(self.best, self.lower):
            self._recut(columns, 0)
            self.lower = columns.raised(self.best.value, self.lower, effort.max_entries)
            for s in range(_MOST_DIVES):
                known = self.best
                if known.value > self.lower * (1 + _WORTH_DIVING):
                    self._dive(columns, effort.seeds + s)
                    self._recut(columns, effort.seeds + s)
                if self.best is known:
                    break
            if not self._near() and self.blocks.count <= MOST_MORE:
                self.lower = columns.raised(self.best.value, self.lower, effort.more_entries, effort.max_entries // 10)
        near = CLOSE if self.blocks.count * max(1, len(device_slots(self.problem))) <= _FEW else NEAR
        if self.best.value > self.lower * (1 + near):
            self._polish()

    def _near(self) -> bool:
        return self.best.value <= self.lower * (1 + NEAR)

    def _offer(self, found: Placement, name: str) -> bool:
        """Keep `found` if it is better; return whether it is."""
        better = found.value < self.best.value * (1 - PROVED)
        if better:
            self.best, self.name = found, name
        return better

    def _annealed(self, start: Placement, seed: int, heat: float) -> Placement:
        return anneal(self.problem, self.blocks, start, self.effort, False, seed, heat)

    def _dive(self, columns: Columns, seed: int) -> None:
        """Make placements of the most valuable sets of one device after another, and anneal the best of them."""
        lower, upper = self.lower, self.best.value
        tried: list[Placement] = []
        for share in _DIVES if math.isfinite(upper) and not is_proved(self.best, lower) else ():
            home = columns.dive(lower + share * (upper - lower), self.best.slots)
            if home is not None:
                tried.append(valued(self.problem, self.blocks, home, self.best.slots))
        for s, start in enumerate(sorted((x for x in tried if math.isfinite(x.value)), key=lambda x: x.value)[:_KEPT]):
            self._offer(self._annealed(start, seed + s, _WARM), "sets of one device")

    def _recut(self, columns: Columns, seed: int) -> None:
        """Cut pairs of devices anew, then anneal a little."""
        if is_proved(self.best, self.lower) or not math.isfinite(self.best.value):
            return
        most = self.effort.max_entries // _RECUT
        if self._offer(recut(self.problem, self.blocks, columns.pricer, self.best, most), "pairs of devices cut anew"):
            self._offer(self._annealed(self.best, seed, _COOL), "pairs of devices cut anew")

    def _polish(self) -> None:
        """Improve the placement or the bound by CP-SAT."""
        best, limit_s = self.best, self.effort.cpsat_s
        home, self.lower = polish(self.problem, self.blocks, best.home, best.slots, best.value, self.lower, limit_s)
        self._offer(valued(self.problem, self.blocks, home, best.slots), "CP-SAT")
