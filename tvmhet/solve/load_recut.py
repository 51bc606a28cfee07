"""Two devices' blocks cut anew: one takes the most work that it can run within a time, the other the rest.

The fullest device is paired with each other one, the emptiest first. A set of the most work within a time
(`load_sets`) goes to one of the two; if the loads are then lower, the fullest first, that is kept.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tvmhet.solve.contract import Blocks
from tvmhet.solve.load_chain import Placement, valued
from tvmhet.solve.load_sets import SetPricer
from tvmhet.solve.loads import LoadProblem

_OVER = (1.0002, 1.001)  # times that are tried, over the mean load of the two
_UNDER = 1 - 1e-4  # and under the larger one
_GRAIN = 2e-5  # of the time: loads this close are taken for the smaller one
_PASS = 1_000_000  # entries of one set
_SAME = 1 - 1e-9


def recut(problem: LoadProblem, blocks: Blocks, pricer: SetPricer, start: Placement, max_entries: int) -> Placement:
    """Return a placement that is no worse than `start`, by up to `max_entries` entries of the pricing tables."""
    best, left = start, max_entries
    while left > 0:
        better, spent = _improved(problem, blocks, pricer, best, left)
        left -= spent
        if better is None:
            break
        best = better
    return best


def _improved(
    problem: LoadProblem, blocks: Blocks, pricer: SetPricer, now: Placement, max_entries: int
) -> tuple[Placement | None, int]:
    """Return (the first better placement or None, entries)."""
    load = loads(problem, blocks, now)
    top, spent = int(load.argmax()), 0
    before = np.sort(load)[::-1]
    for other in np.argsort(load, kind="stable").tolist():
        for one, rest in ((top, other), (other, top)) if other != top else ():
            mean = (load[top] + load[other]) / 2
            for budget in (*(mean * x for x in _OVER), load[top] * _UNDER):
                if budget >= load[top] or spent >= max_entries:
                    continue
                home, entries = _cut(blocks, pricer, now, one, rest, budget)
                spent += entries
                if home is None:
                    continue
                found = valued(problem, blocks, home, now.slots)
                if math.isfinite(found.value) and _is_lower(np.sort(loads(problem, blocks, found))[::-1], before):
                    return found, spent
    return None, spent


def _cut(
    blocks: Blocks, pricer: SetPricer, now: Placement, one: int, rest: int, budget: float
) -> tuple[NDArray[np.int32] | None, int]:
    """Return (the devices of the blocks when `one` takes what it can and `rest` the rest or None, entries)."""
    kind, other = now.slots[one], now.slots[rest]
    ours = (now.home == one) | (now.home == rest)
    only = ours & ~np.isfinite(blocks.time_s[:, other])  # which must be taken
    work = np.where(np.isfinite(blocks.time_s[:, other]), blocks.time_s[:, other], 0.0)
    values = np.where(only, work.sum() + 1.0, work)
    time_s = np.where(ours, blocks.time_s[:, kind], np.inf)
    found = pricer.best(kind, budget, values, time_s, grain=budget * _GRAIN, max_entries=_PASS)
    taken = np.zeros(blocks.count, bool)
    taken[list(found.blocks)] = True
    if not math.isfinite(found.value) or (only & ~taken).any():
        return None, found.entries
    return np.where(ours, np.where(taken, one, rest), now.home).astype(np.int32), found.entries


def _is_lower(load: NDArray[np.float64], before: NDArray[np.float64]) -> bool:
    """Is the first that differs lower?"""
    for a, b in zip(load, before, strict=True):
        if a < b * _SAME or b < a * _SAME:
            return bool(a < b)
    return False


def loads(problem: LoadProblem, blocks: Blocks, plan: Placement) -> NDArray[np.float64]:
    """Return the load of each device."""
    load = np.zeros(len(plan.slots))
    np.add.at(load, plan.home, blocks.time_s[np.arange(blocks.count), np.array(plan.slots)[plan.home]])
    for src, readers, cost in zip(blocks.net_src, blocks.net_readers, blocks.net_cost_s.tolist(), strict=True):
        devices = {int(plan.home[v]) for v in (src, *readers)}
        for d in devices if len(devices) > 1 else ():
            load[d] += cost * problem.types[plan.slots[d]].transfer_scale
    return load
