"""Every plan of a tiny training problem, one after another: stages between all states, all modes and replica counts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import combinations, pairwise, product

from tvmhet.solve.iteration import StagePlacing
from tvmhet.solve.iteration_tables import IterationTables
from tvmhet.solve.iteration_ways import KernelWays
from tvmhet.solve.schedules import Schedule


def few_plans(ways: KernelWays, limit: int) -> bool:
    """Return whether `all_placings` yields about `limit` plans at most. What follows a cut is counted once.

    Of plans with several stages on a device it may yield more. Raises TooManyWays, as it does.
    """
    tables = ways.tables
    last = len(tables.cuts) - 1
    most = sum(max(0, g.num_devices) for g in tables.problem.groups)

    @cache
    def plans(b: int, used: tuple[int, ...], left: int) -> int:
        total = 0
        for c in range(b + 1, last + 1) if left > 0 else ():
            for parts in _teams(ways, b, c, used):
                chosen = math.prod(len(ways.of(b, c, m)) for m, _, _ in parts)
                total += chosen * (1 if c == last else plans(c, _with(tables, used, parts), left - 1))
                if total > limit:
                    return total
        return total

    return plans(0, (0,) * len(tables.problem.groups), most * tables.problem.most_chunks) <= limit


def all_placings(ways: KernelWays) -> Iterator[tuple[Schedule, tuple[StagePlacing, ...]]]:
    """Yield every (schedule, placings) between the states, with each choice of kernels that no other beats."""
    tables = ways.tables
    problem = tables.problem
    linear = tuple(s for s in problem.schedules if s is not Schedule.INTERLEAVED)
    no_waves = tuple(s for s in linear if s is not Schedule.WAVELET) or linear
    most = sum(max(0, g.num_devices) for g in problem.groups)
    for path in _paths(ways, 0, most):
        for teams in _linear(ways, path, 0, (0,) * len(problem.groups)):
            for placings in _placed(ways, path, teams):
                for schedule in linear if len(path) > 3 else no_waves:  # two stages have no waves of their own
                    yield schedule, placings
    if Schedule.INTERLEAVED in problem.schedules:
        for chunks in range(2, problem.most_chunks + 1):
            for path in _paths(ways, 0, most * chunks):
                if len(path) > 2 * chunks and (len(path) - 1) % chunks == 0:
                    for placings in interleaved_over(ways, path, (len(path) - 1) // chunks):
                        yield Schedule.INTERLEAVED, placings


def _paths(ways: KernelWays, at: int, most: int) -> Iterator[tuple[int, ...]]:
    """Every sequence of cuts from `at` to the end with at most `most` stages."""
    last = len(ways.tables.cuts) - 1
    if at == last:
        yield (last,)
    elif most > 0:
        for c in range(at + 1, last + 1):
            if any(ways.of(at, c, m) for m in range(len(ways.tables.modes))):
                for rest in _paths(ways, c, most - 1):
                    yield (at, *rest)


#: Replicas of a stage in one mode: (mode, replicas, share of the micro-batches or 0 for all).
_Part = tuple[int, int, int]


def _linear(
    ways: KernelWays, path: tuple[int, ...], i: int, used: tuple[int, ...]
) -> Iterator[tuple[tuple[_Part, ...], ...]]:
    """Yield the parts of each stage from the i-th on."""
    if i + 1 == len(path):
        yield ()
        return
    for parts in _teams(ways, path[i], path[i + 1], used):
        for rest in _linear(ways, path, i + 1, _with(ways.tables, used, parts)):
            yield (parts, *rest)


def _with(tables: IterationTables, used: tuple[int, ...], parts: tuple[_Part, ...]) -> tuple[int, ...]:
    """The devices of each group in use once a stage is added."""
    now = list(used)
    for m, r, _ in parts:
        now[tables.modes[m].group] += r * tables.modes[m].degree
    return tuple(now)


def _teams(ways: KernelWays, b: int, c: int, used: tuple[int, ...]) -> Iterator[tuple[_Part, ...]]:
    """Yield the replicas of one stage: in one mode, or in modes of several groups with every split into shares."""
    tables = ways.tables
    problem, micro = tables.problem, tables.problem.num_microbatches(tables.option)
    runs = [m for m in range(len(tables.modes)) if ways.of(b, c, m)]
    free = {m: (problem.groups[g].num_devices - used[g]) // d for m in runs for g, d in [_kind(tables, m)]}
    for m in runs:
        for r in range(1, min(free[m], micro) + 1):
            yield ((m, r, 0),)
    for size in range(2, len(problem.groups) + 1 if problem.may_mix else 0):
        for modes in combinations(runs, size):
            if len({tables.modes[m].group for m in modes}) < size:
                continue
            for counts in product(*(range(1, min(free[m], micro) + 1) for m in modes)):
                for shares in _compositions(micro, counts):
                    yield tuple(zip(modes, counts, shares, strict=True))


def _kind(tables: IterationTables, mode: int) -> tuple[int, int]:
    return tables.modes[mode].group, tables.modes[mode].degree


def _compositions(total: int, least: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every way to write `total` as a sum of as many numbers, each at least its `least`."""
    if len(least) == 1:
        if total >= least[0]:
            yield (total,)
        return
    for first in range(least[0], total + 1):
        for rest in _compositions(total - first, least[1:]):
            yield (first, *rest)


def _placed(
    ways: KernelWays, path: tuple[int, ...], teams: tuple[tuple[_Part, ...], ...]
) -> Iterator[tuple[StagePlacing, ...]]:
    """Yield the placings of the parts of each stage, with each choice of their kernels."""
    rows = [(b, c, *part) for (b, c), parts in zip(pairwise(path), teams, strict=True) for part in parts]
    for chosen in product(*(ways.of(b, c, m) for b, c, m, _, _ in rows)):
        yield tuple(
            _placing(ways, kernels, m, r, place, share)
            for place, (kernels, (_, _, m, r, share)) in enumerate(zip(chosen, rows, strict=True))
        )


def _placing(
    ways: KernelWays, kernels: tuple[int, ...], mode: int, replicas: int, place: int, share: int = 0
) -> StagePlacing:
    m = ways.tables.modes[mode]
    return StagePlacing(kernels, m.group, replicas, place, m.recompute, m.degree, share)


def interleaved_over(ways: KernelWays, path: tuple[int, ...], num_places: int) -> Iterator[tuple[StagePlacing, ...]]:
    """Yield the interleaved placings of the pieces of `path` on `num_places` places, each with one mode for all chunks.

    All places have the same number of replicas; each replica's micro-batches are a multiple of the places.
    """
    tables = ways.tables
    problem = tables.problem
    micro = problem.num_microbatches(tables.option)
    pieces = list(pairwise(path))
    for replicas in range(1, micro // num_places + 1 if problem.replicate_interleaved else 2):
        if micro % (replicas * num_places):
            continue
        for modes in product(range(len(tables.modes)), repeat=num_places):
            used = [0] * len(problem.groups)
            for m in modes:
                used[tables.modes[m].group] += replicas * tables.modes[m].degree
            if any(u > g.num_devices for u, g in zip(used, problem.groups, strict=True)):
                continue
            for chosen in product(*(ways.of(b, c, modes[i % num_places]) for i, (b, c) in enumerate(pieces))):
                yield tuple(
                    _placing(ways, kernels, modes[i % num_places], replicas, i % num_places)
                    for i, kernels in enumerate(chosen)
                )
