"""Interleaved plans: the model in v chunks per device, cut so that the slowest piece is as fast as it can be.

    2 devices, 2 chunks:   device 0 runs pieces 0 and 2, device 1 pieces 1 and 3

For a sequence of modes around the ring of devices and a number of chunks, the cuts that minimise the slowest piece are
a dynamic program over (piece, cut).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from tvmhet.solve.iteration import StagePlacing
from tvmhet.solve.iteration_tables import IterationTables

_MOST_PLACES = 16
_UNLIKE_PLACES, _UNLIKE_RINGS = 4, 256  # every ring of up to so many places, while there are so few


def chunk_placings(
    tables: IterationTables, like: Sequence[StagePlacing], upper_s: float = math.inf
) -> Iterator[tuple[StagePlacing, ...]]:
    """Yield one interleaved plan per ring of devices, number of chunks and of replicas, where one exists.

    Plans in which a device computes longer than `upper_s` are left out.

    Rings are of one group, of any few groups, or have the groups of the plan `like` in its order.
    """
    problem = tables.problem
    micro = problem.num_microbatches(tables.option)
    for ring in rings(tables, like):
        places = len(ring)
        most = whole_rings(tables, ring)
        most = most if problem.replicate_interleaved else min(most, 1)
        divisors = [r for r in range(1, most + 1) if micro % (r * places) == 0]
        if not divisors:
            continue
        for chunks in range(2, problem.most_chunks + 1):
            cuts = balanced_cuts(tables, [ring[i % places] for i in range(places * chunks)])
            if not cuts:
                continue
            pieces = [float(tables.time_s[ring[i % places], b, c]) for i, (b, c) in enumerate(pairwise(cuts))]
            busy_s = micro * max(sum(pieces[place::places]) for place in range(places))
            for r in {1, divisors[-1], *(d for d in divisors if d * 2 > most)}:
                if busy_s / r > upper_s:
                    continue
                tables.learn([[x for i, (b, c) in enumerate(pairwise(cuts)) for x in (b, c, ring[i % places], r)]])
                yield tuple(
                    tables.placing(b, c, ring[i % places], r, i % places) for i, (b, c) in enumerate(pairwise(cuts))
                )


def rings(tables: IterationTables, like: Sequence[StagePlacing]) -> list[tuple[int, ...]]:
    """Return modes of two or more places in a row: of one group, of any few groups, or those of the plan `like`."""
    found: dict[tuple[int, ...], None] = {}
    for m, mode in enumerate(tables.modes):
        most = tables.problem.groups[mode.group].num_devices // mode.degree
        for places in range(2, min(most, _MOST_PLACES) + 1):
            found[(m,) * places] = None
    for places in range(2, _UNLIKE_PLACES + 1):
        if len(tables.modes) ** places <= _UNLIKE_RINGS:
            found.update(dict.fromkeys(product(range(len(tables.modes)), repeat=places)))
    index = {(mode.group, mode.degree, mode.recompute): m for m, mode in enumerate(tables.modes)}
    own = [index.get((p.group, p.degree, p.recompute)) for p in like]
    if len(own) > 1 and None not in own:
        found[tuple(m for m in own if m is not None)] = None
    return list(found)


def whole_rings(tables: IterationTables, ring: Sequence[int]) -> int:
    """Return how many replicas of all places of `ring` there are devices for."""
    need: dict[int, int] = {}
    for m in ring:
        need[tables.modes[m].group] = need.get(tables.modes[m].group, 0) + tables.modes[m].degree
    return min(tables.problem.groups[g].num_devices // n for g, n in need.items())


def balanced_cuts(
    tables: IterationTables, modes: Sequence[int], scale: Sequence[float] = (), window: Sequence[int] = ()
) -> list[int]:
    """Return the cuts between consecutive pieces that minimise the slowest piece; empty if the pieces do not fit.

    `scale` multiplies the seconds of each piece; `window` is how many micro-batches its device keeps at once.
    """
    last = len(tables.cuts) - 1
    slowest = np.full(last + 1, np.inf)
    slowest[0] = 0.0
    back: list[NDArray[np.int64]] = []
    for i, m in enumerate(modes):
        seconds = tables.time_s[m] * (scale[i] if scale else 1.0)
        if window:
            limit = tables.problem.groups[tables.modes[m].group].memory_bytes
            seconds = np.where(tables.memory[m] + window[i] * tables.stash[m] <= limit, seconds, np.inf)
        through = np.maximum(slowest[:, None], seconds)
        through[np.tril_indices(last + 1)] = np.inf
        back.append(through.argmin(axis=0))
        slowest = through.min(axis=0)
    if not np.isfinite(slowest[last]):
        return []
    cuts = [last]
    for before in reversed(back):
        cuts.append(int(before[cuts[-1]]))
    return cuts[::-1]
