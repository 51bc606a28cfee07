"""Plans with two waves (wavelet): as many stages as devices, cut so that they fit with the few micro-batches they hold.

the first half of the stages holds two micro-batches, the second half one: together it should take half a cycle
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from tvmhet.solve.bounds import cheapest_cover
from tvmhet.solve.iteration import StagePlacing
from tvmhet.solve.iteration_chunks import balanced_cuts, rings, whole_rings
from tvmhet.solve.iteration_tables import IterationTables, mode_times
from tvmhet.solve.schedules import Schedule, lags

_LEAST_PLACES = 3  # with fewer the schedule is 1F1B


def wave_placings(
    tables: IterationTables, like: Sequence[StagePlacing], upper_s: float
) -> Iterator[tuple[StagePlacing, ...]]:
    """Yield one plan per row of devices that fits, none where no plan can take less than `upper_s`.

    Two micro-batches are on their way at most, so half of all pairs' ways is a lower bound.
    """
    count = tables.problem.num_microbatches(tables.option)
    both, _ = mode_times(tables.micro, tables.modes)
    fastest = np.ascontiguousarray(both.min(axis=1))
    way = float(fastest[list(cheapest_cover(tables.graph, fastest))].sum())
    if (count + 1) / 2 * way >= upper_s:
        return
    for ring in rings(tables, like):
        if len(ring) < _LEAST_PLACES or not whole_rings(tables, ring):
            continue
        window = [lag + 1 for lag in lags(Schedule.WAVELET, [1] * len(ring), count)]
        half = len(ring) // 2
        scale = [half if k < half else len(ring) - half for k in range(len(ring))]
        if cuts := balanced_cuts(tables, ring, scale, window):
            pieces = zip(ring, pairwise(cuts), strict=True)
            yield tuple(tables.placing(b, c, m, 1, k) for k, (m, (b, c)) in enumerate(pieces))
