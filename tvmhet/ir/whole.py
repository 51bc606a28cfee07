"""Can `main` be cut into stages? Analysis only: the reason why not, or None."""

from __future__ import annotations

import tvm
from tvm import relax

from tvmhet.ir.model import ENTRY


def whole_reason(mod: tvm.IRModule) -> str | None:
    """Say why `main` must stay whole: control flow, a call of a Relax function, side effects, an unbound shape."""
    main = mod[ENTRY]
    if free := sorted({str(v.name) for v in relax.analysis.defined_symbolic_vars(main)}):
        return f"its shapes depend on {', '.join(free)}, which bind_shapes does not bind"
    if relax.analysis.contains_impure_call(main):
        return "it has calls with side effects"
    reasons: list[str] = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.If):
            reasons.append("it has control flow (if)")
        elif isinstance(expr, relax.Function) and not expr.same_as(main):
            reasons.append("it defines a function inside 'main'")
        elif isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.GlobalVar):
            reasons.append(f"it calls the function {expr.op.name_hint!r}")
        elif isinstance(expr, relax.Call) and not _is_static(expr.ty):
            reasons.append(f"the shape of a result of {_name(expr)} depends on the data")

    relax.analysis.post_order_visit(main, visit)
    return reasons[0] if reasons else None


def _name(call: relax.Call) -> str:
    return call.op.name if isinstance(call.op, tvm.ir.Op) else str(call.op)


def _is_static(ty: object) -> bool:
    if isinstance(ty, relax.TupleType):
        return all(_is_static(f) for f in ty.fields)
    if isinstance(ty, relax.TensorType):
        return isinstance(ty.shape, relax.ShapeExpr) and all(hasattr(d, "value") for d in ty.shape.values)
    return True
