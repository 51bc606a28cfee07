"""Two kernels in one function: what the rules for one reduction make of each, one after the other.

    conv2d ─► add ─► clip ─► pad         for ..: t = clip(sums + b)     then    for ..: y = t or 0
    pool ─► reshape ─► matmul ─► add     for ..: t = sums / 49          then    for ..: y = t @ w + b

Rules for reductions write a result where it lies; TVM's fusion lets a padding, a slice or a reshape follow an
activation, though. And an image's mean is read by one product of a few microseconds. Both parts are scheduled as
kernels of their own; what is between them stays in memory. Tried last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm

from tvmhet.emit.cpu.blocks import CpuTarget, Schedule
from tvmhet.emit.cpu.contraction import contraction
from tvmhet.emit.cpu.injective import injective
from tvmhet.emit.cpu.rows import rows
from tvmhet.emit.cpu.sliding import sliding
from tvmhet.emit.cpu.windows import windows
from tvmhet.emit.two_parts import two_parts

_RULES: tuple[Callable[[Any, CpuTarget], Schedule | None], ...] = (injective, sliding, contraction, windows, rows)


def in_turn(func: Any, cpu: CpuTarget) -> Schedule | None:
    """Schedule a kernel of a reduction and moves after what follows it, or of two reductions; None for any other."""
    parts = two_parts(func)
    if parts is None:
        return None
    head, tail = (_scheduled(part, cpu) for part in (parts.head, parts.tail))
    return tvm.s_tir.Schedule(parts.joined(head, tail)) if head and tail else None


def _scheduled(part: Any, cpu: CpuTarget) -> Any:
    made = next(filter(None, (rule(part, cpu) for rule in _RULES)), None)
    return None if made is None else made.mod["main"]
