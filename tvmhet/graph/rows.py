"""Normalisations, softmax and reductions over rows, in one kernel with the element-wise operators around them.

    x ─┬► power ─► mean ─► add ─► rsqrt ─► multiply ─► multiply     FuseOps: {power} {mean add rsqrt multiply multiply}
       └───────────────────────────────────────┘                    here:    all of them, and what follows any of them

TVM's fusion rules take no producers into a softmax, a normalisation or a mean, and nothing after a sum or a maximum
(`fusion.py`). Yet none of these operators looks beyond its own row, so a kernel may take one
row after another through all of them: the rule `rows` does on CPUs, dlight's `GeneralReduction` on GPUs.

A *row kernel* is a convex set of operators with one result that is read outside. At least one of them works along the
trailing axes of a tensor; the axes before these are the rows. All others are element-wise, and every tensor inside has
the rows as its leading axes. A permutation that only such an operator reads may be the first. As in FuseOps nothing is
computed twice.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.opgraph import Operator, OpGraph, PatternKind

_REDUCTIONS = frozenset({"mean", "sum", "max", "min"})
_ALONG_ROWS = frozenset({"nn.softmax", "nn.log_softmax", "nn.layer_norm", "nn.rms_norm"})
_ELEMENT_WISE = (PatternKind.ELEM_WISE, PatternKind.BROADCAST)
_MAX_OPS = 32  # in a kernel, as in those of `legal_kernels`
_MAX_ROW = 1 << 13  # elements; a GPU keeps rows in its shared memory

Shape = tuple[int, ...]


def row_kernels(graph: OpGraph, known: Sequence[LegalKernel]) -> tuple[LegalKernel, ...]:
    """Return the row kernels of two operators or more that are not among `known`, in lexicographic order.

    Of each result the largest row kernel, and what is left of it without its first operators, one by one; of more than
    32 operators the last 32. Deterministic.
    """
    rows_of = {i: rows for i, op in enumerate(graph.operators) if (rows := _rows_along(graph, op))}
    found: set[tuple[int, ...]] = set()
    for rows in sorted(set(rows_of.values())):
        anchors = frozenset(i for i, of in rows_of.items() if of == rows)
        by_rows = [_by_rows(graph, op, rows, anchors) for op in range(len(graph.operators))]
        for sink in range(min(anchors), len(graph.operators)):
            if by_rows[sink]:
                found.update(_ending_in(graph, sink, by_rows, anchors))
    made = {kernel.ops for kernel in known if kernel.maker == "tvm"}
    return tuple(LegalKernel(ops) for ops in sorted(found - made))


def _rows_along(graph: OpGraph, op: Operator) -> Shape:
    """The axes before those that `op` works along; () where it works along none, or along other than trailing axes."""
    if op.family not in _REDUCTIONS | _ALONG_ROWS or len(op.outputs) != 1:
        return ()
    shape = graph.tensors[op.inputs[0]].shape
    axes = op.attrs.get("axis", op.attrs.get("axes"))
    if axes is None:
        return ()
    along = sorted({int(a) % len(shape) for a in ([axes] if isinstance(axes, (int, float, str)) else axes)})
    first = len(shape) - len(along)
    if along != list(range(first, len(shape))) or math.prod(shape[first:]) > _MAX_ROW:
        return ()
    return shape[:first]


def _ending_in(
    graph: OpGraph, sink: int, by_rows: Sequence[bool], anchors: frozenset[int]
) -> Iterator[tuple[int, ...]]:
    """The row kernels over the rows of `anchors` whose result is that of `sink`."""
    members: set[int] = set()
    todo = [-sink]  # producers of members, the last in the graph's order first, so that their readers are decided
    while todo and len(members) < _MAX_OPS:
        op = -heapq.heappop(todo)
        if op in members or not (op == sink or (by_rows[op] and _stays_inside(graph, op, members, anchors))):
            continue
        members.add(op)
        for producer in graph.predecessors(op):
            heapq.heappush(todo, -producer)
    ops = tuple(sorted(members))
    for first in range(len(ops) - 1):
        rest = ops[first:]
        if anchors.intersection(rest) and _is_connected(graph, rest):
            yield rest


def _by_rows(graph: OpGraph, op: int, rows: Shape, anchors: frozenset[int]) -> bool:
    """Whether an operator works along `rows`, or keeps to the rows that its one result has as leading axes."""
    if op in anchors:
        return True
    operator = graph.operators[op]
    if len(operator.outputs) != 1 or graph.tensors[operator.outputs[0]].shape[: len(rows)] != rows:
        return False
    if operator.family == "permute_dims":
        return anchors.issuperset(graph.successors(op))
    return operator.pattern in _ELEMENT_WISE


def _stays_inside(graph: OpGraph, op: int, members: set[int], anchors: frozenset[int]) -> bool:
    """Whether `members` alone read the result of `op`, each of their rows the same row of it."""
    (t,) = graph.operators[op].outputs
    tensor = graph.tensors[t]
    if tensor.is_output or not tensor.consumers or not members.issuperset(tensor.consumers):
        return False
    for reader in tensor.consumers:
        operator = graph.operators[reader]
        if reader in anchors:
            if operator.inputs[0] != t or t in operator.inputs[1:]:
                return False
        elif len(graph.tensors[operator.outputs[0]].shape) != len(tensor.shape):  # broadcast: axes move to the right
            return False
    return True


def _is_connected(graph: OpGraph, ops: Sequence[int]) -> bool:
    """Whether every operator but the last has a reader among `ops`."""
    inside = set(ops)
    return all(inside.intersection(graph.successors(op)) for op in ops[:-1])
