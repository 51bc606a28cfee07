"""The cheapest plan per sample, for inference, within limits of time, rent and rate.

    few pipelines: all of them ──► the cheapest within the limits, proved
    front of period against rent ──► the cheapest within the limits
                                └──► none, or the deadline binds: the fastest plans too, and pipelines of few devices
                                                  └──► none: infeasible, with the nearest limits that can be kept

Its bound: every kernel at the group where its seconds cost least, and what every plan transfers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tvmhet.solve.bounds import cheapest_cover, fixed_s
from tvmhet.solve.cheapest_exact import every_chain
from tvmhet.solve.evaluate import StageChoice, evaluate, latency_s, rent_usd_per_h
from tvmhet.solve.objective import Objective
from tvmhet.solve.pack import StateGraph, allowed_times
from tvmhet.solve.price import price_front
from tvmhet.solve.price_limits import PriceLimits, Trade, cheapest_trade, nearest
from tvmhet.solve.problem import Problem
from tvmhet.solve.search import solve
from tvmhet.solve.solution import Solution, SolvedStage, Status
from tvmhet.solve.splits import with_devices
from tvmhet.solve.state_graphs import all_graphs
from tvmhet.solve.units import find_units

_TYPES = 2  # types that a plan for the least latency may use, besides all of them
_BRANCHES = 2  # devices of one type that may run branches side by side, besides all of them
_LISTED = 20_000  # up to so many plans are all tried
_MOST_DEVICES = 8  # of one pipeline that is looked for because of its latency
_PROVED = 1e-6  # a gap up to this is called optimal

_Plan = tuple[StageChoice, ...]


def cheapest(problem: Problem, limits: PriceLimits | None = None, *, time_limit_s: float = 60.0) -> Solution:
    """Return the cheapest plan found; its objective and bound are in USD per input.

    Infeasible limits come back as INFEASIBLE with the nearest that can be kept as `reason`.
    """
    limits = limits or PriceLimits()
    if every := _listed(problem):
        best = cheapest_trade(every, limits)
        if best is None:
            return Solution((), math.inf, math.inf, Status.INFEASIBLE, len(every), "none", nearest(every, limits))
        stages, value = evaluate(problem, best.plan, Objective.COST)
        return Solution(stages, value, value, Status.OPTIMAL, len(every), "every pipeline")
    known = [_trade(problem, p.stages) for p in price_front(problem).plans]
    best, name = cheapest_trade(known, limits), "front of price and period"
    late = limits.samples is None and best is not cheapest_trade(known, replace(limits, deadline_s=math.inf))
    if best is None or late:  # the front knows periods, no latencies
        fastest = solve(problem, Objective.THROUGHPUT, time_limit_s=time_limit_s)
        if fastest.status is Status.INFEASIBLE:
            return fastest
        known.append(_trade(problem, fastest.stages))
        known += _quick(problem, limits, time_limit_s) if limits.samples is None else []
        if (other := cheapest_trade(known, limits)) is not best:
            best, name = other, "the fastest plans"
    if best is None:
        return Solution((), math.inf, math.inf, Status.INFEASIBLE, 0, "none", nearest(known, limits))
    stages, value = evaluate(problem, best.plan, Objective.COST)
    lower = min(price_bound_usd(problem), value)
    status = Status.OPTIMAL if value - lower <= _PROVED * value else Status.FEASIBLE
    return Solution(stages, value, lower, status, 0, name)


def _listed(problem: Problem) -> list[Trade[_Plan]]:
    """Return every pipeline where they are few, else none."""
    replicas = sum(max(1, g.num_devices) for g in problem.groups)  # of one chain, at most
    chains = every_chain(problem, _LISTED // replicas) or []
    return [_trade(problem, plan) for chain in chains for plan in _replicated(problem, chain)]


def price_bound_usd(problem: Problem) -> float:
    """Return a lower bound on the price of one input, in USD; 0 where the covers are too many to know."""
    graph = _complete_graph(problem)
    if graph is None:
        return 0.0
    usd_per_s = np.array([g.usd_per_h / 3600.0 for g in problem.groups])
    cost = priced(allowed_times(problem), usd_per_s)
    cover = list(cheapest_cover(graph, cost))
    return (float(cost[cover].sum()) + fixed_s(problem, usd_per_s)) * (1 - 1e-12)


def priced(time_s: NDArray[np.float64], usd_per_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least price of each kernel over the columns; inf where it runs on none. Shape (kernels,)."""
    runs = np.isfinite(time_s)
    return np.asarray(np.where(runs, np.where(runs, time_s, 0.0) * usd_per_s, np.inf).min(axis=1))


def _complete_graph(problem: Problem) -> StateGraph | None:
    """Return a graph of states that holds every cover."""
    return next((g for g in all_graphs(problem) if g.full or not g.truncated), None)


def _trade(problem: Problem, stages: Sequence[SolvedStage | StageChoice]) -> Trade[_Plan]:
    plan = tuple(StageChoice(s.kernels, s.group, s.num_replicas, s.shares) for s in stages)
    period_s = evaluate(problem, plan, Objective.THROUGHPUT)[1]
    rate = 1.0 / period_s if period_s > 0 else math.inf
    return Trade(plan, latency_s(problem, plan), rate, rent_usd_per_h(problem, plan))


def _quick(problem: Problem, limits: PriceLimits, time_limit_s: float) -> Iterator[Trade[_Plan]]:
    """Plans that answer one input soon: the soonest on some of the types, and pipelines within the deadline.

    Each with more replicas too.
    """
    chains: list[_Plan] = []
    used = [g for g, group in enumerate(problem.groups) if group.num_devices > 0 and group.team_of < 0]
    sizes = {*range(1, min(_TYPES, len(used)) + 1), len(used)}
    some = [set(s) for size in sorted(sizes) for s in itertools.combinations(used, size)]
    for kept, most in [*((s, math.inf) for s in some), *(({g}, _BRANCHES) for g in used)]:
        counts = [int(min(g.num_devices, most)) if i in kept else 0 for i, g in enumerate(problem.groups)]
        soonest = solve(with_devices(problem, counts), Objective.LATENCY, time_limit_s=time_limit_s)
        chains.append(tuple(StageChoice(s.kernels, s.group, s.num_replicas, s.shares) for s in soonest.stages))
    if limits.deadline_s < math.inf:
        unshared = replace(problem, wires=())  # its pipelines are then priced with the lines between regions
        units = find_units(unshared, max_devices=_MOST_DEVICES, latency_limit_s=limits.deadline_s).units
        chains += [tuple(StageChoice(s.kernels, s.group, s.num_replicas) for s in u.stages) for u in units]
    for chain in dict.fromkeys(c for c in chains if c):
        for plan in _replicated(problem, chain):
            yield _trade(problem, plan)


def _replicated(problem: Problem, chain: _Plan) -> Iterator[_Plan]:
    """The stages of `chain` with ever more replicas, always of the busiest, as long as there are devices."""
    now = list(chain)
    while True:
        yield tuple(now)
        if any(s.shares >= 0 for s in now):
            return
        stages, _ = evaluate(problem, now, Objective.THROUGHPUT)
        most = max(range(len(now)), key=lambda i: (stages[i].load_s, -i))
        group, pool = now[most].group, problem.pool(now[most].group)
        degree = [problem.groups[s.group].degree for s in now]
        used = sum(d * s.num_replicas for d, s in zip(degree, now, strict=True) if problem.pool(s.group) == pool)
        if used + degree[most] > problem.groups[pool].num_devices:
            return
        now[most] = StageChoice(now[most].kernels, group, now[most].num_replicas + 1)
