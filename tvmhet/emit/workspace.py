"""What kernels on a CPU take for themselves while they run: padded images, gathered operands, unfused results.

    legalise, fuse, schedule as `lower` does ─► buffers of each kernel, shrunk to what is live at once ─► bytes

No code is generated, so that it is known before anything is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from tvmhet._tvm import PrimFunc, SBlock
from tvmhet.emit.lower import make_target, scheduled_kernels
from tvmhet.emit.schedule import ScheduleReport
from tvmhet.emit.shared_memory import compacted, size_bytes

_SMALL_BYTES = 1024  # smaller ones may lie on the stack, and fit into a page that is there


def workspaces(mod: tvm.IRModule, description: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return the bytes of the buffers that each kernel call of a stage module takes while it runs, in order.

    Calls that take none are left out. `description` is an llvm target. What library functions take is not known.
    """
    target = make_target(description)
    with target:
        _, kernels = scheduled_kernels(mod, target, ScheduleReport())
    own = {g: _buffers(f) for g, f in kernels.functions_items() if isinstance(f, PrimFunc)}
    called: list[tuple[int, ...]] = []

    def visit(call: Any) -> None:
        if call.op == _CALL_TIR and own.get(call.args[0]):
            called.append(own[call.args[0]])

    tvm_ffi.structural_walk(kernels["main"].body, (relax.Call, visit))
    return tuple(called)


_CALL_TIR = tvm.ir.Op.get("relax.call_tir")


def _buffers(func: PrimFunc) -> tuple[int, ...]:
    """Sizes, outer blocks before those inside them, as code asks for them."""
    found: list[list[int]] = []

    def visit(block: Any) -> None:
        found.append([size_bytes(b) for b in block.alloc_buffers])

    tvm_ffi.structural_walk(compacted(func).body, (SBlock, visit))
    return tuple(size for sizes in reversed(found) for size in sizes if size >= _SMALL_BYTES)
