"""Drop operators that change nothing, and join two reshapes or two transpositions in a row.

Before:  a = R.reshape(x, (2, 8))          After:  b = R.reshape(x, (4, 4))
         b = R.reshape(a, (4, 4))                  y = R.nn.relu(b)
         c = R.astype(b, "float32")
         y = R.nn.relu(c)

Identities: dropout, reshape and broadcast_to the same shape, astype the same dtype, a transposition that keeps the
order, a stride-1 slice of everything, and the empty operands of a concatenation: what is left of a rotary embedding of
every column, and keys and values before the first token. Runs after the mends. Idempotent.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import relax

from tvmhet.ir.rewrite import Rebuild, Step, bindings_of, dtype_of, op_name, rewrite_straight_lines, shape_of

_RESHAPES = {"reshape", "expand_dims", "squeeze", "flatten"}


@tvm.transform.module_pass(opt_level=0, name="tvmhet.RemoveIdentities")
class RemoveIdentities:
    """Remove identities and join reshapes and transpositions in every straight-line function."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return rewrite_straight_lines(mod, _make_step)


def _make_step(func: relax.Function) -> Step | None:
    bound = {b.var: b.value for b in bindings_of(func)}
    return _step if any(not _simpler(bound, b.value).same_as(b.value) for b in bindings_of(func)) else None


def _step(state: Rebuild, var: relax.Var, value: Any) -> Any:
    if op_name(value) == "nn.dropout":
        state.became[var] = relax.Tuple([value.args[0], value.args[0]])
        return None
    return _simpler(state.bound, value)


def _simpler(bound: dict[Any, Any], value: Any) -> Any:
    """Return what `value` can be replaced by: an operand, a shorter expression, or itself."""
    name = op_name(value)
    if name == "nn.dropout":
        return value.args[0]
    if name == "concat":
        return _without_empty(bound, value)
    if not name or not value.args or not isinstance(value.args[0].ty, relax.TensorType):
        return value
    source = value.args[0]
    inner: Any = bound.get(source)
    if _is_identity(name, value, source):
        return source
    if name in _RESHAPES and op_name(inner) in _RESHAPES and (shape := shape_of(value)) is not None:
        joined = relax.op.reshape(inner.args[0], shape)
        return inner.args[0] if shape_of(inner.args[0]) == shape else joined
    if name == "permute_dims" and op_name(inner) == "permute_dims":
        outer, before = _axes(value), _axes(inner)
        axes = [before[a] for a in outer]
        return inner.args[0] if axes == sorted(axes) else relax.op.permute_dims(inner.args[0], axes)
    return value


def _without_empty(bound: dict[Any, Any], value: Any) -> Any:
    """Return a concatenation of the operands that have elements; the operand itself, if one has."""
    operands = bound.get(value.args[0], value.args[0])
    if value.attrs.axis is None or not isinstance(operands, relax.Tuple):
        return value
    shapes = [shape_of(field) for field in operands.fields]
    kept = [f for f, shape in zip(operands.fields, shapes, strict=True) if shape is None or math.prod(shape) > 0]
    if not kept or len(kept) == len(shapes):
        return value
    return kept[0] if len(kept) == 1 else relax.op.concat(kept, int(value.attrs.axis))


def _is_identity(name: str, value: Any, source: Any) -> bool:
    if name == "astype":
        return dtype_of(source) == dtype_of(value)
    if name == "permute_dims":
        return _axes(value) == sorted(_axes(value))
    same = shape_of(source) is not None and shape_of(source) == shape_of(value)
    if name == "strided_slice":
        return same and all(s is not None and _as_int(s) == 1 for s in _strides(value))
    return same and name in _RESHAPES | {"broadcast_to"}


def _axes(call: Any) -> list[int]:
    """Return a transposition's axes, spelled out and non-negative."""
    rank = len(call.args[0].ty.shape.values)
    axes = call.attrs.axes
    return list(reversed(range(rank))) if axes is None else [int(a) % rank for a in axes]


def _strides(call: Any) -> list[Any]:
    """Return the strides of a strided_slice; empty when all are 1 by default."""
    return list(call.args[4].fields) if len(call.args) > 4 and isinstance(call.args[4], relax.Tuple) else []


def _as_int(expr: Any) -> int | None:
    return int(expr.value) if hasattr(expr, "value") and not isinstance(expr, tvm.ir.GenericConst) else None
