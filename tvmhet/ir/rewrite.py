"""Rebuild a straight-line function binding by binding: the one tool of the passes in transform/.

    for each binding `v = op(args)`:   step(builder, v, op(args'))  ->  the expression that v becomes

`args'` are the arguments after earlier replacements. The function that was given is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import tvm
from tvm import relax

#: Takes the builder, the old variable and its value with replaced arguments; returns the new value, or None to drop it.
Step = Callable[["Rebuild", relax.Var, Any], Any]


@dataclass
class Rebuild:
    """State of one rebuild: what each old variable became, and what each new one is bound to."""

    builder: relax.BlockBuilder = field(default_factory=relax.BlockBuilder)
    became: dict[Any, Any] = field(default_factory=dict)
    bound: dict[Any, Any] = field(default_factory=dict)

    def emit(self, expr: Any, name: str = "") -> Any:
        """Bind `expr` to a new variable and return it; variables and constants are returned as they are."""
        if isinstance(expr, tvm.ir.Var | tvm.ir.GenericConst):
            return expr
        var = self.builder.emit(expr, name_hint=name)
        self.bound[var] = self.builder.lookup_binding(var)
        return var

    def replaced(self, expr: Any) -> Any:
        """Return `expr` with every old variable in it replaced; the very same expression when nothing changes."""
        if isinstance(expr, tvm.ir.Var):
            return self.became.get(expr, expr)
        if isinstance(expr, relax.Tuple):
            fields = [self.replaced(f) for f in expr.fields]
            return relax.Tuple(fields) if _differ(fields, expr.fields) else expr
        if isinstance(expr, relax.TupleGetItem):
            source = self.replaced(expr.tuple_value)
            if isinstance(source, relax.Tuple):
                return source.fields[expr.index]
            return expr if source.same_as(expr.tuple_value) else relax.TupleGetItem(source, expr.index)
        if isinstance(expr, relax.Call):
            args = [self.replaced(a) for a in expr.args]
            return relax.Call(expr.op, args, expr.attrs, expr.ty_args) if _differ(args, expr.args) else expr
        return expr


def _differ(new: Sequence[Any], old: Sequence[Any]) -> bool:
    return any(not n.same_as(o) for n, o in zip(new, old, strict=True))


def bindings_of(func: relax.Function) -> list[relax.Binding]:
    """Return the bindings of a function whose body is a sequence of blocks, in order."""
    return [b for block in func.body.blocks for b in block.bindings] if isinstance(func.body, relax.SeqExpr) else []


def is_straight_line(func: relax.Function) -> bool:
    """True when the body is one dataflow block."""
    body = func.body
    return isinstance(body, relax.SeqExpr) and len(body.blocks) == 1 and isinstance(body.blocks[0], relax.DataflowBlock)


def rebuild(
    func: relax.Function,
    step: Step,
    params: Sequence[relax.Var] | None = None,
    result: Callable[[Any], Any] = lambda expr: expr,
    renamed: Mapping[Any, relax.Var] = MappingProxyType({}),
) -> relax.Function:
    """Return `func` with each binding replaced by what `step` returns, and its result by what `result` makes of it.

    `params` replaces its parameters; `renamed` are new variables in the place of some.
    """
    state = Rebuild()
    state.became.update(renamed)
    new_params = [renamed.get(p, p) for p in (func.params if params is None else params)]
    name = str(func.attrs["global_symbol"]) if func.attrs and "global_symbol" in func.attrs else "main"
    attrs = dict(func.attrs.items()) if func.attrs else {}
    with state.builder.function(name, new_params, attrs=attrs):
        with state.builder.dataflow():
            for binding in bindings_of(func):
                _rebuild_binding(state, binding, step)
        state.builder.emit_func_output(result(state.replaced(func.body.body)))
    return state.builder.get()[name]


def _rebuild_binding(state: Rebuild, binding: relax.Binding, step: Step) -> None:
    value = state.replaced(binding.value)
    if isinstance(binding, relax.MatchCast):
        state.became[binding.var] = state.builder.match_cast(value, binding.ty)
        return
    if not value.same_as(binding.value):
        value = state.builder.normalize(value)  # infer its type again
    new = step(state, binding.var, value)
    if new is None:
        return
    name = str(binding.var.name)
    inner = isinstance(binding.var, relax.DataflowVar)
    state.became[binding.var] = state.emit(new, name) if inner else state.builder.emit_output(new, name_hint=name)


def rewrite_straight_lines(
    mod: tvm.IRModule,
    make_step: Callable[[relax.Function], Step | None],
    rename: Callable[[relax.Function], Mapping[Any, relax.Var]] = lambda _func: {},
) -> tvm.IRModule:
    """Rebuild every straight-line function for which `make_step` gives a step; the very same module when none is."""
    changed = {}
    for gvar, func in mod.functions_items():
        if isinstance(func, relax.Function) and is_straight_line(func) and (step := make_step(func)) is not None:
            changed[gvar] = rebuild(func, step, renamed=rename(func))
    if not changed:
        return mod
    out = mod.clone()
    for gvar, func in changed.items():
        out.update_func(gvar, func)
    return out


def shape_of(expr: Any) -> tuple[int, ...] | None:
    """Return the static shape of a tensor expression, or None when a dim is symbolic or unknown."""
    ty = expr.ty
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    dims = tuple(ty.shape.values)
    return tuple(int(d) for d in dims) if all(hasattr(d, "value") for d in dims) else None


def dtype_of(expr: Any) -> str:
    """Return the dtype of a tensor expression."""
    return str(expr.ty.dtype)


def op_name(expr: Any) -> str:
    """Return the name of the operator that `expr` calls, without `relax.`; empty when it calls none."""
    if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op):
        return str(expr.op.name).removeprefix("relax.")
    return ""


def num_uses(func: relax.Function) -> dict[Any, int]:
    """Return how often each variable is read in a straight-line function, its result included."""
    uses: dict[Any, int] = {}

    def count(expr: Any) -> None:
        if isinstance(expr, tvm.ir.Var):
            uses[expr] = uses.get(expr, 0) + 1
        for child in children(expr):
            count(child)

    for binding in bindings_of(func):
        count(binding.value)
    count(func.body.body)
    return uses


def children(expr: Any) -> tuple[Any, ...]:
    """Return the direct operands of an expression in normal form."""
    if isinstance(expr, relax.Tuple):
        return tuple(expr.fields)
    if isinstance(expr, relax.TupleGetItem):
        return (expr.tuple_value,)
    return tuple(expr.args) if isinstance(expr, relax.Call) else ()
