"""List schedules of one input: nodes in turn, each to the device that suits it best at that moment.

- HEFT (Topcuoglu, Hariri & Wu, TPDS 2002): nodes by upward rank, the mean seconds from their start to the end of the
  graph; each to the device where it ends first, in an idle gap if one is long enough.
- ETF (Hwang et al., SIAM J. Comput. 1989), in the memory-aware form of Baechi (Jeon et al., SoCC 2020): of all ready
  nodes and devices with room, the pair that can start first. A host takes only what no device has room for.
- SCT (Hanen & Munier; Baechi's m-SCT): ETF where a node's favourite child is kept for the node's own device.

They know node times and transfers, not the rule that a device runs all of its nodes as one call. So they only choose
where nodes run, among choices that keep the calls in an order; what a placement is worth is for the caller to say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tvmhet.solve.orders import order_by, successors


class Slot(NamedTuple):
    """One device: its type (a column of the times) and its memory.

    `one_call`: it is called once for all of its nodes. `parallel`: it runs any number of nodes at once, as a host does.
    """

    kind: int
    memory_bytes: float
    one_call: bool = True
    parallel: bool = False


@dataclass(frozen=True)
class Tasks:
    """What list schedules know. Nodes are 0.. in any order that `preds` allows.

    `time_s`: (nodes, types), inf where a node cannot run; `move_s`: (nodes, types, types), to move a node's result.
    """

    time_s: NDArray[np.float64]
    preds: Sequence[Sequence[int]]
    move_s: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]
    slots: Sequence[Slot]


@dataclass
class _State:
    """A schedule as it grows."""

    tasks: Tasks
    home: list[int]
    finish: list[float]
    busy: list[list[tuple[float, float]]] = field(default_factory=list)  # per slot: (start, end), ascending
    used: list[float] = field(default_factory=list)
    calls: list[set[int]] = field(default_factory=list)  # per node: the last calls that it, or its call, waits for
    after: list[set[int]] = field(default_factory=list)  # per slot: calls that wait for it

    def candidates(self, node: int) -> list[int]:
        """Slots that may run `node`; of the idle ones of each type only the first, for they are alike."""
        out, idle = [], set()
        for s, slot in enumerate(self.tasks.slots):
            if not math.isfinite(self.tasks.time_s[node, slot.kind]):
                continue
            if self.used[s] + self.tasks.memory_bytes[node] > slot.memory_bytes:
                continue
            if not self.busy[s]:
                if slot in idle:
                    continue
                idle.add(slot)
            elif slot.one_call and not self._in_order(node, s):
                continue
            out.append(s)
        return out

    def _in_order(self, node: int, slot: int) -> bool:
        """Would the call of `slot` still not wait for itself if it held `node`?"""
        for u in self.tasks.preds[node]:
            if self.home[u] != slot and any(c == slot or c in self.after[slot] for c in self.calls[u]):
                return False
        return True

    def ready_s(self, node: int, slot: int) -> float:
        """When the last input of `node` is on `slot`."""
        kind = self.tasks.slots[slot].kind
        return max(
            (
                self.finish[u]
                + (0.0 if self.home[u] == slot else self.tasks.move_s[u, self.tasks.slots[self.home[u]].kind, kind])
                for u in self.tasks.preds[node]
            ),
            default=0.0,
        )

    def start_s(self, node: int, slot: int, *, insert: bool) -> float:
        """The earliest start of `node` on `slot`: in a gap if `insert`, else after all that it runs."""
        ready = self.ready_s(node, slot)
        if self.tasks.slots[slot].parallel or not self.busy[slot]:
            return ready
        if insert:
            need, free = self.tasks.time_s[node, self.tasks.slots[slot].kind], 0.0
            for begin, end in self.busy[slot]:
                if max(free, ready) + need <= begin:
                    return max(free, ready)
                free = max(free, end)
        return max(ready, self.busy[slot][-1][1])

    def place(self, node: int, slot: int, start: float) -> None:
        """Run `node` on `slot` from `start`."""
        self.finish[node] = start + self.tasks.time_s[node, self.tasks.slots[slot].kind]
        self.home[node] = slot
        self.used[slot] += self.tasks.memory_bytes[node]
        self.busy[slot].append((start, self.finish[node]))
        self.busy[slot].sort()
        before = set().union(*(self.calls[u] for u in self.tasks.preds[node])) - {slot}
        self.calls[node] = {slot} if self.tasks.slots[slot].one_call else before
        if self.tasks.slots[slot].one_call:
            late = {slot} | self.after[slot]
            for s, after in enumerate(self.after):
                if s in before or after & before:
                    after |= late


def _empty(tasks: Tasks) -> _State:
    n, m = len(tasks.preds), len(tasks.slots)
    state = _State(tasks, [-1] * n, [0.0] * n)
    state.busy, state.used = [[] for _ in range(m)], [0.0] * m
    state.calls, state.after = [set() for _ in range(n)], [set() for _ in range(m)]
    return state


def upward_ranks_s(tasks: Tasks) -> list[float]:
    """Return, per node, the mean seconds from its start to the end of the graph, mean transfers included."""
    finite = np.where(np.isfinite(tasks.time_s), tasks.time_s, np.nan)
    work = np.nanmean(finite, axis=1)
    kinds = [s.kind for s in tasks.slots]
    pairs = [(a, b) for i, a in enumerate(kinds) for j, b in enumerate(kinds) if i != j][:4096]
    move = np.zeros(len(tasks.preds))
    if pairs:
        between = tasks.move_s[:, [a for a, _ in pairs], [b for _, b in pairs]]
        move = np.where(np.isfinite(between), between, 0.0).mean(axis=1)
    readers = successors(tasks.preds)
    rank = [0.0] * len(tasks.preds)
    for v in reversed(order_by(tasks.preds, lambda v: v)):
        rank[v] = float(work[v]) + max((float(move[v]) + rank[w] for w in readers[v]), default=0.0)
    return rank


def heft(tasks: Tasks) -> list[int] | None:
    """Return the slot of each node, or None if some node fits nowhere."""
    rank = upward_ranks_s(tasks)
    state = _empty(tasks)
    for v in order_by(tasks.preds, lambda v: (-rank[v], v)):
        where = state.candidates(v)
        if not where:
            return None
        start = {s: state.start_s(v, s, insert=True) for s in where}
        best = min(where, key=lambda s: (start[s] + tasks.time_s[v, tasks.slots[s].kind], s))
        state.place(v, best, start[best])
    return state.home


def etf(tasks: Tasks, favourite: Mapping[int, int] | None = None) -> list[int] | None:
    """Return the slot of each node, or None if some node fits nowhere.

    With `favourite` (child -> the parent whose favourite it is) this is SCT: a device that has just run the parent is
    kept for the child, unless all that can run anything are kept.
    """
    rank = upward_ranks_s(tasks)
    readers = successors(tasks.preds)
    waiting = [len(set(p)) for p in tasks.preds]
    ready = [v for v, w in enumerate(waiting) if w == 0]
    state = _empty(tasks)
    kept: dict[int, int] = {}  # slot -> the favourite child it waits for
    while ready:
        found = _first_pair(state, ready, kept, rank) or _first_pair(state, ready, {}, rank)
        if found is None:
            return None
        start, v, s = found
        state.place(v, s, start)
        ready.remove(v)
        kept = {slot: child for slot, child in kept.items() if child != v and slot != s}
        for child in sorted(set(readers[v])):
            waiting[child] -= 1
            if waiting[child] == 0:
                ready.append(child)
            if favourite and favourite.get(child) == v and tasks.slots[s].one_call:
                kept[s] = child
    return state.home


def _first_pair(
    state: _State, ready: Sequence[int], kept: Mapping[int, int], rank: Sequence[float]
) -> tuple[float, int, int] | None:
    """Return (start, node, slot) of the pair that starts first; a slot kept for a child takes no other node."""
    best: tuple[tuple[float, float, int, int], float, int, int] | None = None
    for v in ready:
        where = state.candidates(v)
        where = [s for s in where if not state.tasks.slots[s].parallel] or where
        for s in where:
            start = state.start_s(v, s, insert=False)
            child = kept.get(s)
            if child is not None and child != v:
                continue
            key = (start, -rank[v], v, s)
            if best is None or key < best[0]:
                best = (key, start, v, s)
    return None if best is None else best[1:]
