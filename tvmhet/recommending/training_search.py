"""Which fleets to plan for a training job: one after the other the one that would be best if planning gained there
what it gained on its like, until that fleet is planned already; on small markets each whose bound leaves it a chance.

The best fleet of one type is sought in the same way first, so that it is not compared by halves. The answer is always a
planned fleet. A fleet that is not planned counts as whole copies; where those do not fit, it is no option.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmhet.errors import Infeasible
from tvmhet.recommending.job import Goal, Job
from tvmhet.recommending.option import Option, make_option
from tvmhet.recommending.training import Planned, TrainingStudy
from tvmhet.recommending.training_fleets import Fleet, fleet_of

Floats = NDArray[np.float64]

MOST_SINGLE = 8  # fleets of one type that are planned for a job
MOST_PLANS = 12  # and fleets of any types
MOST_FAILURES = 8  # fleets that turn out too small, in each of both searches
FEW_FLEETS = 40  # of a market: each whose bound is below the best is planned
_SAME = 1e-9
_HOPED = 0.85  # of whole copies' seconds, where no fleet of the kind is planned yet


@dataclass
class FleetSearch:
    """One job on a study: which fleets to plan next, and what is known of each."""

    study: TrainingStudy
    job: Job

    def __post_init__(self) -> None:
        fleets = self.study.fleets
        offers = self.study.market.offers
        self.seconds = fleets.copies_s.copy()  # of an iteration, as known
        self.least_s = fleets.bound_s.copy()
        names = sorted({o.device.name for o in offers})
        has = np.array([[o.device.name == n for n in names] for o in offers])
        kinds, kind_of = np.unique(fleets.counts @ has > 0, axis=0, return_inverse=True)
        self.kinds = [frozenset(n for n, h in zip(names, row, strict=True) if h) for row in kinds]
        self.kind_of = kind_of.reshape(-1)
        devices = fleets.counts @ np.array([o.num_devices for o in offers])
        like = np.stack([self.kind_of, np.log2(devices).astype(np.int64)], axis=1)
        self.like_of = np.unique(like, axis=0, return_inverse=True)[1].reshape(-1)  # types, and devices within twice
        self.single = np.array([len(k) == 1 for k in self.kinds])[self.kind_of]
        self.usd_per_h = fleets.counts @ np.array([o.usd_per_h for o in offers])
        self.power_w = fleets.counts @ np.array([o.power_w for o in offers])
        self.spot = fleets.counts @ np.array([int(o.spot) for o in offers])
        self.planned: dict[int, Planned | Infeasible] = {}
        keys = [o.key for o in offers]
        for known in list(self.study.plans):
            if {k for k, _ in known} <= set(keys):
                counts = [dict(known).get(k, 0) for k in keys]
                for row in np.flatnonzero((fleets.counts == counts).all(axis=1)):
                    self.know(int(row))

    def run(self, most_single: int = MOST_SINGLE, most: int = MOST_PLANS) -> FleetSearch:
        """Plan fleets of one type, then of any; the best of them is compared with what it is without each offer."""
        self._seek(self.single, most_single)
        self._seek(np.ones_like(self.single), most)
        while left := self._without_an_offer():
            for row in left:
                self.know(row)
        for kind, name in enumerate(self.kinds):  # a type that holds the model in stages only is shown too
            if len(name) == 1 and not np.isfinite(self.seconds[self.kind_of == kind]).any():
                self._seek(self.kind_of == kind, 1)
        if not np.isfinite(self.seconds).any() and np.isfinite(self.least_s).any():
            self.know(self.largest())
        return self

    def _without_an_offer(self) -> list[int]:
        """The fleets without a plan that the best mix becomes when one of its offers is left out."""
        row = self._best(self.seconds, np.ones_like(self.single))
        if row is None:
            return []
        counts = self.study.fleets.counts
        offers = np.flatnonzero(counts[row])
        left = [np.where(np.arange(counts.shape[1]) == o, 0, counts[row]) for o in offers if len(offers) > 1]
        rows = [int(r) for less in left for r in np.flatnonzero((counts == less).all(axis=1))]
        return [r for r in rows if r not in self.planned]

    def largest(self) -> int:
        """The fleet with the most memory."""
        offers = self.study.market.offers
        return int((self.study.fleets.counts @ [o.num_devices * o.device.memory_bytes for o in offers]).argmax())

    def _seek(self, allowed: NDArray[np.bool_], most: int) -> None:
        few = len(self.seconds) <= FEW_FLEETS
        left, failures = (len(self.seconds), len(self.seconds)) if few else (most, MOST_FAILURES)
        while left > 0 and failures > 0:
            row = self._best(self.expected_s(unknown=1.0), allowed)
            if few and (row is None or row in self.planned):
                row = self._open(allowed)
            if row is None or row in self.planned:
                break
            self.know(row)
            found = isinstance(self.planned[row], Planned)
            left, failures = left - found, failures - (not found)
        while (row := self._best(self.seconds, allowed)) is not None and row not in self.planned:
            self.know(row)  # the answer has a plan, whatever was expected of others

    def know(self, row: int) -> None:
        """Plan the fleet of a row, and count it as planned from now on."""
        found = self.study.planned(self.fleet(row))
        self.planned[row] = found
        if isinstance(found, Infeasible):
            fleets = self.study.fleets
            less = (fleets.counts <= fleets.counts[row]).all(axis=1) & np.isinf(fleets.copies_s)
            less[row] = True
            self.seconds[less] = self.least_s[less] = math.inf
        else:
            self.seconds[row] = found.iteration_s
            self.least_s[row] = max(self.least_s[row], found.plan.lower_bound)

    def expected_s(self, unknown: float = math.inf) -> Floats:
        """Seconds of an iteration, where there is no plan if planning gained what it gained on a fleet's like.

        Where copies do not fit and no like is planned, they are the bound times `unknown`.
        """
        fleets = self.study.fleets
        made = [r for r, p in self.planned.items() if isinstance(p, Planned)]
        gain = np.full(self.like_of.max() + 1, np.nan)  # planned over whole copies, of fleets of a kind
        slack = gain.copy()  # planned over bound
        for r in made:
            k = self.like_of[r]
            if math.isfinite(fleets.copies_s[r]):
                gain[k] = np.fmin(gain[k], self.seconds[r] / fleets.copies_s[r])
            slack[k] = np.fmin(slack[k], self.seconds[r] / self.least_s[r] if self.least_s[r] > 0 else 1.0)
        gain, slack = np.where(np.isnan(gain), _HOPED, gain), np.where(np.isnan(slack), unknown, slack)
        staged = np.maximum(self.least_s, 1e-300) * slack[self.like_of]
        guess = np.where(np.isfinite(fleets.copies_s), fleets.copies_s * gain[self.like_of], staged)
        guess = np.maximum(guess, self.least_s)
        rows = list(self.planned)
        guess[rows] = self.seconds[rows]
        return guess

    def _open(self, allowed: NDArray[np.bool_]) -> int | None:
        """A fleet without a plan whose bound is below the best so far, the lowest first; None if there is none."""
        bound = self.least_s.copy()
        bound[list(self.planned)] = math.inf
        row, best = self._best(bound, allowed), self._best(self.seconds, allowed)
        if row is None or best is None:
            return row
        (least_miss, least), (miss, goal) = self._rank(bound, row), self._rank(self.seconds, best)
        return row if (least_miss, least) < (miss, goal * (1 - _SAME)) else None

    def _rank(self, seconds: Floats, row: int) -> tuple[float, float]:
        """By how much a row misses the limits, then its goal: the lesser is better."""
        figures = self._figures(seconds)
        return float(self._misses(figures)[row]), float(self._goal(figures)[row])

    def _best(self, seconds: Floats, allowed: NDArray[np.bool_]) -> int | None:
        """The best row for the job at these seconds; where none keeps the limits, the one that misses them least."""
        figures = self._figures(seconds)
        goal, hours = self._goal(figures), figures[0]
        miss = self._misses(figures)
        rows = np.flatnonzero(allowed & np.isfinite(goal) & np.isfinite(miss))
        if not len(rows):
            return None
        keys = (self.usd_per_h[rows], hours[rows], np.round(goal[rows], 12), miss[rows])
        return int(rows[np.lexsort(keys)[0]])

    def _misses(self, figures: tuple[Floats, Floats, Floats]) -> Floats:
        """By how much each row misses the limits, as a factor; 1 where it keeps them."""
        miss = np.ones(len(figures[0]))
        for name, figure in zip(("deadline_h", "budget_usd"), figures, strict=False):
            if (limit := self.job.limits().get(name)) is not None:
                miss = np.maximum(miss, figure / limit)
        return np.where(miss <= 1 + _SAME, 1.0, miss)

    def _figures(self, seconds: Floats) -> tuple[Floats, Floats, Floats]:
        assert self.job.samples is not None and self.job.global_batch is not None, "checked by Job"
        work_s = math.ceil(self.job.samples / self.job.global_batch) * seconds
        hours = np.full(len(seconds), math.inf)
        real = np.isfinite(work_s)
        running = self.study.market.running
        hours[real] = [running.hours(float(w), int(n)) for w, n in zip(work_s[real], self.spot[real], strict=True)]
        usd, kwh = np.full_like(hours, math.inf), np.full_like(hours, math.inf)
        usd[real], kwh[real] = self.usd_per_h[real] * hours[real], self.power_w[real] * hours[real] / 1e3
        return hours, usd, kwh

    def fleet(self, row: int) -> Fleet:
        """Return the fleet of a row."""
        return fleet_of(self.study.market, self.study.fleets.counts[row])

    def option(self, row: int, seconds: Floats | None = None) -> Option:
        """Return what a row takes and costs, at its seconds as known by default; its one pipeline is the row."""
        iteration_s = float((self.seconds if seconds is None else seconds)[row])
        rate = self.study.goal.global_batch / max(iteration_s, 1e-12)
        return make_option(self.job, self.study.market.running, self.fleet(row), ((row, 1),), rate, iteration_s)

    def options(self, seconds: Floats | None = None) -> list[Option]:
        """Return the options that are worth a look: of each set of types those that no other of it beats in time and
        rent, and all that are planned. `seconds` of each row are as known by default."""
        seconds = self.seconds if seconds is None else seconds
        kept: list[int] = []
        order = np.lexsort((seconds, self.usd_per_h))
        least = np.full(len(self.kinds), math.inf)
        for row in order[np.isfinite(seconds[order])]:
            kind = self.kind_of[row]
            if seconds[row] < least[kind] * (1 - _SAME) or row in self.planned:
                kept.append(int(row))
                least[kind] = min(least[kind], seconds[row])
        return [self.option(r, seconds) for r in sorted(kept)]

    def bound(self) -> float:
        """Return a value of the goal that no fleet compared goes below within the limits, whatever its plan."""
        figures = self._figures(self.least_s)
        keeps = np.isfinite(self.least_s)
        for name, figure in zip(("deadline_h", "budget_usd"), figures, strict=False):
            if (limit := self.job.limits().get(name)) is not None:
                keeps &= figure <= limit * (1 + _SAME)
        return float(self._goal(figures)[keeps].min(initial=math.inf))

    def reach(self) -> dict[str, float]:
        """Return, for each limit, what no plan of a fleet that keeps the others goes below."""
        limits, figures = self.job.limits(), self._figures(self.least_s)
        least = {}
        for name in limits:
            keeps = np.isfinite(self.least_s)
            for other, figure in zip(("deadline_h", "budget_usd"), figures, strict=False):
                if other in limits and other != name:
                    keeps &= figure <= limits[other] * (1 + _SAME)
            least[name] = float(figures[("deadline_h", "budget_usd").index(name)][keeps].min(initial=math.inf))
        return least

    def _goal(self, figures: tuple[Floats, Floats, Floats]) -> Floats:
        return figures[(Goal.TIME, Goal.PRICE, Goal.ENERGY).index(self.job.goal)]


def refused(search: FleetSearch) -> Infeasible:
    """Return why no fleet was found to train the model on: the reason of the fleet with most memory."""
    try:
        search.study.plan(search.fleet(search.largest()))
    except Infeasible as error:
        return error
    raise AssertionError("else it would be an option")
