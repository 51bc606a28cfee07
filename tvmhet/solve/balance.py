"""Solve load problems: exact over downsets while they are few, annealing beyond, always with a bound.

contiguous:      several linear orders (exact on each) ──► exact over all downsets ──► bound by sets of one device
                                                                                   ──► anneal with the order kept
non-contiguous:  the contiguous answer ──► anneal without the order ──► bound by sets of one device ──► CP-SAT
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tvmhet._passes import passes_func
from tvmhet.solve.contract import Blocks, contract
from tvmhet.solve.load_chain import Placement, best_chain, over_core, valued
from tvmhet.solve.load_columns import Columns, column_bound, columns_of
from tvmhet.solve.load_cpsat import polish
from tvmhet.solve.load_fit import impossible, packing, smallest_mend
from tvmhet.solve.loads import LoadPlan, LoadProblem, device_load, device_slots, fractional_bound
from tvmhet.solve.orders import linear_orders, successors
from tvmhet.solve.pack import as_tensor, pack_lists

_PROVED = 1e-9  # relative; closer than this is equal
_OPTIMAL = 1e-6  # a gap up to this is called optimal
_HEATS = (0.3, 0.015)  # first temperatures of annealing, in turn
_WARM = 0.1  # first temperature of annealing from sets of one device
_DIVES = (0.2, 0.4, 0.6, 0.8)  # loads of sets, of the way from the bound to the known load
_KEPT = 2  # of them are annealed
_CLOSE = 1e-4  # a gap up to this is not worth annealing in order
_FEW = 500  # blocks times devices: up to here CP-SAT is tried on smaller gaps too
_NEAR = 0.0099  # a gap up to this is not worth CP-SAT's time


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits in steps, so that results repeat. The defaults take a few seconds on one core."""

    anneal_moves: int = 400_000  # per round
    anneal_rounds: int = 8
    seeds: int = 8
    max_downsets: int = 60_000
    max_pairs: int = 60_000_000
    max_entries: int = 100_000_000  # of the tables that price sets of one device; 0: never
    cpsat_s: float = 6.0  # in CP-SAT's deterministic seconds; 0: never


def balance(
    problem: LoadProblem,
    *,
    contiguous: bool = True,
    effort: Effort | None = None,
    time_limit_s: float = math.inf,
    seed: int = 0,
) -> LoadPlan:
    """Return the best placement found, with a lower bound on every placement of the same kind.

    `time_limit_s` is checked between phases and given to CP-SAT; work limits are those of `effort`. An infeasible
    problem comes back without devices, with an infinite objective and the `reason`.
    """
    effort = effort or Effort()
    deadline = time.monotonic() + time_limit_s
    lower = fractional_bound(problem)
    blocks = contract(problem, contiguous=contiguous)
    if reason := impossible(problem, blocks):
        return LoadPlan((), (), math.inf, math.inf, False, "none", 0, reason)
    if contiguous:
        best, lower, name = _contiguous(problem, blocks, lower, effort, deadline, seed)
    else:
        best, lower, name = _free(problem, blocks, lower, effort, deadline, seed)
    if best is None:
        reason = _no_plan(problem, contiguous, math.isinf(lower), effort)
        return LoadPlan((), (), math.inf, lower, False, "none", 0, reason)
    return _plan(problem, blocks, best, lower, name)


def _plan(problem: LoadProblem, blocks: Blocks, best: Placement, lower: float, name: str) -> LoadPlan:
    devices = tuple(
        tuple(sorted(v for b in np.flatnonzero(best.home == d) for v in blocks.nodes[b]))
        for d in range(len(best.slots))
    )
    value = max(device_load(problem, nodes, t) for nodes, t in zip(devices, best.slots, strict=True))
    lower = min(lower, value)
    return LoadPlan(devices, best.slots, value, lower, value - lower <= _OPTIMAL * value, name, 0)


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


def _chains(problem: LoadProblem, blocks: Blocks, effort: Effort) -> tuple[Placement | None, bool]:
    """Return (the best contiguous plan found by exact search, is it the best of all)."""
    best = _over_orders(problem, blocks)
    below = best.value * (1 - _PROVED) if best else math.inf
    found, done = best_chain(problem, blocks, blocks.preds, below, effort.max_downsets, effort.max_pairs)
    return found or best, done


def _contiguous(
    problem: LoadProblem, blocks: Blocks, lower: float, effort: Effort, deadline: float, seed: int
) -> tuple[Placement | None, float, str]:
    """Return (the best contiguous plan, a lower bound on all of them, name of the algorithm)."""
    best, done = _chains(problem, blocks, effort)
    if done:
        return best, best.value if best else math.inf, "exact over all downsets"
    name = "exact on linear orders"
    upper = best.value if best else math.inf
    start, lower = over_core(problem, blocks, lower, upper, effort.max_downsets, effort.max_pairs)
    lower = _raised(problem, blocks, best, lower, effort.max_entries, ordered=True)
    known = best
    for origin in (best, start):
        now = origin if origin and math.isfinite(origin.value) else None
        for s in range(effort.seeds):
            if now is None or time.monotonic() >= deadline or (best and best.value <= lower * (1 + _CLOSE)):
                break
            better = _anneal(problem, blocks, now, effort, True, seed + s)
            if s > 0 and better.value >= now.value * (1 - _PROVED):
                break  # both positions of idle devices were tried
            now = min(now, better, key=lambda x: x.value)
            if best is None or now.value < best.value * (1 - _PROVED):
                best, name = now, "annealing in order"
    if best is not known:
        lower = _raised(problem, blocks, best, lower, effort.max_entries, ordered=True)
    if best and best.value > lower * (1 + _NEAR):
        lower = _polished(problem, blocks, best, lower, effort, deadline)[1]
    return best, lower, name


def _free(
    problem: LoadProblem, blocks: Blocks, lower: float, effort: Effort, deadline: float, seed: int
) -> tuple[Placement | None, float, str]:
    """Return (the best placement found, a lower bound on all of them, name of the algorithm)."""
    chained = contract(problem, contiguous=True)
    chain = _chains(problem, chained, effort)[0]
    start = _translate(problem, chained, blocks, chain) if chain else None
    if start is None:
        start, none_fits = _packed(problem, blocks)
        lower = math.inf if none_fits else lower
    columns = columns_of(problem, blocks, ordered=False)
    best, name = start, "contiguous"
    idle = 0  # seeds in a row that found nothing better
    for s in range(effort.seeds):
        if best is None or time.monotonic() >= deadline or _is_proved(best, lower) or idle == len(_HEATS):
            break
        origin = start if s % 2 and start else best
        better = _anneal(problem, blocks, origin, effort, False, seed + s, _HEATS[s % len(_HEATS)])
        idle += 1
        if better.value < best.value * (1 - _PROVED):
            best, name, idle = better, "annealing", 0
        if s == 0 and columns:
            lower = columns.raised(best.value, lower, effort.max_entries // 10)  # where a proof is quick, that is all
            best, name = _dived(problem, blocks, (best, name), lower, columns, effort, deadline, seed)
        if best.value <= lower * (1 + _NEAR):
            break
    if best and columns and not _is_proved(best, lower):
        lower = columns.raised(best.value, lower, effort.max_entries)
        if best.value > lower * (1 + _NEAR):
            best, name = _dived(problem, blocks, (best, name), lower, columns, effort, deadline, seed + effort.seeds)
    near = _CLOSE if blocks.count * max(1, len(device_slots(problem))) <= _FEW else _NEAR
    if best and best.value > lower * (1 + near):
        better, lower = _polished(problem, blocks, best, lower, effort, deadline)
        if better.value < best.value * (1 - _PROVED):
            best, name = better, "CP-SAT"
    return best, lower, name


def _dived(
    problem: LoadProblem,
    blocks: Blocks,
    known: tuple[Placement, str],
    lower: float,
    columns: Columns,
    effort: Effort,
    deadline: float,
    seed: int,
) -> tuple[Placement, str]:
    """Return the best placement with its algorithm: `known`, or made of sets of one device and annealed."""
    best, name = known
    tried: list[Placement] = []
    for share in _DIVES if math.isfinite(best.value) and not _is_proved(best, lower) else ():
        if time.monotonic() >= deadline:
            break
        home = columns.dive(lower + share * (known[0].value - lower), best.slots)
        if home is not None:
            tried.append(valued(problem, blocks, home, best.slots))
    for s, start in enumerate(sorted((x for x in tried if math.isfinite(x.value)), key=lambda x: x.value)[:_KEPT]):
        better = _anneal(problem, blocks, start, effort, False, seed + s, _WARM)
        if better.value < best.value * (1 - _PROVED):
            best, name = better, "sets of one device"
    return best, name


def _is_proved(best: Placement | None, lower: float) -> bool:
    return best is not None and best.value - lower <= _OPTIMAL * best.value


def _raised(
    problem: LoadProblem, blocks: Blocks, best: Placement | None, lower: float, max_entries: int, *, ordered: bool
) -> float:
    """Return a lower bound, at least `lower`, by sets of blocks on one device: contiguous ones, or any."""
    if best is None or _is_proved(best, lower):
        return lower
    lower = column_bound(problem, blocks, best.value, lower, max_entries, ordered=ordered)
    if ordered and best.value > lower * (1 + _NEAR):
        lower = column_bound(problem, blocks, best.value, lower, max_entries, ordered=False)
    return lower


def _polished(
    problem: LoadProblem, blocks: Blocks, best: Placement, lower: float, effort: Effort, deadline: float
) -> tuple[Placement, float]:
    """Return (a placement, a lower bound on every placement) by CP-SAT."""
    limit = min(effort.cpsat_s, max(0.0, deadline - time.monotonic()))
    home, lower = polish(problem, blocks, best.home, best.slots, best.value, lower, limit)
    return valued(problem, blocks, home, best.slots), lower


def _translate(problem: LoadProblem, chained: Blocks, blocks: Blocks, plan: Placement) -> Placement:
    """Express a plan over the (coarser) contiguous blocks in the blocks of the free problem."""
    device = {v: int(plan.home[b]) for b, nodes in enumerate(chained.nodes) for v in nodes}
    home = np.array([device[nodes[0]] for nodes in blocks.nodes], np.int32)
    return valued(problem, blocks, home, plan.slots)


def _packed(problem: LoadProblem, blocks: Blocks) -> tuple[Placement | None, bool]:
    """Return (any placement that fits or None, is it known that there is none)."""
    slots = device_slots(problem)
    home, none_fits = packing(problem, blocks, slots)
    return (None if home is None else valued(problem, blocks, home, slots)), none_fits


def _no_plan(problem: LoadProblem, contiguous: bool, proved: bool, effort: Effort) -> str:
    """Say why there is no plan, how sure that is, and what would help."""
    kind = "contiguous placement" if contiguous else "placement"
    if not proved:
        return f"memory: no {kind} was found in which every device holds its nodes; add memory or devices"

    def fits(changed: LoadProblem) -> bool:
        blocks = contract(changed, contiguous=contiguous)
        if not contiguous:
            return _packed(changed, blocks)[0] is not None
        limits = (effort.max_downsets, effort.max_pairs)
        return best_chain(changed, blocks, blocks.preds, math.inf, *limits)[0] is not None

    return f"memory: in no {kind} every device holds its nodes; {smallest_mend(problem, fits)}"


def _anneal(
    problem: LoadProblem,
    blocks: Blocks,
    start: Placement,
    effort: Effort,
    ordered: bool,
    seed: int,
    heat: float = _HEATS[0],
) -> Placement:
    slots, home = start.slots, start.home.copy()
    if ordered and seed % 2:  # idle devices first instead of last: a new first stage becomes possible
        idle = [d for d in range(len(slots)) if not (home == d).any()]
        turn = idle + [d for d in range(len(slots)) if d not in idle]
        home = np.array([turn.index(int(d)) for d in home], np.int32)
        slots = tuple(slots[d] for d in turn)
    nets_read: list[list[int]] = [[] for _ in range(blocks.count)]
    nets_made: list[list[int]] = [[] for _ in range(blocks.count)]
    for e, (src, readers) in enumerate(zip(blocks.net_src, blocks.net_readers, strict=True)):
        nets_made[src].append(e)
        for r in readers:
            nets_read[r].append(e)
    before: list[list[int]] = [[] for _ in range(blocks.count)]
    for u, v in blocks.neighbours:
        before[v].append(u)
    along = blocks.preds if ordered else before
    arrays = (
        np.ascontiguousarray(blocks.time_s[:, list(slots)]),
        blocks.memory_bytes,
        blocks.net_cost_s,
        np.array([problem.types[t].memory_bytes for t in slots], np.float64),
        np.array([problem.types[t].transfer_scale for t in slots], np.float64),
        np.array(blocks.net_src, np.int32),
        *pack_lists(blocks.net_readers),
        *pack_lists(nets_read),
        *pack_lists(nets_made),
        *pack_lists(along),
        *pack_lists(successors(along)),
    )
    passes_func("tvmhet.LoadAnneal")(
        [as_tensor(a) for a in arrays],
        as_tensor(home),
        ordered,
        effort.anneal_moves,
        effort.anneal_rounds,
        heat,
        seed + 1,
    )
    return valued(problem, blocks, home, slots)
