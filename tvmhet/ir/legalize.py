"""TVM's LegalizeOps, with four mends: other kernels are the same.

Its legalisation of `take` warns on standard error, for each, that indices out of bounds are read as they are; that of
`full` raises a TypeError where the value is infinite or no number, as in the masks of attention. A tensor compared with
itself becomes a constant, as TVM's arithmetic takes any x for equal to itself; NaN is not. For
bfloat16 TVM has no tests for NaN and infinities: those of float32 say the same.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import relax, te, tirx, topi


def legalize_ops() -> tvm.transform.Pass:
    """Return the pass that makes PrimFuncs of operators."""
    kinds = dict.fromkeys(("relax.isnan", "relax.isinf", "relax.isfinite"), _is_of_kind)
    equal = dict.fromkeys(("relax.equal", "relax.not_equal"), _equal)
    return relax.transform.LegalizeOps({"relax.take": _take, "relax.full": _full, **equal, **kinds})


def _equal(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    a, b = call.args
    if not a.same_as(b) or "float" not in str(a.ty.dtype):
        return call.op.get_attr("FLegalize")(builder, call)
    return _tested(builder, call)


def _is_of_kind(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if str(call.args[0].ty.dtype) != "bfloat16":
        return call.op.get_attr("FLegalize")(builder, call)
    return _tested(builder, call)


_TESTS = {
    "equal": lambda x: tirx.Not(tirx.isnan(x)),
    "not_equal": tirx.isnan,
    "isnan": tirx.isnan,
    "isinf": tirx.isinf,
    "isfinite": tirx.isfinite,
}


def _tested(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    name = call.op.name.removeprefix("relax.")
    return builder.call_te(_test, call.args[0], name, primfunc_name_hint=name)


def _test(x: te.Tensor, name: str) -> te.Tensor:
    test, is_bfloat16 = _TESTS[name], str(x.dtype) == "bfloat16"

    def element(*at: Any) -> Any:
        return test(x(*at).astype("float32") if is_bfloat16 else x(*at))

    return te.compute(x.shape, element, name=f"T_{name}", tag="injective")


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
