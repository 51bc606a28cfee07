"""Solve load problems: exact over downsets while they are few, annealing beyond, always with a bound.

contiguous:      several linear orders (exact on each) ──► exact over all downsets ──► bound by sets of one device
                                                                                   ──► anneal with the order kept
non-contiguous:  see load_free.py
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np

from tvmhet.solve.contract import Blocks, contract
from tvmhet.solve.load_anneal import Effort, anneal
from tvmhet.solve.load_chain import Placement, best_chain, over_core
from tvmhet.solve.load_columns import column_bound
from tvmhet.solve.load_cpsat import polish
from tvmhet.solve.load_fit import impossible, smallest_mend
from tvmhet.solve.load_free import free_placement
from tvmhet.solve.load_start import CLOSE, MOST_MORE, NEAR, OPTIMAL, PROVED, chains, is_proved, packed
from tvmhet.solve.loads import LoadPlan, LoadProblem, device_load, fractional_bound

_EXACTLY = 1e-9  # sums of bytes in another order

__all__ = ["Effort", "balance"]


def balance(
    problem: LoadProblem,
    *,
    contiguous: bool = True,
    effort: Effort | None = None,
) -> LoadPlan:
    """Return the best placement found, with a lower bound on every placement of the same kind.

    Work is limited by `effort`. An infeasible problem comes back without devices, with an infinite objective and the
    `reason`. KeyboardInterrupt ends the search: the best so far is returned, with the bound so far; where there is none
    yet, it is raised.
    """
    effort = effort or Effort()
    given = _useful(problem)
    blocks = contract(given, contiguous=contiguous)
    if reason := impossible(given, blocks):
        return LoadPlan((), (), math.inf, math.inf, False, "none", reason)
    problem = _fitting(given)
    if problem is not given:
        blocks = contract(problem, contiguous=contiguous)
    lower = fractional_bound(problem)
    if contiguous:
        best, lower, name = _contiguous(problem, blocks, lower, effort)
    else:
        best, lower, name = free_placement(problem, blocks, lower, effort)
    if best is None:
        reason = _no_plan(given, contiguous, math.isinf(lower), effort)
        return LoadPlan((), (), math.inf, lower, False, "none", reason)
    return _plan(problem, blocks, best, lower, name)


def _useful(problem: LoadProblem) -> LoadProblem:
    """Leave out devices beyond one of a type for each node: no placement uses them."""
    most = max(1, problem.num_nodes)
    return replace(problem, types=tuple(replace(t, num_devices=min(t.num_devices, most)) for t in problem.types))


def _fitting(problem: LoadProblem) -> LoadProblem:
    """Say of nodes that a type has too little memory for that it cannot run them: bounds then know it."""
    groups = problem.group or (-1,) * problem.num_nodes
    together: dict[int, float] = {}
    for group, size in zip(groups, problem.memory_bytes, strict=True):
        together[group] = together.get(group, 0.0) + size
    held = [size if g < 0 else together[g] for g, size in zip(groups, problem.memory_bytes, strict=True)]
    rows = tuple(
        tuple(s if h <= t.memory_bytes * (1 + _EXACTLY) else math.inf for s, t in zip(row, problem.types, strict=True))
        for row, h in zip(problem.time_s, held, strict=True)
    )
    return problem if rows == problem.time_s else replace(problem, time_s=rows)


def _plan(problem: LoadProblem, blocks: Blocks, best: Placement, lower: float, name: str) -> LoadPlan:
    devices = tuple(
        tuple(sorted(v for b in np.flatnonzero(best.home == d) for v in blocks.nodes[b]))
        for d in range(len(best.slots))
    )
    value = max(device_load(problem, nodes, t) for nodes, t in zip(devices, best.slots, strict=True))
    lower = min(lower, value)
    return LoadPlan(devices, best.slots, value, lower, value - lower <= OPTIMAL * value, name)


def _contiguous(
    problem: LoadProblem, blocks: Blocks, lower: float, effort: Effort
) -> tuple[Placement | None, float, str]:
    """Return (the best contiguous plan, a lower bound on all of them, name of the algorithm)."""
    best, done = chains(problem, blocks, effort)
    if done:
        return best, best.value if best else math.inf, "exact over all downsets"
    name = "exact on linear orders"
    upper = best.value if best else math.inf
    try:
        start, lower = over_core(problem, blocks, lower, upper, effort.max_downsets, effort.max_pairs)
        raised = partial(_raised, problem, blocks)
        lower = raised(best, lower, effort.max_entries)
        known = best
        for origin in (best, start):
            now = origin if origin and math.isfinite(origin.value) else None
            for s in range(effort.seeds):
                if now is None or (best and best.value <= lower * (1 + CLOSE)):
                    break
                better = anneal(problem, blocks, now, effort, True, s)
                if s > 0 and better.value >= now.value * (1 - PROVED):
                    break  # both positions of idle devices were tried
                now = min(now, better, key=lambda x: x.value)
                if best is None or now.value < best.value * (1 - PROVED):
                    best, name = now, "annealing in order"
        if best is not known:
            lower = raised(best, lower, effort.max_entries)
        if best and best.value > lower * (1 + NEAR) and blocks.count <= MOST_MORE:
            lower = raised(best, lower, effort.more_entries)
        if best and best.value > lower * (1 + NEAR):
            lower = polish(problem, blocks, best.home, best.slots, best.value, lower, effort.cpsat_s)[1]
    except KeyboardInterrupt:
        if best is None:
            raise
    return best, lower, name


def _raised(problem: LoadProblem, blocks: Blocks, best: Placement | None, lower: float, max_entries: int) -> float:
    """Return a lower bound, at least `lower`, by sets of blocks on one device: contiguous ones, then any."""
    if best is None or is_proved(best, lower):
        return lower
    lower = column_bound(problem, blocks, best.value, lower, max_entries, ordered=True)
    if best.value > lower * (1 + NEAR):
        lower = column_bound(problem, blocks, best.value, lower, max_entries, ordered=False)
    return lower


def _no_plan(problem: LoadProblem, contiguous: bool, proved: bool, effort: Effort) -> str:
    """Say why there is no plan, how sure that is, and what would help."""
    kind = "contiguous placement" if contiguous else "placement"
    if not proved:
        return f"memory: no {kind} was found in which every device holds its nodes; add memory or devices"

    def fits(changed: LoadProblem) -> bool:
        blocks = contract(changed, contiguous=contiguous)
        if not contiguous:
            return packed(changed, blocks)[0] is not None
        limits = (effort.max_downsets, effort.max_pairs)
        return best_chain(changed, blocks, blocks.preds, math.inf, *limits)[0] is not None

    return f"memory: in no {kind} every device holds its nodes; {smallest_mend(problem, fits)}"
