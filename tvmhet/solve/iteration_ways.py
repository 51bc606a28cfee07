"""Every choice of kernels for a training stage that no other choice beats, in problems small enough to list all plans.

    state b ──k──► ... ──k──► state c      forward seconds, backward seconds and working bytes of each way between them

The fastest kernels of both passes together, which the tables have, need not be those of the best plan: where memory is
short, slower ones may need less of it; where stages wait for each other in each pass apart (GPipe), a longer backward
pass may be worth a shorter forward pass; and on a device that has time, one hides more of an all-reduce.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvmhet.solve.iteration import StagePlacing
from tvmhet.solve.iteration_memory import StageNeeds
from tvmhet.solve.iteration_tables import IterationTables

_MOST = 64  # ways to one state; where there are more, not all plans are listed
_SAME = 1 + 1e-12  # the same kernels summed in another order


class TooManyWays(Exception):
    """More ways lead to a state than are worth keeping."""


@dataclass(frozen=True, slots=True)
class _Way:
    """Kernels from the first state of a stage to a later one."""

    forward_s: float
    backward_s: float
    peak_bytes: float
    kernels: tuple[int, ...]

    def is_as_good_as(self, other: _Way, hides: bool) -> bool:
        """`hides`: a longer backward pass may be of use."""
        return (
            self.forward_s <= other.forward_s * _SAME
            and self.backward_s <= other.backward_s * _SAME
            and self.peak_bytes <= other.peak_bytes
            and not (hides and self.backward_s * _SAME < other.backward_s)
        )


class KernelWays:
    """The ways of all stages between the states of `tables`, whose cuts are all states of all downsets."""

    def __init__(self, tables: IterationTables) -> None:
        self.tables = tables
        self._needs = StageNeeds(tables.problem, tables.option)
        self._states = [int.from_bytes(row.tobytes(), "little") for row in tables.graph.words]
        forward = tables.micro.forward
        rank = {v: i for i, v in enumerate(tables.graph.order)}
        self._made = [
            (1 << rank[e.src], sum(1 << rank[v] for v in set(e.dsts)), e.size_bytes, e.is_output)
            for e in forward.edges
            if e.src >= 0
        ]
        self._nodes = [sum(1 << rank[v] for v in k.nodes) for k in forward.kernels]
        self._seconds = tables.seconds()
        self._next: list[list[tuple[int, int]]] = [[] for _ in self._states]
        for u, v, k in tables.graph.edges.tolist():
            self._next[u].append((v, k))
        self._known: dict[tuple[int, int], list[list[tuple[int, ...]]]] = {}

    def of(self, b: int, c: int, mode: int) -> list[tuple[int, ...]]:
        """Return the kernels of each way from state b to c that a device of `mode` can hold with one micro-batch.

        Raises `TooManyWays`.
        """
        if (b, mode) not in self._known:
            self._known[b, mode] = [
                [kernels for kernels in ways if self._fits(kernels, mode)] for ways in self._from(b, mode)
            ]
        return self._known[b, mode][c]

    def _fits(self, kernels: tuple[int, ...], mode: int) -> bool:
        m = self.tables.modes[mode]
        need = self._needs.of(StagePlacing(kernels, m.group, 1, 0, m.recompute, m.degree))
        limit = self.tables.problem.groups[m.group].memory_bytes
        return bool(kernels) and math.ceil(need.state + need.working + need.stash) <= limit

    def _from(self, b: int, mode: int) -> list[list[tuple[int, ...]]]:
        forward, backward = (s[:, mode] for s in self._seconds)
        hides = self.tables.problem.reduce_overlap > 0
        ways: list[list[_Way]] = [[] for _ in self._states]
        ways[b] = [_Way(0.0, 0.0, 0.0, ())]
        for u in range(b, len(self._states)):
            live = self._live_bytes(b, u) if ways[u] else 0.0
            for v, k in self._next[u] if ways[u] else ():
                if not math.isfinite(forward[k] + backward[k]):
                    continue
                step = live + self._own_bytes(k)
                for w in ways[u]:
                    f, back = w.forward_s + float(forward[k]), w.backward_s + float(backward[k])
                    _keep(ways[v], _Way(f, back, max(w.peak_bytes, step), (*w.kernels, k)), hides)
        return [[w.kernels for w in at] for at in ways]

    def _live_bytes(self, b: int, u: int) -> float:
        """Bytes of the results made between two states that are still needed."""
        begin, done = self._states[b], self._states[u]
        made = ((size, out or readers & ~done) for src, readers, size, out in self._made if src & done & ~begin)
        return float(sum(size for size, needed in made if needed))

    def _own_bytes(self, kernel: int) -> float:
        """Bytes of a kernel's results that are needed outside it, and its workspace."""
        nodes = self._nodes[kernel]
        results = sum(size for src, readers, size, out in self._made if src & nodes and (out or readers & ~nodes))
        return float(results + self.tables.micro.forward.kernels[kernel].workspace_bytes)


def _keep(ways: list[_Way], new: _Way, hides: bool) -> None:
    """Add a way unless one is as good, without those that it is as good as."""
    if any(w.is_as_good_as(new, hides) for w in ways):
        return
    ways[:] = [w for w in ways if not new.is_as_good_as(w, hides)]
    ways.append(new)
    if len(ways) > _MOST:
        raise TooManyWays
