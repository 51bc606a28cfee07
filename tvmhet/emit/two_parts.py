"""A kernel cut in two, each part a function of its own to schedule, and put together again.

    main(x, w, b, y):  t = conv(x, w);  u = t + b;  y = pad(u)   ──►   head(x, w, b, u):     u = conv(x, w) + b
                                                                       tail(x, w, b, u, y):  y = pad(u)

What is between them is held by the kernel, in memory. It is cut after what follows a reduction where it lies, or before
a second reduction; and behind a reduction whose results are computed with at other places than their own, as those of a
transposed convolution are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvmhet._tvm import SBlock, TensorLoad
from tvmhet.emit.cpu.blocks import Block, BlockInfo, Schedule, blocks_of, costly_producers, loads_of
from tvmhet.emit.cpu.nests import held, in_order, stages_of


@dataclass(frozen=True, slots=True)
class TwoParts:
    """The two functions, and the tensor that the first one hands to the second one."""

    func: Any
    head: Any
    tail: Any
    between: Any

    def joined(self, head: Any, tail: Any) -> Any:
        """Return the kernel again, of two functions that are scheduled."""
        return self.func.with_body(held(in_order([head.body, tail.body]), [self.between], "root"))


def two_parts(func: Any) -> TwoParts | None:
    """Cut a kernel of a reduction and moves after what follows it, or of two reductions; None for any other."""
    sch = tvm.s_tir.Schedule(func)
    infos = blocks_of(sch) or ()
    second = _second(infos)
    if second is None or not all(hasattr(sch.get(i.block).body, "value") for i in infos):
        return None
    kept = _summed_elsewhere(sch, infos) or costly_producers(sch, second.block)
    return _cut(sch, kept[0]) if len(kept) == 1 else None


def behind_reduction(func: Any) -> TwoParts | None:
    """Cut a kernel behind its reduction; None where the results are computed with where they lie."""
    sch = tvm.s_tir.Schedule(func)
    kept = _summed_elsewhere(sch, blocks_of(sch) or ())
    return _cut(sch, kept[0]) if kept else None


def _second(infos: Sequence[BlockInfo]) -> BlockInfo | None:
    """The block that reads what the first kernel made: the last of a move, or the second reduction."""
    reductions = [i for i in infos if i.is_reduction]
    if len(reductions) == 1 and not infos[-1].is_reduction:
        return infos[-1]
    return reductions[1] if len(reductions) == 2 else None


def _summed_elsewhere(sch: Schedule, infos: Sequence[BlockInfo]) -> list[Block]:
    """The one reduction of a kernel, if a block computes with its results at other places than their own."""
    found = [i for i in infos if i.is_reduction]
    if len(found) != 1 or not hasattr(sch.get(found[0].block).body, "value"):
        return []
    made = sch.get(found[0].block).body.buffer
    bodies = [sch.get(c).body for c in sch.get_consumers(found[0].block)]
    values = [b.value for b in bodies if hasattr(b, "value") and not isinstance(b.value, TensorLoad)]
    loads = [load for value in values for load in loads_of(value) if load.source.same_as(made)]
    elsewhere = any(not _is_plain(i) for load in loads for i in load.indices)
    return [found[0].block] if elsewhere else []


def _is_plain(index: Any) -> bool:
    """Whether an index is an axis or a number."""
    return isinstance(index, tirx.Var | tirx.IntImm)


def _cut(sch: Schedule, last: Block) -> TwoParts | None:
    """Cut a kernel behind a block; None where what comes later reads more of what came before than its result."""
    func = sch.mod["main"]
    between = sch.get(last).writes[0].source
    head, tail = _before_and_after(stages_of(func), between)
    if not _reads_only(tail, between, func):
        return None
    *inputs, result = func.params
    return TwoParts(func, _part(func, head, [*inputs, between]), _part(func, tail, [*inputs, between, result]), between)


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
