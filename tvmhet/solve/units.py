"""Units: pipelines that serve inputs by themselves, on a few devices each. A fleet is a number of units of each kind.

    rate of (1 a100)  800/s    of (1 t4)  250/s    of (1 a100, 1 t4)  1,020/s      dropped: 800 + 250 is more

Every small set of devices gets its fastest pipeline (passes/unit_search.cc); a set whose parts do better apart is
dropped. What is left is what unlike devices gain by sharing one model: little where it fits each of them, all where it
does not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmhet.errors import NotSupported
from tvmhet.solve.evaluate import StageChoice, Uses, evaluate, latency_s, transfers
from tvmhet.solve.infeasible import memory_reason, no_kernel_reason
from tvmhet.solve.objective import Objective
from tvmhet.solve.pack import allowed_times
from tvmhet.solve.pipeline import StageSearch, crossing_bytes, pick_cuts, progress_s
from tvmhet.solve.problem import Problem
from tvmhet.solve.solution import SolvedStage
from tvmhet.solve.state_graphs import all_graphs

_FULL_STATES = 300  # every downset is a state up to here
_CUTS = 40  # states at which stages may end: all of a graph that has no more
_LABELS = 600  # units kept per state
_GAIN = 1e-9  # what a set of devices must gain over its parts to be kept


@dataclass(frozen=True, slots=True)
class Unit:
    """One pipeline: its stages, the devices of each group it takes, seconds between results and of one input.

    n inputs take at most latency + (n - 1) period + `late_s`, as far as they were run (0: by the closed forms).
    """

    stages: tuple[SolvedStage, ...]
    devices: tuple[int, ...]
    period_s: float
    latency_s: float
    late_s: float = 0.0

    @property
    def rate_per_s(self) -> float:
        """Results per second."""
        return 1.0 / self.period_s


@dataclass(frozen=True, slots=True)
class Units:
    """Units by ascending number of devices. `complete`: no cut, order or set of devices was left out of the search."""

    units: tuple[Unit, ...]
    complete: bool
    reason: str = ""  # why there is none


@dataclass(frozen=True, slots=True)
class _Found:
    """The fastest pipeline of a set of devices as rows of the search that found it."""

    period_s: float
    search: StageSearch
    rows: NDArray[np.int64]
    cuts: NDArray[np.int32]

    def choices(self) -> tuple[StageChoice, ...]:
        return self.search.choices(self.rows, self.cuts)


def find_units(
    problem: Problem,
    *,
    max_devices: int,
    sizes: Sequence[frozenset[int]] | None = None,
    alone_up_to: Sequence[int] = (),
    latency_limit_s: float = math.inf,
) -> Units:
    """Return the units of up to `max_devices` devices whose latency is within the limit.

    `sizes[g]`: how many devices of group g a unit may take besides none; any number where not given. `alone_up_to[g]`:
    so many in a unit of that group alone, where they are more than `max_devices`. Teams come after the groups that have
    their devices, and count as those.
    """
    if problem.wires:
        raise NotSupported("units that share lines between regions", "plan one region's devices at a time, or solve()")
    if reason := no_kernel_reason(problem):
        return Units((), True, reason)
    limits = [min(g.num_devices, max_devices) for g in problem.groups]
    own = sum(g.team_of < 0 for g in problem.groups)
    alone = [sizes is None or (g < own and 1 in sizes[g]) for g in range(len(limits))]
    pool = np.array([problem.pool(g) for g in range(len(limits))])
    degree = np.array([g.degree for g in problem.groups])
    time_s = allowed_times(problem)
    graphs = list(all_graphs(problem, _FULL_STATES))
    found: dict[tuple[int, ...], _Found] = {}
    complete = bool(graphs) and graphs[0].full and _is_exact(problem, latency_limit_s)
    for graph in graphs:
        search = StageSearch(problem, graph, time_s, Objective.THROUGHPUT)
        cuts = pick_cuts(crossing_bytes(problem, graph), progress_s(graph, time_s.min(axis=1)), _CUTS)
        units, all_there = search.units(cuts, limits, alone, max_devices, latency_limit_s, _LABELS)
        for g, most in enumerate(alone_up_to):
            if (most := min(most, problem.groups[g].num_devices)) > max_devices:
                only = [most if h == g else 0 for h in range(len(limits))]
                more, all_more = search.units(cuts, only, alone, most, latency_limit_s, _LABELS)
                units, all_there = units + more, all_there and all_more
        complete = complete and all_there and len(cuts) == graph.num_states
        for rows, period_s in units:
            group = rows[:, 2]
            used = tuple(int(n) for n in np.bincount(pool[group], rows[:, 3] * degree[group], own))
            allowed = sizes is None or all(n == 0 or n in s for n, s in zip(used, sizes, strict=True))
            if allowed and (used not in found or period_s < found[used].period_s):
                found[used] = _Found(period_s, search, rows, cuts)
    kept = worth_having({used: 1.0 / f.period_s for used, f in found.items() if 0 < f.period_s < math.inf})
    for chosen in {id(found[used].search): found[used] for used in kept}.values():
        chosen.search.learn((found[u].rows for u in kept if found[u].search is chosen.search), chosen.cuts)
    uses = Uses.of(problem)
    exact = {used: _unit(problem, found[used].choices(), used, uses) for used in kept}
    good = {d: u for d, u in exact.items() if u.latency_s <= latency_limit_s * (1 + 1e-12) and u.period_s < math.inf}
    left = worth_having({d: u.rate_per_s for d, u in good.items()})
    units_kept = tuple(good[d] for d in sorted(left, key=lambda d: (sum(d), d)))
    return Units(units_kept, complete, "" if units_kept else _reason(problem, latency_limit_s))


def _is_exact(problem: Problem, latency_limit_s: float) -> bool:
    """Does the search price every stage as it is? On one line of nodes; else where all links are alike and there is no
    latency limit: it takes what a stage reads to come from the stage before it, and one stage to wait for another.

    What it finds is timed as it is in any case.
    """
    steps = {(e.src, d) for e in problem.edges if e.src >= 0 for d in e.dsts}
    if len({a for a, _ in steps}) == len({b for _, b in steps}) == len(steps) == problem.num_nodes - 1:
        return True
    return latency_limit_s == math.inf and len({link for row in problem.links for link in row}) <= 1


def worth_having(rate: Mapping[tuple[int, ...], float]) -> list[tuple[int, ...]]:
    """Return the sets of devices that do better together than in any way apart."""
    known: dict[tuple[int, ...], float] = {}

    def best(devices: tuple[int, ...]) -> float:
        if devices not in known:
            known[devices] = max(apart(devices), rate.get(devices, 0.0))
        return known[devices]

    def apart(devices: tuple[int, ...]) -> float:
        most = 0.0
        for part in itertools.product(*(range(n + 1) for n in devices)):
            rest = tuple(n - p for n, p in zip(devices, part, strict=True))
            if part < devices and part >= rest and any(part):
                most = max(most, best(part) + (best(rest) if any(rest) else 0.0))
        return most

    return [d for d in sorted(rate, key=lambda d: (sum(d), d)) if rate[d] > apart(d) * (1 + _GAIN)]


def _unit(problem: Problem, choices: tuple[StageChoice, ...], used: tuple[int, ...], uses: Uses) -> Unit:
    moved = transfers(problem, choices)
    stages, period_s = evaluate(problem, choices, Objective.THROUGHPUT, uses, moved)
    return Unit(stages, used, period_s, latency_s(problem, choices, moved))


def _reason(problem: Problem, latency_limit_s: float) -> str:
    if latency_limit_s < math.inf:
        return f"no pipeline of these devices answers within {latency_limit_s:g} s"
    return memory_reason(problem) or "no pipeline of so few devices holds the model"
