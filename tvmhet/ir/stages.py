"""Take the stages of a split module out, one self-contained module each, so that equal stages are equal modules."""

from __future__ import annotations

import re

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmhet.ir.attrs import KERNEL_ATTR, STAGE_ATTR


def stage_modules(mod: tvm.IRModule) -> tuple[tvm.IRModule, ...]:
    """Return one module per stage function of `mod`: the stage as `main`, and the functions that it calls.

    Callees are named by operator and order of first use, and carry no kernel name, so that two stages which compute
    the same are structurally equal wherever they stood in the model.
    """
    stages = {
        int(f.attrs[STAGE_ATTR]): f
        for _, f in mod.functions_items()
        if isinstance(f, relax.Function) and f.attrs and STAGE_ATTR in f.attrs
    }
    return tuple(standalone(mod, stages[i].without_attr(STAGE_ATTR)) for i in sorted(stages))


def standalone(mod: tvm.IRModule, func: relax.Function) -> tvm.IRModule:
    """Return a module whose `main` is `func`, with the functions of `mod` that it reaches."""
    renamed: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar] = {}
    bodies: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {}
    main = _collect(mod, func, renamed, bodies)
    out = tvm.IRModule({renamed[old]: body for old, body in bodies.items()})
    out["main"] = main.with_attr("global_symbol", "main")
    return out


def _collect(
    mod: tvm.IRModule,
    func: relax.Function,
    renamed: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar],
    bodies: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc],
) -> relax.Function:
    """Give every callee of `func`, and theirs, a new name; return `func` with the new names."""
    callees: list[tvm.ir.GlobalVar] = []
    relax.analysis.post_order_visit(
        func, lambda e: callees.append(e) if isinstance(e, tvm.ir.GlobalVar) and e not in callees else None
    )
    for gvar in callees:
        if gvar in renamed:
            continue
        fresh = tvm.ir.GlobalVar(_unused(gvar.name_hint, {g.name_hint for g in renamed.values()}))
        relax.expr._update_type(fresh, gvar.ty)
        renamed[gvar] = fresh
        body = mod[gvar]
        if isinstance(body, relax.Function):
            body = _collect(mod, body.without_attr(KERNEL_ATTR), renamed, bodies)
        elif "global_symbol" in (body.attrs or {}):
            body = body.without_attr("global_symbol")
        bodies[gvar] = body
    return RenameGlobals(renamed).visit_expr(func) if callees else func


def _unused(name: str, taken: set[str]) -> str:
    stem = re.sub(r"_?\d+$", "", name) or name
    unused, i = stem, 0
    while unused in taken or unused == "main":
        i += 1
        unused = f"{stem}_{i}"
    return unused


@mutator
class RenameGlobals(PyExprMutator):
    """Replace global variables by a map; what is not in it stays."""

    def __init__(self, renamed: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar]) -> None:
        super().__init__()
        self.renamed = renamed

    def visit_global_var_(self, gvar: tvm.ir.GlobalVar) -> tvm.ir.GlobalVar:
        return self.renamed.get(gvar, gvar)
