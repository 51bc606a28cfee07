"""Fleets without a plan as rivals of those that have one: how long an iteration on them may take.

A fleet's plan is no longer than whole copies of the model on its devices, and was expected to take what planning gained
on the fleet's like (`FleetSearch.expected_s`): it lies between the two. Where copies do not fit it is as expected. The
part that is compute is the model's cheapest kernels, divided over the devices by their speed; with v the micro-batches
per second of a type's devices together and e the drawn factor on its compute, that part becomes

    compute  *  sum of v  /  sum of v / e
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tvmhet.recommending.training import TrainingStudy
from tvmhet.recommending.training_search import FleetSearch
from tvmhet.recommending.training_sure import compute_factor
from tvmhet.recommending.uncertainty import Draws, Floats, KernelBelief, spread


@dataclass(frozen=True, slots=True)
class Rival:
    """A fleet's seconds of an iteration, at least and at most, and those of its compute.

    `parts` are (micro-batches per second, what is known of one micro-batch's kernels) for each of its types.
    """

    low_s: float
    high_s: float
    compute_s: float
    parts: tuple[tuple[float, tuple[KernelBelief, ...]], ...]

    @property
    def beliefs(self) -> list[KernelBelief]:
        """What is known of the kernels of all its types."""
        return [b for _, known in self.parts for b in known]

    def draws(self, draws: Draws, place: Floats | float = 0.5) -> Floats:
        """Return the seconds of one iteration in each draw; `place` is where in the interval, from 0 to 1."""
        base = self.low_s + (self.high_s - self.low_s) * place
        speed = np.zeros(draws.num_draws)
        for v, known in self.parts:
            speed = speed + v / compute_factor(known, draws)
        factor = sum(v for v, _ in self.parts) / speed
        return np.asarray(base + np.minimum(self.compute_s, base) * (factor - 1.0))


def rivals_of(search: FleetSearch, rows: Sequence[int]) -> dict[int, Rival]:
    """Return fleets without a plan as rivals; those that nothing is known of are left out."""
    study = search.study
    expected, copies = search.expected_s(), study.fleets.copies_s
    sizes = np.array([study.market.offers[o].num_devices for o in study.sold])
    speeds = np.array([[1.0 / k.seconds for k in each] for each in study.alone])  # [micro-batch size, group]
    micro = np.array([study.problem.num_microbatches(o) for o in range(len(speeds))])
    beliefs: dict[tuple[int, int], tuple[KernelBelief, ...]] = {}
    found = {}
    for row in rows:
        devices = study.fleets.counts[row, study.sold] * sizes
        rates = speeds * devices
        option = int((rates.sum(axis=1) / micro).argmax())
        used = np.flatnonzero(rates[option]).tolist()
        high = float(copies[row] if np.isfinite(copies[row]) else expected[row])
        if not used or not 0 < high < math.inf:
            continue
        for g in used:
            if (option, g) not in beliefs:
                beliefs[option, g] = _beliefs(study, option, g)
        parts = tuple((float(rates[option, g]), beliefs[option, g]) for g in used)
        found[row] = Rival(min(float(expected[row]), high), high, float(micro[option] / rates[option].sum()), parts)
    return found


def _beliefs(study: TrainingStudy, option: int, group: int) -> tuple[KernelBelief, ...]:
    """What is known of the kernels of one micro-batch on a group's type."""
    size = study.problem.options[option].size
    made = next(g for g in study.graphs if g.size == size)
    name = study.market.offers[study.sold[group]].device.name
    out = []
    for k in study.alone[option][group].kernels:
        entry = made.forward.entry(k, name)
        sigma = spread(entry.seconds, entry.low, entry.high)
        family = made.candidates.descs[k].root.family
        out.append(KernelBelief(entry.seconds, sigma, name, family, made.candidates.keys[k], entry.source))
    return tuple(out)
