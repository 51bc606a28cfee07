"""Reductions beside a contiguous axis: pooling, depthwise convolution, one row times a matrix, sums over outer axes.

Before:  for c, y, x, ry, rx: s[c, y, x] += p[c, y + ry, x + rx] * w[c, ry, rx]
         for c, y, x:         o[c, y, x] = max(s[c, y, x] + b[c], 0)

After:   for c, y tile, x tile:  tile[y, vector of x] = 0
                                 for ry, rx, y: tile[y] += p[c, y + ry, vector] * w[c, ry, rx]      in registers
                                 o = max(tile + b, 0)

Results along the innermost spatial axis form the vectors, so no result is split and additions keep their order. Several
rows of results at a time keep as many sums in flight as hide an addition's latency, and share what they read.

A single row of results over a long reduction (a vector times a matrix) reads its matrix from memory, which is fast in
the order in which it lies there. So the row of sums stays in the cache and some rows of the matrix are added at a time:

           for k tile:  for n:  s[n] += x[k] * w[k, n] + x[k + 1] * w[k + 1, n] + ...

Windows of more than two axes that move by two sum whole rows, of which LLVM makes vectors.
"""

from __future__ import annotations

import math
from typing import Any

import tvm

from tvmhet.emit.cpu.blocks import (
    BlockInfo,
    CpuTarget,
    Schedule,
    around_reduction,
    loads_of,
    parallelize,
    stride_along,
    uses,
    vector_length,
)
from tvmhet.emit.cpu.injective import schedule_spatial

VECTORS = 8  # registers of results: enough sums in flight to hide the latency of an addition
_MAX_UNROLLED = 64  # steps of a window that are written out
_LONG = 32  # steps of one axis: more are no window's
_WINDOW_AXES = 2  # of a pooling that is left to LLVM where it steps; a convolution that steps is no window here
_MATRIX_ROWS = 8  # of a matrix that are added to the sums at a time
_ROW_BYTES = 16 << 10  # of sums that stay in the first cache


def windows(func: Any, cpu: CpuTarget) -> Schedule | None:
    """Schedule a kernel with one reduction, whose operands are not reduced along their contiguous axis; else None."""
    found = around_reduction(func)
    if found is None:
        return None
    sch, infos, place = found
    info = infos[place]
    step = _step(sch, info)
    if len(infos) - place > 2 or step is None:
        return None
    final = infos[place + 1] if len(infos) > place + 1 else None
    spatial = [a for a in info.axes if not a.reduced]
    if final is not None and [a.extent for a in final.axes] != [a.extent for a in spatial]:
        return None
    for producer in infos[:place]:
        schedule_spatial(sch, producer, cpu)
    cpu = cpu.for_products([info])
    if step > 1:
        if len([a for a in info.axes if a.reduced and a.extent > 1]) <= _WINDOW_AXES:
            return None
        one_row_at_a_time(sch, info, final, cpu)
    elif _is_one_long_row(info):
        _some_matrix_rows_at_a_time(sch, info, final, cpu)
    else:
        one_vector_at_a_time(sch, info, final, cpu)
    return sch


def _step(sch: Schedule, info: BlockInfo) -> int | None:
    """In which steps operands are read along the innermost spatial axis, which no long reduction may share; else None.

    LLVM makes better code of a step of two from the plain loop than TVM's vectors of gathered elements are.
    """
    spatial = [a for a in info.axes if not a.reduced]
    long = [a.var for a in info.axes if a.reduced and a.extent > _LONG]
    body = sch.get(info.block).body
    if not spatial or not hasattr(body, "value"):  # several results at once, as of a norm
        return None
    own = body.buffer
    loads = [x for x in loads_of(body.value) if x.indices and not x.source.same_as(own)]
    vectors = [x.indices[-1] for x in loads if uses(x.indices[-1], [spatial[-1].var])]
    steps = [stride_along(i, spatial[-1].var) for i in vectors]
    if not vectors or any(uses(i, long) for i in vectors) or None in steps:
        return None
    return max(step for step in steps if step is not None)


def _is_one_long_row(info: BlockInfo) -> bool:
    *outer, _ = [a.extent for a in info.axes if not a.reduced]
    reduced = [a.extent for a in info.axes if a.reduced]
    return math.prod(outer) == 1 and len(reduced) == 1 and reduced[0] > _LONG


def _some_matrix_rows_at_a_time(sch: Schedule, info: BlockInfo, final: BlockInfo | None, cpu: CpuTarget) -> None:
    """LLVM makes vectors of the row: its extent may be any."""
    block = info.block
    loops = list(sch.get_loops(block))
    *outer, row = [loop for loop, axis in zip(loops, info.axes, strict=True) if not axis.reduced]
    (k,) = [loop for loop, axis in zip(loops, info.axes, strict=True) if axis.reduced]
    item_bytes = int(tvm.DataType(str(sch.get(block).writes[0].source.dtype)).bits) // 8
    extent = int(sch.get(row).extent)
    tile, row = sch.split(row, [None, _row_length(extent, _ROW_BYTES // item_bytes, cpu)])
    k_outer, k_inner = sch.split(k, [None, vector_length(int(sch.get(k).extent), 1, _MATRIX_ROWS)])
    sch.reorder(*outer, tile, k_outer, row, k_inner)
    if final is not None:
        sch.set_scope(block, 0, "local")
        sch.reverse_compute_at(final.block, tile)
    sch.unroll(k_inner)
    parallelize(sch, [*outer, tile], cpu)
    sch.decompose_reduction(block, k_outer)


def _row_length(extent: int, most: int, cpu: CpuTarget) -> int:
    """The longest divisor of a row that fits the cache and leaves each core a part; the whole row if none is near."""
    limit = max(1, min(most, -(-extent // cpu.num_cores)))
    found = max(d for d in range(1, limit + 1) if extent % d == 0)
    return found if 4 * found > limit else extent


def one_row_at_a_time(sch: Schedule, info: BlockInfo, final: BlockInfo | None, cpu: CpuTarget) -> None:
    """LLVM makes vectors of the row, whose operands lie in steps of two or more; the sums stay in the first cache."""
    block = info.block
    tail = final.block if final is not None else sch.cache_write(block, 0, "local")
    loops = list(sch.get_loops(block))
    *outer, row = [loop for loop, axis in zip(loops, info.axes, strict=True) if not axis.reduced]
    reduced = [loop for loop, axis in zip(loops, info.axes, strict=True) if axis.reduced]
    sch.reorder(*outer, *reduced, row)
    if final is not None:
        sch.set_scope(block, 0, "local")
    sch.reverse_compute_at(tail, outer[-1])
    parallelize(sch, outer, cpu)
    sch.decompose_reduction(block, reduced[0])


def one_vector_at_a_time(sch: Schedule, info: BlockInfo, final: BlockInfo | None, cpu: CpuTarget) -> None:
    block = info.block
    tail = final.block if final is not None else sch.cache_write(block, 0, "local")
    loops = list(sch.get_loops(block))
    *outer, row = [loop for loop, axis in zip(loops, info.axes, strict=True) if not axis.reduced]
    reduced = [loop for loop, axis in zip(loops, info.axes, strict=True) if axis.reduced]
    is_short = math.prod(a.extent for a in info.axes if a.reduced) <= _MAX_UNROLLED
    lanes = cpu.lanes(str(sch.get(block).writes[0].source.dtype))
    extent = int(sch.get(row).extent)
    length = vector_length(extent, lanes, VECTORS * lanes)
    row, inner = sch.split(row, [None, length if length > 1 else extent])
    beside = []
    if length > 1 and is_short and len(outer) > 1:  # a row has too few vectors to hide the latency of an addition
        most = VECTORS // math.ceil(length / lanes)
        outer[-1], rows = sch.split(outer[-1], [None, vector_length(int(sch.get(outer[-1]).extent), 1, most)])
        beside.append(rows)
    sch.reorder(*outer, row, *reduced, *beside, inner)
    if final is not None:
        sch.set_scope(block, 0, "local")
    sch.reverse_compute_at(tail, row)
    if length > 1:
        for lane in (inner, sch.get_loops(tail)[-1]):  # LLVM would make 8 lanes of 14 results, and leave 6 alone
            _vectorize(sch, lane, length, lanes)
    for loop in (*beside, *(reduced if is_short else ())):
        sch.unroll(loop)
    parallelize(sch, [*outer, row], cpu)
    sch.decompose_reduction(block, reduced[0])


def _vectorize(sch: Schedule, loop: Any, length: int, lanes: int) -> None:
    """Make a loop of `length` one vector, or several registers if it is as many as whole ones."""
    if length % lanes == 0 and length > lanes:
        unrolled, loop = sch.split(loop, [None, lanes])
        sch.unroll(unrolled)
    sch.vectorize(loop)
