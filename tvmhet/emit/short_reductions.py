"""Schedule a CUDA kernel that reduces few elements to each of many results: a thread per result.

Before:  for i, j: for k: s[i, j] += x[i, j + k]
         for i, j: y[i, j] = s[i, j] / 9

After:   blockIdx.x, threadIdx.x = i and j as one; s is the thread's own, the loop over k and the division are in it

dlight gives each result a block of threads, of which all but a few wait: by the mean of 3 x 3 windows of a padded image
Inception-v3 at batch 8 took three times as long on an H200.
"""

from __future__ import annotations

import math
from typing import Any

import tvm

from tvmhet.emit.cpu.blocks import BlockInfo, Schedule, blocks_of, inline_injective

_THREADS = 256  # of a block: divides what a multiprocessor of any generation holds (1024, 1536, 2048)
_LONGEST = 64  # of a reduction by one thread
_RESULTS_PER_ELEMENT = 128  # fewer results than so many for each element of one keep too few threads busy


def short_reduction(func: Any) -> Schedule | None:
    """Schedule a kernel of one short reduction and what follows it element by element; None for any other."""
    sch = tvm.s_tir.Schedule(func)
    inline_injective(sch)
    infos = blocks_of(sch)
    if infos is None or not _is_short(infos):
        return None
    last = infos[-1]
    loops = sch.get_loops(last.block)[: last.num_leading]
    if len(infos) == 2:
        sch.compute_at(infos[0].block, loops[-1])
        sch.set_scope(infos[0].block, 0, "local")
    grid, thread = sch.split(sch.fuse(*loops), [None, _THREADS])
    sch.bind(grid, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    reduced = sch.get_loops(infos[0].block)[-sum(axis.reduced for axis in infos[0].axes) :]
    sch.decompose_reduction(infos[0].block, reduced[0])
    return sch


def _is_short(infos: tuple[BlockInfo, ...]) -> bool:
    """Whether the kernel is a short reduction of many results, or one and a block of as many results."""
    first, *after = infos
    if not first.is_reduction or len(after) > 1 or any(info.is_reduction for info in after):
        return False
    length = math.prod(axis.extent for axis in first.axes if axis.reduced)
    results = math.prod(axis.extent for axis in first.axes[: first.num_leading])
    in_order = all(axis.reduced for axis in first.axes[first.num_leading :]) and first.num_leading > 0
    as_many = all(math.prod(axis.extent for axis in info.axes) == results for info in after)
    return in_order and as_many and length <= _LONGEST and results >= _RESULTS_PER_ELEMENT * length
