"""What would change the recommendation: prices, a type sold out, a faster network."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tvmhet.cluster.link import Link
from tvmhet.cluster.market import Market, Running
from tvmhet.errors import HetError
from tvmhet.recommending.job import Goal, Job
from tvmhet.recommending.option import Option, best, make_option, meets, value

_MOST = 10.0  # price factors beyond which nothing is sought
_STEPS = 24  # of bisection
FASTER = 4.0  # times the network's rate


@dataclass(frozen=True, slots=True)
class Change:
    """One changed condition and the best option under it; `refused` says why there is none."""

    what: str
    option: Option | None
    value: float
    refused: str = ""


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The factor on the price of a type at which another option becomes best, and that option; inf: none does."""

    device_type: str
    factor: float
    option: Option | None


@dataclass(frozen=True, slots=True)
class Case:
    """A changed condition and how to find the best option under it."""

    what: str
    best: Callable[[], Option]


def repriced(job: Job, running: Running, option: Option, device_type: str, factor: float) -> Option:
    """Return the option with all prices of a type multiplied."""
    instances = [
        (dataclasses.replace(o, usd_per_h=o.usd_per_h * factor) if o.device.name == device_type else o, n)
        for o, n in option.instances
    ]
    return make_option(job, running, instances, option.pipelines, option.rate_per_s, option.latency_s, option.late_s)


#: The option that is taken if each is changed by a function, None if none keeps the limits.
Winner = Callable[[Callable[[Option], Option]], Option | None]


def break_even(job: Job, running: Running, chosen: Option, device_type: str, winner: Winner) -> BreakEven:
    """Return how much dearer a type of `chosen` may become, or how much cheaper another must, to change the answer.

    Rates do not depend on prices, so the same options are compared at other prices, by `winner`.
    """
    dearer = device_type in chosen.devices

    def at(factor: float) -> Option | None:
        return winner(lambda o: repriced(job, running, o, device_type, factor))

    def same(factor: float) -> bool:
        won = at(factor)
        return won is not None and won.devices == chosen.devices

    low, high = 1.0, _MOST if dearer else 1.0 / _MOST
    if same(high):
        return BreakEven(device_type, math.inf, None)
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if same(middle) else (low, middle)
    return BreakEven(device_type, high, at(high))


def contenders(job: Job, options: Sequence[Option], device_type: str) -> list[Option]:
    """Return the options that may win at some price of a type.

    Those are within the limits but the budget, and no other is better in one of these and as good in all: the goal, the
    rent for that type, the rent for the rest, and the rents that a budget is for, by the hour where the goal is the
    price of an input.
    """
    limits = {n: v for n, v in job.limits().items() if n != "budget_usd"}
    kept = [o for o in options if meets(o, limits)]
    rows = np.array([_parts(job, o, device_type) for o in kept]).reshape(len(kept), 5)
    out: list[Option] = []
    front = np.empty((0, 5))
    for i in np.lexsort(rows.T[::-1]):  # what is better comes before
        better = (front <= rows[i]).all(axis=1) & (front < rows[i]).any(axis=1)
        if not better.any():
            out.append(kept[i])
            front = np.vstack([front, rows[i]])
    return out


def _parts(job: Job, option: Option, device_type: str) -> tuple[float, float, float, float, float]:
    """The goal where prices do not change it; what is paid for a type and for the rest: for the goal, of a budget."""
    own, rest = (math.fsum(o.usd_per_h * n for o, n in option.instances if (o.device.name == device_type) == is_own)
                 for is_own in (True, False))  # fmt: skip
    hours = 1.0 if option.hours is None else option.hours
    by_input = option.hours is None and job.goal is Goal.PRICE and job.throughput_per_s is None
    paid = 1.0 / option.rate_per_s if by_input else hours
    budget = 0.0 if job.budget_usd is None else hours
    goal = 0.0 if job.goal is Goal.PRICE else value(job, option)
    return goal, own * paid, rest * paid, own * budget, rest * budget


def break_evens(
    job: Job, market: Market, chosen: Option, options: Sequence[Option], robust: Winner | None
) -> tuple[BreakEven, ...]:
    """Return the break-even of each type of the market. `robust` picks by risk, where that was asked for."""

    def winner(name: str) -> Winner:
        few = contenders(job, options, name)
        return robust or (lambda change: best(job, [change(o) for o in few]))

    names = [d.name for d in market.device_types()]
    return tuple(break_even(job, market.running, chosen, n, winner(n)) for n in names)


def changes(
    job: Job, market: Market, chosen: Option, again: Callable[[Market], Option], more: Sequence[Case] = ()
) -> tuple[Change, ...]:
    """Return the best option with each type of `chosen` sold out, with a faster network between instances, and `more`.

    `again` gives the best option on another market, and raises what `recommend` would.
    """
    faster = Link(market.network.latency_s, market.network.byte_per_s * FASTER, market.network.name)

    def sold_out(name: str) -> Option:
        return again(market.without(name))

    cases = [Case(f"{n} sold out", partial(sold_out, n)) for n in sorted(chosen.devices)]
    cases.append(Case(f"network {FASTER:g} times as fast", lambda: again(market.with_network(faster))))
    out = []
    for case in (*cases, *more):
        try:
            option = case.best()
        except HetError as e:
            out.append(Change(case.what, None, math.nan, e.problem))
        else:
            out.append(Change(case.what, option, value(job, option)))
    return tuple(out)
