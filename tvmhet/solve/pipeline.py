"""Stages in a row: kernels, cuts, device groups and replicas chosen together (see passes/stage_search.cc).

    state graph ──► segment table ──► Pareto search over cuts ──► exact closed forms ──► best of all orders

While downsets are few they are all states and every cut is tried. Beyond that, states follow several linear orders, and
cuts are thinned to those that move the least, then refined around the first answer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmhet._passes import passes_func
from tvmhet.solve.chain_bound import chain_bound_s
from tvmhet.solve.evaluate import StageChoice, evaluate
from tvmhet.solve.objective import Objective
from tvmhet.solve.pack import ModelArrays, StateGraph, as_tensor, link_arrays, model_arrays, wire_arrays
from tvmhet.solve.problem import Problem
from tvmhet.solve.solution import SolvedStage

_TOLERANCE = 1e-6  # relative, of the bisection
_COARSE_TOLERANCE = 2e-4  # where cuts are many: local search does the rest
_FEW_CUTS = 64  # up to here the search is as precise as in small problems
_ROWS = 256  # of states turned into numbers at once
_STARTS = 6  # answers of one search that are improved
_REACH = 24  # cuts that local search moves by at once
_POLISH_STEPS = 20_000  # of each start


@dataclass(frozen=True)
class Found:
    """The best stages of one search. `proved_s`: no plan over these cuts has a smaller objective; else -inf."""

    stages: tuple[SolvedStage, ...]
    objective_s: float
    proved_s: float
    steps: int


def crossing_bytes(problem: Problem, graph: StateGraph) -> NDArray[np.float64]:
    """Return, for each state, the bytes of tensors made before it and read after it."""
    bits = np.unpackbits(graph.words.view(np.uint8), axis=1, bitorder="little").astype(bool)
    rank = {v: i for i, v in enumerate(graph.order)}
    weight, shared = np.zeros(bits.shape[1]), np.zeros(graph.num_states)
    for e in (e for e in problem.edges if e.dsts and e.src >= 0):
        weight[rank[e.src]] += e.size_bytes
        if len(e.dsts) == 1:
            weight[rank[e.dsts[0]]] -= e.size_bytes
        else:
            shared += e.size_bytes * bits[:, [rank[d] for d in e.dsts]].all(axis=1)
    rows = [bits[i : i + _ROWS] @ weight for i in range(0, len(bits), _ROWS)]  # what is read ran after what made it
    return np.concatenate(rows) - shared if rows else shared


def progress_s(graph: StateGraph, cost_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, for each state, the least cost of kernels that reach it."""
    reach = np.full(graph.num_states, np.inf)
    reach[0] = 0.0
    for a, b, k in graph.edges.tolist():
        reach[b] = min(reach[b], reach[a] + cost_s[k])
    return reach


def pick_cuts(crossing: NDArray[np.float64], progress: NDArray[np.float64], limit: int) -> NDArray[np.int32]:
    """Return at most about `limit` states, ascending: in each equal slice of the work, those that move the least."""
    num = len(progress)
    if num <= limit:
        return np.arange(num, dtype=np.int32)
    end = progress[-1] if math.isfinite(progress[-1]) and progress[-1] > 0 else 1.0
    slices = np.minimum((np.where(np.isfinite(progress), progress, 0.0) / end * limit).astype(np.int64), limit - 1)
    rank = np.lexsort((np.arange(num), crossing, slices))
    first = np.ones(num, bool)
    first[1:] = slices[rank][1:] != slices[rank][:-1]
    chosen = set(rank[first].tolist()) | {0, num - 1}
    for s in np.argsort(crossing, kind="stable").tolist():
        if len(chosen) >= limit:
            break
        chosen.add(s)
    return np.array(sorted(chosen), np.int32)


def near_cuts(
    chosen: Sequence[int], crossing: NDArray[np.float64], progress: NDArray[np.float64], limit: int
) -> NDArray[np.int32]:
    """Return at most about `limit` states: those nearest in progress to the cuts of a first answer."""
    chosen_at = progress[list(chosen)]
    distance = np.abs(np.where(np.isfinite(progress), progress, np.inf)[:, None] - chosen_at[None, :]).min(axis=1)
    rank = np.lexsort((crossing, distance))
    return np.array(sorted({*rank[:limit].tolist(), *chosen, 0, len(progress) - 1}), np.int32)


class StageSearch:
    """Searches for one problem over one state graph; keeps the packed arrays between searches."""

    def __init__(self, problem: Problem, graph: StateGraph, time_s: NDArray[np.float64], objective: Objective) -> None:
        self.problem = problem
        self.graph = graph
        self.objective = objective
        groups = problem.groups
        self._memory = np.array([g.memory_bytes for g in groups], np.float64)
        self._arrays: ModelArrays = model_arrays(problem, graph, time_s, self._memory)
        self._last: tuple[bytes, NDArray[np.float64], NDArray[np.float64]] = (b"", np.empty(0), np.empty(0))
        self._stage_bytes: NDArray[np.float64] = np.empty(0)  # of the last table
        self._known: dict[tuple[int, int, int], tuple[int, ...]] = {}  # kernels between two states on a group
        self._fastest = True  # is every entry of the last table the fastest that fits?
        *self._links, self._counts = link_arrays(problem)  # the last: a row of numbers of devices for each group
        self._wires = wire_arrays(problem)

    def over(
        self,
        cuts: NDArray[np.int32],
        lower_s: float,
        upper_s: float,
        max_labels: int,
        max_steps: int,
        only: int | None = None,
        start: Found | None = None,
    ) -> Found | None:
        """Return the best stages between `cuts`, or None if there are none with an objective up to `upper_s`.

        With `only`, all stages are on that group. For throughput the last few answers, and `start`, whose cuts must be
        among `cuts`, are improved by local search.
        """
        counts = self._counts.copy()
        if only is not None:
            counts[np.arange(len(counts)) != only, 0] = 0
        lists, truncated, steps, proved = passes_func("tvmhet.StageSearch")(
            [as_tensor(a) for a in (*self._table(cuts), *self._links, counts, *self._wires)],
            self.problem.overlap_transfers,
            self.objective is Objective.LATENCY,
            lower_s,
            upper_s,
            _TOLERANCE if len(cuts) <= _FEW_CUTS else _COARSE_TOLERANCE,
            max_labels,
            max_steps,
        )
        starts = list(lists)
        if self.objective is Objective.LATENCY:
            return (
                self._found(starts[-1], cuts, -math.inf if truncated else float(proved), int(steps)) if starts else None
            )
        starts = starts[-_STARTS:] + ([self._flat(start, cuts)] if start else [])
        flat, spent = self._polish(starts, cuts, counts)
        if not len(flat):
            return None
        found = self._found(flat, cuts, -math.inf if truncated else float(proved), int(steps) + spent, columns=5)
        return found if found.objective_s <= upper_s else None

    def _flat(self, found: Found, cuts: NDArray[np.int32]) -> list[int]:
        """Return `found` as (from cut, to cut, group, replicas) of each stage, cuts by their index in `cuts`."""
        inner = np.searchsorted(cuts, self.cuts_of(found)).tolist()
        ends = [*inner, len(cuts) - 1]
        return [
            x
            for begin, end, s in zip([0, *inner], ends, found.stages, strict=True)
            for x in (begin, end, s.group, s.num_replicas)
        ]

    def bound_s(self, lower_s: float, upper_s: float) -> float:
        """Return a lower bound on the largest load of any plan. All downsets must be states.

        `lower_s` is a bound already known, `upper_s` the load of a known plan.
        """
        table = self._table(np.arange(self.graph.num_states, dtype=np.int32))
        return chain_bound_s(self.problem, *table, lower_s, upper_s) if self._fastest else lower_s

    def knows_all(self, cuts: NDArray[np.int32]) -> bool:
        """Say whether the stages between `cuts` hold every possible plan, each stage at its fastest that fits."""
        self._table(cuts)
        return self.graph.full and len(cuts) == self.graph.num_states and self._fastest

    def possible(self, cuts: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return, for stages between `cuts`, whether a group can run and hold them: [cuts, cuts, groups]."""
        return np.isfinite(self._table(cuts)[0])

    def virtual(self, cuts: NDArray[np.int32], rounds: int, start: Found | None) -> Found | None:
        """Return the best plan between `cuts` in which a group's devices may run several stages, None if there is none.

        Candidates: `rounds` chains of least price, and `start`, whose cuts must be among `cuts`.
        """
        lists = passes_func("tvmhet.StagePriced")(
            [as_tensor(a) for a in (*self._table(cuts), *self._links, self._counts, *self._wires)],
            self.problem.overlap_transfers,
            rounds,
        )
        starts = [*list(lists)[-_STARTS:], *([self._flat(start, cuts)] if start else [])]
        flat, spent = self._polish(starts, cuts, self._counts, share=True)
        return self._found(flat, cuts, -math.inf, spent, columns=5) if len(flat) else None

    def _polish(
        self, starts: list[Any], cuts: NDArray[np.int32], counts: NDArray[np.int64], share: bool = False
    ) -> tuple[Any, int]:
        words = np.ascontiguousarray(self.graph.words[cuts])
        arrays = (*self._table(cuts), *self._links, counts, *self._wires, words, *self._arrays.keep[5:10])
        if share:
            arrays = (*arrays, self._stage_bytes, self._memory)
        flat, _, steps = passes_func("tvmhet.StagePolish")(
            self._arrays.num_nodes,
            [as_tensor(a) for a in arrays],
            self.problem.overlap_transfers,
            starts,
            _REACH,
            _POLISH_STEPS,
        )
        return flat, int(steps)

    def front(self, cuts: NDArray[np.int32], step: float, max_labels: int) -> tuple[list[Found], bool]:
        """Return the cheapest stages for every bottleneck, cheapest first, and whether some may be missing."""
        table = self._table(cuts)
        prices = np.array([g.usd_per_h for g in self.problem.groups], np.float64)
        lists, truncated = passes_func("tvmhet.StageFront")(
            [as_tensor(a) for a in (*table, *self._links, self._counts, *self._wires)],
            as_tensor(prices),
            self.problem.overlap_transfers,
            step,
            max_labels,
        )
        return [self._found(flat, cuts, -math.inf, 0) for flat in lists], bool(truncated)

    def units(
        self,
        cuts: NDArray[np.int32],
        limits: Sequence[int],
        alone: Sequence[bool],
        max_devices: int,
        latency_limit_s: float,
        max_labels: int,
    ) -> tuple[list[tuple[NDArray[np.int64], float]], bool]:
        """Return, for every set of devices, the fastest stages and their period; and whether no label was dropped.

        Sets whose devices do more each by itself may be left out; `alone`: one device of the group may be a pipeline.
        Stages are rows (from cut, to cut, group, replicas), which `choices` takes. `limits` is the most devices of each
        group in one pipeline (of teams not read), `max_devices` of all together.
        """
        groups = self.problem.groups
        found, truncated, _ = passes_func("tvmhet.UnitSearch")(
            [as_tensor(a) for a in (*self._table(cuts), *self._links)],
            as_tensor(np.array(limits, np.int64)),
            as_tensor(np.array(alone, np.int64)),
            as_tensor(np.array([self.problem.pool(g) for g in range(len(groups))], np.int64)),
            as_tensor(np.array([g.degree for g in groups], np.int64)),
            max_devices,
            self.problem.overlap_transfers,
            latency_limit_s,
            max_labels,
        )
        return [(np.array(list(flat), np.int64).reshape(-1, 4), float(s)) for flat, s in found], not truncated

    def _table(self, cuts: NDArray[np.int32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Seconds [cuts, cuts, groups] (inf where a stage is impossible) and transfers [cuts, cuts, 8]."""
        key = cuts.tobytes()
        if self._last[0] != key:
            shape = (len(cuts), len(cuts), len(self.problem.groups))
            time_s, memory, moves = np.empty(shape), np.empty(shape), np.zeros((len(cuts), len(cuts), 8))
            arrays = [as_tensor(a) for a in (cuts, time_s, memory, moves)]
            fastest = passes_func("tvmhet.SegmentTable")(self._arrays.num_nodes, list(self._arrays.tensors), *arrays)
            self._last, self._fastest = (key, time_s, moves), bool(fastest)
            self._stage_bytes = memory
        return self._last[1:]

    def exact(self, upper_s: float, tail_s: NDArray[np.float64], max_steps: int) -> tuple[Found | None, bool, int]:
        """Branch and bound over all states. Return (a plan below `upper_s` or None, is there no better one, steps).

        `tail_s` bounds, per node in the problem's numbering, the seconds from its start to the end of the model.
        """
        cuts = np.arange(self.graph.num_states, dtype=np.int32)
        time_s, _ = self._table(cuts)
        src, size, output, reader_ptr, reader_ids = self._arrays.keep[5:10]
        tail = np.ascontiguousarray(tail_s[list(self.graph.order)])
        tensors = (src, size, output, reader_ptr, reader_ids, tail)
        arrays = (time_s, self.graph.words, *self._links, self._counts, *tensors, *self._wires)
        flat, complete, steps = passes_func("tvmhet.StageExact")(
            self._arrays.num_nodes,
            [as_tensor(a) for a in arrays],
            self.problem.overlap_transfers,
            self.objective is Objective.LATENCY,
            upper_s,
            max_steps,
        )
        found = self._found(flat, cuts, -math.inf, int(steps)) if len(flat) else None
        return found, bool(complete) and self.knows_all(cuts), int(steps)

    def _found(self, flat: Any, cuts: NDArray[np.int32], proved_s: float, steps: int, columns: int = 4) -> Found:
        stages, value = evaluate(self.problem, self.choices(flat, cuts, columns), self.objective)
        return Found(stages, value, proved_s, steps)

    def choices(self, flat: Any, cuts: NDArray[np.int32], columns: int = 4) -> tuple[StageChoice, ...]:
        """Return stages given as (from cut, to cut, group, replicas) each, with 5 `columns` also `shares`.

        Raises ValueError for one that fits not.
        """
        rows = np.array(flat if isinstance(flat, np.ndarray) else list(flat), np.int64).reshape(-1, columns)
        return tuple(
            StageChoice(self._kernels(int(cuts[b]), int(cuts[c]), int(g)), int(g), int(r), *map(int, shares))
            for b, c, g, r, *shares in rows
        )

    def learn(self, plans: Iterable[NDArray[np.int64]], cuts: NDArray[np.int32]) -> None:
        """Find the kernels of all stages of these plans at once; `choices` then takes no time."""
        wanted = {(int(cuts[b]), int(cuts[c]), int(g)) for rows in plans for b, c, g, _ in rows}
        for begin, stages in itertools.groupby(sorted(wanted - self._known.keys()), key=lambda s: s[0]):
            mine = list(stages)
            ends = as_tensor(np.array([s[1:] for s in mine], np.int64))
            paths = passes_func("tvmhet.SegmentPaths")(self._arrays.num_nodes, list(self._arrays.tensors), begin, ends)
            self._known |= {s: tuple(int(k) for k in path) for s, path in zip(mine, paths, strict=True)}

    def _kernels(self, begin: int, end: int, group: int) -> tuple[int, ...]:
        key = (begin, end, group)
        if key not in self._known:
            path = passes_func("tvmhet.SegmentKernels")(self._arrays.num_nodes, list(self._arrays.tensors), *key)
            self._known[key] = tuple(int(k) for k in path)
        return self._known[key]

    def holds(self, found: Found) -> bool:
        """Say whether the states between the stages of `found` are among those of this graph."""
        try:
            self.cuts_of(found)
        except KeyError:
            return False
        return True

    def cuts_of(self, found: Found) -> list[int]:
        """Return the states between the stages of `found`; KeyError where one is not in the graph."""
        rank = {v: i for i, v in enumerate(self.graph.order)}
        index = {self.graph.words[s].tobytes(): int(s) for s in range(self.graph.num_states)}
        state = np.zeros_like(self.graph.words[0])
        out: list[int] = []
        for stage in found.stages[:-1]:
            for k in stage.kernels:
                for v in self.problem.kernels[k].nodes:
                    state[rank[v] // 64] |= np.uint64(1 << (rank[v] % 64))
            out.append(index[state.tobytes()])
        return out
