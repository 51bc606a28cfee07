"""Kernels without a search: the library's where it has one, TVM's own fusion for the rest.

    matmul ─► add(bias) ─► gelu ─► mul ─► sum        {matmul add gelu} by the library, {mul sum} by TVM

For functions that a plan places but does not cut into kernels, such as the backward pass of a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvmhet.graph.fusion import LegalKernel, fuse_ops_groups
from tvmhet.graph.library import library_kernels
from tvmhet.graph.library_rows import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS
from tvmhet.graph.opgraph import OpGraph, PatternKind

#: What the library makes better than a fused group does: products, and rows that need several passes. Pools are not
#: among them: torch walks NCHW windows on CPUs one value at a time (816 us where a generated kernel takes 40).
_ROOTS = CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS | {
    "matmul", "nn.attention", "nn.attention_bias", "nn.softmax", "nn.log_softmax", "nn.layer_norm", "take",
    "grad.max_pool2d_backward", "grad.avg_pool2d_backward",
}  # fmt: skip


#: A sum of more terms than this is made one by one, where a term has so many bytes: see `_added_in_turn`.
_MANY_TERMS, _LARGE_BYTES = 4, 2**20


def greedy_kernels(graph: OpGraph, makers: Sequence[str] = ("tvm", "library")) -> tuple[LegalKernel, ...]:
    """Return kernels that cover the graph, in an execution order. Longer library kernels come first.

    Beside the maker "tvm", the library makes only kernels with an operator that it makes better.
    """
    chosen: list[LegalKernel] = []
    taken: set[int] = set()
    if "library" in makers:
        for kernel in sorted(library_kernels(graph), key=lambda k: (-len(k.ops), k.ops)):
            wanted = "tvm" not in makers or any(graph.operators[i].family in _ROOTS for i in kernel.ops)
            if wanted and taken.isdisjoint(kernel.ops):
                chosen.append(kernel)
                taken.update(kernel.ops)
    operators = tuple(
        replace(op, pattern=PatternKind.OPAQUE) if i in taken else op for i, op in enumerate(graph.operators)
    )
    rest = fuse_ops_groups(OpGraph(operators, graph.tensors, graph.inputs, graph.outputs))
    for kernel in rest:
        if taken.isdisjoint(kernel.ops):
            chosen += _added_in_turn(graph, kernel)
    return tuple(sorted(chosen, key=lambda k: k.sink))


def _added_in_turn(graph: OpGraph, kernel: LegalKernel) -> list[LegalKernel]:
    """A kernel that only adds many large tensors, such as the gradients of a weight by every step of an LSTM, in parts.

    In one kernel all of them would be kept until the last is there; one after the other, two are.
    """
    operators = [graph.operators[i] for i in kernel.ops]
    size_bytes = min(graph.tensors[t].size_bytes for op in operators for t in op.outputs)
    if all(op.family == "add" for op in operators) and len(operators) >= _MANY_TERMS and size_bytes >= _LARGE_BYTES:
        return [LegalKernel((i,)) for i in kernel.ops]
    return [kernel]
