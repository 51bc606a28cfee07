"""Matmul and convolution: both are C[b, m, n] += A[b, m, k] * B[b, k, n], B packed, C's tile held in registers.

Before:  for m, n, k: C[m, n] += A[m, k] * B[k, n]      After:  for n tile:
         for m, n: y[m, n] = max(C[m, n] + bias, 0)                 pack: panel[k, vectors of n] of B, zeros added
                                                                    for m tile:
                                                                        tile[m, n] += A[m, k] * panel[k, n]
                                                                        y = max(tile + bias, 0)

The n operand is the one whose own axis is the result's innermost: a matmul's right side, a convolution's image, which
packing gathers window by window (im2col, one panel at a time). The other operand is read element by element and spread
over a vector. The tile is the one whose multiplications, loads and padding together take the fewest cycles. A sum that
is so long that the caches do not hold its operands is cut: C[p, b, m, n] of parts p, and then their sum.
Of several cores each takes tiles of n; where these are too few, shares of the m tiles, too, with a panel for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm

from tvmhet._tvm import TensorLoad
from tvmhet.emit.cpu.blocks import (
    Axis,
    BlockInfo,
    CpuTarget,
    Schedule,
    around_reduction,
    blocks_of,
    conditions_of,
    long_indices,
    parallelize,
    reduces,
    uses,
)
from tvmhet.emit.cpu.groups import groups_apart
from tvmhet.emit.cpu.prefetching import prefetching
from tvmhet.emit.cpu.tile_vectors import tile_vectors
from tvmhet.emit.cpu.windows import one_vector_at_a_time

FMA_PER_CYCLE = 2  # vectors, as on Intel since Haswell and AMD since Zen 2; so are the loads
_LOADS_PER_CYCLE = 2
# Of a step, as sums wait for the last ones: multiplying and adding takes 4 cycles on Intel since Skylake and AMD since
# Zen 3. With AVX2, 8, 9 and 12 sums at a time reach 106, 113 and 126 GFLOP/s (AMD EPYC of family 26).
_LEAST_CYCLES, _LEAST_CYCLES_APART = 5, 4
_COPY_CYCLES = 2  # a vector read and written
# Packing pays from so many rows on, by the bytes of a tile's row of vectors: with AVX-512 (256 and more, AMD EPYC of
# family 26) 32 x 768 x 3072 takes 0.80 of the time unpacked, 64 rows 0.95; with AVX2 (96) 1.7 and 1.5 times as long.
_MIN_ROWS_TO_PACK, _MIN_WIDE_ROWS_TO_PACK, _WIDE_BYTES = 4, 96, 256
_FIRST_CACHE_BYTES = 32 << 10  # an operand that it holds whole is read as fast where it lies
_FLOAT_BYTES = 4
# A sum is cut where its operands are larger than that, in parts no longer than so many steps. On an AMD EPYC (1 MiB of
# second cache) 128 x 3072 x 768 takes 0.84 of the time, 1024 x 3072 x 768 0.81; 1.6 MiB and less lose 4 to 7 %.
_MAX_OPERAND_BYTES = 2 << 20
_MAX_STEPS = 1280
_MAX_PARTS = 16
_FEW_ROWS = 4  # of a tile
MAX_ROWS = 12  # of a tile: more unroll into code that no longer fits the instruction cache


@dataclass(frozen=True, slots=True)
class Roles:
    """Axes of a product by the operands they occur in, each in the order of the result."""

    batch: tuple[Axis, ...]
    rows: tuple[Axis, ...]  # of the operand that is spread over a vector
    columns: tuple[Axis, ...]  # of the operand that is loaded as vectors
    reduced: tuple[Axis, ...]
    column_operand: int  # position among the block's reads


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of the register tile; columns are whole vectors."""

    rows: int
    columns: int
    lanes: int

    def cycles(self, num_rows: int, num_columns: int, cpu: CpuTarget) -> float:
        """Cycles of one step of k over a whole result, padding included.

        Where no whole tiles cover the rows, they are copied and padded first.
        """
        copy = _COPY_CYCLES * num_rows / self.lanes if num_rows % self.rows else 0.0
        return self.step_cycles(cpu) * math.ceil(num_rows / self.rows) * math.ceil(num_columns / self.columns) + copy

    def step_cycles(self, cpu: CpuTarget) -> float:
        """Cycles of one step of k over one tile."""
        vectors = self.columns // self.lanes
        loads = (self.rows + vectors) / _LOADS_PER_CYCLE
        least = _LEAST_CYCLES if cpu.has_fma else _LEAST_CYCLES_APART
        return max(self.rows * vectors / FMA_PER_CYCLE, loads, least)

    def num_shares(self, num_panels: int, num_tiles: int, packs: bool, cpu: CpuTarget) -> int:
        """Into how many shares to cut the tiles of rows, so that the cores have about as much to do.

        Each share packs its panels of columns for itself.
        """
        pack = _COPY_CYCLES * self.columns / self.lanes if packs else 0.0

        def busiest(shares: int) -> float:
            each = num_tiles // shares * self.step_cycles(cpu) + pack
            return math.ceil(num_panels * shares / cpu.num_cores) * each

        return min((d for d in range(1, cpu.num_cores + 1) if num_tiles % d == 0), key=lambda d: (busiest(d), d))


def contraction(func: Any, cpu: CpuTarget) -> Schedule | None:
    """Schedule a kernel with one product of two tensors and what follows it element by element; None for any other."""
    found = around_reduction(func)
    if found is None:
        return None
    sch, infos, place = found
    sch, infos = groups_apart(sch, infos, place)
    product, after = infos[place], infos[place + 1 :]
    roles = roles_of(sch, product)
    if roles is None or len(after) > 1:
        return None
    final = after[0] if after else None
    if final is not None and [a.extent for a in final.axes] != [a.extent for a in product.axes if not a.reduced]:
        return None
    cpu = cpu.for_products([product])
    dtype = str(sch.get(product.block).writes[0].source.dtype)
    within = _panel_columns(sch, product, roles)
    allowed = _rows_that_divide(sch, product, roles)
    tile = choose_tile(_size(roles.rows), _size(roles.columns), cpu, cpu.lanes(dtype), allowed, within=within)
    if (parts := num_parts(roles, tile)) > 1:
        product, roles = _in_parts(sch, product, final, parts, cpu)
        final = None
    return _schedule(sch, product, final, roles, tile, cpu, in_panels=within > 0)


def _panel_columns(sch: Schedule, info: BlockInfo, roles: Roles) -> int:
    """How many columns a panel of the vectors' operand holds, if it comes in panels [.., n // T, k, n % T]; else 0."""
    found = operands(sch, info)
    assert found is not None
    column = roles.columns[-1].var
    for load in found:
        last = load.indices[-1]
        if isinstance(last, tvm.tirx.FloorMod) and column.same_as(last.a) and hasattr(last.b, "value"):
            return int(last.b.value)
    return 0


def _rows_that_divide(sch: Schedule, info: BlockInfo, roles: Roles) -> list[int]:
    """How many rows a tile may have where they are what lies in line: others would be turned to be padded; else any."""
    found = operands(sch, info)
    assert found is not None
    columns = sch.get(info.block).reads[roles.column_operand].source
    (other,) = (load for load in found if not load.source.same_as(columns))
    if not uses(long_indices(other)[-1:], [a.var for a in roles.rows]):
        return []
    return [r for r in range(_FEW_ROWS, MAX_ROWS + 1) if _size(roles.rows) % r == 0]


def num_parts(roles: Roles, tile: Tile) -> int:
    """Into how many equal parts to cut a long sum, each added up apart; 1 where that does not pay.

    A tile of columns goes through all rows of the one operand and a panel of the other. In parts of `_MAX_STEPS` at
    most both stay in the second cache, the rows from one tile of columns to the next.
    """
    first, steps = roles.reduced[0].extent, _size(roles.reduced)
    size_bytes = (_size(roles.rows) + tile.columns) * steps * _FLOAT_BYTES
    if len(roles.reduced) > 1 or size_bytes <= _MAX_OPERAND_BYTES:  # windows are gathered part by part: no gain
        return 1
    return next((p for p in range(1, _MAX_PARTS + 1) if first % p == 0 and steps // p <= _MAX_STEPS), 1)


def _in_parts(
    sch: Schedule, product: BlockInfo, final: BlockInfo | None, parts: int, cpu: CpuTarget
) -> tuple[BlockInfo, Roles]:
    """Cut the outermost reduced axis: each part becomes a product of a batch, and their sum is scheduled here."""
    loops = list(sch.get_loops(product.block))
    first = next(i for i, a in enumerate(product.axes) if a.reduced)
    part, rest = sch.split(loops[first], [parts, None])
    sch.reorder(part, *loops[:first], rest, *loops[first + 1 :])
    made = sch.rfactor(part, 0)
    infos = blocks_of(sch) or ()
    product, total = (next(i for i in infos if sch.get(i.block).same_as(sch.get(b))) for b in (made, product.block))
    one_vector_at_a_time(sch, total, final, cpu)
    roles = roles_of(sch, product)
    assert roles is not None
    return product, roles


def roles_of(sch: Schedule, info: BlockInfo) -> Roles | None:
    """Return the axes' roles in `C = C + A * B`; None if the block is no product, or has no row or no column axis."""
    found = operands(sch, info)
    if found is None:
        return None
    spatial = [a for a in info.axes if not a.reduced]
    in_a = [uses(found[0].indices, [a.var]) for a in spatial]
    in_b = [uses(found[1].indices, [a.var]) for a in spatial]
    if not spatial or in_a[-1] == in_b[-1]:
        return None
    own, other = (in_b, in_a) if in_b[-1] else (in_a, in_b)
    first = len(spatial)
    while first > 0 and own[first - 1] and not other[first - 1]:
        first -= 1
    columns = tuple(spatial[first:])
    rest = list(zip(spatial[:first], own[:first], other[:first], strict=True))
    rows = tuple(a for a, o, x in rest if x and not o)
    batch = tuple(a for a, o, x in rest if o or not x)
    reduced = tuple(a for a in info.axes if a.reduced)
    if not rows or not reduced:
        return None
    block = sch.get(info.block)
    wanted = found[1 if in_b[-1] else 0].source
    column_operand = next(i for i, r in enumerate(block.reads) if r.source.same_as(wanted))
    return Roles(batch, rows, columns, reduced, column_operand)


def operands(sch: Schedule, info: BlockInfo) -> tuple[Any, Any] | None:
    """Return the two loads of `C[..] = C[..] + A[..] * B[..]` of two tensors, else None."""
    found = factors(sch, info)
    return None if found is None or found[0].source.same_as(found[1].source) else found


def factors(sch: Schedule, info: BlockInfo) -> tuple[Any, Any] | None:
    """Return the two loads of `C[..] = C[..] + A[..] * B[..]`, which may be of one tensor, else None."""
    body = sch.get(info.block).body
    value = getattr(body, "value", None)
    add = tvm.tirx.Add
    if not isinstance(value, add) or not isinstance(value.a, TensorLoad) or not isinstance(value.b, tvm.tirx.Mul):
        return None
    a, b = value.b.a, value.b.b
    if not isinstance(a, TensorLoad) or not isinstance(b, TensorLoad):
        return None
    return (a, b) if value.a.source.same_as(body.buffer) else None


def _size(axes: Sequence[Axis]) -> int:
    return math.prod(a.extent for a in axes)


def choose_tile(
    num_rows: int,
    num_columns: int,
    cpu: CpuTarget,
    lanes: int,
    allowed: Sequence[int] | None = None,
    *,
    within: int = 0,
) -> Tile:
    """Return the tile with the fewest cycles for one step of k over the whole result, padding included.

    `allowed` are the numbers of rows to choose from; all that fit the registers by default. The columns of a tile
    divide `within`.
    """
    most = max(1, min(16 if num_rows == 1 else 6, math.ceil(num_columns / lanes)))
    shapes = [
        Tile(rows, vectors * lanes, lanes)
        for vectors in range(1, most + 1)
        for rows in allowed or range(1, min(MAX_ROWS, num_rows) + 1)
        if _fits(rows, vectors, cpu) and within % (vectors * lanes) == 0
    ]
    return min(shapes, key=lambda t: (t.cycles(num_rows, num_columns, cpu), -t.rows * t.columns, t.rows))


def _fits(rows: int, vectors: int, cpu: CpuTarget) -> bool:
    """Whether sums, a row of vectors and the spread element fit the registers.

    A vector of products has one of its own where it is not multiplied and added at once.
    """
    return rows * vectors + vectors + (1 if cpu.has_fma else 2) <= cpu.num_registers


def _schedule(
    sch: Schedule,
    info: BlockInfo,
    final: BlockInfo | None,
    roles: Roles,
    tile: Tile,
    cpu: CpuTarget,
    *,
    in_panels: bool,
) -> Schedule:
    block = info.block
    num_rows, num_columns = _size(roles.rows), _size(roles.columns)
    packs = not in_panels and _pays_to_pack(num_rows, num_columns, _size(roles.reduced), tile)
    packs = packs or _lies_across(sch, info, roles)
    if final is not None:
        _as_matmul(sch, final, roles, info)
    _as_matmul(sch, info, roles, info)
    panel = sch.reindex(block, ("read", roles.column_operand))
    other = sch.reindex(block, ("read", 1 - roles.column_operand))
    sch.reindex(block, ("write", 0))
    sch.pad_einsum(block, [1] * len(roles.batch) + [tile.rows, tile.columns, 1])
    panel = _absorb(sch, panel)
    if before := _made_once(sch, panel, num_columns * _size(roles.reduced) * _size(roles.batch)):
        sch.compute_inline(before)
        packs = True
    if num_rows % tile.rows == 0:
        sch.compute_inline(other)
    else:
        _absorb(sch, other)
    return _tile_loops(sch, block, panel, len(roles.batch), num_columns, tile, packs, cpu)


def _lies_across(sch: Schedule, info: BlockInfo, roles: Roles) -> bool:
    """Whether the operand that is loaded as vectors is contiguous along another axis, as a transposed weight is."""
    found = operands(sch, info)
    assert found is not None
    column = [roles.columns[-1].var]
    return not any(uses([load.indices[-1]], column) for load in found)


def _made_once(sch: Schedule, panel: Any, num_elements: int) -> Any | None:
    """Return the block that computes what panels hold, if each element of it is copied to them once."""
    for block in sch.get_producers(panel):
        stmt = sch.get(block)
        size = math.prod(int(e) for e in stmt.writes[0].source.shape)
        if size == num_elements and not reduces(sch, block) and not conditions_of(stmt.body):
            return block
    return None


def _pays_to_pack(num_rows: int, num_columns: int, steps: int, tile: Tile) -> bool:
    if num_columns % tile.columns:
        return True
    if num_columns * steps * _FLOAT_BYTES <= _FIRST_CACHE_BYTES:
        return False
    wide = tile.columns * _FLOAT_BYTES >= _WIDE_BYTES
    return num_rows >= (_MIN_WIDE_ROWS_TO_PACK if wide else _MIN_ROWS_TO_PACK)


def _as_matmul(sch: Schedule, info: BlockInfo, roles: Roles, product: BlockInfo) -> None:
    """Make a block's axes (batch..., m, n) and k, if it has them: rows, columns and reduced axes become one each.

    `info` is the product or the block after it, whose axes are the product's spatial ones.
    """
    spatial = [a for a in product.axes if not a.reduced]
    owners = spatial if info is not product else list(product.axes)

    def position(axis: Axis) -> int:
        return next(i for i, a in enumerate(owners) if a is axis)

    reduced = [roles.reduced] if info is product else []
    groups = [[position(a) for a in group] for group in (roles.rows, roles.columns, *reduced)]
    batch = [position(a) for a in roles.batch]

    def mapping(*axes: Any) -> list[Any]:
        fused = []
        for group in groups:
            value = axes[group[0]]
            for i in group[1:]:
                value = value * owners[i].extent + axes[i]
            fused.append(value)
        return [*(axes[i] for i in batch), *fused]

    sch.transform_block_layout(info.block, tvm.tirx.IndexMap.from_func(mapping, ndim=len(owners)))


def _absorb(sch: Schedule, reindexed: Any) -> Any:
    """Return the block that reads a reindexed operand before the product: its padding, with the reindexing inlined."""
    readers = sch.get_consumers(reindexed)
    if len(readers) == 1 and "pad" in sch.get(readers[0]).name_hint:
        sch.compute_inline(reindexed)
        return readers[0]
    return reindexed


def _tile_loops(
    sch: Schedule, block: Any, panel: Any, num_batch: int, num_columns: int, tile: Tile, packs: bool, cpu: CpuTarget
) -> Schedule:
    if packs:
        _store_as_panels(sch, panel, tile)
    _split_columns(sch, block, num_batch, tile)
    *batch, m, n_outer, n_inner, k = sch.get_loops(block)
    m_outer, m_inner = sch.split(m, [None, tile.rows])
    num_panels = math.prod(int(sch.get(loop).extent) for loop in (*batch, n_outer))
    if (shares := tile.num_shares(num_panels, int(sch.get(m_outer).extent), packs, cpu)) > 1:
        share, m_outer = sch.split(m_outer, [shares, None])
        batch.append(share)
    num_tiles = int(sch.get(m_outer).extent)
    sch.reorder(*batch, n_outer, m_outer, k, m_inner, n_inner)
    if packs:
        _pack_at(sch, panel, n_outer, cpu)
    else:
        sch.compute_inline(panel)
    _finish(sch, block, m_outer)
    vectors, lane = sch.split(n_inner, [None, tile.lanes])
    sch.vectorize(lane)
    sch.unroll(vectors)
    sch.unroll(m_inner)
    parallelize(sch, [*batch, n_outer], cpu)
    sch.decompose_reduction(block, k)
    # Indices such as m // 14 * 14 + m % 14 become m: else the tile's storage would be as large as the whole result.
    simple = tvm.s_tir.transform.StmtSimplify()(sch.mod)["main"]
    ahead = prefetching(simple, tile.rows, tile.columns, num_tiles)
    return tvm.s_tir.Schedule(tile_vectors(ahead, tile.lanes, num_columns))


def _split_columns(sch: Schedule, block: Any, num_batch: int, tile: Tile) -> None:
    """Make the column axis two, so that the inner one is a plain index of the panel."""

    def split(*axes: Any) -> list[Any]:
        *before, column, k = axes
        return [*before, column // tile.columns, column % tile.columns, k]

    sch.transform_block_layout(block, tvm.tirx.IndexMap.from_func(split, ndim=num_batch + 3))


def _store_as_panels(sch: Schedule, panel: Any, tile: Tile) -> None:
    """Store the panel [batch, n, k] as [batch, n tile, k, n in tile]."""

    def layout(*axes: Any) -> list[Any]:
        *batch, column, k = axes
        return [*batch, column // tile.columns, k, column % tile.columns]

    rank = len(sch.get(panel).writes[0].source.shape)
    sch.transform_layout(panel, ("write", 0), tvm.tirx.IndexMap.from_func(layout, ndim=rank))
    sch.transform_block_layout(panel, tvm.tirx.IndexMap.from_func(layout, ndim=rank))


def _pack_at(sch: Schedule, panel: Any, n_outer: Any, cpu: CpuTarget) -> None:
    """Make one panel at a time, in the order in which it lies in memory."""
    sch.compute_at(panel, n_outer, preserve_unit_loops=False)


def _finish(sch: Schedule, block: Any, m_outer: Any) -> None:
    """Write a tile back, through whatever follows the product, as soon as its sums are complete."""
    last = sch.get_consumers(block)[0]
    while (after := sch.get_consumers(last)) and not reduces(sch, after[0]):
        sch.compute_inline(last)
        last = after[0]
    sch.set_scope(block, 0, "local")
    sch.reverse_compute_at(last, m_outer)
