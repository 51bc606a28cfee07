"""A sum over one element is that element: what looks like a reduction and is none becomes an element-wise block.

Before:  s[i] = 0;  for k in 1: s[i] = s[i] + exp(x[i, k])        After:  s[i] = 0 + exp(x[i, 0])
         y[i] = log(s[i])                                                 y[i] = log(s[i])

dlight drops such an axis k and then takes the block for one without a reduction, but keeps its first value: its
`Fallback` put y's formula into both, y[i] = log(0), then y[i] = log(y[i] + exp(x[i, 0])), which is no number.
Runs before CUDA rules. Other blocks are left alone.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx

from tvmhet._tvm import SBlock, TensorLoad
from tvmhet.emit.cpu.nests import REDUCE, SPATIAL


def without_unit_reductions(func: Any) -> Any:
    """Return `func` with every reduction whose axes all have one element computed at once; `func` if it has none."""
    found: list[Any] = []

    def rewrite(block: Any) -> Any:
        if not _is_over_one(block):
            return block
        found.append(block)
        store, first = block.body, block.init.value

        def of_load(load: Any) -> Any:
            return first if load.source.same_as(store.buffer) else load

        value = tvm_ffi.structural_map(store.value, (TensorLoad, of_load))
        axes = [tirx.IterVar(v.dom, v.var, SPATIAL) for v in block.iter_vars]
        body = tirx.BufferStore(store.buffer, value, store.indices)
        return SBlock(axes, block.reads, block.writes, block.name_hint, body)

    body = tvm_ffi.structural_map(func.body, (SBlock, rewrite))
    return func.with_body(body) if found else func


def _is_over_one(block: Any) -> bool:
    if not isinstance(block.init, tirx.BufferStore) or not isinstance(block.body, tirx.BufferStore):
        return False
    reduced = [v.dom.extent for v in block.iter_vars if int(v.iter_type) == REDUCE]
    return all(hasattr(extent, "value") and int(extent) == 1 for extent in reduced)
