"""Take bools one at a time in CUDA kernels, where TVM's code generator reads two of them as 16 bits each.

Before:  for v in T.vectorized(4): y[i + v] = where(mask[i + v], x[i + v], 0)        (ushort4 of mask: other bytes)

After:   for v in T.unroll(4): y[i + v] = where(mask[i + v], x[i + v], 0)

Runs on scheduled kernels. Vector loops that touch no tensor of bools are left alone.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvmhet._tvm import PrimFunc, TensorLoad


@tirx.transform.prim_func_pass(opt_level=0, name="tvmhet.UnrollBoolVectors")
class UnrollBoolVectors:
    """Unroll the vector loops of every PrimFunc that touch bools; Relax functions are untouched."""

    def transform_function(self, func: PrimFunc, _mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> PrimFunc:
        """Return the same function, in narrower steps."""
        return unroll_bool_vectors(func)


def unroll_bool_vectors(func: PrimFunc) -> PrimFunc:
    """Return `func` with the vector loops unrolled that load from or store to a tensor of bools."""

    def rewrite(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.VECTORIZED or not _touches_bools(loop.body):
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.UNROLLED, loop.body)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, rewrite)))


def _touches_bools(body: Any) -> bool:
    found: list[bool] = []

    loads = (TensorLoad, lambda load: found.append(str(load.source.dtype) == "bool"))
    stores = (tirx.BufferStore, lambda store: found.append(str(store.buffer.dtype) == "bool"))
    tvm_ffi.structural_walk(body, (loads, stores))
    return any(found)
