"""Products that read a permuted operand where it lies, so that no transposed copy of a weight or a head is made.

    w ─► permute_dims ─► matmul ─► add      {permute_dims} {matmul add}      ==>      {permute_dims matmul add}

TVM's fusion rules take no producers into a product (`fusion.py`), since they would be computed again for every tile.
Reading at other indices costs nothing when the product packs its operand anyway, as ours do on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.opgraph import OpGraph


def only_reader(graph: OpGraph, op: int) -> int | None:
    """Return the one operator that reads the first result of `op`; None if there are others, or it leaves the model."""
    tensor = graph.tensors[graph.operators[op].outputs[0]]
    return tensor.consumers[0] if len(tensor.consumers) == 1 and not tensor.is_output else None


def permuted_operands(graph: OpGraph, product: int) -> tuple[int, ...]:
    """Return the `permute_dims` operators, ascending, whose results are operands of `product` and of nothing else."""
    makers = {graph.tensors[t].producer for t in graph.operators[product].inputs} - {-1}
    return tuple(
        p for p in sorted(makers) if graph.operators[p].family == "permute_dims" and only_reader(graph, p) == product
    )


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


def with_permuted_operands(graph: OpGraph, kernels: Sequence[LegalKernel]) -> tuple[LegalKernel, ...]:
    """Return, for each generated kernel with a matmul whose operands are permuted outside it, the kernel with both."""
    found: dict[tuple[int, ...], None] = {}
    for kernel in kernels:
        products = [i for i in kernel.ops if graph.operators[i].family == "matmul"]
        permuted = {p for i in products for p in permuted_operands(graph, i)} - set(kernel.ops)
        if kernel.maker == "tvm" and permuted:
            found[tuple(sorted({*kernel.ops, *permuted}))] = None
    return tuple(LegalKernel(ops) for ops in found)
