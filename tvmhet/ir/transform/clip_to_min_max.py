"""Write a clip that is open on a side, or of integers, as maximum and minimum.

Before:  y = R.clip(x, 1, T.float64("inf"))          After:  y = R.maximum(x, R.const(1, "int64"))

TVM casts the bounds to the operand's dtype, which fails for an infinite bound of integers. A float clip with two
finite bounds stays. Runs early in normalisation. Idempotent.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import relax

from tvmhet.ir.rewrite import Rebuild, Step, bindings_of, dtype_of, op_name, rewrite_straight_lines


@tvm.transform.module_pass(opt_level=0, name="tvmhet.ClipToMinMax")
class ClipToMinMax:
    """Rewrite every clip of integers or with an infinite bound."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return rewrite_straight_lines(mod, _make_step)


def _make_step(func: relax.Function) -> Step | None:
    return _step if any(_is_open(b.value) for b in bindings_of(func)) else None


def _bounds(value: Any) -> tuple[float, float] | None:
    """Return the literal bounds of a clip, or None when `value` is no clip or its bounds are computed."""
    if op_name(value) != "clip" or not all(hasattr(a, "value") for a in value.args[1:]):
        return None
    low, high = (a.value for a in value.args[1:])
    return low, high


def _is_open(value: Any) -> bool:
    bounds = _bounds(value)
    return bounds is not None and (not dtype_of(value).startswith(("float", "bfloat")) or any(map(math.isinf, bounds)))


def _step(state: Rebuild, _var: relax.Var, value: Any) -> Any:
    bounds = _bounds(value)
    if bounds is None or not _is_open(value):
        return value
    (low, high), x, dtype = bounds, value.args[0], dtype_of(value)
    raised = x if low == -math.inf else relax.op.maximum(x, relax.const(low, dtype))
    return raised if high == math.inf else relax.op.minimum(state.emit(raised), relax.const(high, dtype))
