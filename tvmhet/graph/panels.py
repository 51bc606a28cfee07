"""Which weights may be stored in panels: second operands of products that nothing else reads.

    x[.., m, k] @ w[k, n]  ──►  w stored once as [n / T, k, T]: all rows of x go through one panel after the other

A weight is a parameter of a model that does not train: its panels are made once, before the first run. How wide they
are, T, the emitter decides for each device type; a kernel by the library, or on a GPU, reads the weight as it came.
"""

from __future__ import annotations

import math

from tvmhet.graph.opgraph import Operator, OpGraph

_MIN_ROWS = 2  # of x: one row reads each weight once, as it lies


def panel_weights(graph: OpGraph) -> frozenset[int]:
    """Return the tensors of `graph` that products may read in panels, by index."""
    return frozenset(op.inputs[1] for i, op in enumerate(graph.operators) if _reads_panels(graph, i, op))


def _reads_panels(graph: OpGraph, index: int, op: Operator) -> bool:
    if op.family != "matmul" or len(op.inputs) != 2:
        return False
    x, w, y = (graph.tensors[t] for t in (*op.inputs, *op.outputs))
    if not w.is_param or w.is_output or w.consumers != (index,) or {x.dtype, w.dtype, y.dtype} != {"float32"}:
        return False
    if len(w.shape) == 2:
        return len(x.shape) >= 2 and math.prod(x.shape[:-1]) >= _MIN_ROWS
    return len(w.shape) > 2 and w.shape[:-2] == x.shape[:-2] and x.shape[-2] >= _MIN_ROWS
