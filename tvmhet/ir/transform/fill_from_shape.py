"""Make constant tensors from their shape, not from another tensor of that shape.

Before:  z = R.zeros_like(x)          After:  z = R.zeros((4, 8), "float32")

The copy of the shape would be an edge of the graph, and so a transfer, that carries nothing. With the edge gone,
`fold_parameters` can compute what follows. Only static shapes. Runs early in normalisation. Idempotent.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from tvmhet.ir.rewrite import Rebuild, Step, bindings_of, dtype_of, op_name, rewrite_straight_lines, shape_of

_LIKE = ("zeros_like", "ones_like", "full_like")


@tvm.transform.module_pass(opt_level=0, name="tvmhet.FillFromShape")
class FillFromShape:
    """Rewrite zeros_like, ones_like and full_like of a static shape to zeros, ones and full."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return rewrite_straight_lines(mod, _make_step)


def _make_step(func: relax.Function) -> Step | None:
    return _step if any(_copies_shape(b.value) for b in bindings_of(func)) else None


def _copies_shape(value: Any) -> bool:
    return op_name(value) in _LIKE and shape_of(value) is not None


def _step(_state: Rebuild, _var: relax.Var, value: Any) -> Any:
    if not _copies_shape(value):
        return value
    shape, dtype = shape_of(value), dtype_of(value)
    if op_name(value) == "full_like":
        return relax.op.full(shape, value.args[1], dtype)
    return (relax.op.zeros if op_name(value) == "zeros_like" else relax.op.ones)(shape, dtype)
