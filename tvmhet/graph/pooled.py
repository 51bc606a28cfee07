"""The mean of an image, and the product that reads it, in one kernel.

    adaptive_avg_pool2d ─► reshape ─► matmul ─► add      {adaptive_avg_pool2d} {matmul add}     ==>     all of them

TVM's fusion rules take no producers into a product (`fusion.py`). The mean of an image is a few kilobytes, made once
before the first of the product's steps: on a CPU the call of a kernel is saved (`emit/cpu/in_turn.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.operands import only_reader
from tvmhet.graph.opgraph import OpGraph

_PRODUCTS = frozenset({"matmul", "nn.conv2d"})
_VIEWS = frozenset({"reshape", "flatten", "squeeze"})
_POOL = "nn.adaptive_avg_pool2d"
_MAX_BYTES = 1 << 16  # of the mean, which the second cache holds beside the weights that pass through it


def pooled_products(graph: OpGraph, kernels: Sequence[LegalKernel]) -> tuple[LegalKernel, ...]:
    """Return, for each generated kernel with a product of the mean of an image, the kernel with what makes that."""
    found: dict[tuple[int, ...], None] = {}
    for kernel in kernels:
        products = [i for i in kernel.ops if graph.operators[i].family in _PRODUCTS]
        if kernel.maker == "tvm" and len(products) == 1 and (before := _mean_before(graph, products[0])):
            found[tuple(sorted({*kernel.ops, *before}))] = None
    return tuple(LegalKernel(ops, cpu_only=True) for ops in found)


def _mean_before(graph: OpGraph, product: int) -> tuple[int, ...]:
    """The operators from a pooling of whole images to a product; none if it reads something else."""
    chain: list[int] = []
    op, reader = graph.tensors[graph.operators[product].inputs[0]].producer, product
    while op >= 0 and only_reader(graph, op) == reader:
        operator = graph.operators[op]
        chain.append(op)
        if operator.family == _POOL:
            image, made = (graph.tensors[t] for t in (operator.inputs[0], operator.outputs[0]))
            mean = made.shape[2:] == (1, 1) != image.shape[2:]
            return tuple(chain) if mean and made.size_bytes <= _MAX_BYTES and made.dtype == "float32" else ()
        if operator.family not in _VIEWS:
            return ()
        op, reader = graph.tensors[operator.inputs[0]].producer, op
    return ()
