"""Sum booleans as int64: TVM's cumsum of a boolean tensor stays boolean.

Before:  s: bool = R.cumsum(m)          After:  i: int64 = R.astype(m, "int64")
                                                s: int64 = R.cumsum(i, dtype="int64")

Where the call asks for a dtype other than bool, only the operand is cast. Runs first in normalisation. Idempotent.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from tvmhet.ir.rewrite import Rebuild, Step, bindings_of, dtype_of, op_name, rewrite_straight_lines


@tvm.transform.module_pass(opt_level=0, name="tvmhet.CastBoolCumsum")
class CastBoolCumsum:
    """Cast the boolean operand of every cumsum to the dtype of its sum, int64 unless the call names one."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return rewrite_straight_lines(mod, _make_step)


def _make_step(func: relax.Function) -> Step | None:
    return _step if any(_sums_booleans(b.value) for b in bindings_of(func)) else None


def _sums_booleans(value: Any) -> bool:
    return op_name(value) == "cumsum" and dtype_of(value.args[0]) == "bool"


def _step(state: Rebuild, _var: relax.Var, value: Any) -> Any:
    if not _sums_booleans(value):
        return value
    asked = dtype_of(value)
    dtype = "int64" if asked == "bool" else asked
    operand = state.emit(relax.op.astype(value.args[0], dtype))
    return relax.op.cumsum(operand, value.attrs.axis, dtype, value.attrs.exclusive)
