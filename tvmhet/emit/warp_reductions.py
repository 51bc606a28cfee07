"""Schedule a CUDA kernel of few reductions whose operands end in axes of one element: a warp per result.

Before:  for o: for k: s[o] += x[0, k, 0, 0] * w[o, k, 0, 0]
         for o, p: y[o, p] = sigmoid(s[o]) * image[o, p]

After:   blockIdx.x, threadIdx.y = o; threadIdx.x takes every 32nd k, whose sums are added up by shuffles, and p

Gates of one pixel (squeeze-and-excitation) are such, alone or spread over an image. dlight's GEMV took 57 us on an H200
for those of MobileNetV3 over 28 x 28 pixels, of 24 and of 32 channels. It shares the loads of a vector among threads by
its innermost axis, of one element here, so that one thread loads it all; what else takes so long was not looked into.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import tirx

from tvmhet.emit.cpu.blocks import BlockInfo, Schedule, blocks_of, inline_injective

_LANES, _WARPS = 32, 8
_SHORTEST, _MOST_RESULTS = 8, 1 << 14


def warp_reduction(func: Any) -> Schedule | None:
    """Schedule a kernel of one reduction, along an axis after which there are but single elements; None for others."""
    sch = tvm.s_tir.Schedule(func)
    inline_injective(sch)
    infos = blocks_of(sch)
    if infos is None or not _suits(sch, infos):
        return None
    first, last = infos[0], infos[-1]
    loops = sch.get_loops(last.block)
    results, beside = loops[: first.num_leading], loops[first.num_leading :]
    if first is not last:
        sch.compute_at(first.block, results[-1])
        sch.set_scope(first.block, 0, "local")
        if beside:
            sch.bind(sch.split(sch.fuse(*beside), [None, _LANES])[1], "threadIdx.x")
    grid, warp = sch.split(sch.fuse(*results), [None, _WARPS])
    sch.bind(grid, "blockIdx.x")
    sch.bind(warp, "threadIdx.y")
    reduced = sch.get_loops(first.block)[-(len(first.axes) - first.num_leading) :]
    sch.bind(sch.split(sch.fuse(*reduced), [None, _LANES])[1], "threadIdx.x")
    return sch


def _suits(sch: Schedule, infos: tuple[BlockInfo, ...]) -> bool:
    first, *after = infos
    if not first.is_reduction or len(after) > 1 or any(info.is_reduction for info in after):
        return False
    lead = [axis.extent for axis in first.axes[: first.num_leading]]
    length = math.prod(axis.extent for axis in first.axes[first.num_leading :])
    in_order = math.prod(lead) > 1 and all(axis.reduced for axis in first.axes[first.num_leading :])
    beside = all([axis.extent for axis in info.axes[: len(lead)]] == lead for info in after)
    few = math.prod(lead) <= _MOST_RESULTS and length >= _SHORTEST
    return in_order and beside and few and all(_ends_in_one(read.source) for read in sch.get(first.block).reads)


def _ends_in_one(buffer: Any) -> bool:
    extent = buffer.shape[-1]
    return len(buffer.shape) > 1 and isinstance(extent, tirx.IntImm) and int(extent) == 1
