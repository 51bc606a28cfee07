"""A lower bound on a training iteration, by which group runs each node, and by stages of how many replicas.

With X the seconds of one micro-batch over all stages, D the rest of the pipeline and M micro-batches, a stage of w
seconds on r replicas has X + (M / r - 1) w <= X + D: its r devices run no more than r / (M - r) D. After the passes
its gradients are exchanged, which takes a ring of r the more time the larger r is, and its weights are updated, both
within E: `iteration >= X + D + E`. Few replicas fill slowly, many exchange much.

So every group's work is dealt to stages of 1, 2-3, 4-7, ... replicas, which share its devices:

    node -> v100 -> stages of 1 replica | 2-3 | 4-7 | 8        a100 -> ...

The program of assign_bound.py, with these limits, branches on the nodes with most transfers. Activations and their
gradients cross between groups at the better direction's link. With v chunks a device, X / v and r / (M - r / v). It
holds for replicas of a stage on one group, without splits.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tvmhet.solve.assign_bound import AssignProgram, Terms, branched
from tvmhet.solve.floor import node_floors
from tvmhet.solve.iteration import IterationProblem
from tvmhet.solve.problem import Link, Problem
from tvmhet.solve.schedules import Schedule

_MOST_PAIRS = 8000  # nodes times sizes of stages of a program
_MOST_WORK = 20_000_000  # simplex steps times rows, of all programs


def iteration_bound_s(problem: IterationProblem, option: int, work_s: NDArray[np.float64], upper_s: float) -> float:
    """Return a lower bound in seconds on every iteration below `upper_s`, that of a known plan; 0 if it knows none.

    `work_s` (kernels, groups): device seconds of both passes of one micro-batch.
    """
    if problem.may_mix or problem.options[option].splits or not 0 < upper_s < math.inf:
        return 0.0
    floor_s = node_floors(problem.options[option].forward, work_s, alike=True)
    chunks = {problem.most_chunks if s is Schedule.INTERLEAVED else 1 for s in problem.schedules}
    return min(_bound_s(problem, option, floor_s, v, upper_s) for v in sorted(chunks))


def _bound_s(
    problem: IterationProblem, option: int, floor_s: NDArray[np.float64], chunks: int, upper_s: float
) -> float:
    """`chunks`: the most stages of a device; several are on one replica each where rings are not replicated."""
    single = chunks > 1 and not problem.replicate_interleaved
    most = [1 if single else min(max(0, g.num_devices), problem.num_microbatches(option)) for g in problem.groups]
    sizes = [_sizes(min(m, max(0, g.num_devices))) for m, g in zip(most, problem.groups, strict=True)]
    if sum(map(len, sizes)) * len(floor_s) > _MOST_PAIRS or np.isinf(floor_s).all(axis=1).any():
        return 0.0
    both = _both_passes(problem, option)
    program = _Program(problem, option, both, floor_s, sizes, chunks, upper_s)
    return min(1.0, branched(program, both, _MOST_WORK)) * upper_s * (1 - 1e-9)


def _sizes(most: int) -> list[tuple[int, int]]:
    """The fewest and most replicas of each size of stages: 1, 2-3, 4-7, ..."""
    return [(2**i, min(2 ** (i + 1) - 1, most)) for i in range(most.bit_length())]


def _both_passes(problem: IterationProblem, option: int) -> Problem:
    """Both passes of one micro-batch as one: gradients cross as activations do."""
    micro = problem.options[option]
    forward = micro.forward

    def link(a: int, b: int) -> Link:
        there, back = forward.links[a][b], forward.links[b][a]
        return Link(min(there.latency_s, back.latency_s), max(there.byte_per_s, back.byte_per_s))

    back = [
        replace(e, is_output=False)
        for i, e in enumerate(forward.edges)
        if e.src >= 0 and e.dsts and i not in micro.no_gradient
    ]
    groups = range(len(forward.groups))
    return replace(
        forward,
        edges=(*forward.edges, *back),
        groups=tuple(replace(g, stage_overhead_s=2 * g.stage_overhead_s) for g in forward.groups),
        links=tuple(tuple(link(a, b) for b in groups) for a in groups),
        wires=(),
    )


class _Program(AssignProgram):
    """T = X / chunks + D + E, each a share of the known plan's iteration."""

    def __init__(
        self,
        training: IterationProblem,
        option: int,
        both: Problem,
        floor_s: NDArray[np.float64],
        sizes: list[list[tuple[int, int]]],
        chunks: int,
        upper_s: float,
    ) -> None:
        self._training, self._count = training, training.num_microbatches(option)
        self._sizes, self._chunks = sizes, chunks
        super().__init__(both, floor_s, upper_s)

    def _limits(self, floor_s: NDArray[np.float64]) -> None:
        way: Terms = []
        rest, after = self._variable(), self._variable()
        for g in np.flatnonzero(self.usable).tolist():
            busy, receive, send = self._loads(floor_s, g)
            way += busy + receive
            dealt = self._dealt(g)
            work: Terms = []
            kept: Terms = []
            least = max(0.0, self._count - self._sizes[g][-1][1] / self._chunks)
            for (fewest, most), at in zip(self._sizes[g], dealt, strict=True):
                left = max(0.0, self._count - most / self._chunks)
                mine = [(x, float(floor_s[v, g])) for v, x in at.items() if math.isfinite(floor_s[v, g])]
                mine += [(at[self._of[v]], float(floor_s[v, g])) for v in self._followers if self._of[v] in at]
                work += [(x, s * left) for x, s in mine]
                kept += [(x, s * fewest) for x, s in self._after(g, fewest, at, mine)]
            moved = [[(x, s * least) for x, s in side] for side in (receive, send)]
            sides = [work, *moved] if self.problem.overlap_transfers else [work + moved[0] + moved[1]]
            devices = float(self.problem.groups[g].num_devices)
            for side in sides:
                self._row(-self._inf, 0.0, [(rest, -devices), *self._shares(side)])
            self._row(-self._inf, 0.0, [(after, -devices), *self._shares(kept)])
        total = [(x, s / self._chunks) for x, s in way]
        self._row(-self._inf, 0.0, [(self._t, -1.0), (rest, 1.0), (after, 1.0), *self._shares(total)])

    @property
    def _followers(self) -> list[int]:
        return [v for v, u in enumerate(self._of) if u != v]

    def _dealt(self, g: int) -> list[dict[int, int]]:
        """Per size of stages: the share of each node on group g that they run."""
        nodes = [v for v, u in enumerate(self._of) if u == v and g in self._at[v]]
        if len(self._sizes[g]) == 1:
            return [{v: self._at[v][g] for v in nodes}]
        dealt = [{v: self._variable() for v in nodes} for _ in self._sizes[g]]
        for v in nodes:
            self._row(0.0, 0.0, [(self._at[v][g], -1.0), *((at[v], 1.0) for at in dealt)])
        return dealt

    def _after(self, g: int, replicas: int, at: dict[int, int], work: Terms) -> Terms:
        """Seconds after the passes of stages of so many replicas: exchange beyond what hides, and update.

        Weights that several nodes read are left out.
        """
        training = self._training
        network = training.all_reduce[g]
        per_byte = (network.seconds(1e9, replicas) - network.seconds(0.0, replicas)) / 1e9 * training.gradient_ratio
        held = [
            (at[self._of[w.nodes[0]]], float(w.size_bytes))
            for w in self.problem.weights
            if len(set(w.nodes)) == 1 and self._of[w.nodes[0]] in at
        ]
        updated = [(x, size * training.update_s_per_byte[g]) for x, size in held]
        exchanged = [(x, size * per_byte) for x, size in held if math.isfinite(per_byte) and per_byte > 0]
        if not exchanged or not training.reduce_overlap:
            return updated + exchanged
        over = self._variable(float(self.problem.groups[g].num_devices))  # no less than what does not hide, nor than 0
        hidden = [(x, -s * training.reduce_overlap) for x, s in work]
        self._row(0.0, self._inf, [(over, 1.0), *((x, -s) for x, s in self._shares(exchanged + hidden))])
        return [*updated, (over, self._unit)]
