"""Which weights may be stored in panels: second operands of products of as many rows, that nothing else reads.

    x[.., m, k] @ w[k, n]  ──►  w stored once as [n / T, k, T]: all rows of x go through one panel after the other

A weight is a parameter of a model that does not train: its panels are made once, before the first run. How wide they
are, T, the emitter decides for each device type; a kernel by the library, or on a GPU, reads the weight as it came. The
steps of a recurrent network read the same weights: they come in panels where all of them are generated kernels of one
stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvmhet.graph.opgraph import Operator, OpGraph, Tensor
from tvmhet.graph.placement import KernelPlacement

_MIN_ROWS = 2  # of x: one row reads each weight once, as it lies


def panel_weights(graph: OpGraph) -> frozenset[int]:
    """Return the tensors of `graph` that products may read in panels, by index."""
    return frozenset(
        t
        for t, weight in enumerate(graph.tensors)
        if weight.is_param and not weight.is_output and weight.consumers and _all_may(graph, t, weight)
    )


def panels_of_stage(graph: OpGraph, kernels: Sequence[KernelPlacement]) -> frozenset[int]:
    """Return the weights that a stage of `kernels` may read in panels: all that read them are its generated kernels."""
    own = generated(kernels)
    weights = panel_weights(graph)
    return frozenset(t for t in weights if {graph.operators[o].name for o in graph.tensors[t].consumers} <= own)


def generated(kernels: Sequence[KernelPlacement]) -> frozenset[str]:
    """Return the operators that `kernels` make without the library, by name."""
    return frozenset(op for k in kernels if k.maker != "library" for op in k.ops)


def _all_may(graph: OpGraph, index: int, weight: Tensor) -> bool:
    """Whether all that reads a weight may read panels of it, as wide for the one as for the other."""
    readers = [graph.operators[o] for o in weight.consumers]
    if not all(_reads_panels(graph, index, op) for op in readers):
        return False
    return len({num_rows(graph.tensors[op.inputs[0]], weight) for op in readers}) == 1


def _reads_panels(graph: OpGraph, weight: int, op: Operator) -> bool:
    if op.family != "matmul" or len(op.inputs) != 2 or op.inputs[1] != weight:
        return False
    x, w, y = (graph.tensors[t] for t in (*op.inputs, *op.outputs))
    if {x.dtype, w.dtype, y.dtype} != {"float32"} or len(x.shape) < 2 or len(w.shape) < 2:
        return False
    return (len(w.shape) == 2 or w.shape[:-2] == x.shape[:-2]) and num_rows(x, w) >= _MIN_ROWS


def num_rows(x: Tensor, weight: Tensor) -> int:
    """Rows of a product's first operand that read the same part of a weight."""
    return x.shape[-2] if len(weight.shape) > 2 else math.prod(x.shape[:-1])
