"""TVM's LegalizeOps, with two mends: the kernels are the same.

Its legalisation of `take` warns on standard error, for each, that indices out of bounds are read as they are; that of
`full` raises a TypeError where the value is infinite or no number, as in the masks of attention.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import relax, te, topi


def legalize_ops() -> tvm.transform.Pass:
    """Return the pass that makes PrimFuncs of operators."""
    return relax.transform.LegalizeOps({"relax.take": _take, "relax.full": _full})


def _full(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    shape, filling = call.args
    value = float(filling.value.numpy()) if isinstance(filling, tvm.ir.GenericConst) else 0.0
    if math.isfinite(value) or not isinstance(shape, relax.ShapeExpr):
        return tvm.ir.Op.get("relax.full").get_attr("FLegalize")(builder, call)
    return builder.call_te(topi.full, shape.values, str(call.ty.dtype), value, primfunc_name_hint="full")


def _take(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if call.attrs.axis is None or call.attrs.mode != "fast":
        return tvm.ir.Op.get("relax.take").get_attr("FLegalize")(builder, call)
    return builder.call_te(_rows, call.args[0], call.args[1], int(call.attrs.axis), primfunc_name_hint="take")


def _rows(data: te.Tensor, indices: te.Tensor, axis: int) -> te.Tensor:
    axis, rank = axis % len(data.shape), len(indices.shape)
    shape = [*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]]

    def element(*at: Any) -> Any:
        return data(*at[:axis], indices(*at[axis : axis + rank]), *at[axis + rank :])

    return te.compute(shape, element, name="T_take", tag="injective")
