"""Normalise a row of exponentials with one division: multiply it by the reciprocal of its sum.

Before:  y[i, k] = e[i, k] / s[i]               After:  y[i, k] = e[i, k] * (1 / s[i])

Only where e is an exponential and s its float32 sum, as in a softmax. The reciprocal does not depend on the innermost
axis, so LLVM takes it out of the vectors' loop, where a division costs ten times a product. Such a sum is zero or at
least 1e-38 (`fast_math.py`), so its reciprocal is exact to half a unit in the last place or infinite where the quotient
is; the result is off by one unit more than that of a division. Runs inside the `rows` rule. Other divisions stay.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx

from tvmhet._tvm import SBlock, TensorLoad
from tvmhet.emit.cpu.blocks import calls, loads_of, uses


def reciprocals(func: Any) -> Any:
    """Return `func` with each such division replaced."""
    blocks: list[Any] = []
    tvm_ffi.structural_walk(func.body, (SBlock, blocks.append))
    stores = [(b, b.body) for b in blocks if isinstance(b.body, tirx.BufferStore)]
    exponentials = [s.buffer for _, s in stores if any(str(c.op.name) == "tirx.exp" for c in calls(s.value))]
    sums = [
        (store.buffer, load.source)
        for block, store in stores
        if block.init is not None and isinstance(store.value, tirx.Add)
        for load in loads_of(store.value.b)
        if store.value.b.same_as(load) and any(load.source.same_as(e) for e in exponentials)
    ]

    def rewrite(division: Any) -> Any:
        e, s = division.a, division.b
        if not (isinstance(e, TensorLoad) and isinstance(s, TensorLoad) and str(s.ty) == "float32"):
            return division
        if uses(s.indices, [e.indices[-1]]) or not any(s.source.same_as(t) and e.source.same_as(o) for t, o in sums):
            return division
        return e * (tirx.const(1.0, "float32") / s)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.Div, rewrite))) if sums else func
