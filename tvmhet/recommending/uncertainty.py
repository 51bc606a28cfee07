"""How sure a recommendation is, given the intervals of its predicted times.

    log(true / predicted) of kernel k on type t  =  all + kernel(k) + type(t) + family(t, family of k) + own(t, k)

The 80 % interval of a prediction gives the spread of the sum. How its variance is divided (`SHARES`) is an assumption,
stated once: a model that is wrong is wrong in part on every type and in part for one kernel everywhere, neither of
which changes the choice much; the rest is one bias of the type, of a family on it, and of the kernel there. A measured
time has an error of its own only.

In each draw every option is timed again, and the best of those that keep the limits is found. An option that misses a
limit is charged in proportion to the miss, and at least what the best one costs: it has to be replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmhet.cluster.market import Running
from tvmhet.cost.table import MEASURED
from tvmhet.recommending.job import Goal, Job
from tvmhet.recommending.option import Option, meets
from tvmhet.solve.units import Unit

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the variance of a log error; they add up to 1."""

    everything: float = 0.2
    kernel: float = 0.2
    device_type: float = 0.3
    family: float = 0.15
    own: float = 0.15


SHARES = Shares()
_Z80 = 1.2815515655446004  # half the width of an 80 % interval, in standard deviations
NUM_DRAWS = 1000  # of the errors: a share of draws is then known to a standard error of 1.6 % at most
NEAR = 0.05  # an option within this of the best counts as right
_NUM_RIVALS = 3  # that a report names


@dataclass(frozen=True, slots=True)
class KernelBelief:
    """One kernel on one group: seconds, spread of the log error, the type and family its error is shared with."""

    seconds: float
    sigma: float
    device_type: str
    family: str
    key: str  # equal kernels on equal types share their error whole
    source: str  # of the seconds, as in a time table

    @property
    def measured(self) -> bool:
        """Whether the seconds are no prediction."""
        return self.source == "given" or self.source in MEASURED


def spread(seconds: float, low: float, high: float) -> float:
    """Return the standard deviation of the log error that an 80 % interval stands for.

    >>> round(spread(1.0, 0.8, 1.25), 3)
    0.174
    """
    return max(0.0, math.log(high / low) / (2 * _Z80)) if math.isfinite(seconds) else 0.0


@dataclass(frozen=True, slots=True)
class Confidence:
    """What the intervals mean for the choice.

    `probability`: that it keeps the limits and no other option that does is better by more than 5 %. `keeps_limits`:
    that it keeps all limits. `rivals` are the options that win otherwise, with the share of draws. `regret`: the mean
    loss against the best of each draw, as a share; `regret_95`: the loss that 95 % of draws stay below. `low` and
    `high` bound the goal's value in 80 % of draws.
    """

    probability: float
    keeps_limits: float
    rivals: tuple[tuple[Option, float], ...]
    regret: float
    regret_95: float
    low: float
    high: float
    num_draws: int


@dataclass(frozen=True, slots=True)
class Draws:
    """Drawn log errors: for each kernel key of each type, an array of one value per draw."""

    errors: Mapping[tuple[str, str], Floats]
    num_draws: int


def draw(beliefs: Sequence[KernelBelief], num_draws: int, seed: int) -> Draws:
    """Draw errors for these kernels. The same seed gives the same errors for the same set of kernels."""
    rng = np.random.default_rng(seed)
    known = {(b.device_type, b.key): b for b in beliefs}

    def normal(names: Iterable[object]) -> dict[object, Floats]:
        return {name: rng.standard_normal(num_draws) for name in sorted(set(names), key=str)}

    everything = rng.standard_normal(num_draws)
    kernel = normal(b.key for b in known.values())
    device = normal(b.device_type for b in known.values())
    family = normal((b.device_type, b.family) for b in known.values())
    own = normal(known)
    errors: dict[tuple[str, str], Floats] = {}
    for name, b in known.items():
        parts = (
            (SHARES.everything, everything),
            (SHARES.kernel, kernel[b.key]),
            (SHARES.device_type, device[b.device_type]),
            (SHARES.family, family[b.device_type, b.family]),
            (SHARES.own, own[name]),
        )
        mixed = own[name] if b.measured else sum((math.sqrt(s) * z for s, z in parts), np.zeros(num_draws))
        errors[name] = b.sigma * mixed
    return Draws(errors, num_draws)


def unit_periods(
    unit: Unit, beliefs: Mapping[tuple[int, int], KernelBelief], draws: Draws, overhead_s: Sequence[float]
) -> tuple[Floats, Floats]:
    """Return seconds between results and of one input in each draw. `beliefs` are by (kernel, group).

    Transfers and overheads keep their figures, and so does the share in which stages wait for each other.
    """
    busiest = max((s.compute_s + overhead_s[s.group] + s.transfer_s) / s.num_replicas for s in unit.stages)
    period, latency = np.zeros(draws.num_draws), np.full(draws.num_draws, unit.latency_s)
    for stage in unit.stages:
        compute = np.zeros(draws.num_draws)
        for k in stage.kernels:
            b = beliefs[k, stage.group]
            compute = compute + b.seconds * np.exp(draws.errors[b.device_type, b.key])
        latency = latency + compute - stage.compute_s
        busy = compute + overhead_s[stage.group] + stage.transfer_s
        period = np.maximum(period, busy / stage.num_replicas)
    waits = unit.period_s / busiest if busiest > 0 else 1.0
    return period * max(1.0, waits), latency


def values(
    job: Job,
    running: Running,
    options: Sequence[Option],
    periods: Mapping[int, Floats],
    latencies: Mapping[int, Floats],
) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the goal's value of each option in each draw, and whether it keeps the limits; shape (options, draws).

    A value includes what making up for a missed limit costs, in proportion to the miss.
    """
    num = len(next(iter(periods.values())))
    out, kept = np.empty((len(options), num)), np.ones((len(options), num), bool)
    for i, option in enumerate(options):
        rate = np.zeros(num)
        latency = np.zeros(num)
        for u, copies in option.pipelines:
            rate += copies / periods[u]
            latency = np.maximum(latency, latencies[u])
        out[i], kept[i] = _value(job, running, option, rate, latency)
    return out, kept


def _value(
    job: Job, running: Running, option: Option, rate: Floats, latency: Floats
) -> tuple[Floats, NDArray[np.bool_]]:
    hours = cost = None
    if job.samples is not None:
        work = job.samples / rate + latency + option.late_s
        if job.global_batch is not None:  # whole iterations, whose seconds are the latency
            work = math.ceil(job.samples / job.global_batch) * latency
        hours = np.array([running.hours(float(s), option.num_spot) for s in work])
        cost = option.usd_per_h * hours
    figures = {
        "deadline_h": hours,
        "budget_usd": cost if cost is not None else np.full_like(rate, option.usd_per_h),
        "throughput_per_s": rate,
        "latency_ms": latency * 1e3,
    }
    excess = np.ones_like(rate)
    for name, limit in job.limits().items():
        figure = figures[name]
        assert figure is not None, "deadlines come with samples"
        excess = np.maximum(excess, limit / figure if name == "throughput_per_s" else figure / limit)
    per_input = 1.0 if job.throughput_per_s is not None else 1.0 / rate
    if job.goal is Goal.TIME:
        value = 1.0 / rate if hours is None else hours
    elif job.goal is Goal.PRICE:
        value = option.usd_per_h * per_input + np.zeros_like(rate) if cost is None else cost
    else:
        value = option.power_w * (per_input + np.zeros_like(rate) if hours is None else hours / 1e3)
    return value * excess, excess <= 1 + 1e-9


@dataclass(frozen=True, eq=False)
class Robust:
    """A choice by quantile `risk` of the drawn values; periods and latencies as for `values`."""

    job: Job
    running: Running
    options: tuple[Option, ...]
    periods: Mapping[int, Floats]
    latencies: Mapping[int, Floats]
    risk: float

    def best(self, change: Callable[[Option], Option] = lambda o: o) -> Option | None:
        """Return the option, each changed so, that is best among those that keep the limits as predicted."""
        options = [change(o) for o in self.options]
        allowed = [i for i, o in enumerate(options) if meets(o, self.job.limits())]
        if not allowed:
            return None
        drawn, _ = values(self.job, self.running, options, self.periods, self.latencies)
        return options[min(allowed, key=lambda i: (float(np.quantile(drawn[i], self.risk)), i))]


def confidence(options: Sequence[Option], chosen: int, drawn: Floats, kept: NDArray[np.bool_]) -> Confidence:
    """Return how sure option `chosen` is, from the values of `values`."""
    allowed = np.where(kept | ~kept.any(axis=0), drawn, np.inf)
    best = allowed.min(axis=0)
    mine = np.where(kept[chosen], drawn[chosen], np.maximum(drawn[chosen], best))
    free = best == 0  # owned machines cost nothing: whatever costs nothing too is as good
    loss = np.where(free, np.where(mine > 0, np.inf, 0.0), mine / np.where(free, 1.0, best) - 1.0)
    right = kept[chosen] & (loss <= NEAR)
    winner = allowed.argmin(axis=0)
    wrong = winner[~right]
    share = sorted(((float((wrong == i).sum()) / drawn.shape[1], i) for i in set(wrong.tolist())), key=_most)
    return Confidence(
        float(right.mean()),
        float(kept[chosen].mean()),
        tuple((options[i], s) for s, i in share[:_NUM_RIVALS]),
        float(loss.mean()),
        float(np.quantile(loss, 0.95)),
        float(np.quantile(drawn[chosen], 0.1)),
        float(np.quantile(drawn[chosen], 0.9)),
        drawn.shape[1],
    )


def _most(pair: tuple[float, int]) -> tuple[float, int]:
    return -pair[0], pair[1]
