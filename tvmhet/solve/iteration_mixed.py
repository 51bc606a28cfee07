"""Data parallel training: every device holds the whole model, on unlike groups the faster ones run more micro-batches.

The search finds such plans too, to within its step; these are all of them, where they are few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product

from tvmhet.solve.iteration import StagePlacing
from tvmhet.solve.iteration_shares import with_shares
from tvmhet.solve.iteration_tables import IterationTables

_SAME = 1e-9
_ALL_COUNTS = 256  # up to here every vector of device counts is tried, beyond it whole groups only


def whole_placings(tables: IterationTables) -> Iterator[tuple[StagePlacing, ...]]:
    """Yield the whole model on the devices of each group alone: what any search must not be worse than.

    On all of them, as far as there is a micro-batch for each.
    """
    most = tables.problem.num_microbatches(tables.option)
    for m in _whole_modes(tables):
        devices = tables.problem.groups[tables.modes[m].group].num_devices
        yield (tables.placing(0, len(tables.cuts) - 1, m, min(devices // tables.modes[m].degree, most), 0),)


def mixed_placings(
    tables: IterationTables, upper_s: Callable[[], float] = lambda: math.inf
) -> Iterator[tuple[StagePlacing, ...]]:
    """Yield, for sets of two and more groups, the whole model on each with the shares that end first.

    Those whose devices together compute for longer than `upper_s` at the time are left out.
    """
    problem = tables.problem
    ways = {m: tables.placing(0, len(tables.cuts) - 1, m, 1, 0) for m in _whole_modes(tables)}
    by_group: dict[int, list[int]] = {}
    for m in ways:
        by_group.setdefault(tables.modes[m].group, []).append(m)
    for size in range(2, len(by_group) + 1):
        for groups in combinations(sorted(by_group), size):
            for modes in product(*(_fastest(tables, by_group[g]) for g in groups)):
                most = [
                    problem.groups[g].num_devices // tables.modes[m].degree for g, m in zip(groups, modes, strict=True)
                ]
                each_s = [float(tables.time_s[m, 0, -1]) for m in modes]
                for counts in _counts(most):
                    per_s = math.fsum(n / s if s > 0 else math.inf for n, s in zip(counts, each_s, strict=True))
                    if problem.num_microbatches(tables.option) / per_s > upper_s() * (1 + _SAME):
                        continue
                    parts = [
                        replace(ways[m], place=place, num_replicas=count)
                        for place, (m, count) in enumerate(zip(modes, counts, strict=True))
                    ]
                    placed = with_shares(problem, tables.option, [parts])
                    if sum(p.num_replicas for p in placed) == sum(counts):
                        yield placed


def _whole_modes(tables: IterationTables) -> list[int]:
    last = len(tables.cuts) - 1
    fits = [m for m in range(len(tables.modes)) if math.isfinite(tables.time_s[m, 0, last])]
    tables.learn([[0, last, m, 1] for m in fits])
    return fits


def _fastest(tables: IterationTables, modes: Sequence[int]) -> list[int]:
    """The fastest mode of each degree: one micro-batch in flight leaves no other use for recomputation."""
    last = len(tables.cuts) - 1
    best: dict[int, int] = {}
    for m in modes:
        d = tables.modes[m].degree
        if d not in best or tables.time_s[m, 0, last] < tables.time_s[best[d], 0, last]:
            best[d] = m
    return list(best.values())


def _counts(most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if math.prod(most) <= _ALL_COUNTS:
        yield from product(*(range(n, 0, -1) for n in most))  # the fastest soon
    else:
        yield tuple(most)
