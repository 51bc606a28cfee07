"""Write the dims of tensors whose shape is known as constants.

Before:  s = R.shape_of(x); t = R.shape_to_tensor(s)         x: (4, 8)          After:  t = const([4, 8])

TVM's ONNX front end asks for a tensor's shape at every Gather and Scatter, to count negative indices from the end. A
shape is no tensor, so a graph with one could not be cut. Runs early in normalisation; dead code elimination removes
what is read no more. Idempotent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvmhet.ir.rewrite import Rebuild, Step, bindings_of, op_name, rewrite_straight_lines


@tvm.transform.module_pass(opt_level=0, name="tvmhet.ReadStaticShapes")
class ReadStaticShapes:
    """Rewrite shape_to_tensor of a static shape to a constant."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return rewrite_straight_lines(mod, _make_step)


def _make_step(func: relax.Function) -> Step | None:
    return _step if any(_dims(b.value) is not None for b in bindings_of(func)) else None


def _step(_state: Rebuild, _var: relax.Var, value: Any) -> Any:
    dims = _dims(value)
    return value if dims is None else relax.const(np.array(dims, "int64"), "int64")


def _dims(value: Any) -> list[int] | None:
    """Return the dims that a shape_to_tensor gives, if all are known."""
    if op_name(value) != "shape_to_tensor" or not isinstance(value.args[0].ty, relax.ShapeType):
        return None
    dims = value.args[0].ty.values
    return [int(d) for d in dims] if dims is not None and all(hasattr(d, "value") for d in dims) else None
