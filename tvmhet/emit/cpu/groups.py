"""Grouped convolutions as a batch of products: the groups become an axis of their own.

Before:  for o, y, x, c, ry, rx:     s[o, y, x] += d[o // 16 * 8 + c, y + ry, x + rx] * w[o, c, ry, rx]
After:   for g, o, y, x, c, ry, rx:  s[g * 16 + o, y, x] += d[g * 8 + c, y + ry, x + rx] * w[g * 16 + o, c, ry, rx]

The channels of a group are then rows of a product like any other's, so that `sliding` and `contraction` take the
kernel. Groups of one channel stay as they are, for `sliding` by channel and `windows`.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi

from tvmhet.emit.cpu.blocks import Axis, BlockInfo, Schedule, blocks_of, loads_of

_MIN_CHANNELS = 2  # of a group: with one, a convolution is depthwise, and needs no axis of its own


def groups_apart(sch: Schedule, infos: tuple[BlockInfo, ...], place: int) -> tuple[Schedule, tuple[BlockInfo, ...]]:
    """Split the axis that loads of the reduction at `place` divide, there and in the block after it, if there is one.

    Return the schedule and its blocks anew; as they are where no axis is divided.
    """
    if not hasattr(sch.get(infos[place].block).body, "value"):  # several results at once, as of a norm
        return sch, infos
    spatial = [a for a in infos[place].axes if not a.reduced]
    sizes = [group_size(sch, infos[place], axis) for axis in spatial]
    if not any(sizes):
        return sch, infos
    position, size = next((i, s) for i, s in enumerate(sizes) if s)
    block, indices = infos[place].block, sch.get(infos[place].block).body.indices
    own = [i for i, index in enumerate(indices) if spatial[position].var.same_as(index)]
    if len(own) == 1 and len(infos) > place + 1:  # TVM does not find a tile of g * 16 + o again in the block after it
        sch.transform_layout(block, ("write", 0), split_axis(own[0], size, len(indices)))
    for info in infos[place : place + 2]:
        if [a.extent for a in info.axes[: len(spatial)]] == [a.extent for a in spatial]:
            sch.transform_block_layout(info.block, split_axis(position, size, len(info.axes)))
    sch = tvm.s_tir.Schedule(tvm.s_tir.transform.StmtSimplify()(sch.mod))  # (16 * g + o) // 16 is g
    return sch, blocks_of(sch) or ()


def split_axis(position: int, size: int, rank: int) -> Any:
    """The map that makes one of `rank` indices two: which part of `size`, and where in it."""

    def split(*axes: Any) -> list[Any]:
        return [*axes[:position], axes[position] // size, axes[position] % size, *axes[position + 1 :]]

    return tvm.tirx.IndexMap.from_func(split, ndim=rank)


def group_size(sch: Schedule, info: BlockInfo, axis: Axis) -> int:
    """By what a load of the block divides an axis; 0 if by nothing, or by what does not make groups worth it.

    A load that reads the remainder, too, reads a weight in panels (`ir/transform/pack_weights.py`), not groups.
    """
    found: set[int] = set()

    def visit(division: Any) -> None:
        if axis.var.same_as(division.a) and hasattr(division.b, "value"):
            found.add(0 if isinstance(division, tvm.tirx.FloorMod) else int(division.b.value))

    for load in loads_of(sch.get(info.block).body.value):
        tvm_ffi.structural_walk(load.indices, ((tvm.tirx.FloorDiv, tvm.tirx.FloorMod), visit))
    (size,) = found if len(found) == 1 else (0,)
    return size if _MIN_CHANNELS <= size < axis.extent and axis.extent % size == 0 else 0
