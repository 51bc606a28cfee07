"""Schedule a CUDA kernel whose rows have several axes, as those of group and instance norms: a block for each row.

Before:  for g, k, p: s[g] += x[g * 2 + k, p]
         for c, p:    y[c, p] = x[c, p] - s[c // 2]

After:   blockIdx.x = g, threadIdx.x = t:  s in shared memory, by all threads of the block
                                           for the row's elements k * p as one, in turns of the threads: y

dlight does one row after the other in one block where the result has channels and not groups, and gives threads the
last axis alone, of which an image has few.
"""

from __future__ import annotations

import math
from typing import Any

import tvm

from tvmhet.emit.cpu.blocks import BlockInfo, Schedule, blocks_of, inline_injective
from tvmhet.emit.cpu.rows_of_groups import rows_of_groups

_WARP = 32
_MOST_THREADS = 1024  # of a block, on every generation
_ELEMENTS_EACH = 4  # of a row, where it has as many


def deep_rows(func: Any) -> Schedule | None:
    """Schedule a kernel of reductions of rows with several axes and what follows them; None for any other."""
    sch = tvm.s_tir.Schedule(func)
    inline_injective(sch)
    sch = rows_of_groups(sch)
    infos = blocks_of(sch)
    if infos is None or not _are_deep(infos):
        return None
    *reductions, last = infos
    leading = reductions[0].num_leading
    threads = threads_of(math.prod(axis.extent for axis in last.axes[leading:]))
    row = sch.fuse(*sch.get_loops(last.block)[:leading])
    sch.bind(row, "blockIdx.x")
    for info in reversed(reductions):
        sch.compute_at(info.block, row, preserve_unit_loops=True)
        sch.set_scope(info.block, 0, "shared")
    for info in infos:
        own = sch.get_loops(info.block)[1:]
        _, thread = sch.split(sch.fuse(*own), [None, threads])
        sch.bind(thread, "threadIdx.x")
    return sch


def threads_of(length: int) -> int:
    """Return how many threads share a row: whole warps, as many as give each thread some of its elements."""
    return min(_MOST_THREADS, math.ceil(length / (_ELEMENTS_EACH * _WARP)) * _WARP)


def _are_deep(infos: tuple[BlockInfo, ...]) -> bool:
    """Whether all blocks but the last reduce the same rows, each of several axes, and the last has them, too."""
    *reductions, last = infos
    if not reductions or last.is_reduction or not all(info.is_reduction for info in reductions):
        return False
    rows = [axis.extent for axis in reductions[0].axes[: reductions[0].num_leading]]
    shapes = [[axis.extent for axis in info.axes[: len(rows)]] for info in infos]
    inner = [info.axes[len(rows) :] for info in reductions]
    same = all(shape == rows for shape in shapes) and len({len(axes) for axes in inner}) == 1
    return bool(rows) and same and all(a.reduced for axes in inner for a in axes) and len(last.axes) > len(rows) + 1
