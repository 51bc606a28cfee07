"""Replay a tuned schedule on the kernel that it was found for.

Before:  fused_conv2d_relu, no schedule       After:  the same function, scheduled by the trace; attributes unchanged

Which function that is, is decided by the hash of its body: names and attributes do not count.
"""

from __future__ import annotations

import json
from typing import Any

import tvm

from tvmhet._tvm import PrimFunc, replay, structural_hash


def function_hash(func: PrimFunc) -> str:
    """Return the hash of an unscheduled function without its attributes, as hex; stable within one TVM version."""
    for name in list((func.attrs or {}).keys()):
        func = func.without_attr(name)
    return f"{structural_hash(func) & (2**64 - 1):016x}"


def apply_schedule(func: PrimFunc, trace: str) -> Any:
    """Return `func` scheduled by `trace` (JSON text). Raises whatever TVM raises if the trace does not fit."""
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    scheduled = replay(mod, json.loads(trace)).mod["main"]
    if "global_symbol" not in (func.attrs or {}):
        return scheduled.without_attr("global_symbol")
    return scheduled.with_attr("global_symbol", func.attrs["global_symbol"])
