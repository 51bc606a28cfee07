"""Kernels without a search: the library's where it has one, TVM's own fusion for the rest.

    matmul ─► add(bias) ─► gelu ─► mul ─► sum        {matmul add gelu} by the library, {mul sum} by TVM

For functions that a plan places but does not cut into kernels, such as the backward pass of a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvmhet.graph.fusion import LegalKernel, fuse_ops_groups
from tvmhet.graph.library import library_kernels
from tvmhet.graph.opgraph import OpGraph, PatternKind


def greedy_kernels(graph: OpGraph, makers: Sequence[str] = ("tvm", "library")) -> tuple[LegalKernel, ...]:
    """Return kernels that cover the graph, in an execution order. Longer library kernels come first."""
    chosen: list[LegalKernel] = []
    taken: set[int] = set()
    if "library" in makers:
        for kernel in sorted(library_kernels(graph), key=lambda k: (-len(k.ops), k.ops)):
            if taken.isdisjoint(kernel.ops):
                chosen.append(kernel)
                taken.update(kernel.ops)
    operators = tuple(
        replace(op, pattern=PatternKind.OPAQUE) if i in taken else op for i, op in enumerate(graph.operators)
    )
    rest = fuse_ops_groups(OpGraph(operators, graph.tensors, graph.inputs, graph.outputs))
    chosen += [kernel for kernel in rest if taken.isdisjoint(kernel.ops)]
    return tuple(sorted(chosen, key=lambda k: k.sink))
