"""Placements to start from: contiguous ones over linear orders or downsets, and any that fits."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from tvmhet.solve.contract import Blocks
from tvmhet.solve.load_anneal import Effort
from tvmhet.solve.load_chain import Placement, best_chain, valued
from tvmhet.solve.load_fit import packing
from tvmhet.solve.loads import LoadProblem, device_slots
from tvmhet.solve.orders import linear_orders

PROVED = 1e-9  # relative; closer than this is equal
OPTIMAL = 1e-6  # a gap up to this is called optimal
NEAR = 0.0099  # a gap up to this is not worth CP-SAT's time
MOST_MORE = 500  # blocks: up to here a gap above that is worth a second, larger effort
CLOSE = 1e-4  # a gap up to this is not worth annealing in order


def interval_plan(problem: LoadProblem, blocks: Blocks, order: tuple[int, ...]) -> float:
    """Return the least largest load when every device holds an interval of `order`; inf if none fits."""
    found = _intervals(problem, blocks, order, math.inf)
    return found.value if found else math.inf


def _intervals(problem: LoadProblem, blocks: Blocks, order: tuple[int, ...], upper: float) -> Placement | None:
    before: list[tuple[int, ...]] = [()] * blocks.count
    for a, b in pairwise(order):
        before[b] = (a,)
    return best_chain(problem, blocks, before, upper, Effort().max_downsets, Effort().max_pairs)[0]


def _over_orders(problem: LoadProblem, blocks: Blocks) -> Placement | None:
    """Return the best plan in which every stage is an interval of one of several linear orders."""
    best: Placement | None = None
    for order in linear_orders(blocks.preds):
        found = _intervals(problem, blocks, order, best.value if best else math.inf)
        best = found or best
    return best


def chains(problem: LoadProblem, blocks: Blocks, effort: Effort) -> tuple[Placement | None, bool]:
    """Return (the best contiguous plan found by exact search, is it the best of all)."""
    best = _over_orders(problem, blocks)
    below = best.value * (1 - PROVED) if best else math.inf
    found, done = best_chain(problem, blocks, blocks.preds, below, effort.max_downsets, effort.max_pairs)
    return found or best, done


def translated(problem: LoadProblem, chained: Blocks, blocks: Blocks, plan: Placement) -> Placement:
    """Express a plan over the (coarser) contiguous blocks in the blocks of the free problem."""
    device = {v: int(plan.home[b]) for b, nodes in enumerate(chained.nodes) for v in nodes}
    home = np.array([device[nodes[0]] for nodes in blocks.nodes], np.int32)
    return valued(problem, blocks, home, plan.slots)


def packed(problem: LoadProblem, blocks: Blocks) -> tuple[Placement | None, bool]:
    """Return (any placement that fits or None, is it known that there is none)."""
    slots = device_slots(problem)
    home, none_fits = packing(problem, blocks, slots)
    return (None if home is None else valued(problem, blocks, home, slots)), none_fits


def is_proved(best: Placement | None, lower: float) -> bool:
    """Is `best` known to be optimal?"""
    return best is not None and best.value - lower <= OPTIMAL * best.value
