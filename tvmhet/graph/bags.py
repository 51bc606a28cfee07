"""Rows of a table, looked up and added up, in one kernel: bags of an embedding.

    index ─► take(one column) ─► take(table) ─► sum      {take} {take} {sum}      ==>      {take take sum}

A `take` stays alone by TVM's fusion rules, as it may read any element. Yet a reduction over the places that are looked
up reads each row once, and along the row as contiguously as before; which rows, the first `take` says of a column of
the indices. On CPUs the rule `windows` makes vectors of the rows; on GPUs it was not tried.
"""

from __future__ import annotations

from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.operands import only_reader
from tvmhet.graph.opgraph import OpGraph

_REDUCTIONS = frozenset({"sum", "mean", "max", "min"})


def bag_kernels(graph: OpGraph) -> tuple[LegalKernel, ...]:
    """Return, for each reduction of looked-up rows, the kernel of both, and with what chooses the indices."""
    found: list[LegalKernel] = []
    for reduction, op in enumerate(graph.operators):
        rows = _made_for(graph, op.inputs[0], reduction) if op.family in _REDUCTIONS else None
        if rows is None or not _looks_up_rows(graph, rows) or not _keeps_rows(graph, reduction):
            continue
        found.append(LegalKernel((rows, reduction), cpu_only=True))
        column = _made_for(graph, graph.operators[rows].inputs[1], rows)
        if column is not None and "arg1" in graph.operators[column].attrs:  # by a constant
            found.append(LegalKernel((column, rows, reduction), cpu_only=True))
    return tuple(sorted(found, key=lambda kernel: kernel.ops))


def _made_for(graph: OpGraph, tensor: int, reader: int) -> int | None:
    """The `take` that makes a tensor for one reader alone; None if it is none."""
    maker = graph.tensors[tensor].producer
    if maker < 0 or graph.operators[maker].family != "take" or only_reader(graph, maker) != reader:
        return None
    return maker


def _looks_up_rows(graph: OpGraph, take: int) -> bool:
    op = graph.operators[take]
    table = graph.tensors[op.inputs[0]]
    return len(op.inputs) == 2 and op.attrs["axis"] == 0 and len(table.shape) == 2 and table.dtype == "float32"


def _keeps_rows(graph: OpGraph, reduction: int) -> bool:
    """Whether a reduction leaves the last axis, that of a row, as it is."""
    op = graph.operators[reduction]
    rank = len(graph.tensors[op.inputs[0]].shape)
    axes = op.attrs["axis"]
    return axes is not None and rank - 1 not in {int(a) % rank for a in axes} and len(op.outputs) == 1
