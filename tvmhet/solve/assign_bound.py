"""A lower bound on the largest load: which group runs each node, and what must then pass between groups.

Relaxed: the order of stages, whole devices, more than one stage on a group. Kept: every node on one group; a tensor
that is made on one group and read on another is sent once and received once, at the best link that each has; model
inputs and outputs; wires; weights fit all devices of their group together. So it holds for shared devices too.

As a linear program alone this spreads every node over all groups in the same proportions, and nothing passes. So it
branches: the node with most transfers is on group 0, or 1, or 2, ... What the other groups do must then come from and
go to them. Wide models need few branches, for all their branches meet in one node:

    embeddings ─┐            concat on t4: bound 80.8 us
    embeddings ─┼─ concat ─  concat on l4: bound 126 us      ──► 80.8 us, the load of a known plan
    embeddings ─┘            concat on p4: bound 190 us

A node that takes no time and only hands on a tensor goes with its neighbour: moving it never adds to what passes. Each
program's bound is computed from its dual values, so it holds however exact the solver was.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from tvmhet.solve.problem import Problem, Wire

_MOST_VARIABLES = 25_000  # of one program: larger ones are not tried
_MOST_PROGRAMS = 64  # solved for one bound
_MOST_WORK = 30_000_000  # simplex steps times rows, of all programs
_TINY = 1e-9  # seconds of a term, as a share of the upper bound, that are left out
_NEAR = 2e-3  # a bound this near to the known plan is good enough

_GLOP = "use_dual_simplex: true use_preprocessing: false"  # so that a branch starts from the last one's basis

Terms = list[tuple[int, float]]  # (variable, factor)


def assign_bound_s(problem: Problem, floor_s: NDArray[np.float64], lower_s: float, upper_s: float) -> float:
    """Return a lower bound in seconds, no less than `lower_s`, a bound already known.

    `floor_s` (nodes, groups): no kernel takes less than its nodes together. `upper_s`: the load of a known plan.
    """
    pairs = int(np.isfinite(floor_s).sum())
    if not 0 < upper_s < math.inf or 3 * pairs > _MOST_VARIABLES or np.isinf(floor_s).all(axis=1).any():
        return lower_s
    bound = branched(AssignProgram(problem, floor_s, upper_s), problem, _MOST_WORK)
    return max(lower_s, min(1.0, bound) * upper_s * (1 - 1e-9))


def branched(program: AssignProgram, problem: Problem, most_work: int) -> float:
    """Return the least bound over the branches of a program, as a share of the known plan's value."""
    weight = _transfers_s(problem)
    bound, parts = program.solve({})
    open_: list[tuple[float, int, dict[int, int], NDArray[np.float64]]] = [(bound, 0, {}, parts)]
    count = 1
    while count < _MOST_PROGRAMS and program.work < most_work and open_[0][0] < 1 - _NEAR:
        bound, _, fixed, parts = open_[0]
        v = _branching(weight, parts, fixed)
        if v < 0:
            break
        heapq.heappop(open_)
        for g in program.groups_of(v):
            below, parts = program.solve({**fixed, v: g})
            heapq.heappush(open_, (max(bound, below), count, {**fixed, v: g}, parts))
            count += 1
    return open_[0][0]


def _transfers_s(problem: Problem) -> NDArray[np.float64]:
    """Seconds of the tensors that each node makes and reads, over the best link there is."""
    out = np.zeros(problem.num_nodes)
    for e in problem.edges:
        if e.src >= 0 and e.dsts:
            seconds = min(x.transfer_s(e.size_bytes) for row in problem.links for x in row)
            readers = list(dict.fromkeys(e.dsts))
            out[readers] += seconds
            out[e.src] += seconds * len(readers)
    return np.where(np.isfinite(out), out, 1.0)


def _with_neighbours(problem: Problem, floor_s: NDArray[np.float64], tiny_s: float) -> list[int]:
    """Return, for each node, that which it goes with: its own number, or a neighbour's where it takes no time.

    Either its maker has no other reader and its result is no larger than what it reads, or it has one reader and what
    it reads is no larger than its result. Over wires the way matters: there each node is on its own.
    """
    out = list(range(problem.num_nodes))
    read: list[list[int]] = [[] for _ in out]
    made: list[list[int]] = [[] for _ in out]
    for i, e in enumerate(problem.edges):
        for d in set(e.dsts):
            read[d].append(i)
        if e.src >= 0:
            made[e.src].append(i)
    free = np.where(np.isfinite(floor_s), floor_s, 0.0).max(axis=1, initial=0.0) <= tiny_s

    def hands_on(v: int) -> bool:
        if problem.wires or not free[v] or [len(read[v]), len(made[v])] != [1, 1]:
            return False
        before, after = problem.edges[read[v][0]], problem.edges[made[v][0]]
        return before.src >= 0 and len(made[before.src]) == 1 and not after.is_output and bool(after.dsts)

    for v in filter(hands_on, range(problem.num_nodes)):
        before, after = problem.edges[read[v][0]], problem.edges[made[v][0]]
        if set(before.dsts) == {v} and not before.is_output and after.size_bytes <= before.size_bytes:
            out[v] = out[before.src]
    followed = {u for v, u in enumerate(out) if u != v}
    for v in filter(hands_on, reversed(range(problem.num_nodes))):
        before, after = problem.edges[read[v][0]], problem.edges[made[v][0]]
        if out[v] == v and v not in followed and len(set(after.dsts)) == 1 and before.size_bytes <= after.size_bytes:
            out[v] = out[after.dsts[0]]
            followed.add(out[v])
    return out


def _branching(weight: NDArray[np.float64], parts: NDArray[np.float64], fixed: dict[int, int]) -> int:
    """The node that is spread most over the groups, by its transfers; the first time that with most transfers."""
    if not parts.size:
        return -1
    score = weight * (1 - parts.max(axis=1)) if fixed else weight
    score[list(fixed)] = -1.0
    v = int(score.argmax())
    return v if score[v] > 1e-9 * weight.max() else -1


class AssignProgram:
    """Minimise T; all seconds are shares of a known plan's load, so no better plan has T above 1."""

    def __init__(self, problem: Problem, floor_s: NDArray[np.float64], upper_s: float) -> None:
        self.problem = problem
        self.usable = np.array([g.num_devices > 0 for g in problem.groups])
        self.work = 0
        self._unit = upper_s
        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        self._solver.SetSolverSpecificParametersAsString(_GLOP)
        self._inf = self._solver.infinity()
        self._variables: list[pywraplp.Variable] = []
        self._most: list[float] = []
        self._rows: list[pywraplp.Constraint] = []
        self._low: list[float] = []
        self._high: list[float] = []
        self._terms: list[tuple[int, int, float]] = []
        self._t = self._variable()
        self._variables[self._t].SetUb(self._inf)  # a program always has an answer
        self._of = _with_neighbours(problem, floor_s, _TINY * upper_s)
        places = np.isfinite(floor_s) & self.usable
        at = {v: {int(g): self._variable() for g in np.flatnonzero(places[v])} for v in sorted(set(self._of))}
        for mine in at.values():
            self._row(1.0, 1.0, [(x, 1.0) for x in mine.values()])
        self._at = [at[v] for v in self._of]
        self._limits(floor_s)
        self._solver.Minimize(self._variables[self._t])
        rows, columns, factors = zip(*self._terms, strict=True)
        self._matrix = np.array(rows), np.array(columns), np.array(factors)

    def groups_of(self, v: int) -> list[int]:
        """Groups that may run a node."""
        return sorted(self._at[v])

    def solve(self, fixed: dict[int, int]) -> tuple[float, NDArray[np.float64]]:
        """Return (a lower bound on T, share of each node on each group) with some nodes fixed; no shares if it failed.

        Any dual values give a bound, by the reduced costs of the bounded variables.
        """
        upper = np.array(self._most)
        lower = np.zeros(len(self._variables))
        for v, g in fixed.items():
            for h, x in self._at[v].items():
                lower[x] = upper[x] = float(h == g)
                self._variables[x].SetBounds(lower[x], upper[x])
        status = self._solver.Solve()
        self.work += (1 + self._solver.iterations()) * len(self._rows)
        parts = np.zeros((self.problem.num_nodes if status == self._solver.OPTIMAL else 0, len(self.usable)))
        bound = 0.0
        if status == self._solver.OPTIMAL:
            for v, at in enumerate(self._at):
                for g, x in at.items():
                    parts[v, g] = self._variables[x].solution_value()
            bound = self._certain(np.array([r.dual_value() for r in self._rows]), lower, upper)
        for v in fixed:
            for x in self._at[v].values():
                self._variables[x].SetBounds(0.0, 1.0)
        return bound, parts

    def _certain(self, dual: NDArray[np.float64], lower: NDArray[np.float64], upper: NDArray[np.float64]) -> float:
        low, high = np.array(self._low), np.array(self._high)
        dual = np.where(np.isinf(low), np.minimum(dual, 0.0), dual)
        dual = np.where(np.isinf(high), np.maximum(dual, 0.0), dual)
        side = np.where(dual > 0, low, high)
        rows, columns, factors = self._matrix
        reduced = -np.bincount(columns, factors * dual[rows], len(lower))
        reduced[self._t] += 1.0
        fixed = float(np.where(dual != 0, dual * np.where(dual != 0, side, 0.0), 0.0).sum())
        return fixed + float(np.where(reduced > 0, reduced * lower, reduced * upper).sum())

    def _limits(self, floor_s: NDArray[np.float64]) -> None:
        """What each group computes, receives and sends takes its devices no more than T each; a team's are counted."""
        for members in self._pools():
            busy: Terms = []
            receive: Terms = []
            send: Terms = []
            for g in members:
                degree = self.problem.groups[g].degree
                for side, mine in zip((busy, receive, send), self._loads(floor_s, g), strict=True):
                    side += [(x, seconds * degree) for x, seconds in mine]
            sides = [busy, receive, send] if self.problem.overlap_transfers else [busy + receive + send]
            for side in sides:
                self._within(side, self.problem.groups[members[0]].num_devices)
        for wire in self.problem.wires:
            self._wire(wire)
        self._memory()

    def _loads(self, floor_s: NDArray[np.float64], g: int) -> tuple[Terms, Terms, Terms]:
        """Seconds in which a group computes, receives and sends; what cannot be (inf) is left to other rows."""
        problem = self.problem
        busy = [(at[g], float(floor_s[v, g])) for v, at in enumerate(self._at) if g in at]
        busy = [(x, seconds) for x, seconds in busy if math.isfinite(seconds)]
        if busy:
            used = self._any(sorted({x for x, _ in busy}))
            busy.append((used, problem.groups[g].stage_overhead_s))
        receive: Terms = []
        send: Terms = []
        others = [h for h in np.flatnonzero(self.usable).tolist() if h != g]
        for e in problem.edges:
            readers = sorted({self._of[d] for d in e.dsts})
            if e.src >= 0 and not e.is_output and readers == [self._of[e.src]]:
                continue
            here = [self._at[d][g] for d in readers if g in self._at[d]]
            home = problem.host_links[g].transfer_s(e.size_bytes)
            if e.src < 0:
                if here:
                    receive.append((self._any(here), home))
                continue
            made = self._at[e.src].get(g, -1)
            if e.is_output and made >= 0:
                send.append((made, home))
            into = min((problem.links[h][g].transfer_s(e.size_bytes) for h in others), default=0.0)
            if here and into > 0:
                receive.append((self._above([[(x, 1.0), *self._minus(made)] for x in here]), into))
            out = min((problem.links[g][h].transfer_s(e.size_bytes) for h in others), default=0.0)
            if made >= 0 and readers and out > 0:
                kept = [self._minus(self._at[d].get(g, -1)) for d in readers]
                send.append((self._above([[(made, 1.0), *k] for k in kept]), out))
        return busy, receive, send

    def _wire(self, wire: Wire) -> None:
        """What surely crosses: from any of the senders to a group that all of them reach over it only."""
        places = [-1, *np.flatnonzero(self.usable).tolist()]
        senders = {a for a, _ in wire.ways} & set(places)
        reached = {b for b in places if b not in senders and all((a, b) in wire.ways for a in senders)}
        moved: Terms = []
        for e in self.problem.edges if senders and reached else ():
            made = [(x, 1.0) for g, x in self._at[e.src].items() if g in senders] if e.src >= 0 else []
            if not made and not (e.src < 0 and -1 in senders):
                continue
            sure = 0.0 if e.src >= 0 else 1.0
            read = [
                [*made, *((x, -1.0) for g, x in self._at[d].items() if g not in reached)] for d in sorted(set(e.dsts))
            ]
            read += [made] if e.is_output and -1 in reached else []
            if read:
                moved.append((self._above(read, sure), e.size_bytes / wire.byte_per_s))
        if moved:
            self._within(moved, 1)

    def _pools(self) -> list[list[int]]:
        """The groups that share devices: each with those of its teams that can be."""
        usable = np.flatnonzero(self.usable).tolist()
        pools: dict[int, list[int]] = {}
        for g in usable:
            pools.setdefault(self.problem.pool(g), []).append(g)
        return list(pools.values())

    def _memory(self) -> None:
        """Weights of all nodes of a group fit its devices together; only where they might not."""
        problem = self.problem
        total = sum(w.size_bytes for w in problem.weights if w.nodes)
        for members in self._pools():
            room = problem.groups[members[0]].num_devices * problem.groups[members[0]].memory_bytes
            if total <= room:
                continue
            held: Terms = []
            for w in problem.weights:
                here = [self._at[v][g] for v in sorted(set(w.nodes)) for g in members if g in self._at[v]]
                if here:
                    held.append((self._any(here), w.size_bytes / total))
            self._row(-self._inf, room / total, held)

    def _variable(self, most: float = 1.0) -> int:
        self._most.append(most)
        self._variables.append(self._solver.NumVar(0.0, most, ""))
        return len(self._variables) - 1

    def _row(self, low: float, high: float, terms: Iterable[tuple[int, float]]) -> None:
        row = self._solver.RowConstraint(low, high, "")
        merged: dict[int, float] = {}
        for x, factor in terms:
            merged[x] = merged.get(x, 0.0) + factor
        for x, factor in merged.items():
            row.SetCoefficient(self._variables[x], factor)
            self._terms.append((len(self._rows), x, factor))
        self._rows.append(row)
        self._low.append(low)
        self._high.append(high)

    def _above(self, cases: list[Terms], least: float = 0.0) -> int:
        """A variable that is no less than the sum of any of `cases` plus `least`."""
        x = self._variable()
        for terms in cases:
            self._row(least, self._inf, [(x, 1.0), *((y, -factor) for y, factor in terms)])
        return x

    def _any(self, variables: list[int]) -> int:
        return variables[0] if len(variables) == 1 else self._above([[(x, 1.0)] for x in variables])

    @staticmethod
    def _minus(variable: int) -> Terms:
        return [(variable, -1.0)] if variable >= 0 else []

    def _within(self, seconds: Terms, devices: int) -> None:
        """These terms, in seconds, are no more than T on each of `devices`."""
        self._row(-self._inf, 0.0, [(self._t, -float(devices)), *self._shares(seconds)])

    def _shares(self, seconds: Terms) -> Terms:
        """Terms as shares of the known plan's value, without those that are nothing or cannot be (inf)."""
        return [(x, s / self._unit) for x, s in seconds if math.isfinite(s) and abs(s) > _TINY * self._unit]
