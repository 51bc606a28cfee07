"""Schedule a CUDA kernel that goes element by element: a thread takes four values that lie side by side.

Before:  for i, j: y[i, j] = relu(x[i, j] + b[i])

After:   blockIdx.x, threadIdx.x, v = i and j as one; v vectorized: x and y are read and written 16 bytes at a time

Axes along which every operand moves as along one are one, so that a vector ends where the pixels of a channel do. What
reads in another order than it writes is left to dlight's rules: a vector of it would be four loads.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import tirx

from tvmhet.emit.cpu.blocks import BlockInfo, Schedule, blocks_of, conditions_of, inline_injective, loads_of
from tvmhet.emit.cpu.merged_axes import merged_axes

_THREADS, _LANES = 256, 4
_FEWEST = 1 << 18  # values: with fewer there are too few threads to hide what a load takes
_DTYPES = frozenset({"float32", "float16", "bfloat16", "int32"})  # of 4 lanes CUDA has a type, and TVM uses it rightly


def vectors(func: Any) -> Schedule | None:
    """Schedule a kernel of one block that reads what it writes, element by element; None for any other."""
    sch = tvm.s_tir.Schedule(func)
    inline_injective(sch)
    infos = blocks_of(sch)
    if infos is None or len(infos) != 1 or infos[0].is_reduction:
        return None
    merged = merged_axes(sch, range(len(infos[0].axes)))
    if merged is None:
        return _scheduled(sch)
    done = _scheduled(tvm.s_tir.Schedule(merged.func))
    return None if done is None else merged.restored(done)


def _scheduled(sch: Schedule) -> Schedule | None:
    (info,) = blocks_of(sch) or ()
    if not _suits(sch, info):
        return None
    block, result = info.block, sch.cache_write(info.block, 0, "local")
    whole = [i for i, load in enumerate(sch.get(block).reads) if _is_whole(load.source, info)]
    operands = [sch.cache_read(block, i, "local") for i in whole]
    *outer, last = sch.get_loops(block)
    vector, lane = sch.split(last, [None, _LANES])
    grid, thread = sch.split(sch.fuse(*outer, vector), [None, _THREADS])
    sch.bind(grid, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    sch.unroll(lane)
    for operand in operands:
        sch.compute_at(operand, thread)
        sch.vectorize(sch.get_loops(operand)[-1])
    sch.reverse_compute_at(result, thread)
    sch.vectorize(sch.get_loops(result)[-1])
    return sch


def _is_whole(buffer: Any, info: BlockInfo) -> bool:
    """Whether an operand has as many elements as the result."""
    return math.prod(int(e) for e in buffer.shape) == math.prod(axis.extent for axis in info.axes)


def _suits(sch: Schedule, info: BlockInfo) -> bool:
    """Whether the block is large, no row ends inside a vector, and each tensor is read in one place, in order."""
    count = math.prod(axis.extent for axis in info.axes)
    if count < _FEWEST or info.axes[-1].extent % _LANES:
        return False
    body = sch.get(info.block).body
    if not isinstance(body, tirx.BufferStore) or conditions_of(body):
        return False
    place = {axis.var: i for i, axis in enumerate(info.axes) if axis.extent > 1}
    pairs = [(body.buffer, body.indices), *((load.source, load.indices) for load in loads_of(body))]
    where = [(tensor, _where(indices, place)) for tensor, indices in pairs]
    return (
        all(str(tensor.dtype) in _DTYPES and found is not None for tensor, found in where)
        and [i for i in where[0][1] or () if i >= 0] == sorted(place.values())
        and all(found == other for a, found in where for b, other in where if a.same_as(b))
    )


def _where(indices: Any, place: dict[Any, int]) -> tuple[int, ...] | None:
    """The axes of the result that indices are, one after another, constants as -1 - c; None if they are anything else.

    A tensor that is read at two places, as in x - x[:, :1], would be held from one to the other.
    """
    found: list[int] = []
    for index in indices:
        if isinstance(index, tirx.IntImm):
            found.append(-1 - int(index))
            continue
        at = next((i for var, i in place.items() if var.same_as(index)), None)
        if at is None:
            return None
        found.append(at)
    axes = [i for i in found if i >= 0]
    return tuple(found) if axes == sorted(set(axes)) else None
