"""How much shared memory a scheduled CUDA kernel asks of a block, before it is compiled.

Regions that a schedule stages are as large as what a block reads, which is known after TVM has compacted them: dlight's
GEMV kept 16 rows of 1024 floats there, 64 KiB, where a block may have 48, and only ptxas said so.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
import tvm_ffi
from tvm.s_tir import transform as T

from tvmhet._tvm import PrimFunc, SBlock

_COMPACT = tvm.transform.Sequential(
    [
        T.LowerInitBlock(),
        T.PlanAndUpdateBufferAllocationLocation(),
        T.ConvertBlocksToOpaque(),
        T.CompactBufferAllocation(),
    ]
)


def shared_bytes(func: PrimFunc) -> int:
    """Return the bytes of shared memory that the kernels of `func` allocate, all of them together at most."""
    found: list[Any] = []

    def visit(block: Any) -> None:
        found.extend(b for b in block.alloc_buffers if str(b.scope()).startswith("shared"))

    tvm_ffi.structural_walk(compacted(func).body, (SBlock, visit))
    return sum(size_bytes(b) for b in found)


def compacted(func: PrimFunc) -> PrimFunc:
    """Return a scheduled function with each buffer where it is first needed, and only as large as is live at once."""
    return _COMPACT(tvm.IRModule({"main": func}))["main"]


def size_bytes(buffer: Any) -> int:
    """Return the bytes of a buffer of known shape."""
    dtype = tvm.DataType(str(buffer.dtype))
    return math.prod(int(e) for e in buffer.shape) * int(dtype.bits) * int(dtype.lanes) // 8
