"""Reductions along the innermost axes, softmax and normalisations: one row at a time, every step of it in the cache.

Before:  for i, k: m[i] = max(m[i], x[i, k])          After:  for i:  m in vectors of k, then m of its lanes
         for i, k: e[i, k] = exp(x[i, k] - m[i])                      e of row i in vectors
         for i, k: s[i] += e[i, k]                                    s in vectors, then s of its lanes
         for i, k: y[i, k] = e[i, k] / s[i]                           y of row i in vectors

All blocks share the leading axes, which become one loop, parallel if there are cores. A reduction is split (rfactor)
into as many partial results as fit four registers, so the order of its additions differs from the plain loop's. An
extent without a fitting divisor (197) is first cut into whole vectors and a rest, see `remainder.py`.

A transposed operand is laid out by rows first, some at a time, so that they are still in the cache when they are read:
as many as whole squares can be turned of, see `merged_axes.py` and `transposing.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tvm

from tvmhet._tvm import TensorLoad
from tvmhet.emit.cpu.blocks import (
    BlockInfo,
    CpuTarget,
    Schedule,
    blocks_of,
    inline_injective,
    is_output,
    loads_of,
    long_indices,
    may_fuse,
    num_reductions,
    parallelize,
    reduces,
    uses,
    vector_length,
    vector_lengths,
)
from tvmhet.emit.cpu.injective import tile
from tvmhet.emit.cpu.merged_axes import merged_axes
from tvmhet.emit.cpu.reciprocals import reciprocals
from tvmhet.emit.cpu.remainder import PARTIAL, REST, cut_remainders
from tvmhet.emit.cpu.rows_of_groups import rows_of_groups
from tvmhet.emit.cpu.transposing import rows_at_a_time, steps_of, turned_moves

_VECTORS = 4  # registers of partial results
_CACHED_BYTES = 256 << 10  # of rows that are laid out
_FLOAT_BYTES = 4
_SERIAL = 4  # lanes that are added up one by one


def rows(func: Any, cpu: CpuTarget) -> Schedule | None:
    """Schedule a kernel whose reductions run over innermost axes; None for any other."""
    if num_reductions(func) == 0:
        return None
    return _merged(func, cpu) or _rows(func, cpu, lay_out=False) or _laid_out(func, cpu)


def _merged(func: Any, cpu: CpuTarget) -> Schedule | None:
    """Schedule such a kernel with neighbouring axes of its rows as one; None where nothing can be merged."""
    sch = tvm.s_tir.Schedule(func)
    inline_injective(sch)
    sch = rows_of_groups(sch)
    infos = blocks_of(sch) or ()
    ends = [len(i.axes) for i in infos]
    return _with_one_axis_of(sch, range(_num_leading(infos), max(ends, default=0)), cpu, lay_out=False)


def _laid_out(func: Any, cpu: CpuTarget) -> Schedule | None:
    """Schedule such a kernel with a block of its own for what moves data to where a reduction reads it."""
    sch = tvm.s_tir.Schedule(func)
    inline_injective(sch, keep=_moves(sch))
    leading = range(_num_leading(blocks_of(sch) or ()))
    return _with_one_axis_of(sch, leading, cpu, lay_out=True) or _rows(func, cpu, lay_out=True)


def _num_leading(infos: Sequence[BlockInfo]) -> int:
    return min((i.num_leading for i in infos if i.is_reduction), default=0)


def _with_one_axis_of(sch: Schedule, places: range, cpu: CpuTarget, *, lay_out: bool) -> Schedule | None:
    """Schedule a kernel whose axes at `places` are one where they move as one; None where none do."""
    merged = merged_axes(sch, places) if len(places) > 1 else None
    made = None if merged is None else _rows(merged.func, cpu, lay_out=lay_out)
    return None if merged is None or made is None else merged.restored(made)


def _rows(func: Any, cpu: CpuTarget, *, lay_out: bool) -> Schedule | None:
    """Schedule such a kernel; with `lay_out` what moves data to where a reduction reads it stays a block of its own."""
    sch = tvm.s_tir.Schedule(func)
    inline_injective(sch, keep=_moves(sch) if lay_out else ())
    sch = rows_of_groups(sch)
    infos = blocks_of(sch)
    if infos is None or not any(i.is_reduction for i in infos) or not all(_suits(sch, i) for i in infos):
        return None
    leading_axes = [a for i in infos if i.is_reduction for a in i.axes[: i.num_leading]]
    alone = all(a.extent == 1 for a in leading_axes)  # TVM drops such an axis elsewhere
    if not alone and not _keeps_rows(sch, infos):
        return None
    sch = tvm.s_tir.Schedule(cut_remainders(reciprocals(sch.mod["main"]), cpu))
    infos = blocks_of(sch) or ()
    cpu = cpu.for_elements(infos)
    reductions = [i for i in infos if i.is_reduction]
    leading = 0 if alone else min(i.num_leading for i in reductions)
    if any(len(i.axes) < leading for i in infos):
        return None
    extents = [a.extent for a in infos[-1].axes[:leading]]
    if any([a.extent for a in i.axes[:leading]] != extents for i in infos):
        return None
    moves = _moves(sch) if lay_out else []
    laid_out = [[a.extent for a in i.axes] for i in infos if any(sch.get(i.block).same_as(sch.get(b)) for b in moves)]
    step = _rows_at_a_time(laid_out, leading, cpu) if moves and leading else 0
    for info in infos:
        if not sch.get_loops(info.block):
            sch.add_unit_loop(info.block)  # of a single number: TVM splits no reduction beside a block in no loop
    blocks = [b for info in infos for b in _split_reduction(sch, info, cpu)]
    return _one_row_at_a_time(sch, blocks, moves, leading, step, cpu)


def _keeps_rows(sch: Schedule, infos: Sequence[BlockInfo]) -> bool:
    """Whether blocks read of each other's results their own row alone.

    A product of a mean reads all rows of it, which would be made again for each of the product's.
    """
    leading = min(i.num_leading for i in infos if i.is_reduction)
    made = [w.source for i in infos for w in sch.get(i.block).writes]
    for info in infos:
        row = [a.var for a in info.axes[:leading]]
        for load in loads_of(sch.get(info.block).body):
            if not any(load.source.same_as(m) for m in made):
                continue
            indices = long_indices(load)
            if len(indices) < len(row) or not all(v.same_as(i) for v, i in zip(row, indices, strict=False)):
                return False
    return True


def _moves(sch: Schedule) -> list[Any]:
    """Blocks that a reduction reads and that only copy elements, or are made of parameters that lie across."""
    params = sch.mod["main"].params

    def moves(info: BlockInfo) -> bool:
        value = getattr(sch.get(info.block).body, "value", None)
        if value is None or info.is_reduction:
            return False
        loads = loads_of(value)
        lies_across = any(x.indices and uses(x.indices[:-1], [info.axes[-1].var]) for x in loads)
        made_of_parameters = all(any(x.source.same_as(p) for p in params) for x in loads)
        return isinstance(value, TensorLoad) or (lies_across and made_of_parameters)

    found = [i.block for i in blocks_of(sch) or () if moves(i)]
    return [b for b in found if any(reduces(sch, reader) for reader in sch.get_consumers(b))]


def _suits(sch: Schedule, info: BlockInfo) -> bool:
    """Whether a block has no reduction, or reduces its last axes and reads operands contiguously along the last.

    A pooling window slides along a spatial axis too: LLVM makes better code of it.
    """
    if not info.is_reduction:
        return True
    body = sch.get(info.block).body
    if not all(a.reduced for a in info.axes[info.num_leading :]) or not hasattr(body, "value"):
        return False
    last = info.axes[-1].var
    spatial = [a.var for a in info.axes[: info.num_leading]]
    operands = [long_indices(load) for load in loads_of(body.value)]
    read = [indices for indices in operands if indices and uses(indices, [last])]
    return all(not uses(i[:-1], [last]) and not uses(i[-1], spatial) for i in read)


def _split_reduction(sch: Schedule, info: BlockInfo, cpu: CpuTarget) -> list[Any]:
    """Turn a reduction into partial results by lane and their reduction; return the blocks in order."""
    if not info.is_reduction or not _is_associative(sch, info) or _is_cut(sch, info.block):
        return [info.block]
    loops = sch.get_loops(info.block)
    reduced = loops[info.num_leading :]
    lanes = cpu.lanes(str(sch.get(info.block).writes[0].source.dtype))
    inner = reduced[-1]
    length = _partial_results(info.axes[-1].extent, lanes)
    if length < max(2, lanes // 2) and len(reduced) > 1 and may_fuse(sch):
        inner = sch.fuse(*reduced)
        length = _partial_results(int(sch.get(inner).extent), lanes)
    extent = int(sch.get(inner).extent)
    if length < 2:
        return [info.block]
    partials = []
    position = len(sch.get(info.block).writes[0].source.shape)
    while length > 1:
        if length < extent:
            _, lane = sch.split(inner, [None, length])
            partials.append(sch.rfactor(lane, position))
        extent, inner = length, sch.get_loops(info.block)[-1]
        length = vector_length(length, 1, max(1, length // 4)) if length > _SERIAL else 1
    return [*partials, info.block]


def _partial_results(extent: int, lanes: int) -> int:
    """How many partial results a reduction has: registers that can be halved down to one, where a divisor allows it."""
    lengths = vector_lengths(extent, lanes, _VECTORS * lanes)
    return next((n for n in lengths if n in (4 * lanes, 2 * lanes, lanes)), next(iter(lengths), 1))


def _is_cut(sch: Schedule, block: Any) -> bool:
    """Whether `cut_remainders` made the block."""
    return str(sch.get(block).name_hint).endswith((PARTIAL, REST))


def _is_associative(sch: Schedule, info: BlockInfo) -> bool:
    """Whether TVM can split the reduction: one result, combined by +, *, min or max of floats or integers."""
    return len(sch.get(info.block).writes) == 1


def _one_row_at_a_time(
    sch: Schedule, blocks: list[Any], moves: list[Any], leading: int, step: int, cpu: CpuTarget
) -> Schedule | None:
    outputs = [b for b in blocks if is_output(sch, b)]
    if len(outputs) != 1:
        return None
    root = outputs[0]
    copies = [sch.get(b) for b in moves]
    blocks = [b for b in blocks if not any(sch.get(b).same_as(copy) for copy in copies)]
    around = list(sch.get_loops(root))[:leading]
    last = []
    if step:
        outer, inner = sch.split(around.pop(), [None, step])
        around, last = [*around, outer], [inner]
    fused = min(len(around), 1) if may_fuse(sch) else len(around)
    depth = fused + len(last)
    if around:
        row = parallelize(sch, around, cpu)
        for block in reversed([b for b in blocks if b is not root]):
            sch.compute_at(block, *(last or [row]), preserve_unit_loops=False)
        if last:
            for block in moves:
                sch.compute_at(block, row, preserve_unit_loops=False)
    turned = []
    for block in moves:
        own = list(sch.get_loops(block))[fused:]
        if turned_moves(sch.mod["main"], [name := str(sch.get(block).name_hint)], cpu) is not None:
            turned.append(name)
        elif len(own) > 1:
            tile(sch, own)
    for block in blocks:
        _vectorize_row(sch, block, depth, cpu)
    return tvm.s_tir.Schedule(turned_moves(sch.mod["main"], turned, cpu)) if turned else sch


def _rows_at_a_time(shapes: Sequence[Sequence[int]], leading: int, cpu: CpuTarget) -> int:
    """How many rows of tensors of `shapes` are laid out before they are read."""
    *outer, extent = shapes[0][:leading]
    row_bytes = sum(math.prod(shape[leading:]) * _FLOAT_BYTES for shape in shapes)
    lanes = cpu.lanes("float32")

    def steps(rows: int) -> float:
        """Twice as many beyond the cache: they are written to memory, and read from there."""
        return steps_of(rows, lanes) * (1 if rows * row_bytes <= _CACHED_BYTES else 2)

    return rows_at_a_time(extent, row_bytes, steps, around=math.prod(outer), cores=cpu.num_cores)


def _vectorize_row(sch: Schedule, block: Any, depth: int, cpu: CpuTarget) -> None:
    """Vectorise a block's innermost loop if it is a spatial one of a constant extent that divides into vectors."""
    loops = list(sch.get_loops(block))[depth:]
    stmt = sch.get(block)
    spatial = [v for v in stmt.iter_vars if int(v.iter_type) == 0]
    if not loops or not spatial:
        return
    if any(int(v.iter_type) != 0 for v in stmt.iter_vars):
        if str(stmt.name_hint).endswith(REST):
            sch.unroll(loops[-1])
        else:
            _vectorize_lanes(sch, block, loops, cpu)
        return
    inner, extent = loops[-1], int(sch.get(loops[-1]).extent)
    lanes = cpu.lanes(str(stmt.writes[0].source.dtype))
    length = vector_length(extent, lanes, _VECTORS * lanes)
    if length % lanes and extent > lanes:  # whole vectors, and one that LLVM rounds up to a register: 197 as 192 and 5
        inner, rest = sch.loop_partition(inner, [extent - extent % lanes, None])
        sch.vectorize(rest)
        length = vector_length(extent - extent % lanes, lanes, _VECTORS * lanes)
    if length > 1:
        _, vector = sch.split(inner, [None, length])
        sch.vectorize(vector)


def _vectorize_lanes(sch: Schedule, block: Any, loops: list[Any], cpu: CpuTarget) -> None:
    """In a partial reduction [lane, k] bring the lanes innermost and make them vectors, initialised apart.

    Each vector is a register: LLVM takes one that is stored as four and read as one apart element by element.
    """
    name = sch.get(block).name_hint
    if not name.endswith(PARTIAL):
        return
    kinds = _loop_kinds(sch, block, loops)
    lane = max(
        (loop for loop, kind in zip(loops, kinds, strict=True) if kind == "S"),
        key=lambda loop: int(sch.get(loop).extent),
    )
    reduced = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == "R"]
    if not reduced:
        return
    sch.reorder(*reduced, lane)
    lanes, extent = cpu.lanes(str(sch.get(block).writes[0].source.dtype)), int(sch.get(lane).extent)
    if extent > lanes and extent % lanes == 0:
        registers, lane = sch.split(lane, [None, lanes])
        sch.unroll(registers)
    sch.vectorize(lane)
    sch.decompose_reduction(block, reduced[0])


def _loop_kinds(sch: Schedule, block: Any, loops: list[Any]) -> list[str]:
    stmt = sch.get(block)
    values = tvm.get_global_func("s_tir.schedule.GetSBlockRealize")(sch, block).iter_values
    kinds = []
    for loop in loops:
        var = sch.get(loop).loop_var
        found = {int(v.iter_type) for v, value in zip(stmt.iter_vars, values, strict=True) if uses(value, [var])}
        kinds.append("R" if 2 in found else "S")
    return kinds
