"""The last rule for CUDA: a thread per element of each block, whatever is inside it.

Before:  for i, j: for k in range(last(i) - first(i)): y[i, j] += x[first(i) + k, j]

After:   blockIdx.x, threadIdx.x = i and j as one; the loop over k, whose extent i decides, in the thread

dlight's fallback wants reductions of constant extent, which those of an adaptive pooling are not. Blocks that launch
threads by themselves, as TVM's sort and scatter operators for CUDA do, stay: the others beside them (the transposed
indices of a scatter) would run on the host, which cannot read a GPU's memory. Blocks of empty tensors stay, too.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx

from tvmhet._tvm import s_tir

_THREADS = 256  # of a block: divides what a multiprocessor of any generation holds (1024, 1536, 2048)


def one_thread_each(func: Any) -> Any:
    """Schedule a kernel of leaf blocks whose outer loops are spatial and of constant extent; None for any other."""
    sch = s_tir.Schedule(func)
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        axes, loops = sch.get(block).iter_vars, sch.get_loops(block)
        if _is_bound(sch, block) or any(a.iter_type == tirx.IterVar.DataPar and _is_zero(a.dom.extent) for a in axes):
            continue
        spatial = [loop for loop, axis in zip(loops, axes, strict=False) if axis.iter_type == tirx.IterVar.DataPar]
        constant = all(isinstance(sch.get(loop).extent, tirx.IntImm) for loop in spatial)
        if len(loops) != len(axes) or spatial != loops[: len(spatial)] or not constant:
            return None
        flat = sch.fuse(*spatial) if spatial else sch.add_unit_loop(loops[0] if loops else block)
        grid, thread = sch.split(flat, [None, _THREADS])
        sch.bind(grid, "blockIdx.x")
        sch.bind(thread, "threadIdx.x")
    return sch


def launches_threads(stmt: Any) -> bool:
    """Whether a statement binds threads by itself."""
    found: list[bool] = []
    attributes = (tirx.AttrStmt, lambda stmt: found.append(stmt.attr_key == "thread_extent"))
    loops = (tirx.For, lambda loop: found.append(loop.kind == tirx.ForKind.THREAD_BINDING))
    tvm_ffi.structural_walk(stmt, (attributes, loops))
    return any(found)


def has_host_blocks(func: Any) -> bool:
    """Whether a function has blocks that neither launch threads nor lie in a loop that does."""
    if not isinstance(func.body, s_tir.SBlockRealize) or func.body.block.name_hint != "root":  # nothing beside
        return False
    sch = s_tir.Schedule(func)
    return not all(_is_bound(sch, block) for block in sch.get_child_blocks(sch.get_sblock("root")))


def _is_bound(sch: Any, block: Any) -> bool:
    loops = [sch.get(loop) for loop in sch.get_loops(block)]
    return launches_threads(sch.get(block).body) or any(x.kind == tirx.ForKind.THREAD_BINDING for x in loops)


def _is_zero(extent: Any) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 0
