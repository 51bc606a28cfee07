"""Schedule a CUDA kernel whose loops must not be fused: a thread per element, the axes on the grid's own axes.

Before:  for i, j, k: y[i, j, k] = x[i, j, (k - 1) // 2]

After:   blockIdx.z = i, blockIdx.y = j, blockIdx.x and threadIdx.x = k; further axes and reductions run in the thread

dlight's rules fuse all loops of a kernel, and TVM then simplifies such an index to another one (`blocks.may_fuse`).
"""

from __future__ import annotations

from typing import Any

import tvm

from tvmhet.emit.cpu.blocks import BlockInfo, Schedule, blocks_of, inline_injective, may_fuse

_THREADS = 256  # of a block: divides what a multiprocessor of any generation holds (1024, 1536, 2048)
_MAX_GRID = 65535  # of blockIdx.y and .z (CUDA C++ programming guide, compute capabilities)


def apart(func: Any) -> Schedule | None:
    """Schedule a kernel whose loops may not be fused; None for any other, and where extents are not known."""
    sch = tvm.s_tir.Schedule(func)
    inline_injective(sch)
    if may_fuse(sch):
        return None
    infos = blocks_of(sch)
    if infos is None:
        return None
    for info in infos:
        _one_thread_per_element(sch, info)
    return sch


def _one_thread_per_element(sch: Schedule, info: BlockInfo) -> None:
    loops = list(zip(sch.get_loops(info.block), info.axes, strict=True))
    spatial = [(loop, axis.extent) for loop, axis in loops if not axis.reduced]
    reduced = [loop for loop, axis in loops if axis.reduced]
    if not spatial:
        spatial = [(sch.add_unit_loop(info.block if not loops else loops[0][0]), 1)]
    last, extent = spatial.pop()
    grid, thread = sch.split(last, [None, min(extent, _THREADS)])
    bound = {"threadIdx.x": thread, "blockIdx.x": grid}
    for name in ("blockIdx.y", "blockIdx.z"):
        if spatial and spatial[-1][1] <= _MAX_GRID:
            bound[name] = spatial.pop()[0]
    inside = [*(loop for loop, _ in spatial), *reduced]
    sch.reorder(*reversed(bound.values()), *inside)
    for name, loop in bound.items():
        sch.bind(loop, name)
