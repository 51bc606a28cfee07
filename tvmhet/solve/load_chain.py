"""Chains of contiguous stages of a load problem: exact over all downsets, where they are few (passes/downset_chain.cc).

Where they are many, a *core* of the blocks still gives a bound: without some blocks, and with what is left of their
tensors, no placement gets worse. The order between the blocks of the core is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmhet._passes import passes_func
from tvmhet.solve.contract import Blocks
from tvmhet.solve.loads import LoadProblem, device_load, device_slots
from tvmhet.solve.orders import order_by
from tvmhet.solve.pack import as_tensor, pack_lists


@dataclass(frozen=True)
class Placement:
    """Blocks on devices, and the largest load; inf if a device's memory is exceeded."""

    home: NDArray[np.int32]  # block -> device
    slots: tuple[int, ...]  # device -> type
    value: float


def valued(problem: LoadProblem, blocks: Blocks, home: NDArray[np.int32], slots: tuple[int, ...]) -> Placement:
    """Return a placement with its largest load."""
    value = 0.0
    for d, t in enumerate(slots):
        mine = np.flatnonzero(home == d)
        if blocks.memory_bytes[mine].sum() > problem.types[t].memory_bytes * (1 + 1e-12):
            return Placement(home, slots, math.inf)
        value = max(value, device_load(problem, [v for b in mine for v in blocks.nodes[b]], t))
    return Placement(home, slots, value)


def best_chain(
    problem: LoadProblem,
    blocks: Blocks,
    preds: Sequence[Sequence[int]],
    upper: float,
    max_downsets: int,
    max_pairs: int,
) -> tuple[Placement | None, bool]:
    """Exact search over the downsets of `preds`. Return (a plan below `upper` or None, was it exhaustive)."""
    arrays = (
        *pack_lists(preds),
        *pack_lists(blocks.net_readers),
        blocks.time_s,
        blocks.memory_bytes,
        blocks.net_cost_s,
        np.array([t.memory_bytes for t in problem.types], np.float64),
        np.array([t.transfer_scale for t in problem.types], np.float64),
        np.array(blocks.net_src, np.int32),
        np.array([max(0, t.num_devices) for t in problem.types], np.int64),
    )
    flat, outcome, _ = passes_func("tvmhet.DownsetChain")(
        [as_tensor(a) for a in arrays], upper, max_downsets, max_pairs
    )
    stages = [int(x) for x in flat]
    if not stages:
        return None, outcome == 0
    home = np.empty(blocks.count, np.int32)
    used: list[int] = []
    while stages:
        kind, size = stages[:2]
        home[stages[2 : 2 + size]] = len(used)
        used.append(kind)
        stages = stages[2 + size :]
    spare = list(device_slots(problem))
    for t in used:
        spare.remove(t)
    return valued(problem, blocks, home, (*used, *spare)), outcome == 0


def over_core(
    problem: LoadProblem, blocks: Blocks, lower: float, upper: float, max_downsets: int, max_pairs: int
) -> tuple[Placement | None, float]:
    """Search the first core whose downsets can be listed.

    Return (its best chain with the other blocks added one by one, or None; a lower bound on every contiguous
    placement, between `lower` and `upper`, the load of a known one).
    """
    for kept in _cores(blocks):
        core = _core(blocks, kept)
        found, done = best_chain(problem, core, core.preds, upper, max_downsets, max_pairs)
        if done and found is None:
            return None, upper
        if done and found:
            return _extended(problem, blocks, kept, found), max(lower, _load_of_nets(problem, core, found))
    return None, lower


def _extended(problem: LoadProblem, blocks: Blocks, kept: Sequence[int], found: Placement) -> Placement:
    """Add the blocks outside a core to its chain, each where it costs the least between what it reads and its readers.

    A device's place in the chain is its number.
    """
    slots, home = found.slots, np.full(blocks.count, -1, np.int32)
    home[list(kept)] = found.home
    order = order_by(blocks.preds, lambda v: v)
    latest = np.where(home >= 0, home, len(slots) - 1)  # no reader in the core lies on an earlier device
    for v in reversed(order):
        for u in blocks.preds[v]:
            latest[u] = min(latest[u], latest[v])
    ends = [(src, *readers) for src, readers in zip(blocks.net_src, blocks.net_readers, strict=True)]
    nets = [[e for e, vs in enumerate(ends) if v in vs] for v in range(blocks.count)]
    load, memory = np.zeros(len(slots)), np.zeros(len(slots))
    for v in [*kept, *(v for v in order if home[v] < 0)]:
        if home[v] < 0:
            first = max((int(home[u]) for u in blocks.preds[v]), default=0)
            cost = {d: load[d] + blocks.time_s[v, slots[d]] for d in range(first, int(latest[v]) + 1)}
            for d, t in enumerate(slots):
                if d not in cost:
                    continue
                if memory[d] + blocks.memory_bytes[v] > problem.types[t].memory_bytes:
                    cost[d] = math.inf
                placed = (e for e in nets[v] if any(home[u] not in (-1, d) for u in ends[e]))
                cost[d] += sum(float(blocks.net_cost_s[e]) for e in placed) * problem.types[t].transfer_scale
            home[v] = min(cost, key=lambda d: (cost[d], d))
        load[home[v]] += blocks.time_s[v, slots[home[v]]]
        memory[home[v]] += blocks.memory_bytes[v]
    return valued(problem, blocks, home, slots)


def _cores(blocks: Blocks) -> Iterator[list[int]]:
    """Sets of blocks, larger ones first: all that have an order with others, then the heavier ones among them."""
    ordered = {u for before in blocks.preds for u in before} | {v for v, before in enumerate(blocks.preds) if before}
    weight = np.where(np.isfinite(blocks.time_s), blocks.time_s, np.inf).min(axis=1)
    rank = sorted(ordered, key=lambda v: (-weight[v], v))
    sizes = [len(rank) * share // 8 for share in (8, 6, 4, 3, 2, 1)]
    return (sorted(rank[:n]) for n in dict.fromkeys(sizes) if n)


def _core(blocks: Blocks, kept: Sequence[int]) -> Blocks:
    """The blocks `kept`, the order among them, and the nets that still join two of them."""
    index = {v: i for i, v in enumerate(kept)}
    nearest: dict[int, set[int]] = {}  # the last kept blocks before each block
    for v in order_by(blocks.preds, lambda v: v):
        nearest[v] = set().union(*({u} if u in index else nearest[u] for u in blocks.preds[v]))
    nets: dict[tuple[int, ...], float] = {}
    for src, readers, cost in zip(blocks.net_src, blocks.net_readers, blocks.net_cost_s, strict=True):
        ends = tuple(index[v] for v in (src, *readers) if v in index)
        if len(ends) > 1:
            nets[ends] = nets.get(ends, 0.0) + float(cost)
    return Blocks(
        tuple(blocks.nodes[v] for v in kept),
        tuple(tuple(sorted(index[u] for u in nearest[v])) for v in kept),
        (),
        blocks.time_s[list(kept)],
        blocks.memory_bytes[list(kept)],
        tuple(ends[0] for ends in nets),
        tuple(ends[1:] for ends in nets),
        np.array(list(nets.values()), np.float64),
    )


def _load_of_nets(problem: LoadProblem, core: Blocks, found: Placement) -> float:
    """The largest load of a core, which pays for its own nets only."""
    load = np.zeros(len(found.slots))
    for b, d in enumerate(found.home.tolist()):
        load[d] += core.time_s[b, found.slots[d]]
    for src, readers, cost in zip(core.net_src, core.net_readers, core.net_cost_s, strict=True):
        devices = {int(found.home[v]) for v in (src, *readers)}
        for d in devices if len(devices) > 1 else ():
            load[d] += cost * problem.types[found.slots[d]].transfer_scale
    return float(load.max())
