"""What would change the recommendation: prices, a type sold out, a faster network."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tvmhet.cluster.link import Link
from tvmhet.cluster.market import Market, Running
from tvmhet.errors import HetError
from tvmhet.recommending.job import Job
from tvmhet.recommending.option import Option, make_option, value

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
    return make_option(job, running, instances, option.pipelines, option.rate_per_s, option.latency_s)


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
