"""What no fleet of a market can do for a service or a job of inputs, whatever its pipelines: proofs for refusals.

For any prices v[g] >= 0 the cheapest cover by kernels that cost min over g of v[g] * t[k, g] is no more than the priced
work of one input, so, with v[g] = 1 / seconds alone on g, a fleet's

    rate <= sum over devices of v / cover(v)            latency >= cover(1)

A kernel on a team of devices takes its seconds on each of them.
With these rates for single devices every fleet is tried while they are few; beyond, parts of instances may be bought.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tvmhet.cluster.market import InstanceOffer, Running
from tvmhet.recommending.job import Job
from tvmhet.recommending.option import make_option, measured, meets
from tvmhet.recommending.space import Space
from tvmhet.solve import Problem
from tvmhet.solve.bounds import cheapest_cover
from tvmhet.solve.fleet import Bundle, FleetProblem, fleets, is_small
from tvmhet.solve.pack import StateGraph, allowed_times, state_graph

Floats = NDArray[np.float64]

_FULL_STATES = 1500  # of the graph that bounds are computed on
_HALVINGS = 60  # of an interval: float64 tells no more apart
_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Rates:
    """At most so many results per second of one device of each offer; at least so many seconds of one input."""

    per_s: tuple[float, ...]
    latency_s: float


def reach_of(problem: Problem, space: Space, job: Job) -> dict[str, float]:
    """Return, for each limit, what no fleet that keeps the others goes beyond; inf (of a rate: 0) where none keeps
    them. Nothing is known of models with very many cuts: 0 (of a rate: inf)."""
    rates = rates_of(problem, space)
    limits = job.limits()
    offers, running = space.offers, space.market.running
    if not all(math.isfinite(r) for r in rates.per_s):
        return {n: math.inf if n == "throughput_per_s" else 0.0 for n in limits}
    demand = tuple(tuple(int(i == o) for i in range(len(offers))) for o, r in enumerate(rates.per_s) if r > 0)
    bundles = tuple(Bundle(o.num_devices, o.max_instances, 0.0) for o in offers)
    single = FleetProblem(demand, tuple(r for r in rates.per_s if r > 0), bundles)
    if not is_small(single):
        return {n: _Parts(offers, rates, running, job).reach(n) for n in limits}
    options = [
        make_option(job, running, tuple(zip(offers, f.instances, strict=True)), (), f.rate_per_s, rates.latency_s)
        for f in fleets(single)[0]
    ]
    found = {}
    for name in limits:
        rest = {n: v for n, v in limits.items() if n != name}
        each = [measured(name, o) for o in options if meets(o, rest)]
        found[name] = max(each, default=0.0) if name == "throughput_per_s" else min(each, default=math.inf)
    return found


def rates_of(problem: Problem, space: Space) -> Rates:
    """Return the bounds of single devices and inputs; infinite rates where the model has too many cuts to say."""
    names = [o.device.name for o in space.offers]
    graph = state_graph(problem, range(problem.num_nodes), full=True, max_states=_FULL_STATES)
    if not graph.num_states:
        return Rates((math.inf,) * len(names), 0.0)
    types = {names[o]: g for g, o in reversed(list(enumerate(space.offer_of)))}
    every = allowed_times(problem)
    degree = np.array([g.degree for g in problem.groups])
    teams = {n: [t for t, g in enumerate(problem.groups) if g.team_of >= 0 and names[space.offer_of[g.team_of]] == n]
             for n in types}  # fmt: skip
    times = np.stack([(every * degree)[:, [g, *teams[n]]].min(axis=1) for n, g in types.items()], axis=1)
    alone = np.array([_cover_s(graph, times[:, t]) for t in range(len(types))])
    runs = np.isfinite(alone) & (alone > 0)
    speed = np.where(runs, 1.0 / np.where(runs, alone, 1.0), 0.0)
    if not runs.all():  # of a type that holds some kernels only: as fast as the fastest of its kernels
        least, finite = _cover_s(graph, times.min(axis=1)), np.isfinite(times)
        quickest = np.where(finite.any(axis=1), times.min(axis=1), 1.0)[:, None]
        part = np.where(finite, times / quickest, math.inf).min(axis=0)
        speed = np.where(runs, speed, 1.0 / np.maximum(part * least, 1e-300))
    priced = np.where(np.isfinite(times), np.where(np.isfinite(times), times, 0.0) * speed, math.inf)
    cover = _cover_s(graph, priced.min(axis=1)) * (1 - _SAME)
    rate = {n: float(speed[i] / cover) if cover > 0 else math.inf for i, n in enumerate(types)}
    return Rates(tuple(rate.get(n, 0.0) for n in names), _cover_s(graph, every.min(axis=1)) * (1 - _SAME))


def _cover_s(graph: StateGraph, times: Floats) -> float:
    least = np.ascontiguousarray(times)
    cover = list(cheapest_cover(graph, least))
    return float(least[cover].sum()) if cover else math.inf


@dataclass(frozen=True)
class _Parts:
    """Bounds where parts of instances may be bought: all figures by the rate of the fleet."""

    offers: tuple[InstanceOffer, ...]
    rates: Rates
    running: Running
    job: Job

    def reach(self, name: str) -> float:
        """What no fleet that keeps the limits other than this goes beyond."""
        rest = {n: v for n, v in self.job.limits().items() if n != name}
        low, high = self._rates_within(rest)
        late = self.rates.latency_s * 1e3 > rest.get("latency_ms", math.inf) * (1 + _SAME)
        if late or low > high * (1 + _SAME) or high <= _SAME * self._most:
            return 0.0 if name == "throughput_per_s" else math.inf
        if name == "throughput_per_s":
            return high
        if name == "latency_ms":
            return self.rates.latency_s * 1e3
        if name == "deadline_h":
            return self._hours(high)
        least_usd_per_h = min(o.usd_per_h for o in self.offers if o.max_instances)
        cheapest = max(low, min(self._rate_for(least_usd_per_h), high))
        return max(self._usd_per_h(cheapest), least_usd_per_h) * (1.0 if self.job.is_service else self._hours(cheapest))

    def _rates_within(self, limits: Mapping[str, float]) -> tuple[float, float]:
        """The least rate that keeps a throughput and a deadline, and the greatest within a budget."""
        high = self._most
        low = limits.get("throughput_per_s", 0.0)
        if "deadline_h" in limits:
            low = max(low, _edge(high, lambda rate: self._hours(rate) <= limits["deadline_h"] * (1 + _SAME)))
        if "budget_usd" in limits:
            high = min(high, _edge(high, lambda rate: self._usd(rate) > limits["budget_usd"] * (1 + _SAME)))
        return low, high

    @cached_property
    def _most(self) -> float:
        """The rate of all devices together."""
        return math.fsum(most for _, most in self._by_price)

    def _hours(self, rate: float) -> float:
        assert self.job.samples is not None, "deadlines are of jobs"
        if not rate > 0:
            return math.inf
        return self.running.hours(self.job.samples / rate + self.rates.latency_s, 0)

    def _usd(self, rate: float) -> float:
        """The least cost of a fleet of this rate; of a service for an hour. It grows with the rate."""
        return self._usd_per_h(rate) * (1.0 if self.job.is_service else self._hours(rate))

    def _usd_per_h(self, rate: float) -> float:
        """The least rent for a rate: the offers that cost least per result first."""
        usd, left = 0.0, rate
        for per_rate, most in self._by_price:
            usd += per_rate * min(left, most)
            left -= min(left, most)
        return usd

    def _rate_for(self, usd_per_h: float) -> float:
        """The greatest rate for a rent."""
        rate, left = 0.0, usd_per_h
        for per_rate, most in self._by_price:
            bought = most if per_rate * most <= left else left / per_rate
            rate, left = rate + bought, left - per_rate * bought
        return rate

    @cached_property
    def _by_price(self) -> list[tuple[float, float]]:
        """(USD per hour and rate, rate in all) of each offer, the cheapest first."""
        rates = [r * o.num_devices for r, o in zip(self.rates.per_s, self.offers, strict=True)]
        return sorted((o.usd_per_h / r, r * o.max_instances) for r, o in zip(rates, self.offers, strict=True) if r > 0)


def _edge(high: float, holds: Callable[[float], bool]) -> float:
    """The rate from which on `holds`, up to `high` (inf: not even there); a little less or more, as rounding goes."""
    if not holds(high):
        return math.inf
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
