"""Stages between the cuts of state graphs: the search of passes/iteration_search.cc, coarse, fine and refined.

some cuts ──► best plan ──► more cuts ──► better plan ──► cuts near its own ──► ... until it gets no better
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tvmhet._passes import passes_func
from tvmhet.solve.iteration import IterationProblem, StagePlacing
from tvmhet.solve.iteration_candidate import Candidate, judge, linear_schedules
from tvmhet.solve.iteration_graphs import search_is_exact, state_graphs
from tvmhet.solve.iteration_memory import StageNeeds
from tvmhet.solve.iteration_tables import IterationTables, Mode, Segments
from tvmhet.solve.pack import StateGraph
from tvmhet.solve.pipeline import crossing_bytes, near_cuts, pick_cuts, progress_s
from tvmhet.solve.problem import Problem
from tvmhet.solve.schedules import Schedule


@dataclass(frozen=True, slots=True)
class Effort:
    """How finely to look: cuts, labels kept per cut, relative distance of the limits tried."""

    cuts: int
    labels: int
    step: float


COARSE = Effort(56, 32, 0.06)
FINE = Effort(96, 64, 0.02)
_REFINEMENTS = 3
_SHIFTS = 9  # powers of two by which a cut is moved, in states
_SHIFT_STEPS = 2000  # that judging a plan counts


@dataclass(frozen=True)
class _GraphFacts:
    """What does not depend on the cuts: packed arrays, and of each state the bytes that cross it and its progress."""

    segments: Segments
    crossing: NDArray[np.float64]
    progress: NDArray[np.float64]


class StageSearch:
    """Searches over one problem; `steps` counts their work, `found` are the plans, all with their closed forms.

    `exact`: for some micro-batch sizes what no plan of one stage per device is below, proved by a search over all cuts.
    """

    def __init__(self, problem: IterationProblem, max_steps: int, until: float) -> None:
        self.problem, self.max_steps, self.until = problem, max_steps, until
        self.steps = 0
        self.found: list[Candidate] = []
        self.exact: dict[int, float] = {}
        self._gpipe_only = linear_schedules(problem) == (Schedule.GPIPE,)
        self._graphs: dict[tuple[tuple[int, ...], ...], list[StateGraph]] = {}
        self._facts: dict[tuple[int, int], _GraphFacts] = {}
        self._needs = [StageNeeds(problem, o) for o in range(len(problem.options))]

    def any(self) -> Candidate | None:
        """Return any plan that fits: enough to know that there is one."""
        for option in range(len(self.problem.options)):
            for graph in self.graphs(option):
                cuts = self.cuts(option, graph, COARSE)
                if found := self._over(option, graph, cuts, COARSE, math.inf, any_plan=True):
                    return found
        return None

    def graphs(self, option: int) -> list[StateGraph]:
        """Every downset where they are few, else several linear orders."""
        key = tuple(k.nodes for k in self.problem.options[option].forward.kernels)
        if key not in self._graphs:
            self._graphs[key] = state_graphs(self.problem, option)
        return self._graphs[key]

    def judge(
        self, option: int, placings: tuple[StagePlacing, ...], schedule: Schedule, solver: str
    ) -> Candidate | None:
        """Return the plan with its closed form, or None if it does not fit."""
        return judge(self.problem, option, placings, schedule, solver, self._needs[option])

    def spent(self) -> bool:
        """Has the search taken its steps or its time?"""
        return self.steps >= self.max_steps or self.late()

    def late(self) -> bool:
        """Has the search taken its time?"""
        return time.monotonic() > self.until

    def cuts(self, option: int, graph: StateGraph, effort: Effort) -> NDArray[np.int32]:
        """Return the states of `graph` between which stages are looked for."""
        known = self._of(option, graph)
        return pick_cuts(known.crossing, known.progress, effort.cuts)

    def tables(self, option: int, graph: StateGraph, effort: Effort) -> IterationTables:
        """Return all stages between the cuts of an effort."""
        return IterationTables(
            self.problem, option, graph, self.cuts(option, graph, effort), self._of(option, graph).segments
        )

    def whole(self, option: int, graph: StateGraph) -> IterationTables:
        """Return the stage that is the whole model."""
        ends = np.array([0, graph.num_states - 1], np.int32)
        return IterationTables(self.problem, option, graph, ends, self._of(option, graph).segments)

    def _of(self, option: int, graph: StateGraph) -> _GraphFacts:
        key = option, id(graph)  # `graphs` keeps them alive
        if key not in self._facts:
            segments = Segments(self.problem, option, graph)
            crossing = crossing_bytes(self.problem.options[option].forward, graph)
            self._facts[key] = _GraphFacts(segments, crossing, progress_s(graph, segments.both.min(axis=1)))
        return self._facts[key]

    def coarse(self, option: int, graph: StateGraph, upper_s: float) -> Candidate | None:
        """Return the best plan over few cuts, or None if none has a closed form below about `upper_s`."""
        return self._over(option, graph, self.cuts(option, graph, COARSE), COARSE, upper_s)

    def fine(self, option: int, upper_s: float, mix: bool) -> Iterator[Candidate]:
        """Plans found between more cuts, then between cuts near those of each best plan.

        Without `mix` no stage has unlike replicas: the search takes their shares to be any numbers, and may so prefer a
        plan that whole micro-batches make slower.
        """
        forward = self.problem.options[option].forward
        for graph in self.graphs(option):
            if self.spent():
                return
            cuts = self.cuts(option, graph, FINE)
            found = self._over(option, graph, cuts, FINE, upper_s * 1.02, mix=mix)
            if found is None:
                continue
            yield found
            upper_s = min(upper_s, found.value.iteration_s)
            if len(cuts) == graph.num_states:
                continue
            known = self._of(option, graph)
            for _ in range(_REFINEMENTS):
                if self.spent() or len(found.placings) == 1:
                    break
                states = _states_of(forward, graph, found.placings) or []
                near = near_cuts(states, known.crossing, known.progress, FINE.cuts // 2)
                finer = self._over(option, graph, near, FINE, found.value.iteration_s * (1 - 1e-9), mix=mix)
                if finer is None or finer.value.iteration_s >= found.value.iteration_s * (1 - 1e-6):
                    break
                yield finer
                found = finer

    def shifted(self, starts: int) -> Iterator[Candidate]:
        """Plans found by moving single cuts of the best plans, of unlike devices each, while that makes them faster."""
        kinds: dict[tuple[object, ...], Candidate] = {}
        for c in sorted(self.found, key=lambda c: c.key):
            kinds.setdefault((c.option, *((p.group, p.degree, p.num_replicas) for p in c.placings)), c)
        several = [c for c in kinds.values() if len(c.placings) > 1 and not any(p.share for p in c.placings)]
        for start in several[:starts]:
            for graph in self.graphs(start.option):
                best: Candidate | None = start
                states = None if graph.full else _states_of(self._forward(start), graph, start.placings)
                while best is not None and states is not None and not self.spent():
                    start = best
                    best = min(self._moved(start, graph, states), key=lambda c: c.key, default=None)
                    if best is None or best.key >= start.key:
                        break
                    yield best
                    states = _states_of(self._forward(best), graph, best.placings)

    def _forward(self, plan: Candidate) -> Problem:
        return self.problem.options[plan.option].forward

    def _moved(self, plan: Candidate, graph: StateGraph, states: list[int]) -> list[Candidate]:
        """The plan with one of its cuts elsewhere, near ones and far ones; judged with every linear schedule."""
        segments = self._of(plan.option, graph).segments
        modes = [segments.modes.index(Mode(p.group, p.degree, p.recompute)) for p in plan.placings]
        ends = [0, *states, graph.num_states - 1]
        rows = []
        for i in range(1, len(ends) - 1):
            for step in (sign * 2**e for e in range(_SHIFTS) for sign in (-1, 1)):
                if ends[i - 1] < ends[i] + step < ends[i + 1]:
                    moved = [*ends[:i], ends[i] + step, *ends[i + 1 :]]
                    rows.append([(b, c, m) for (b, c), m in zip(pairwise(moved), modes, strict=True)])
        segments.learn(stage for row in rows for stage in row)
        self.steps += len(rows) * _SHIFT_STEPS
        found = []
        for row in rows:
            kernels = [segments.kernels(stage) for stage in row]
            if all(kernels):
                placings = tuple(replace(p, kernels=k) for p, k in zip(plan.placings, kernels, strict=True))
                for schedule in linear_schedules(self.problem):
                    if c := self.judge(plan.option, placings, schedule, plan.solver):
                        found.append(c)
        self.found += found
        return found

    def _over(
        self,
        option: int,
        graph: StateGraph,
        cuts: NDArray[np.int32],
        effort: Effort,
        upper_s: float,
        any_plan: bool = False,
        mix: bool = True,
    ) -> Candidate | None:
        """Return the best plan over these cuts, or None if none has a closed form below about `upper_s`."""
        every = mix or not self.problem.may_mix
        problem = self.problem if every else replace(self.problem, may_mix=False)
        tables = IterationTables(problem, option, graph, cuts, self._of(option, graph).segments)
        whole = len(cuts) == graph.num_states and graph.full
        lists, _, proved, truncated, steps = passes_func("tvmhet.IterationSearch")(
            tables.arrays(),
            tables.scalars(),
            tables.micro.forward.overlap_transfers,
            self._gpipe_only,
            upper_s,
            0.9 if any_plan else 1e-7 if whole and len(cuts) <= COARSE.cuts else effort.step,
            0.0,
            effort.labels if not whole else 4 * effort.labels,
            max(100_000, (self.max_steps - self.steps) // 4),
        )
        self.steps += int(steps)
        if whole and not truncated and every and search_is_exact(problem, option):
            self.exact[option] = max(self.exact.get(option, 0.0), float(proved))
        name = "stages over all downsets" if graph.full else "stages over linear orders"
        answers = [[int(x) for x in flat] for flat in lists]
        tables.learn(answers)
        found = [
            c
            for flat in answers
            for schedule in linear_schedules(problem)
            if (c := self.judge(option, tables.placings(flat), schedule, name))
        ]
        self.found += found
        return min(found, key=lambda c: c.key, default=None)


def _states_of(forward: Problem, graph: StateGraph, placings: tuple[StagePlacing, ...]) -> list[int] | None:
    """Return the states between consecutive stages; None where the graph does not have them."""
    rank = {v: i for i, v in enumerate(graph.order)}
    index = {graph.words[s].tobytes(): int(s) for s in range(graph.num_states)}
    state = np.zeros_like(graph.words[0])
    out: list[int] = []
    for p in placings[:-1]:
        for k in p.kernels:
            for v in forward.kernels[k].nodes:
                state[rank[v] // 64] |= np.uint64(1 << (rank[v] % 64))
        if state.tobytes() not in index:
            return None
        out.append(index[state.tobytes()])
    return out
