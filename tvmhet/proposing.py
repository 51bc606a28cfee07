"""Which rewrites would pay: one more planning problem, in which computing again and merging are kernels like others.

    nodes     the operators, cheap producers once per group of readers (`graph.copies`)
    kernels   all that cover nodes; what runs a producer once; a merged product over all its members' nodes

The cover that the solver picks names the rewrites. It is a proposal: what is computed once may count as two tensors
here, and slices of a merged product that join their readers' kernels as free, so the rewritten model is planned again
before anything is believed (`tvmhet.rewriting`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tvmhet.candidates import candidate_kernels
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.cost.table import TimeTable
from tvmhet.graph.concurrent import CONCURRENT
from tvmhet.graph.copies import Copies, cheap_producers, chosen_copies, once, with_copies
from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.merges import find_merges
from tvmhet.graph.opgraph import OpGraph
from tvmhet.graph.rewrites import Batch, Merge, merged_names
from tvmhet.ir.prepare import Prepared
from tvmhet.ir.rewritten import rewritten
from tvmhet.planning_problem import make_problem, pinned_operators, resolve_pins
from tvmhet.solve import Objective, Solution, Status, solve
from tvmhet.times import Candidates

#: Rewrites that may be proposed.
RECOMPUTE, MERGE = "recompute", "merge"
KINDS = frozenset({RECOMPUTE, MERGE})
#: That plans which ran are chosen by what they took (`tvmhet.raced`).
RACE = "race"
#: What plans may use beyond kernels of operators one after another: rewrites, branches at the same time, and races.
CHOICES = KINDS | {CONCURRENT, RACE}

Price = Callable[[Prepared, Candidates], TimeTable]
#: The graph with copies, kernels over it, and their seconds (kernels, groups).
Parts = tuple[Copies, Sequence[LegalKernel], NDArray[np.float64]]
#: A merge, the operators that its kernel replaces, and seconds (groups).
MergedKernel = tuple[Merge, tuple[int, ...], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Variant:
    """A model after some rewrites, its candidate kernels and their times."""

    prepared: Prepared
    candidates: Candidates
    table: TimeTable
    rewrites: tuple[Batch, ...] = ()

    @property
    def graph(self) -> OpGraph:
        """The operators after the rewrites."""
        return self.prepared.operator_graph


def variant_of(prepared: Prepared, makers: Sequence[str], price: Price, rewrites: Sequence[Batch] = ()) -> Variant:
    """Return the model after `rewrites`, with all candidate kernels priced."""
    after = rewritten(prepared, rewrites)
    candidates = Candidates.of(after.operator_graph, candidate_kernels(after.operator_graph, makers))
    return Variant(after, candidates, price(after, candidates), tuple(rewrites))


def offered(graph: OpGraph, pin: Mapping[str, str]) -> frozenset[str]:
    """Return the kinds of rewrites for which a graph has operators that `pin` leaves free."""
    pinned = pinned_operators(graph, pin)
    found = {RECOMPUTE: cheap_producers(graph, pinned), MERGE: find_merges(graph, pinned)}
    return frozenset(kind for kind, operators in found.items() if operators)


class Proposer:
    """The joint problem of one variant; what it is made of is drawn up once for all kinds of rewrites.

    Operators that `pin` names are left alone.
    """

    def __init__(
        self, variant: Variant, cluster: ClusterSpec, pin: Mapping[str, str], makers: Sequence[str], price: Price
    ) -> None:
        self._variant, self._cluster, self._groups = variant, cluster, cluster.groups()
        self._pin, self._makers, self._price = pin, makers, price
        self._columns = [variant.table.column(g.device.name) for g in self._groups]

    def propose(
        self, objective: Objective, kinds: frozenset[str] = KINDS, time_limit_s: float = 30.0
    ) -> tuple[Batch, ...]:
        """Return the rewrites of some kinds that the joint problem picks, in batches; none where none pays."""
        graph = self._variant.graph
        copies, kernels, seconds = self._over_copies if RECOMPUTE in kinds else self._as_they_are
        merged = self._merged if MERGE in kinds else []
        if not merged and len(copies.graph.operators) == len(graph.operators):
            return ()
        kernels = [*kernels, *(LegalKernel(copies.all_of(ops), "library") for _, ops, _ in merged)]
        seconds = np.vstack([seconds, *(row for _, _, row in merged)])
        pins = resolve_pins(graph, self._groups, self._pin)
        copied_pins = {i: allowed for o, allowed in pins.items() for i in copies.of[o]}
        problem = make_problem(copies.graph, kernels, seconds, self._cluster, self._groups, copied_pins)
        # what is quicker is cheaper
        goal = Objective.THROUGHPUT if objective is Objective.COST else objective
        found = solve(problem, goal, time_limit_s=time_limit_s, bounded=False)
        if found.status is Status.INFEASIBLE:
            return ()
        return _rewrites(graph, copies, kernels, found, [m for m, _, _ in merged])

    @property
    def _as_they_are(self) -> Parts:
        variant = self._variant
        return with_copies(variant.graph, ()), variant.candidates.kernels, variant.table.seconds[:, self._columns]

    @cached_property
    def _over_copies(self) -> Parts:
        variant = self._variant
        pinned = pinned_operators(variant.graph, self._pin)
        copies = with_copies(variant.graph, cheap_producers(variant.graph, pinned))
        if len(copies.graph.operators) == len(variant.graph.operators):
            return self._as_they_are
        found = Candidates.of(copies.graph, candidate_kernels(copies.graph, self._makers))
        table = self._price(variant.prepared, found)
        shared = once(copies, variant.candidates.kernels)
        seconds = [
            table.seconds[:, self._columns],
            variant.table.seconds[[k for k, _ in shared]][:, self._columns],
        ]
        return copies, [*found.kernels, *(kernel for _, kernel in shared)], np.vstack(seconds)

    @cached_property
    def _merged(self) -> list[MergedKernel]:
        variant = self._variant
        pinned = pinned_operators(variant.graph, self._pin)
        return [
            found
            for level in find_merges(variant.graph, pinned)
            for found in _merged_kernels(variant, level, self._makers, self._price, self._columns)
        ]


def _rewrites(
    graph: OpGraph, copies: Copies, kernels: Sequence[LegalKernel], found: Solution, merges: Sequence[Merge]
) -> tuple[Batch, ...]:
    """What the chosen kernels mean. A producer whose readers are merged across its copies is not computed again."""
    chosen = [k for s in found.stages for k in s.kernels]
    first_merged = len(kernels) - len(merges)
    picked = tuple(merges[k - first_merged] for k in sorted(chosen) if k >= first_merged)
    products = [{member[0] for member in m.members} for m in picked]
    again = tuple(
        r
        for r in chosen_copies(graph, copies, [kernels[k].ops for k in chosen])
        if not any(0 < len(p.intersection(group)) < len(p) for p in products for group in r.readers)
    )
    return tuple(batch for batch in (again, picked) if batch)


def _merged_kernels(
    variant: Variant, level: Sequence[Merge], makers: Sequence[str], price: Price, columns: Sequence[int]
) -> list[MergedKernel]:
    """Return a kernel for each merge and each part of its members that one kernel makes.

    The time is the merged kernel's and that of the slices which no reader's kernel takes in.
    """
    after = rewritten(variant.prepared, [tuple(level)])
    graph, merged = variant.graph, after.operator_graph
    index = merged.index
    taken = {op.name for op in graph.operators} | {t.name for t in graph.tensors}
    of: dict[int, tuple[Merge, int]] = {}  # merged operator -> its merge, its position in the members
    slices: dict[int, Merge] = {}
    for merge, names in zip(level, merged_names(level, taken), strict=True):
        of |= {index(name): (merge, step) for step, name in enumerate(names)}
        slices |= {index(member[-1]): merge for member in merge.members}
    every = candidate_kernels(merged, makers)
    joined = {i for k in every if len(k.ops) > 1 and not k.branches for i in k.ops if i in slices}
    wanted = [k for k in every if all(i in of for i in k.ops) or (len(k.ops) == 1 and k.sink in slices)]
    candidates = Candidates.of(merged, wanted)
    seconds = price(after, candidates).seconds[:, columns]
    apart: dict[Merge, NDArray[np.float64]] = {}
    best: dict[tuple[Merge, int], NDArray[np.float64]] = {}
    single: dict[int, NDArray[np.float64]] = {}
    for kernel, row in zip(wanted, seconds, strict=True):
        if kernel.sink in slices:
            single[kernel.sink] = np.minimum(single.get(kernel.sink, math.inf), row)
        elif of[kernel.ops[0]][1] == 0:  # from the product on
            merge, last = of[kernel.sink]
            best[merge, last] = np.minimum(best.get((merge, last), math.inf), row)
    for i, merge in slices.items():
        extra = single[i] if i not in joined else np.zeros(len(columns))
        apart[merge] = apart.get(merge, np.zeros(len(columns))) + extra
    return [
        (
            Merge(tuple(member[: last + 1] for member in merge.members)),
            tuple(sorted(graph.index(name) for member in merge.members for name in member[: last + 1])),
            row + apart[merge],
        )
        for (merge, last), row in best.items()
    ]
