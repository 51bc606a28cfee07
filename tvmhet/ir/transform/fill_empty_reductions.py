"""Make what a reduction over no elements gives: TVM's kernels leave it unwritten, since their loop never begins.

Before:  s = R.sum(x)  with x: (2, 0, 4), axis 1        After:  s = R.full((2, 4), 0)

Only static shapes. Runs early in normalisation. Idempotent.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import relax

from tvmhet.ir.rewrite import Rebuild, Step, bindings_of, dtype_of, op_name, rewrite_straight_lines, shape_of

#: What each reduction gives for no elements.
_NEUTRAL = {"sum": 0.0, "matmul": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf, "mean": math.nan}


@tvm.transform.module_pass(opt_level=0, name="tvmhet.FillEmptyReductions")
class FillEmptyReductions:
    """Rewrite reductions over a dim of 0 elements to their neutral value."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return rewrite_straight_lines(mod, _make_step)


def _make_step(func: relax.Function) -> Step | None:
    return _step if any(_reduces_nothing(b.value) for b in bindings_of(func)) else None


def _reduces_nothing(value: Any) -> bool:
    if op_name(value) not in _NEUTRAL:
        return False
    read, made = shape_of(value.args[0]), shape_of(value)
    return read is not None and made is not None and math.prod(read) == 0 and math.prod(made) > 0


def _step(_state: Rebuild, _var: relax.Var, value: Any) -> Any:
    if not _reduces_nothing(value):
        return value
    neutral, dtype = _NEUTRAL[op_name(value)], dtype_of(value)
    if dtype == "bool":
        neutral = neutral > 0
    elif not math.isfinite(neutral) and not dtype.startswith(("float", "bfloat")):
        limit = tvm.tirx.min_value if neutral < 0 else tvm.tirx.max_value
        neutral = int(limit(dtype).value)
    return relax.op.full(shape_of(value), relax.const(neutral, dtype), dtype)
