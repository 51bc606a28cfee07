"""Two kernels in one function: what the rules for one reduction make of each, one after the other.

    conv2d ─► add ─► clip ─► pad         for ..: t = clip(sums + b)     then    for ..: y = t or 0
    pool ─► reshape ─► matmul ─► add     for ..: t = sums / 49          then    for ..: y = t @ w + b

Rules for reductions write a result where it lies; TVM's fusion lets a padding, a slice or a reshape follow an
activation, though. And an image's mean is read by one product of a few microseconds. Both parts are scheduled as
kernels of their own; what is between them stays in memory. Tried last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvmhet._tvm import SBlock
from tvmhet.emit.cpu.blocks import BlockInfo, CpuTarget, Schedule, blocks_of, costly_producers
from tvmhet.emit.cpu.contraction import contraction
from tvmhet.emit.cpu.injective import injective
from tvmhet.emit.cpu.nests import held, in_order, stages_of
from tvmhet.emit.cpu.rows import rows
from tvmhet.emit.cpu.sliding import sliding
from tvmhet.emit.cpu.windows import windows

_RULES: tuple[Callable[[Any, CpuTarget], Schedule | None], ...] = (injective, sliding, contraction, windows, rows)


def in_turn(func: Any, cpu: CpuTarget) -> Schedule | None:
    """Schedule a kernel of a reduction and moves after what follows it, or of two reductions; None for any other."""
    sch = tvm.s_tir.Schedule(func)
    infos = blocks_of(sch) or ()
    second = _second(infos)
    if second is None or not all(hasattr(sch.get(i.block).body, "value") for i in infos):
        return None
    kept = costly_producers(sch, second.block)
    if len(kept) != 1:
        return None
    func = sch.mod["main"]
    between = sch.get(kept[0]).writes[0].source
    head, tail = _before_and_after(stages_of(func), between)
    if not _reads_only(tail, between, func):
        return None
    *inputs, result = func.params
    parts = [_part(func, head, [*inputs, between]), _part(func, tail, [*inputs, between, result])]
    made = [next(filter(None, (rule(part, cpu) for rule in _RULES)), None) for part in parts]
    if None in made:
        return None
    bodies = [s.mod["main"].body for s in made if s is not None]
    return tvm.s_tir.Schedule(func.with_body(held(in_order(bodies), [between], "root")))


def _second(infos: Sequence[BlockInfo]) -> BlockInfo | None:
    """The block that reads what the first kernel made: the last of a move, or the second reduction."""
    reductions = [i for i in infos if i.is_reduction]
    if len(reductions) == 1 and not infos[-1].is_reduction:
        return infos[-1]
    return reductions[1] if len(reductions) == 2 else None


def _before_and_after(stages: Sequence[Any], between: Any) -> tuple[list[Any], list[Any]]:
    """The loop nests that make a tensor or what it is made of, and the others, each in their order."""
    needed: list[Any] = [between]
    head: list[Any] = []
    tail: list[Any] = []
    for stage in reversed(stages):
        makes = any(w.source.same_as(t) for block in _blocks(stage) for w in block.writes for t in needed)
        (head if makes else tail).insert(0, stage)
        if makes:
            needed += _tensors(stage)
    return head, tail


def _part(func: Any, stages: Sequence[Any], params: Sequence[Any]) -> Any:
    """Return the function of some of a function's loop nests, over `params`."""
    held_there = [b for b in func.body.block.alloc_buffers if not any(b.same_as(p) for p in params)]
    used = [b for b in held_there if any(b.same_as(t) for stage in stages for t in _tensors(stage))]
    body = held(in_order(stages), used, func.body.block.name_hint)
    return tirx.PrimFunc(list(params), body, attrs=func.attrs)


def _reads_only(stages: Sequence[Any], between: Any, func: Any) -> bool:
    """Whether loop nests read of a function's own tensors only those that they make, and `between`."""
    made = [block.writes[0].source for stage in stages for block in _blocks(stage)]
    own = func.body.block.alloc_buffers
    read = [t for stage in stages for t in _tensors(stage) if any(t.same_as(b) for b in own)]
    return all(any(t.same_as(known) for known in (*made, between)) for t in read)


def _blocks(stage: Any) -> list[Any]:
    found: list[Any] = []
    tvm_ffi.structural_walk(stage, (SBlock, found.append))
    return found


def _tensors(stage: Any) -> list[Any]:
    """Every tensor that a loop nest reads or writes."""
    return [t.source for block in _blocks(stage) for t in (*block.reads, *block.writes)]
