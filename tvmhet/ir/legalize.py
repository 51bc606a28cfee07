"""TVM's LegalizeOps, without the warning that it prints on standard error for every `take`.

The kernel is the same: TVM's legalisation of `take` warns that indices out of bounds are read as they are.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, te


def legalize_ops() -> tvm.transform.Pass:
    """Return the pass that makes PrimFuncs of operators."""
    return relax.transform.LegalizeOps({"relax.take": _take})


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
