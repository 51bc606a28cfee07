"""A fleet: how many instances of each offer to buy, and how many units of each kind they run.

    maximise   sum over units of copies * rate
    so that    sum over units of copies * devices(unit, offer) <= size(offer) * instances(offer) <= size * limit

Instances are bought whole. Every fleet is tried while they are few; beyond that an integer program gives the cheapest
fleet for each of many rates. Units fill instances without loss: inside one instance they take sizes that divide each
other, elsewhere single devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_FEW = 400_000  # device vectors up to which every fleet is tried
_FEW_FLEETS = 20_000  # and numbers of instances
_ROUNDED = 1e-12  # relative difference of sums of rates that means nothing
_POINTS = 16  # rates that are asked for beyond
_SCALE = 1 << 30  # rates and prices as whole numbers for the integer program
_ROUNDING = 1e-6  # what rounding the rates down may hide
_UNITS = 40  # kinds of unit that the integer program chooses among
_PER_SET = 3  # of them with the same offers
_WORK = 0.3  # deterministic seconds of the integer program for one rate


@dataclass(frozen=True, slots=True)
class Bundle:
    """One offer as numbers: devices in an instance, the most instances, and what one costs (any unit per hour)."""

    size: int
    limit: int
    cost: float


@dataclass(frozen=True, slots=True)
class FleetProblem:
    """`demand[u][o]` devices of offer o in unit u, `rate_per_s[u]`, and the offers."""

    demand: tuple[tuple[int, ...], ...]
    rate_per_s: tuple[float, ...]
    bundles: tuple[Bundle, ...]

    def only(self, offers: frozenset[int]) -> FleetProblem:
        """Return the problem in which nothing but `offers` can be bought."""
        kept = tuple(b if o in offers else Bundle(b.size, 0, b.cost) for o, b in enumerate(self.bundles))
        return FleetProblem(self.demand, self.rate_per_s, kept)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Instances of each offer, copies of each unit as (unit, copies), and the results per second of all together."""

    instances: tuple[int, ...]
    units: tuple[tuple[int, int], ...]
    rate_per_s: float


def is_small(problem: FleetProblem) -> bool:
    """Whether every fleet is tried."""
    vectors = math.prod(b.size * b.limit + 1 for b in problem.bundles)
    return vectors <= _FEW and math.prod(b.limit + 1 for b in problem.bundles) <= _FEW_FLEETS


def fleets(
    problem: FleetProblem, rates: Sequence[float] = (), costs: Sequence[float] = ()
) -> tuple[tuple[Fleet, ...], bool]:
    """Return the fleets worth a look, and whether no other can be better by any measure of instances and rate.

    While they are few: every fleet that has no instance to spare. Else: the cheapest for each of `rates`, the fastest
    for each of `costs`, and the cheapest for rates from the highest down.
    """
    if not problem.demand:
        return (), True
    if is_small(problem):
        return _every(problem), True
    return _cheapest(problem, rates, costs), False


@lru_cache(maxsize=64)
def _every(problem: FleetProblem) -> tuple[Fleet, ...]:
    """Every fleet without an instance to spare: an unbounded knapsack over device vectors, one unit after the other."""
    sold = [o for o, b in enumerate(problem.bundles) if b.limit]
    sizes = np.array([problem.bundles[o].size for o in sold])
    shape = tuple(problem.bundles[o].size * problem.bundles[o].limit + 1 for o in sold)
    best, via = np.zeros(shape), np.full(shape, -1, np.int64)
    demand = np.array(problem.demand, np.int64)
    usable = (demand[:, sold] < np.array(shape)).all(axis=1) & (demand[:, sold].sum(axis=1) == demand.sum(axis=1))
    for u in np.flatnonzero(usable).tolist():
        _add_copies(best, via, u, demand[u, sold].tolist(), problem.rate_per_s[u])
    grid = best[tuple(slice(None, None, size) for size in sizes)]
    spare = grid <= 0
    for axis in range(grid.ndim):
        fewer, more = (_sliced(grid, axis, s) for s in (slice(None, -1), slice(1, None)))
        _sliced(spare, axis, slice(1, None))[...] |= fewer >= more * (1 - _ROUNDED)
    bought = np.argwhere(~spare)
    copies = _trace(bought * sizes, via, demand[:, sold])
    counts = np.zeros((len(bought), len(problem.bundles)), np.int64)
    counts[:, sold] = bought
    return tuple(_fleet(problem, n, c) for n, c in zip(counts.tolist(), copies, strict=True))


def _add_copies(best: Floats, via: Counts, unit: int, demand: Sequence[int], rate: float) -> None:
    """Allow any number of copies of a unit, a slab along one axis after the other, in place."""
    axis = int(np.argmax(demand))
    step = demand[axis]
    to = [slice(d, None) for d in demand]
    of = [slice(0, n - d) for n, d in zip(best.shape, demand, strict=True)]
    for low in range(step, best.shape[axis], step):
        high = min(low + step, best.shape[axis])
        to[axis], of[axis] = slice(low, high), slice(low - step, high - step)
        more = best[tuple(of)] + rate
        better = more > best[tuple(to)] * (1 + _ROUNDED)
        best[tuple(to)][better] = more[better]
        via[tuple(to)][better] = unit


def _sliced(values: NDArray[Any], axis: int, part: slice) -> NDArray[Any]:
    return values[tuple(part if i == axis else slice(None) for i in range(values.ndim))]


def _trace(devices: Counts, via: Counts, demand: Counts) -> Counts:
    """Return the copies of each unit for each row of `devices`; shape (rows, units)."""
    left, copies = devices.copy(), np.zeros((len(devices), len(demand)), np.int64)
    rows = np.arange(len(devices))
    while len(rows):
        unit = via[tuple(left[rows].T)]
        rows, unit = rows[unit >= 0], unit[unit >= 0]
        copies[rows, unit] += 1
        left[rows] -= demand[unit]
    return copies


def _fleet(problem: FleetProblem, instances: Sequence[int], copies: Counts) -> Fleet:
    units = tuple((int(u), int(copies[u])) for u in np.flatnonzero(copies))
    return Fleet(tuple(instances), units, math.fsum(problem.rate_per_s[u] * n for u, n in units))


def _cheapest(whole: FleetProblem, rates: Sequence[float], costs: Sequence[float] = ()) -> tuple[Fleet, ...]:
    chosen = _promising(whole)
    problem = FleetProblem(
        tuple(whole.demand[u] for u in chosen), tuple(whole.rate_per_s[u] for u in chosen), whole.bundles
    )
    made = _grid(problem, rates, costs)
    return tuple(Fleet(f.instances, tuple((chosen[u], n) for u, n in f.units), f.rate_per_s) for f in made)


def _promising(problem: FleetProblem) -> list[int]:
    """The units that do most for their devices' price, a few of each set of offers; those that can be bought at all."""
    price = [b.cost / b.size for b in problem.bundles]

    def worth(u: int) -> float:
        cost = math.fsum(n * p for n, p in zip(problem.demand[u], price, strict=True))
        return problem.rate_per_s[u] / cost if cost > 0 else problem.rate_per_s[u] * _SCALE / sum(problem.demand[u])

    def bought(u: int) -> bool:
        return all(n <= b.size * b.limit for n, b in zip(problem.demand[u], problem.bundles, strict=True))

    seen: dict[frozenset[int], int] = {}
    first: list[int] = []
    for u in sorted(filter(bought, range(len(problem.demand))), key=lambda u: (-worth(u), u)):
        offers = frozenset(o for o, n in enumerate(problem.demand[u]) if n)
        seen[offers] = seen.get(offers, 0) + 1
        if seen[offers] <= _PER_SET:
            first.append(u)
    return sorted(first[:_UNITS])


def _grid(problem: FleetProblem, rates: Sequence[float], costs: Sequence[float]) -> tuple[Fleet, ...]:
    if not problem.demand:
        return ()
    top = _program(problem, None)
    if top is None:
        return ()
    high, low = top.rate_per_s * (1 - _ROUNDING), min(problem.rate_per_s)
    span = [high * (low / high) ** (i / (_POINTS - 1)) for i in range(_POINTS)]
    found = {top.instances: top}
    for rate in sorted({*span, *(r for r in rates if 0 < r <= top.rate_per_s)}):
        fleet = _program(problem, rate)
        if fleet is not None:
            found.setdefault(fleet.instances, fleet)
    for cost in costs:
        fleet = _program(problem, None, cost)
        if fleet is not None:
            found.setdefault(fleet.instances, fleet)
    return tuple(found[n] for n in sorted(found))


@lru_cache(maxsize=4096)
def _program(problem: FleetProblem, rate: float | None, most_cost: float = math.inf) -> Fleet | None:
    """The cheapest fleet of at least `rate`, its units as fast as they can be; the fastest within the cost if None."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    total = [b.size * b.limit for b in problem.bundles]
    most = [min((total[o] // d for o, d in enumerate(row) if d), default=0) for row in problem.demand]
    copies = [model.new_int_var(0, m, f"x{u}") for u, m in enumerate(most)]
    bought = [model.new_int_var(0, b.limit, f"n{o}") for o, b in enumerate(problem.bundles)]
    for o, b in enumerate(problem.bundles):
        model.add(
            sum(row[o] * x for row, x in zip(problem.demand, copies, strict=True) if row[o]) <= b.size * bought[o]
        )
    high = max(problem.rate_per_s)
    speed = [int(r / high * _SCALE) for r in problem.rate_per_s]
    fast = sum(s * x for s, x in zip(speed, copies, strict=True))
    dear = max((b.cost for b in problem.bundles), default=0.0) or 1.0
    cost = sum(round(b.cost / dear * _SCALE) * n for b, n in zip(problem.bundles, bought, strict=True))
    if rate is None:
        if most_cost < math.inf:  # costs are rounded, by half a unit for each instance
            model.add(cost <= math.floor(most_cost / dear * _SCALE) + sum(b.limit for b in problem.bundles) // 2)
        model.maximize(fast)
    else:
        model.add(fast >= math.ceil(rate / high * _SCALE))
        model.minimize(cost)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = _WORK
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    if rate is not None:  # now the most that these instances can do
        for n in bought:
            model.add(n == solver.value(n))
        model.maximize(fast)
        status = solver.solve(model)
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), "the answer just found fits"
    units = tuple((u, solver.value(x)) for u, x in enumerate(copies) if solver.value(x))
    if not units:  # the cost pays for no unit
        return None
    return Fleet(
        tuple(solver.value(n) for n in bought),
        units,
        math.fsum(problem.rate_per_s[u] * n for u, n in units),
    )
