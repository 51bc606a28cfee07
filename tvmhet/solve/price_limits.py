"""What a price must keep to: deadline, budget, throughput floor. The cheapest trade within them, or the nearest one.

    service (no samples)   deadline: of one input alone    budget: USD per hour    price compared: of one sample
    job (of some samples)  deadline: until all are done    budget: USD in all      price compared: of the job

Filling a pipeline once is left out of a job's time: it takes its samples times the period.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tvmhet.errors import BadInput

_SAME = 1 + 1e-12  # sums taken in another order

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PriceLimits:
    """The limits of a price. inf and 0 where there is none."""

    samples: int | None = None
    deadline_s: float = math.inf
    budget_usd: float = math.inf
    throughput_per_s: float = 0.0

    def __post_init__(self) -> None:
        if self.samples is not None and (type(self.samples) is not int or self.samples < 1):
            raise BadInput(f"a job of {self.samples!r} samples", "give a whole number, at least 1")
        for name, unit, value in (("deadline", "s", self.deadline_s), ("budget", "USD", self.budget_usd)):
            if not isinstance(value, int | float) or not value > 0:
                raise BadInput(f"the {name} is {value!r} {unit}", "give a number, more than 0")
        if not isinstance(self.throughput_per_s, int | float) or not 0 <= self.throughput_per_s < math.inf:
            raise BadInput(f"the throughput floor is {self.throughput_per_s!r} /s", "give a finite rate, 0 or more")

    @property
    def any(self) -> bool:
        """Is anything limited?"""
        return self.deadline_s < math.inf or self.budget_usd < math.inf or self.throughput_per_s > 0


@dataclass(frozen=True, slots=True)
class Trade(Generic[T]):
    """A plan with the seconds of one input alone, samples per second and USD per hour."""

    plan: T
    latency_s: float
    rate_per_s: float
    usd_per_h: float

    @property
    def usd_per_sample(self) -> float:
        """What one sample costs when the pipeline is always full."""
        return self.usd_per_h / self.rate_per_s / 3600.0

    def seconds(self, limits: PriceLimits) -> float:
        """Return what a deadline is about: one input alone, or the whole job."""
        return self.latency_s if limits.samples is None else limits.samples / self.rate_per_s

    def usd(self, limits: PriceLimits) -> float:
        """Return what a budget is about: an hour, or the whole job."""
        return self.usd_per_h if limits.samples is None else limits.samples * self.usd_per_sample

    def _beyond(self, limits: PriceLimits) -> tuple[bool, bool, bool]:
        """Which of deadline, budget and throughput floor are not kept."""
        return (
            self.seconds(limits) > limits.deadline_s * _SAME,
            self.usd(limits) > limits.budget_usd * _SAME,
            self.rate_per_s * _SAME < limits.throughput_per_s,
        )

    def keeps(self, limits: PriceLimits) -> bool:
        """Is it within all limits?"""
        return not any(self._beyond(limits))

    def keeps_all_but(self, limits: PriceLimits, one: int) -> bool:
        """Is it within all limits but perhaps one of (deadline, budget, throughput floor)?"""
        return not any(x for i, x in enumerate(self._beyond(limits)) if i != one)


def cheapest_trade(trades: Iterable[Trade[T]], limits: PriceLimits) -> Trade[T] | None:
    """Return the trade with the least price of a sample within the limits, the faster of equals; or None."""
    within = [t for t in trades if t.keeps(limits)]
    least_usd = min((t.usd_per_sample for t in within), default=math.inf)
    equals = (t for t in within if t.usd_per_sample <= least_usd * _SAME)
    return min(equals, key=lambda t: (1 / t.rate_per_s, t.latency_s, t.usd_per_sample), default=None)


def nearest(trades: Iterable[Trade[T]], limits: PriceLimits) -> str:
    """Return, as "problem; remedy", which limits no trade keeps together and the nearest that can be kept."""
    known = list(trades)
    job = limits.samples is not None
    of = f"a job of {limits.samples} samples" if job else "one input"
    asked, mends = [], []
    if limits.deadline_s < math.inf:
        asked.append(f"{of} within {limits.deadline_s:.6g} s")
        least = min((t.seconds(limits) for t in known if t.keeps_all_but(limits, 0)), default=math.inf)
        mends += [f"a deadline of {_up(least)} s"] if least < math.inf else []
    if limits.budget_usd < math.inf:
        asked.append(f"{limits.budget_usd:.6g} USD" + ("" if job else " per hour"))
        least = min((t.usd(limits) for t in known if t.keeps_all_but(limits, 1)), default=math.inf)
        mends += [f"a budget of {_up(least)} USD" + ("" if job else " per hour")] if least < math.inf else []
    if limits.throughput_per_s > 0:
        asked.append(f"{limits.throughput_per_s:.6g} samples/s")
        most = max((t.rate_per_s for t in known if t.keeps_all_but(limits, 2)), default=0.0)
        mends += [f"a throughput floor of {_down(most)} /s"] if most > 0 else []
    remedy = f"give {' or '.join(mends)}, or faster or more devices" if mends else _far(known, limits)
    return f"price: no plan was found that keeps {' and '.join(asked)}; {remedy}"


def _far(known: list[Trade[T]], limits: PriceLimits) -> str:
    """Where no single limit is in the way: what can be reached of each alone."""
    fastest, cheapest = min(t.seconds(limits) for t in known), min(t.usd(limits) for t in known)
    return (
        f"loosen more than one limit: alone, {_up(fastest)} s, {_up(cheapest)} USD "
        f"or {_down(max(t.rate_per_s for t in known))} samples/s can be reached"
    )


def _up(x: float) -> str:
    """Six digits, rounded up, so that the limit can be kept."""
    return f"{x * (1 + 1e-5):.6g}"


def _down(x: float) -> str:
    return f"{x * (1 - 1e-5):.6g}"
