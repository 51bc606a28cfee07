"""Rows that are groups of channels: the result of a group norm gets the axis that its sums have.

Before:  for g, k, p: s[g] += x[g * 2 + k, p]          After:  for g, k, p: s[g] += x[g * 2 + k, p]
         for c, p:    y[c, p] = x[c, p] - s[c // 2]            for g, k, p: y[g * 2 + k, p] = x[g * 2 + k, p] - s[g]
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi

from tvmhet._tvm import Analyzer, SBlock, access_regions
from tvmhet.emit.cpu.blocks import Schedule, blocks_of, loads_of, num_reductions
from tvmhet.emit.cpu.groups import group_size, split_axis


def rows_of_groups(sch: Schedule) -> Schedule:
    """Split the channels of the last block, where what it reads divides them; the schedule as it is where nothing does.

    What follows the norm is inlined before.
    """
    *_, last = blocks_of(sch) or (None,)
    if last is None or last.is_reduction or num_reductions(sch.mod["main"]) == 0:
        return sch
    sizes = [group_size(sch, last, axis) for axis in last.axes]
    if sum(map(bool, sizes)) != 1:
        return sch
    position, size = next((i, n) for i, n in enumerate(sizes) if n)
    sch.transform_block_layout(last.block, split_axis(position, size, len(last.axes)))
    return tvm.s_tir.Schedule(_with_short_indices(sch.mod["main"]))


def _with_short_indices(func: Any) -> Any:
    """Simplify divisions by what the axes of their block range over, which TVM's pass does not: (2 g + k) // 2 is g."""

    def of_block(block: Any) -> Any:
        if block.init is not None or not block.iter_vars:
            return block
        analyzer = Analyzer()
        for var in block.iter_vars:
            analyzer.bind(var.var, var.dom)
        body = tvm_ffi.structural_map(block.body, (tvm.tirx.FloorDiv, analyzer.simplify))
        used = {x.source: x.source for x in (*loads_of(body), *block.writes)}
        reads, writes, _ = access_regions(SBlock(block.iter_vars, [], [], block.name_hint, body), used)
        return SBlock(block.iter_vars, reads, writes, block.name_hint, body)

    return func.with_body(tvm_ffi.structural_map(func.body, (SBlock, of_block)))
