"""Times of kernels that were not measured, once others were: what both errors share is corrected.

    measured: k0 on t4, 1.3 x as predicted ──► k0 on l4, k1 on t4: somewhat more than predicted, a narrower interval

The belief is the one by which measurements were chosen (belief.py), so that a list that was measured is worth what it
was chosen for. Of a kernel that is further off than predictions are, as one without good code there, others learn only
as much as if it were not. Times that were given or measured before stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tvmhet.cluster.device import DeviceType
from tvmhet.cost.table import Entry, TimeTable
from tvmhet.recommending.belief import NOISE, covariance, generations
from tvmhet.recommending.measurements import Measured, with_measured
from tvmhet.recommending.uncertainty import KernelBelief, spread
from tvmhet.times import Candidates

_MOST = 3.0  # standard deviations of an error that tell about others
_PREDICTED = frozenset({"roofline", "learned", "calibrated", "transfer"})


def with_results(
    table: TimeTable, candidates: Candidates, devices: Sequence[DeviceType], measurements: Sequence[Measured]
) -> TimeTable:
    """Return the table with the measured times, and with what they tell about the others.

    Raises BadInput for a kernel or a type that the table does not have.
    """
    measured = with_measured(table, candidates.keys, measurements)
    predicted = _predicted(table, candidates)
    results = {(m.device_type, m.key): m.seconds for m in measurements if (m.device_type, m.key) in predicted}
    others = {pair: b for pair, b in predicted.items() if pair not in results}
    if not results or not others:
        return measured
    made = generations(devices)
    seen = [predicted[pair] for pair in results]
    errors = np.array([math.log(s / predicted[pair].seconds) for pair, s in results.items()])
    most = _MOST * np.array([b.sigma for b in seen])
    shared = covariance(list(others.values()), seen, made)
    weight = np.linalg.solve(covariance(seen, seen, made) + NOISE**2 * np.eye(len(seen)), shared.T).T
    sigma = np.array([b.sigma for b in others.values()])
    left = np.sqrt(np.clip(sigma**2 - np.einsum("ij,ij->i", weight, shared), 0.0, None))
    narrower = np.divide(left, sigma, out=np.ones_like(sigma), where=sigma > 0)
    factors = np.exp(weight @ np.clip(errors, -most, most))
    change = dict(zip(others, zip(factors.tolist(), narrower.tolist(), strict=True), strict=True))
    note = f"corrected by {len(results)} measured kernel{'s' * (len(results) > 1)}"
    for name in table.device_types:
        entries = {
            i: _corrected(table.entry(i, name), *change[name, key], note)
            for i, key in enumerate(candidates.keys)
            if (name, key) in change
        }
        measured = measured.with_entries(name, entries)
    return measured


def _predicted(table: TimeTable, candidates: Candidates) -> dict[tuple[str, str], KernelBelief]:
    """What is believed of each kernel whose time is a prediction, by (type, key)."""
    out: dict[tuple[str, str], KernelBelief] = {}
    for name in table.device_types:
        for i, key in enumerate(candidates.keys):
            e = table.entry(i, name)
            if e.source in _PREDICTED and (name, key) not in out:
                sigma = spread(e.seconds, e.low, e.high)
                out[name, key] = KernelBelief(e.seconds, sigma, name, candidates.descs[i].root.family, key, e.source)
    return out


def _corrected(entry: Entry, factor: float, narrower: float, note: str) -> Entry:
    seconds = entry.seconds * factor
    low, high = (seconds * (bound / entry.seconds) ** narrower for bound in (entry.low, entry.high))
    notes = f"{entry.note}; {note}" if entry.note else note
    return replace(entry, seconds=seconds, low=min(low, seconds), high=max(high, seconds), note=notes)
