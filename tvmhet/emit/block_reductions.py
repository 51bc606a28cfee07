"""Schedule a CUDA kernel that is one reduction of rows and nothing else: a block of threads for each row.

Before:  for i, k: m[i] = max(m[i], x[i, k])

After:   blockIdx.x = i; threadIdx.x takes every n-th k, whose maxima are joined by shuffles

dlight gives sums such blocks, and what more kernels follow (softmax); the largest or smallest of a row, and products,
it leaves to one thread each.
"""

from __future__ import annotations

import math
from typing import Any

import tvm

from tvmhet.emit.cpu.blocks import BlockInfo, Schedule, blocks_of, inline_injective, loads_of, uses
from tvmhet.emit.deep_rows import threads_of

_SHORTEST = 32  # a lane of a warp has no element of a shorter row


def block_reduction(func: Any) -> Schedule | None:
    """Schedule a kernel of one reduction along its last axes that nothing follows; None for any other."""
    sch = tvm.s_tir.Schedule(func)
    inline_injective(sch)
    infos = blocks_of(sch)
    if infos is None or len(infos) > 1 or not _suits(sch, infos[0]):
        return None
    (info,) = infos
    loops = sch.get_loops(info.block)
    results, reduced = loops[: info.num_leading], loops[info.num_leading :]
    sch.bind(sch.fuse(*results) if results else sch.add_unit_loop(reduced[0]), "blockIdx.x")
    length = math.prod(axis.extent for axis in info.axes if axis.reduced)
    sch.bind(sch.split(sch.fuse(*reduced), [None, threads_of(length)])[1], "threadIdx.x")
    return sch


def _suits(sch: Schedule, info: BlockInfo) -> bool:
    """Whether it has one result, of long rows whose elements lie one after the other."""
    reduced = info.axes[info.num_leading :]
    stmt = sch.get(info.block)
    if not reduced or not all(axis.reduced for axis in reduced) or len(stmt.writes) > 1:
        return False
    along = any(load.indices and uses(load.indices[-1:], [reduced[-1].var]) for load in loads_of(stmt.body.value))
    return along and math.prod(axis.extent for axis in reduced) >= _SHORTEST
