"""Kernel descriptions back to the lines that people read and write: the inverse of `operators.parse`.

KernelDesc(linear, (1, 512, 3072, 768)) ──► {"op": "linear", "b": 1, "m": 512, "n": 3072, "k": 768, "dtype": ...}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvmhet.cost.model import SIZES, KernelDesc, OpDesc, dilation_of
from tvmhet.cost.operators import SCHEMA, parse
from tvmhet.errors import BadInput

_MAX_STRIDE = 8


def record_of(desc: KernelDesc) -> dict[str, Any]:
    """Return the object that `parse` reads as `desc`. Raises BadInput for a kernel that no line describes."""
    op = desc.root
    record = {"op": op.family, **_fields(op), "dtype": op.dtype, "maker": desc.maker}
    if op.backward:
        record["backward"] = True
    if len(desc.ops) == 1 and op.family in SCHEMA and parse(record) == desc:
        return record
    raise BadInput(f"a kernel of {', '.join(o.family for o in desc.ops)} has no line", "describe one operator")


def _fields(op: OpDesc) -> dict[str, Any]:
    sizes = dict(zip(SIZES[op.family], op.sizes, strict=True))
    if op.family in ("conv2d", "pooling"):
        return _window(sizes, dilation_of(op.name))
    if op.family in ("elementwise", "movement"):
        name = op.name.removesuffix("_scalar")
        scalar = {"scalar": True} if name != op.name else {}
        return {"name": name, "shape": [sizes["write"]], **scalar}
    if op.family.startswith("attention"):
        extra = {"causal": op.name == "causal"} if op.family == "attention_prefill" else {}
        return {k: v for k, v in sizes.items() if k in SCHEMA[op.family]} | extra
    if op.family == "moe":
        return sizes | {"balanced": op.name == ""}
    return sizes | ({"name": op.name} if "name" in SCHEMA.get(op.family, {}) else {})


def _window(sizes: Mapping[str, int], dilation: int) -> dict[str, Any]:
    """Return a window operator's fields with a stride and a padding that give its output."""
    plain = {k: v for k, v in sizes.items() if k not in ("oh", "ow")}
    sides = []
    for side, window, out in (("h", "kh", "oh"), ("w", "kw", "ow")):
        found = (
            (stride, padding)
            for stride in range(1, _MAX_STRIDE + 1)
            for padding in range(dilation * (sizes[window] - 1) + 1)
            if (sizes[side] + 2 * padding - dilation * (sizes[window] - 1) - 1) // stride + 1 == sizes[out]
        )
        sides.append(next(found, (1, 0)))
    (down, top), (across, left) = sides
    apart = {"dilation": dilation} if dilation > 1 else {}
    return plain | {"stride": [down, across], "padding": [top, left]} | apart
