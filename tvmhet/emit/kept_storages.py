"""Give a stage's memory to the caller, so that what is captured of a run can be run again in the same places.

Before:  main(x, w):  s0 = alloc_storage(4096); a = alloc_tensor(s0, ..); f(x, w, a); return (a,)

After:   main, as before, and
         storages():         return (alloc_storage(4096),)
         steady(x, w, kept): s0 = kept[0]; a = alloc_tensor(s0, ..); f(x, w, a); return (a,)

The VM gives the storages of `main` back when it returns, and another stage of the process may have them next. A CUDA
graph holds addresses: it is captured of `steady`, whose storages the caller holds as long as the graph
(`tvmhet.runtime.cuda_graph`). Runs after every allocation has a storage, and before storages are let go. Without static
sizes there is no `steady`.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.utils import copy_with_new_vars

from tvmhet._functions import STEADY, STORAGES
from tvmhet.emit.allocations import STORAGE, allocates, sizes


@tvm.transform.module_pass(opt_level=0, name="KeepStorages")
class KeepStorages:
    """The module with `storages` and `steady` beside its `main`."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod` itself if a storage has no constant size, or if there is no `main`."""
        if "main" not in mod:
            return mod
        main = mod["main"]
        allocations = [b for block in main.body.blocks for b in block.bindings if allocates(b.value, STORAGE)]
        if not all(isinstance(d, tvm.tirx.IntImm) for b in allocations for d in sizes(b.value)):
            return mod
        out = mod.clone()
        kept = relax.Var("kept", relax.TupleType([b.var.ty for b in allocations]))
        place = {b.var: i for i, b in enumerate(allocations)}
        blocks = [relax.BindingBlock([_taken(b, place, kept) for b in block.bindings]) for block in main.body.blocks]
        body = relax.SeqExpr(blocks, main.body.body)
        attrs = dict(main.attrs or {})
        steady = relax.Function([*main.params, kept], body, main.ret_ty, is_pure=False)
        out[STEADY] = copy_with_new_vars(steady).with_attrs({**attrs, "global_symbol": STEADY})
        builder = relax.BlockBuilder()
        with builder.function(STORAGES, []):
            builder.emit_func_output(relax.Tuple([builder.emit(b.value) for b in allocations]))
        made = builder.get()[STORAGES]
        out[STORAGES] = made.with_attr("relax.force_pure", True)
        return out


def _taken(binding: relax.Binding, place: dict[relax.Var, int], kept: relax.Var) -> relax.Binding:
    """The binding, with a storage taken from a tuple instead of allocated."""
    if binding.var not in place:
        return binding
    return relax.VarBinding(binding.var, relax.TupleGetItem(kept, place[binding.var]))
