"""Say of PrimFuncs that TVM cannot fuse with others, before anything tries.

Before:  k(A: T.Buffer((8, 8)), B: ...)      After:  the same with op_pattern = opaque

T.Buffer((8, 8)), as one writes it by hand, has int32 sizes, Relax has int64, and FuseTIR takes the two for unlike
buffers and raises. A function that its author has scheduled would lose its schedule.
"""

from __future__ import annotations

import tvm

from tvmhet._tvm import PrimFunc
from tvmhet.graph.opgraph import PatternKind


@tvm.transform.module_pass(opt_level=0, name="tvmhet.MarkUnfusable")
class MarkUnfusable:
    """Give such functions the pattern "opaque"; AnnotateTIROpPattern keeps it."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        found = [(g, f) for g, f in mod.functions_items() if isinstance(f, PrimFunc) and not _can_be_fused(f)]
        if not found:
            return mod
        out = mod.clone()
        for gvar, func in found:
            out.update_func(gvar, func.with_attr("op_pattern", int(PatternKind.OPAQUE)))
        return out


def _can_be_fused(func: PrimFunc) -> bool:
    attrs = func.attrs or {}
    if "op_pattern" in attrs:  # said by somebody already
        return True
    sizes = (n for param in func.params for n in getattr(param.ty, "shape", ()))
    return "tirx.is_scheduled" not in attrs and all(str(n.ty) == "int64" for n in sizes)
