"""What every possible training stage costs, as the arrays that passes/iteration_search.cc takes.

A *mode* is a way to run a stage: a device group, a tensor-split degree, recomputation or not. The fastest kernels of
both passes between two cuts come from the segment table, with modes in the place of groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmhet._passes import passes_func
from tvmhet.solve.iteration import IterationProblem, MicroBatch, StagePlacing
from tvmhet.solve.iteration_shares import with_shares
from tvmhet.solve.pack import StateGraph, allowed_times, as_tensor, model_arrays
from tvmhet.solve.problem import Link, Weight

Floats = NDArray[np.float64]
_NO_LINK_S = 1e30  # stands for "never" where arithmetic with inf would give NaN


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to run a stage."""

    group: int
    degree: int
    recompute: bool


def modes_of(problem: IterationProblem, option: int) -> tuple[Mode, ...]:
    """Return the modes that have times, keeping before recomputing."""
    splits = [(s.group, s.degree) for s in problem.options[option].splits]
    plain = [(g, 1) for g, group in enumerate(problem.groups) if group.num_devices > 0]
    kinds = [*plain, *(s for s in splits if problem.groups[s[0]].num_devices >= s[1])]
    return tuple(Mode(g, d, again) for again in (False, True)[: 1 + problem.may_recompute] for g, d in kinds)


def mode_times(micro: MicroBatch, modes: tuple[Mode, ...]) -> tuple[Floats, Floats]:
    """Return seconds of (both passes, the backward pass with its recomputation), shape (kernels, modes)."""
    allowed = np.isfinite(allowed_times(micro.forward))
    plain = np.array([k.time_s for k in micro.forward.kernels], np.float64).reshape(-1, len(micro.forward.groups))
    back = np.array(micro.backward_s, np.float64).reshape(plain.shape)
    splits = {(s.group, s.degree): s for s in micro.splits}
    both, backward = np.empty((len(plain), len(modes))), np.empty((len(plain), len(modes)))
    for m, mode in enumerate(modes):
        split = splits.get((mode.group, mode.degree))
        ahead = np.array(split.forward_s) if split else plain[:, mode.group]
        after = np.array(split.backward_s) if split else back[:, mode.group]
        backward[:, m] = after + micro.repeat_of(mode.group) * ahead if mode.recompute else after
        both[:, m] = np.where(allowed[:, mode.group], ahead + backward[:, m], math.inf)
    return both, backward


class Segments:
    """One state graph of a micro-batch size, packed, with the kernels between two of its states in a mode."""

    def __init__(self, problem: IterationProblem, option: int, graph: StateGraph) -> None:
        micro = problem.options[option]
        self.modes = modes_of(problem, option)
        self.both, self.backward = mode_times(micro, self.modes)
        self.limits = np.array([problem.groups[m.group].memory_bytes for m in self.modes], np.float64)
        self.arrays = model_arrays(replace(micro.forward, weights=()), graph, self.both, self.limits)
        self._known: dict[tuple[int, int, int], tuple[int, ...]] = {}

    def learn(self, stages: Iterable[tuple[int, int, int]]) -> None:
        """Look up the fastest kernels of many stages at once, none where none fit: (from state, to state, mode)."""
        new = sorted({s for s in stages if s not in self._known})
        if new:
            rows = as_tensor(np.array(new, np.int64))
            paths = passes_func("tvmhet.SegmentStages")(self.arrays.num_nodes, list(self.arrays.tensors), rows)
            for stage, path in zip(new, paths, strict=True):
                self._known[stage] = tuple(int(k) for k in path)

    def kernels(self, stage: tuple[int, int, int]) -> tuple[int, ...]:
        """Return the fastest kernels of a stage; () where its group cannot run or hold it."""
        self.learn((stage,))
        return self._known[stage]


class IterationTables:
    """All stages between `cuts` of one state graph, for one micro-batch option."""

    def __init__(
        self,
        problem: IterationProblem,
        option: int,
        graph: StateGraph,
        cuts: NDArray[np.int32],
        segments: Segments | None = None,
    ) -> None:
        self.problem, self.option, self.graph, self.cuts = problem, option, graph, cuts
        self.micro = problem.options[option]
        self._segments = segments or Segments(problem, option, graph)
        self.modes = self._segments.modes
        both, backward = self._segments.both, self._segments.backward
        finite = np.isfinite(both) & (both > 0)
        share = np.where(finite, backward / np.where(finite, both, 1.0), 0.0).max(axis=0, initial=0.0)
        limits = self._segments.limits
        time_s, memory, moves = self._table()
        updated = tuple(replace(w, size_bytes=w.updated_bytes) for w in self.micro.forward.weights)
        degrees = {1, *(m.degree for m in self.modes)}
        weight = self._parts_of(self.micro.forward.weights, degrees)
        kept = self._parts_of(self.micro.stashes, degrees)
        first = self._parts_of(updated, degrees, first=True)
        live_in = moves[:, :, 1] + moves[:, :, 5]
        state = 1 + problem.gradient_ratio + problem.state_ratio
        stash = np.empty_like(time_s)
        for m, mode in enumerate(self.modes):
            memory[m] += weight[mode.degree] * state + (kept[mode.degree] if mode.recompute else 0.0)
            stash[m] = live_in if mode.recompute else kept[mode.degree]
        self.time_s = np.where(memory + stash <= limits[:, None, None], time_s, math.inf)
        self.memory, self.stash, self.share = memory, stash, share
        self.moves, self.gradients = moves, self._gradient_moves(moves)
        self.weight = weight[1]
        self.held = np.stack([weight[m.degree] for m in self.modes])
        self.updated = np.stack([first[m.degree] for m in self.modes])

    def seconds(self) -> tuple[Floats, Floats]:
        """Return the seconds of (the forward pass, the backward pass with its recomputation), [kernels, modes]."""
        both, backward = self._segments.both, self._segments.backward
        return np.where(np.isfinite(both), both, math.inf) - np.where(np.isfinite(both), backward, 0.0), backward

    def _table(self) -> tuple[Floats, Floats, Floats]:
        """Seconds and bytes [modes, cuts, cuts] without state and stashes, and moves [cuts, cuts, 8]."""
        num = len(self.cuts)
        time_s, memory = np.empty((num, num, len(self.modes))), np.empty((num, num, len(self.modes)))
        moves = np.zeros((num, num, 8))
        arrays = [as_tensor(a) for a in (self.cuts, time_s, memory, moves)]
        model = self._segments.arrays
        passes_func("tvmhet.SegmentTable")(model.num_nodes, list(model.tensors), *arrays)
        return np.moveaxis(time_s, 2, 0).copy(), np.moveaxis(memory, 2, 0).copy(), moves

    def _members(self) -> NDArray[np.bool_]:
        """Which nodes (in the problem's numbering) have run at each cut."""
        bits = np.unpackbits(self.graph.words[self.cuts].view(np.uint8), axis=1, bitorder="little").astype(bool)
        out = np.zeros((len(self.cuts), len(self.graph.order)), bool)
        out[:, list(self.graph.order)] = bits[:, : len(self.graph.order)]
        return out

    def _parts_of(self, items: tuple[Weight, ...], degrees: set[int], first: bool = False) -> dict[int, Floats]:
        """By degree: `_bytes_of` the items on each device of a team."""
        every = self._bytes_of(items, first)
        whole = tuple(w for w in items if w.is_whole) if degrees != {1} else ()
        on_each = self._bytes_of(whole, first) if whole else np.zeros_like(every)
        return {d: every if d == 1 else (every - on_each) / d + on_each for d in degrees}

    def _bytes_of(self, items: tuple[Weight, ...], first: bool = False) -> Floats:
        """Bytes [cuts, cuts] of the items that any node between two cuts owns, or that none does before (`first`)."""
        done = self._members()
        single = [w for w in items if len(set(w.nodes)) == 1]
        total = np.zeros(len(self.cuts))
        for w in single:
            total += w.size_bytes * done[:, w.nodes[0]]
        out = total[None, :] - total[:, None]
        shared = [w for w in items if len(set(w.nodes)) > 1]
        counts = (
            np.array([done[:, sorted(set(w.nodes))].sum(axis=1) for w in shared]).reshape(len(shared), len(self.cuts)).T
        )
        sizes = np.array([w.size_bytes for w in shared], np.float64)
        for b in range(len(self.cuts)):
            out[b] += ((counts > counts[b]) & ((counts[b] == 0) | (not first))) @ sizes
        return np.asarray(np.maximum(out, 0.0))

    def _gradient_moves(self, moves: Floats) -> Floats:
        """Count and bytes of gradients [cuts, cuts, 4]: sent back, received."""
        out = moves[:, :, :4].copy()
        done = self._members()
        for i in self.micro.no_gradient:
            e = self.micro.forward.edges[i]
            if e.src < 0 or not e.dsts:
                continue
            made, reads = done[:, e.src], done[:, sorted(set(e.dsts))].sum(axis=1)
            received = made[:, None] & (reads[None, :] > reads[:, None])
            sent = ~made[:, None] & made[None, :] & (reads < len(set(e.dsts)))[None, :]
            for at, where in ((0, received), (2, sent)):
                out[:, :, at] -= where
                out[:, :, at + 1] -= e.size_bytes * where
        return np.asarray(np.maximum(out, 0.0))

    def arrays(self) -> list[Any]:
        """Return the arrays of IterationSearch, in its order."""
        forward, problem = self.micro.forward, self.problem
        groups = forward.groups
        power = [1.0 / max(t, 1e-30) for t in self._total_s()]
        rows = (
            self.time_s,
            self.memory,
            self.stash,
            np.array([m.group for m in self.modes], np.int64),
            np.array([m.degree for m in self.modes], np.int64),
            self.share,
            self.moves,
            self.gradients,
            self.held,
            np.array([[_latency(x) for x in row] for row in forward.links], np.float64),
            np.array([[_per_byte(x) for x in row] for row in forward.links], np.float64),
            np.array([_latency(x) for x in forward.host_links], np.float64),
            np.array([_per_byte(x) for x in forward.host_links], np.float64),
            np.array([g.stage_overhead_s for g in groups], np.float64),
            np.array([g.memory_bytes for g in groups], np.float64),
            np.array(
                [
                    (_latency(a.inner), _per_byte(a.inner), a.num_inside, _latency(a.outer), _per_byte(a.outer))
                    for a in problem.all_reduce
                ],
                np.float64,
            ),
            np.array(problem.update_s_per_byte, np.float64),
            np.array(power, np.float64),
            np.array([max(0, g.num_devices) for g in groups], np.int64),
            self.updated,
            self.weight,
        )
        return [as_tensor(np.ascontiguousarray(r)) for r in rows]

    def _total_s(self) -> list[float]:
        """A measure of each group's speed: the mean over kernels of its time against the fastest group's."""
        both, _ = mode_times(self.micro, tuple(Mode(g, 1, False) for g in range(len(self.problem.groups))))
        least = np.maximum(both.min(axis=1, keepdims=True), 1e-30)
        runs = np.isfinite(both) & np.isfinite(least)
        ratio = np.where(runs, np.where(runs, both, 1.0) / np.where(runs, least, 1.0), 1e3)
        share = np.where(np.isfinite(least), least, 0.0)
        return [float(x) for x in (ratio * share).sum(axis=0) / max(share.sum(), 1e-30)]

    def scalars(self) -> list[float]:
        """Return the numbers of IterationSearch, in its order."""
        problem = self.problem
        count = float(problem.num_microbatches(self.option))
        return [problem.gradient_ratio, problem.reduce_overlap, count, float(problem.may_mix)]

    def placings(self, flat: Sequence[int]) -> tuple[StagePlacing, ...]:
        """Return the stages of one answer of the search: (from cut, to cut, mode, replicas) each.

        Rows between the same cuts are replicas of one stage, which get their shares here.
        """
        rows = np.array(flat, np.int64).reshape(-1, 4).tolist()
        placed = [self.placing(b, c, m, r, place) for place, (b, c, m, r) in enumerate(rows)]
        stages = [[p for _, p in same] for _, same in groupby(zip(rows, placed, strict=True), key=lambda x: x[0][:2])]
        return with_shares(self.problem, self.option, stages)

    def learn(self, answers: Iterable[Sequence[int]]) -> None:
        """Look up the kernels of all stages of many answers at once, before `placings` of each."""
        rows = [np.array(flat, np.int64).reshape(-1, 4).tolist() for flat in answers]
        self._segments.learn(self._stage(b, c, m) for mine in rows for b, c, m, _ in mine)

    def placing(self, b: int, c: int, mode: int, replicas: int, place: int) -> StagePlacing:
        """Return one stage between two cuts, with the fastest kernels of its mode."""
        m = self.modes[mode]
        kernels = self._segments.kernels(self._stage(b, c, mode))
        assert kernels, "a search places stages that fit"
        return StagePlacing(kernels, m.group, replicas, place, m.recompute, m.degree)

    def _stage(self, b: int, c: int, mode: int) -> tuple[int, int, int]:
        return int(self.cuts[b]), int(self.cuts[c]), mode


def _latency(link: Link) -> float:
    return link.latency_s if link.byte_per_s > 0 else _NO_LINK_S


def _per_byte(link: Link) -> float:
    return 1.0 / link.byte_per_s if link.byte_per_s > 0 else 0.0
