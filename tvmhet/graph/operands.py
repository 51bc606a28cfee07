"""Products that read a moved operand where it lies, so that no copy of a weight, a head or a channel is made.

    w ─► permute_dims ─► matmul ─► add      {permute_dims} {matmul add}      ==>      {permute_dims matmul add}
    x ─► strided_slice ─► conv2d            {strided_slice} {conv2d}         ==>      {strided_slice conv2d}

TVM's fusion rules take no producers into a product (`fusion.py`), since they would be computed again for every tile.
Reading at other indices costs nothing when the product packs its operand anyway, as ours do on CPUs, or where they are
the same ones but for an offset: the slices of a convolution that was merged of several.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.opgraph import OpGraph


def only_reader(graph: OpGraph, op: int) -> int | None:
    """Return the one operator that reads the first result of `op`; None if there are others, or it leaves the model."""
    tensor = graph.tensors[graph.operators[op].outputs[0]]
    return tensor.consumers[0] if len(tensor.consumers) == 1 and not tensor.is_output else None


def moved_operands(graph: OpGraph, product: int) -> tuple[int, ...]:
    """Return the operators, ascending, that only move an operand of `product`, and whose results nothing else reads.

    Permutations of a matmul's operands, and slices of the channels that a convolution reads.
    """
    makers = sorted({graph.tensors[t].producer for t in graph.operators[product].inputs} - {-1})
    moves = {"matmul": _permutes, "nn.conv2d": _takes_channels}[graph.operators[product].family]
    return tuple(p for p in makers if only_reader(graph, p) == product and moves(graph, p))


def _permutes(graph: OpGraph, op: int) -> bool:
    return graph.operators[op].family == "permute_dims"


def _takes_channels(graph: OpGraph, op: int) -> bool:
    """Whether an operator cuts its operand along the second axis alone."""
    operator = graph.operators[op]
    whole, part = (graph.tensors[t].shape for t in (operator.inputs[0], operator.outputs[0]))
    return operator.family == "strided_slice" and (*whole[:1], *whole[2:]) == (*part[:1], *part[2:])


def viewed_operands(graph: OpGraph, product: int) -> tuple[int, ...]:
    """Return the operators, ascending, that only cut, reshape or permute what `product` alone reads then.

    In this order before an operand, each of them or none: strided_slice, reshape, permute_dims. The library reads all
    of them as one view.
    """
    found: set[int] = set()
    for t in graph.operators[product].inputs:
        maker, reader = graph.tensors[t].producer, product
        for family in ("permute_dims", "reshape", "strided_slice"):
            if maker < 0 or graph.operators[maker].family != family or only_reader(graph, maker) != reader:
                continue
            found.add(maker)
            maker, reader = graph.tensors[graph.operators[maker].inputs[0]].producer, maker
    return tuple(sorted(found))


def with_moved_operands(graph: OpGraph, kernels: Sequence[LegalKernel]) -> tuple[LegalKernel, ...]:
    """Return, for each generated kernel with a product whose operands are moved outside it, the kernel with both."""
    found: dict[tuple[int, ...], None] = {}
    for kernel in kernels:
        products = [i for i in kernel.ops if graph.operators[i].family in ("matmul", "nn.conv2d")]
        moved = {p for i in products for p in moved_operands(graph, i)} - set(kernel.ops)
        if kernel.maker == "tvm" and moved:
            found[tuple(sorted({*kernel.ops, *moved}))] = None
    return tuple(LegalKernel(ops) for ops in found)
