"""Which (kernel, type) pairs to measure before renting, when each costs what its type costs to rent.

    value of a measurement  =  expected value of the best choice now  -  ... once its result is known

A result also tells about kernels that were not measured (belief.py). The value is taken from draws: draws are sorted by
the outcome and cut into bins, and in each bin the best option is chosen anew. A measurement is picked by value per
dollar; a first measurement on a type also pays for starting its machine (explorations do not cost the same: Yi et al.,
"Not All Explorations Are Equal", HeterBO, IEEE IPDPS 2020). It ends when knowing everything would gain too little, or
the budget does not pay for another. While single kernels tell nothing, the most telling type is tried by its longest.

Machines are dear to start, so money is kept for the types that are worth most to start (measuring_types.py), which are
sought again after each result; what is left goes to single measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tvmhet.cluster.market import Market
from tvmhet.errors import BadInput
from tvmhet.recommending.belief import NOISE, Belief, Floats, Pair
from tvmhet.recommending.measuring_types import trials, types_to_start

Errors = Mapping[Pair, Floats]

ENOUGH = 0.002  # knowing everything would gain less than this share: stop
CAREFUL = 3.0  # standard deviations above its mean: a log time for which there must be money left
_BINS = 16  # results of a measurement that are told apart
_DRAWS = 512  # of the errors: 32 for each result of a measurement


@dataclass(frozen=True, slots=True)
class Prices:
    """What measuring costs on a type: USD to start its machine (once), USD per second, seconds of each kernel's set-up
    (compiling, warming up) and how often it is run."""

    start_usd: Mapping[str, float]
    usd_per_s: Mapping[str, float]
    setup_s: float = 2.0
    repeats: int = 50

    @staticmethod
    def of(market: Market) -> Prices:
        """The smallest machine of each type is rented, whole, from its start-up on."""
        smallest: dict[str, float] = {}
        for offer in sorted(market.offers, key=lambda o: (o.num_devices, o.usd_per_h)):
            smallest.setdefault(offer.device.name, offer.usd_per_h / 3600)
        return Prices({n: p * market.running.startup_s for n, p in smallest.items()}, smallest)

    def usd(self, device_type: str, seconds: float, started: bool) -> float:
        """Return what one kernel of so many seconds costs."""
        run = self.usd_per_s[device_type] * (self.setup_s + self.repeats * seconds)
        return run + (0.0 if started else self.start_usd[device_type])


@dataclass(frozen=True, slots=True)
class Choice:
    """One measurement: what it costs (as expected, once there is a result as paid), what it was expected to gain (as a
    share of the best value), and its result."""

    device_type: str
    key: str
    usd: float
    gain: float
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Campaign:
    """What was measured, in order, why it ended, and what is believed afterwards.

    `gain_of_all` and `gain_left`: what knowing every time was expected to gain, before and after, as shares of the best
    value.
    """

    choices: tuple[Choice, ...]
    reason: str
    belief: Belief
    gain_of_all: float
    gain_left: float

    @property
    def usd(self) -> float:
        """What it costs in all."""
        return math.fsum(c.usd for c in self.choices)


def check_budget(usd: float) -> None:
    """Raise BadInput for a budget that pays for nothing."""
    if not usd > 0:
        raise BadInput(f"the profiling budget is {usd} USD", "give more than 0")


def choose_measurements(
    belief: Belief,
    prices: Prices,
    budget_usd: float,
    values: Callable[[Errors], Floats],
    *,
    result: Callable[[Pair], float] | None = None,
    seed: int = 0,
) -> Campaign:
    """Pick measurements until the budget is spent or no result can change the choice enough.

    `values` gives the goal's value of every option in each draw of the errors, shape (options, draws). `result` gives
    the seconds of (type, kernel); without it every result is taken to be as believed: the list for a dry run. What is
    measured is paid by the time it took; nothing is begun that the rest would not pay for if it took much longer than
    believed (`CAREFUL`).
    """
    chosen: list[Choice] = []
    first: float | None = None
    left, rng = budget_usd, np.random.default_rng(seed)
    while True:
        errors = belief.draw(rng, _DRAWS)
        drawn = values(errors)
        now = float(drawn.mean(axis=1).min())
        gain = 1.0 - float(drawn.min(axis=0).mean()) / now if now > 0 else 0.0
        first = gain if first is None else first
        if gain <= ENOUGH:
            return Campaign(tuple(chosen), "knowing every time would not change the choice", belief, first, gain)
        started = {c.device_type for c in chosen}
        tried = trials(belief, prices, started, CAREFUL)
        reserve = {n: tried[n].usd for n in types_to_start(belief, tried, left, errors, values, NOISE)}
        best = _next(belief, prices, left, started, reserve, errors, drawn, now)
        if best is None:
            every = len(belief.measured) == len(belief.pairs)
            why = "everything is measured" if every else "the budget does not pay for another"
            return Campaign(tuple(chosen), why, belief, first, gain)
        pair = (best.device_type, best.key)
        seconds = result(pair) if result else belief.expected_s()[pair]
        belief = belief.after(pair, seconds)
        usd = prices.usd(best.device_type, seconds, best.device_type in started)
        chosen.append(replace(best, usd=usd, seconds=seconds if result else None))
        left -= usd


def _next(
    belief: Belief,
    prices: Prices,
    left: float,
    started: set[str],
    reserve: Mapping[str, float],
    errors: Errors,
    drawn: Floats,
    now: float,
) -> Choice | None:
    """The affordable pair with the most value per dollar; of a type whose kernels tell only together, its longest.

    `reserve` is what is kept for the types that are worth starting; no other is started, unless there is none.
    """
    best: tuple[float, Choice] | None = None
    expected, most = belief.expected_s(), belief.expected_s(CAREFUL)
    for name in sorted({t for t, _ in belief.pairs}):
        if reserve and name not in started and name not in reserve:
            continue
        mine = left - math.fsum(usd for n, usd in reserve.items() if n != name)
        open_ = sorted((belief.seconds[p], p) for p in belief.pairs if p[0] == name and p not in belief.measured)
        cost = {p: prices.usd(name, expected[p], name in started) for _, p in open_}
        payable = [p for _, p in open_ if prices.usd(name, most[p], name in started) <= mine]
        if not payable:
            continue
        offers = [(p, value_of(errors[p], drawn), cost[p]) for p in payable]
        together = sum((s * np.exp(errors[p]) for s, p in open_), np.zeros(drawn.shape[1]))
        whole = math.fsum(cost.values()) - (0.0 if name in started else prices.start_usd[name] * (len(cost) - 1))
        offers.append((payable[-1], value_of(together, drawn) * cost[payable[-1]] / whole, cost[payable[-1]]))
        for pair, gain, usd in offers:
            rate = gain / usd if usd > 0 else math.inf
            if best is None or rate > best[0]:
                best = (rate, Choice(*pair, usd, gain / now))
    return None if best is None else best[1]


def value_of(outcome: Floats, drawn: Floats) -> float:
    """Return how much lower the expected value of the best choice is once `outcome` is known.

    >>> value_of(np.array([0.0, 1.0] * 16), np.array([[1.0, 3.0] * 16, [2.0, 2.0] * 16]))
    0.5
    """
    order = np.argsort(outcome, kind="stable")
    after = 0.0
    for part in np.array_split(order, min(_BINS, len(order))):
        after += float(drawn[:, part].mean(axis=1).min()) * len(part) / len(order)
    return max(0.0, float(drawn.mean(axis=1).min()) - after)
