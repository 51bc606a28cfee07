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
    merged = merged_axes(sch, len(infos[0].axes))
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
    """Whether the block is large, no row ends inside a vector, and each load is a vector or of one value."""
    count = math.prod(axis.extent for axis in info.axes)
    if count < _FEWEST or info.axes[-1].extent % _LANES:
        return False
    body = sch.get(info.block).body
    if not isinstance(body, tirx.BufferStore) or conditions_of(body):
        return False
    every = loads_of(body)
    tensors = [body.buffer, *(load.source for load in every)]
    place = {axis.var: i for i, axis in enumerate(info.axes) if axis.extent > 1}
    return (
        all(str(tensor.dtype) in _DTYPES for tensor in tensors)
        and _in_order(body.indices, place) == len(place)
        and all(_in_order(load.indices, place) is not None for load in every)
    )


def _in_order(indices: Any, place: dict[Any, int]) -> int | None:
    """How many axes of the result the indices are, one after another; None if they are anything else."""
    found: list[int] = []
    for index in indices:
        if isinstance(index, tirx.IntImm):
            continue
        at = next((i for var, i in place.items() if var.same_as(index)), None)
        if at is None:
            return None
        found.append(at)
    return len(found) if found == sorted(set(found)) else None
