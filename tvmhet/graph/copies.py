"""The graph with copies of each cheap producer for its readers, so that a planner may compute it once or again.

        r ─┬─► a            r_a ─► a          kernel {r_a r_b}: r computed once, for the time of r alone
           └─► b     ==>    r_b ─► b          kernels {r_a a} and {r_b b}: computed again inside its readers' kernels

An exact cover of the copies by kernels is a choice between the two: the solver needs to know nothing of copies. What
is computed once counts as two tensors here if it leaves its stage, so plans are drawn up again after the choice, for
the operators that it leaves (`tvmhet.rewriting`).

Readers that could take the producer into their kernel have a copy each. The others share one, unless the producer
writes more than it reads: then computing it on both sides of a link moves less, and every reader has its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.opgraph import Operator, OpGraph, PatternKind, Tensor
from tvmhet.graph.rewrites import Recompute, unused

_MAX_READERS = 16  # of a producer that is computed again: there may be a copy for each
_MAX_COPIES = 256  # in all
_MAX_FLOP_PER_BYTE = 16.0  # of what it writes: beyond it, a producer is not cheap


@dataclass(frozen=True, slots=True)
class Copies:
    """`graph` has copies: `of[o]` are its operators that compute operator o of the first graph, ascending."""

    graph: OpGraph
    of: tuple[tuple[int, ...], ...]

    def all_of(self, ops: Sequence[int]) -> tuple[int, ...]:
        """Return the operators that compute `ops` of the first graph, with all copies, ascending."""
        return tuple(sorted(i for o in ops for i in self.of[o]))


def reader_groups(graph: OpGraph, op: int) -> tuple[tuple[int, ...], ...]:
    """Return the readers of an operator that would each share a copy of it, in the order of their first readers."""
    (made,) = graph.operators[op].outputs
    read_bytes = sum(graph.tensors[t].size_bytes for t in set(graph.operators[op].inputs))
    grows = read_bytes < graph.tensors[made].size_bytes
    groups: dict[int, list[int]] = {}
    for reader in graph.tensors[made].consumers:
        fuses = graph.operators[reader].pattern <= PatternKind.COMM_REDUCE
        groups.setdefault(reader if fuses or grows else -1, []).append(reader)
    return tuple(tuple(g) for g in groups.values())


def cheap_producers(graph: OpGraph, without: Collection[str] = ()) -> tuple[int, ...]:
    """Return the operators that may be computed again, ascending: elementwise, broadcast or injective, several readers.

    Operators named in `without`, results of the model, those with more than 16 readers, and those beyond 256 copies in
    all are left out.
    """
    found: list[int] = []
    copies = 0
    for i, op in enumerate(graph.operators):
        if op.pattern > PatternKind.INJECTIVE or len(op.outputs) != 1 or op.name in without:
            continue
        result = graph.tensors[op.outputs[0]]
        if result.is_output or len(result.consumers) > _MAX_READERS or op.flop > _MAX_FLOP_PER_BYTE * op.write_bytes:
            continue
        groups = len(reader_groups(graph, i))
        if groups > 1 and copies + groups <= _MAX_COPIES:
            found.append(i)
            copies += groups
    return tuple(found)


def with_copies(graph: OpGraph, producers: Collection[int]) -> Copies:
    """Return the graph with one copy of each producer per group of readers; the first keeps its name."""
    operators: list[Operator] = []
    original: list[int] = []
    tensors = list(graph.tensors)
    reads: dict[tuple[int, int], int] = {}  # (tensor, reader) -> the copy that the reader reads
    taken = {op.name for op in graph.operators} | {t.name for t in graph.tensors}
    for i, op in enumerate(graph.operators):
        if i not in producers:
            operators.append(op)
            original.append(i)
            continue
        (made,) = op.outputs
        for k, group in enumerate(reader_groups(graph, i)):
            t, name = made, op.name
            if k:
                t, name = len(tensors), unused(f"{op.name}_again", taken)
                tensors.append(replace(tensors[made], name=name))
            reads |= {(made, reader): t for reader in group}
            operators.append(replace(op, name=name, outputs=(t,)))
            original.append(i)
    operators = [
        replace(op, inputs=tuple(reads.get((t, o), t) for t in op.inputs))
        for op, o in zip(operators, original, strict=True)
    ]
    copied = OpGraph(
        tuple(operators),
        _wired(operators, tensors),
        graph.inputs,
        graph.outputs,
        graph.num_states,
        graph.num_sessions,
    )
    of = tuple(tuple(i for i, o in enumerate(original) if o == k) for k in range(len(graph.operators)))
    return Copies(copied, of)


def _wired(operators: Sequence[Operator], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors with the producers and readers that the operators name."""
    producer = {t: i for i, op in enumerate(operators) for t in op.outputs}
    consumers: dict[int, list[int]] = {}
    for i, op in enumerate(operators):
        for t in dict.fromkeys(op.inputs):
            consumers.setdefault(t, []).append(i)
    return tuple(
        replace(t, producer=producer.get(k, -1), consumers=tuple(consumers.get(k, ()))) for k, t in enumerate(tensors)
    )


def once(copies: Copies, kernels: Sequence[LegalKernel]) -> tuple[tuple[int, LegalKernel], ...]:
    """Return, for each kernel of the first graph that runs a copied producer, (its index, it with all the copies)."""
    return tuple(
        (k, LegalKernel(copies.all_of(kernel.ops), kernel.maker))
        for k, kernel in enumerate(kernels)
        if any(len(copies.of[o]) > 1 for o in kernel.ops)
    )


def chosen_copies(graph: OpGraph, copies: Copies, kernels: Sequence[Sequence[int]]) -> tuple[Recompute, ...]:
    """Return what a cover of the copies computes again: copies in one kernel are one, those apart are several."""
    place = {i: k for k, ops in enumerate(kernels) for i in ops}
    found = []
    for o, mine in enumerate(copies.of):
        if len(mine) < 2:
            continue
        apart: dict[int, list[int]] = {}
        for i, group in zip(mine, reader_groups(graph, o), strict=True):
            apart.setdefault(place[i], []).extend(group)
        if len(apart) > 1:
            groups = tuple(tuple(graph.operators[r].name for r in sorted(g)) for g in apart.values())
            found.append(Recompute(graph.operators[o].name, groups))
    return tuple(found)
