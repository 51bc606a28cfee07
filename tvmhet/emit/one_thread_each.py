"""The last rule for CUDA: a thread per element of each block, whatever is inside it.

Before:  for i, j: for k in range(last(i) - first(i)): y[i, j] += x[first(i) + k, j]

After:   blockIdx.x, threadIdx.x = i and j as one; the loop over k, whose extent i decides, in the thread

dlight's fallback wants reductions of constant extent, which those of an adaptive pooling are not.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from tvmhet._tvm import s_tir

_THREADS = 256  # of a block: divides what a multiprocessor of any generation holds (1024, 1536, 2048)


def one_thread_each(func: Any) -> Any:
    """Schedule a kernel of leaf blocks whose outer loops are spatial and of constant extent; None for any other."""
    sch = s_tir.Schedule(func)
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        axes, loops = sch.get(block).iter_vars, sch.get_loops(block)
        spatial = [loop for loop, axis in zip(loops, axes, strict=False) if axis.iter_type == tirx.IterVar.DataPar]
        constant = all(isinstance(sch.get(loop).extent, tirx.IntImm) for loop in spatial)
        if len(loops) != len(axes) or spatial != loops[: len(spatial)] or not constant:
            return None
        flat = sch.fuse(*spatial) if spatial else sch.add_unit_loop(loops[0] if loops else block)
        grid, thread = sch.split(flat, [None, _THREADS])
        sch.bind(grid, "blockIdx.x")
        sch.bind(thread, "threadIdx.x")
    return sch
