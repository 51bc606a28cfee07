"""Keep one of every set of structurally equal kernels; their calls all go to it.

Before:  a = call_tir(fused_matmul_add, (x, w))      After:  a = call_tir(fused_matmul_add, (x, w))
         b = call_tir(fused_matmul_add1, (a, v))             b = call_tir(fused_matmul_add, (a, v))

The layers of a transformer or the steps of a recurrent network are the same code on other data: BERT-base has 141
kernels and 18 of them differ. Runs after FuseTIR, so that scheduling and code generation see each kernel once. The
first by name is kept; kernels whose attributes differ (apart from their own symbol) are not equal.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from tvmhet._tvm import PrimFunc, structural_equal, structural_hash


@tvm.transform.module_pass(opt_level=0, name="ShareKernels")
class ShareKernels:
    """The module with one of each set of equal kernels."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod` itself if no two kernels are equal."""
        kept = _kept(mod)
        if not kept:
            return mod
        redirect = _Redirect(kept)
        functions = {
            gvar: redirect.visit_expr(func) if isinstance(func, relax.Function) else func
            for gvar, func in mod.functions_items()
            if gvar not in kept
        }
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _kept(mod: tvm.IRModule) -> dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar]:
    """The kernel that stands for each kernel that goes."""
    first: dict[int, list[tuple[tvm.ir.GlobalVar, Any]]] = {}
    kept = {}
    for gvar, func in sorted(mod.functions_items(), key=lambda item: str(item[0].name_hint)):
        if not isinstance(func, PrimFunc):
            continue
        body = func.without_attr("global_symbol")
        alike = first.setdefault(structural_hash(body), [])
        same = next((known for known, other in alike if structural_equal(other, body)), None)
        if same is None:
            alike.append((gvar, body))
        else:
            kept[gvar] = same
    return kept


@relax.expr_functor.mutator
class _Redirect(relax.PyExprMutator):
    def __init__(self, kept: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar]) -> None:
        super().__init__()
        self._kept = kept

    def visit_global_var_(self, gvar: tvm.ir.GlobalVar) -> tvm.ir.GlobalVar:
        return self._kept.get(gvar, gvar)
