"""Every plan of a tiny training problem, one after another: stages between all states, all modes and replica counts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np

from tvmhet.solve.iteration import StagePlacing
from tvmhet.solve.iteration_tables import IterationTables
from tvmhet.solve.schedules import Schedule


def few_plans(tables: IterationTables, limit: int) -> bool:
    """Return whether `all_placings` yields about `limit` plans at most."""
    most = sum(max(0, g.num_devices) for g in tables.problem.groups)
    count = 0
    for path in _paths(tables, 0, most * tables.problem.most_chunks):
        for _ in _linear(tables, path, 0, [0] * len(tables.problem.groups)):
            count += 1
            if count > limit:
                return False
        count += 1
        if count > limit:
            return False
    return True


def all_placings(tables: IterationTables) -> Iterator[tuple[Schedule, tuple[StagePlacing, ...]]]:
    """Yield every (schedule, placings) between the cuts of `tables`, with the fastest kernels of each stage."""
    problem = tables.problem
    linear = tuple(s for s in problem.schedules if s is not Schedule.INTERLEAVED)
    most = sum(max(0, g.num_devices) for g in problem.groups)
    for path in _paths(tables, 0, most):
        for flat in _linear(tables, path, 0, [0] * len(problem.groups)):
            for schedule in linear:
                yield schedule, tables.placings(flat)
    if Schedule.INTERLEAVED in problem.schedules:
        for chunks in range(2, problem.most_chunks + 1):
            for path in _paths(tables, 0, most * chunks):
                if len(path) > 2 * chunks and (len(path) - 1) % chunks == 0:
                    for placings in interleaved_over(tables, path, (len(path) - 1) // chunks):
                        yield Schedule.INTERLEAVED, placings


def _paths(tables: IterationTables, at: int, most: int) -> Iterator[tuple[int, ...]]:
    """Every sequence of cuts from `at` to the end with at most `most` stages."""
    last = len(tables.cuts) - 1
    if at == last:
        yield (last,)
    elif most > 0:
        for c in range(at + 1, last + 1):
            if np.isfinite(tables.time_s[:, at, c]).any():
                for rest in _paths(tables, c, most - 1):
                    yield (at, *rest)


def _linear(tables: IterationTables, path: tuple[int, ...], i: int, used: list[int]) -> Iterator[list[int]]:
    if i + 1 == len(path):
        yield []
        return
    micro = tables.problem.num_microbatches(tables.option)
    for m, mode in enumerate(tables.modes):
        if not math.isfinite(tables.time_s[m, path[i], path[i + 1]]):
            continue
        free = (tables.problem.groups[mode.group].num_devices - used[mode.group]) // mode.degree
        for r in range(1, min(free, micro) + 1):
            now = list(used)
            now[mode.group] += r * mode.degree
            for rest in _linear(tables, path, i + 1, now):
                yield [path[i], path[i + 1], m, r, *rest]


def interleaved_over(
    tables: IterationTables, path: tuple[int, ...], num_places: int
) -> Iterator[tuple[StagePlacing, ...]]:
    """Yield the interleaved placings of the pieces of `path` on `num_places` places, each with one mode for all chunks.

    All places have the same number of replicas; each replica's micro-batches are a multiple of the places.
    """
    problem = tables.problem
    micro = problem.num_microbatches(tables.option)
    pieces = list(pairwise(path))
    for replicas in range(1, micro // num_places + 1 if problem.replicate_interleaved else 2):
        if micro % (replicas * num_places):
            continue
        for chosen in product(range(len(tables.modes)), repeat=num_places):
            used = [0] * len(problem.groups)
            for m in chosen:
                used[tables.modes[m].group] += replicas * tables.modes[m].degree
            if any(u > g.num_devices for u, g in zip(used, problem.groups, strict=True)):
                continue
            runs = [(b, c, chosen[i % num_places], i % num_places) for i, (b, c) in enumerate(pieces)]
            if all(math.isfinite(tables.time_s[m, b, c]) for b, c, m, _ in runs):
                yield tuple(tables.placing(b, c, m, replicas, place) for b, c, m, place in runs)
