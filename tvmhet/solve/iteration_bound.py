"""A lower bound on a training iteration, by which group runs each node, and by stages of how many replicas.

With X the seconds of one micro-batch over all stages, D the rest of the pipeline and M micro-batches, a stage of w
seconds on r replicas has X + (M / r - 1) w <= X + D: its r devices run no more than r / (M - r) D. After the passes
its gradients are exchanged, which takes a ring of r the more time the larger r is, and its weights are updated, both
within E: `iteration >= X + D + E`. Few replicas fill slowly, many exchange much.

So every group's work is dealt to stages of 1, 2-3, 4-7, ... replicas, which share its devices:

    node -> v100 -> stages of 1 replica | 2-3 | 4-7 | 8        a100 -> ...

The program of assign_bound.py, with these limits, branches on the nodes with most transfers. Activations and their
gradients cross between groups at the better direction's link. With v chunks a device, X / v and r / (M - r / v).
Large programs take seconds. A quick one comes first, in which nodes that take and hold the same are one, nothing
passes, and sizes are 1, 2, 3, ...; for interleaved plans it is the bound of iteration_ring_bound.py.

It holds for replicas of a stage on one group, without splits.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tvmhet.solve.assign_bound import AssignProgram, Terms, branched
from tvmhet.solve.floor import node_floors
from tvmhet.solve.iteration import IterationProblem
from tvmhet.solve.iteration_ring_bound import ring_bound_s
from tvmhet.solve.problem import Link, Problem, Weight
from tvmhet.solve.schedules import Schedule, passes_of_replica

_MOST_PAIRS = 16_000  # nodes times sizes of stages of a program
_MOST_INTERLEAVED = 8000  # of interleaved plans, of which the bound of rings mostly says more
_MOST_WORK = 20_000_000  # simplex steps times rows, of all programs
_DIGITS = 9  # of nodes' seconds, as shares of the longest, that count nodes as alike

Floats = NDArray[np.float64]
_Sizes = list[list[tuple[int, int]]]  # per group: the fewest and most replicas of each size of stages


def iteration_bound_s(
    problem: IterationProblem, option: int, work_s: Floats, upper_s: float, quick: bool = False
) -> float:
    """Return a lower bound in seconds on every iteration below `upper_s`, that of a known plan; 0 if it knows none.

    `work_s` (kernels, groups): device seconds of both passes of one micro-batch. `quick`: without large programs.
    """
    if problem.may_mix or problem.options[option].splits or not 0 < upper_s < math.inf:
        return 0.0
    floor_s = node_floors(problem.options[option].forward, work_s, alike=True)
    if np.isinf(floor_s).all(axis=1).any():
        return 0.0
    bounds = []  # of linear and of interleaved plans, the quick ones first
    if set(problem.schedules) != {Schedule.INTERLEAVED}:
        bounds.append((_of_kinds_s(problem, option, floor_s, upper_s), 1))
    if Schedule.INTERLEAVED in problem.schedules and problem.most_chunks > 1:
        bounds.append((ring_bound_s(problem, option, floor_s, upper_s), problem.most_chunks))
    least_s = upper_s
    for bound_s, chunks in sorted(bounds):
        if bound_s < least_s:
            better_s = 0.0 if quick else _of_nodes_s(problem, option, floor_s, chunks, upper_s)
            least_s = min(least_s, max(bound_s, better_s))
    return least_s


def _of_nodes_s(problem: IterationProblem, option: int, floor_s: Floats, chunks: int, upper_s: float) -> float:
    """`chunks`: the most stages of a device; several are on one replica each where rings are not replicated."""
    single = chunks > 1 and not problem.replicate_interleaved
    sizes: _Sizes = [
        [(2**i, min(2 ** (i + 1) - 1, most)) for i in range(most.bit_length())] for most in _most(problem, option)
    ]
    if sum(map(len, sizes)) * len(floor_s) > (_MOST_PAIRS if chunks == 1 else _MOST_INTERLEAVED):
        return 0.0
    sizes = [of_group[:1] for of_group in sizes] if single else sizes
    both = _both_passes(problem, option)
    return _bound_s(_Program(problem, option, both, floor_s, sizes, chunks, upper_s), both, upper_s)


def _of_kinds_s(problem: IterationProblem, option: int, floor_s: Floats, upper_s: float) -> float:
    """The bound of linear plans where nodes that take and hold the same are one, and nothing passes."""
    both, floor_s = _of_alike_nodes(_both_passes(problem, option), floor_s)
    most = _most(problem, option)
    if sum(most) * len(floor_s) > _MOST_PAIRS:
        return 0.0
    sizes: _Sizes = [[(r, r) for r in range(1, m + 1)] for m in most]
    return _bound_s(_Program(problem, option, both, floor_s, sizes, 1, upper_s), both, upper_s)


def _most(problem: IterationProblem, option: int) -> list[int]:
    """The most replicas of a stage on each group."""
    return [min(max(0, g.num_devices), problem.num_microbatches(option)) for g in problem.groups]


def _bound_s(program: _Program, both: Problem, upper_s: float) -> float:
    return min(1.0, branched(program, both, _MOST_WORK)) * upper_s * (1 - 1e-9)


def _of_alike_nodes(problem: Problem, floor_s: Floats) -> tuple[Problem, Floats]:
    """Return the problem with one node for all that take and hold the same, without tensors, and its floors.

    The share of such a node on a group is the mean of its members'. Weights that several nodes read are left out.
    """
    unit = float(np.where(np.isfinite(floor_s), floor_s, 0.0).max(initial=0.0)) or 1.0
    lower = np.floor(floor_s / unit * 10**_DIGITS) / 10**_DIGITS * unit
    held: list[tuple[int, ...]] = [() for _ in range(problem.num_nodes)]
    for w in problem.weights:
        if len(set(w.nodes)) == 1:
            held[w.nodes[0]] += (w.size_bytes,)
    kinds: dict[tuple[object, ...], list[int]] = {}
    for v, row in enumerate(lower.tolist()):
        kinds.setdefault((tuple(row), tuple(sorted(held[v]))), []).append(v)
    alike = list(kinds.values())
    weights = [Weight((i,), sum(sum(held[v]) for v in mine)) for i, mine in enumerate(alike)]
    one = replace(problem, num_nodes=len(alike), kernels=(), edges=(), weights=tuple(weights), pins={})
    return one, np.array([lower[mine].sum(axis=0) for mine in alike])


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
        floor_s: Floats,
        sizes: _Sizes,
        chunks: int,
        upper_s: float,
    ) -> None:
        self._training, self._count = training, training.num_microbatches(option)
        self._sizes, self._chunks = sizes, chunks
        super().__init__(both, floor_s, upper_s)

    def _limits(self, floor_s: Floats) -> None:
        way: Terms = []
        rest, after = self._variable(), self._variable()
        for g in np.flatnonzero(self.usable).tolist():
            busy, receive, send = self._loads(floor_s, g)
            way += busy + receive
            dealt = self._dealt(g)
            work: Terms = []
            kept: Terms = []
            left_of = [self._left(fewest, most) for fewest, most in self._sizes[g]]
            for (fewest, _), left, at in zip(self._sizes[g], left_of, dealt, strict=True):
                mine = [(x, float(floor_s[v, g])) for v, x in at.items() if math.isfinite(floor_s[v, g])]
                mine += [(at[self._of[v]], float(floor_s[v, g])) for v in self._followers if self._of[v] in at]
                work += [(x, s * left) for x, s in mine]
                kept += [(x, s * fewest) for x, s in self._after(g, fewest, at, mine)]
            moved = [[(x, s * min(left_of)) for x, s in side] for side in (receive, send)]
            sides = [work, *moved] if self.problem.overlap_transfers else [work + moved[0] + moved[1]]
            devices = float(self.problem.groups[g].num_devices)
            for side in sides:
                self._row(-self._inf, 0.0, [(rest, -devices), *self._shares(side)])
            self._row(-self._inf, 0.0, [(after, -devices), *self._shares(kept)])
        total = [(x, s / self._chunks) for x, s in way]
        self._row(-self._inf, 0.0, [(self._t, -1.0), (rest, 1.0), (after, 1.0), *self._shares(total)])

    def _left(self, fewest: int, most: int) -> float:
        """Device seconds that a stage of a second takes beyond the first micro-batch, with so many replicas."""
        if self._chunks > 1:
            return max(0.0, self._count - most / self._chunks)
        return float(min(r * (passes_of_replica(self._count, r) - 1) for r in range(fewest, most + 1)))

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
