"""Kernels alone, to be measured: one module with a function per kernel, so that many are compiled and linked at once.

main: ... conv ─► add ─► relu ...      ==>      k0(x, w, b) = fused conv, add, relu      k1(y) = softmax
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import relax

from tvmhet import _tvm
from tvmhet.graph.placement import KernelPlacement
from tvmhet.ir.attrs import POOLED_ATTR
from tvmhet.ir.bindings import Bindings, Emitter, live_ins, live_outs, readers_of
from tvmhet.ir.transform.fuse_by_plan import emit_kernel
from tvmhet.ir.transform.pack_weights import PackWeights


def kernels_module(
    mod: tvm.IRModule, kernels: Sequence[KernelPlacement], panels: Mapping[str, int] | None = None
) -> tvm.IRModule:
    """Return a module whose function `k<i>` runs kernel i on its live-ins, in order of first use, and returns a tuple.

    Kernels are made as `FuseByPlan` makes them, so what is measured is what a plan's stage will hold; those that are
    not the library's read the weights of `panels` in panels of so many columns.
    """
    packed = tvm.transform.Sequential([PackWeights(panels or {})])(mod)
    plain, packed_bindings = Bindings(mod["main"]), Bindings(packed["main"])
    readers = readers_of(plain)
    prims = {g: f for g, f in packed.functions_items() if isinstance(f, _tvm.PrimFunc)}
    builder = relax.BlockBuilder(tvm.IRModule(prims))
    for i, kernel in enumerate(kernels):
        bindings = plain if kernel.maker == "library" else packed_bindings
        _add_kernel(builder, f"k{i}", bindings, kernel, live_outs(bindings, kernel.ops, readers))
    return builder.get()


def _add_kernel(
    builder: relax.BlockBuilder, name: str, bindings: Bindings, kernel: KernelPlacement, outs: Sequence[str]
) -> None:
    params = [relax.Var(t, bindings.types[t]) for t in live_ins(bindings, kernel.ops)]
    with builder.function(name, params, attrs={POOLED_ATTR: True}):
        with builder.dataflow():
            emitter = Emitter(builder, frozenset(), frozenset(outs))
            env = emit_kernel(emitter, bindings, kernel, {p.name: p for p in params}, outs)
        builder.emit_func_output(relax.Tuple([env[t] for t in outs]))
