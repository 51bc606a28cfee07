"""Convolutions: a window slides over an image that lies in rows one after the other.

Before:  for o, y, x, c, ry, rx: s[o, y, x] += d[c, y + ry, x + rx] * w[o, c, ry, rx]
         for o, y, x:            z[o, y, x] = max(s[o, y, x] + b[o], 0)

After:   for c, h, x:  image[c, h * W + x] = d[c, h, x]                    W: the length of a row of d; then zeros
         for o tile:   for p tile, c, ry, rx:  tile[o, p] += image[c, p + ry * W + rx] * w[o, c, ry, rx]
                       for y, x:               z = max(sums[o, y * W + x] + b[o], 0)

Positions p go on from one row to the next, so that vectors are whole whatever the length of a row, and are read where
they lie: nothing is gathered, unlike in `contraction`. A window that moves by s, up to four, reads s * s images, of
every s-th row and column: (ry, rx) from the image (ry % s, rx % s), at p + ry // s * W + rx // s. What is summed up
between two rows, at the last positions of each, is not used; where that costs more than gathering, as of small images
with many channels, `contraction` gets the kernel. Where the images of a batch are enough for the cores, each is laid
out just before it is slid over, so that it is still in the cache.

A convolution by channel (depthwise) is taken where its window steps or its rows are no vectors, else `windows` is
faster. Its image, and the padding before it, are made channel by channel, so that they stay in the cache:

         for o:  for h, x:   image[h * W + x] = d[o, h, x]
                 for p tile, ry, rx:  tile[p] += image[p + ry * W + rx] * w[o, ry, rx]
                 for y, x:   z[o, y, x] = max(sums[y * W + x] + b[o], 0)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvmhet._tvm import TensorLoad, detect_linear_equation, structural_equal
from tvmhet.emit.cpu.blocks import (
    Axis,
    BlockInfo,
    CpuTarget,
    Schedule,
    around_reduction,
    loads_of,
    parallelize,
    replaced,
    uses,
    vector_length,
)
from tvmhet.emit.cpu.contraction import FMA_PER_CYCLE, MAX_ROWS, Tile, choose_tile, operands
from tvmhet.emit.cpu.groups import groups_apart
from tvmhet.emit.cpu.nests import REDUCE, SPATIAL, axis, block_in, nest, over, stages_of, with_stages
from tvmhet.emit.cpu.windows import VECTORS

_IMAGE, _SUMS, _LAST = "image", "sums", "last"  # names of the three blocks
_GATHER_CYCLES = 2  # of an element of a window in `contraction`: 1.5 to 5 on an AMD EPYC
_MAX_STRIDE = 4
_MIN_ROWS = 4  # of a tile, which divide the channels; with fewer, vectors are read for too few multiplications
_PRIME_ROWS = 13  # of a tile where no other number divides the channels: one row above MAX_ROWS


@dataclass(frozen=True, slots=True)
class Slide:
    """A convolution's data and what its window reads of it.

    `y` and `x` are axes of the block, `strides` how far the window moves with either; steps are how far a data row, and
    a place in it, move with each reduced axis.
    """

    data: Any  # loads
    weight: Any
    y: Axis
    x: Axis
    rows: Axis  # output channels
    strides: tuple[int, int]
    row_steps: tuple[int, ...]
    place_steps: tuple[int, ...]

    @property
    def by_channel(self) -> bool:
        """Whether each output channel has a channel of the data of its own."""
        return uses(self.data.indices, [self.rows.var])

    @property
    def row(self) -> int:
        """The length of an image's row."""
        return -(-int(self.data.source.shape[-1]) // self.strides[1])

    @property
    def positions(self) -> int:
        """How many positions there are from the first result to the last."""
        return (self.y.extent - 1) * self.row + self.x.extent

    def reach(self, reduced: Sequence[Axis]) -> int:
        """How far behind a position the window's last element lies."""
        down, along = self.last(reduced)
        return down // self.strides[0] * self.row + along // self.strides[1]

    def last(self, reduced: Sequence[Axis]) -> tuple[int, int]:
        """The window's last row and place."""
        down, along = (
            sum(s * (a.extent - 1) for s, a in zip(steps, reduced, strict=True))
            for steps in (self.row_steps, self.place_steps)
        )
        return down, along


def sliding(func: Any, cpu: CpuTarget) -> Schedule | None:
    """Schedule a kernel with one convolution and what follows it element by element; None for any other."""
    found = around_reduction(func)
    if found is None:
        return None
    sch, infos, place = found
    whole = sch
    sch, infos = groups_apart(sch, infos, place)
    info, after = infos[place], infos[place + 1 :]
    slide = slide_of(sch, info)
    if slide is None or len(after) > 1:
        return None
    if after and not follows(sch, info, after[0]):
        return None
    cpu = cpu.for_products([info])
    lanes = cpu.lanes(str(sch.get(info.block).writes[0].source.dtype))
    if slide.by_channel:
        tile = _tile_by_channel(slide, cpu, lanes)
    else:
        tile = _tile(slide, cpu, lanes, grouped=sch is not whole)
    if tile is None:
        return None
    last = sch.get(after[0].block) if after else None
    inside = _laid_out_inside(info, slide, cpu)
    sch = tvm.s_tir.Schedule(_flattened(sch.mod["main"], sch.get(info.block), last, info, slide, tile, inside))
    return _tile_loops(sch, tile, slide.by_channel, inside, cpu)


def _laid_out_inside(info: BlockInfo, slide: Slide, cpu: CpuTarget) -> tuple[int, ...]:
    """The leading axes of the data whose loops are around the copy of it as well as around its convolution."""
    leading = slide.data.indices[:-2]
    if slide.by_channel:
        return tuple(range(len(leading)))
    batch = [a for a in info.axes if not a.reduced][:-3]
    num_images = math.prod(a.extent for a in batch)
    found = [next((i for i, x in enumerate(leading) if x.same_as(a.var)), None) for a in batch]
    if num_images == 1 or num_images % cpu.num_cores or None in found:
        return ()
    return tuple(i for i in found if i is not None)


def _tile(slide: Slide, cpu: CpuTarget, lanes: int, *, grouped: bool) -> Tile | None:
    """Choose the tile of channels and positions; None where gathering is faster."""
    channels = slide.rows.extent
    fewest = 1 if grouped else _MIN_ROWS  # for a group, gathering pays less
    rows = [r for r in range(fewest, MAX_ROWS + 1) if channels % r == 0] or [_PRIME_ROWS]
    if channels % rows[0]:
        return None
    tile = choose_tile(channels, slide.positions, cpu, lanes, rows)
    return tile if _pays(slide, tile, cpu) else None


def _tile_by_channel(slide: Slide, cpu: CpuTarget, lanes: int) -> Tile | None:
    """Choose the tile of one channel's positions; None where vectors along its rows are faster."""
    if slide.strides == (1, 1) and vector_length(slide.x.extent, lanes, VECTORS * lanes) > 1:
        return None
    return choose_tile(1, slide.positions, cpu, lanes, [1])


def _pays(slide: Slide, tile: Tile, cpu: CpuTarget) -> bool:
    """Whether sums that nobody uses take less time than gathering windows would."""
    channels, places = slide.rows.extent, slide.y.extent * slide.x.extent
    columns = choose_tile(channels, places, cpu, tile.lanes).columns
    multiply = channels / (FMA_PER_CYCLE * tile.lanes)  # cycles of one element with every channel's weight
    slid = multiply * _whole(slide.positions, tile.columns)
    return slid <= (multiply + _GATHER_CYCLES) * _whole(places, columns)


def _whole(places: int, columns: int) -> int:
    return math.ceil(places / columns) * columns


def follows(sch: Schedule, info: BlockInfo, final: BlockInfo) -> bool:
    """Whether a block reads each sum at its own place only."""
    spatial = [a for a in info.axes if not a.reduced]
    if [a.extent for a in final.axes] != [a.extent for a in spatial]:
        return False
    body = sch.get(info.block).body
    to = {a.var: b.var for a, b in zip(spatial, final.axes, strict=True)}
    place = [replaced(i, to) for i in body.indices]
    reads = [x for x in loads_of(sch.get(final.block).body.value) if x.source.same_as(body.buffer)]
    return all(structural_equal(a, b) for r in reads for a, b in zip(r.indices, place, strict=True))


def slide_of(sch: Schedule, info: BlockInfo) -> Slide | None:
    """Read a block as a convolution whose window is larger than one place; None if it is none."""
    found = operands(sch, info)
    spatial, reduced = [a for a in info.axes if not a.reduced], [a for a in info.axes if a.reduced]
    if found is None or len(spatial) < 3 or not reduced:
        return None
    *_, rows, y, x = spatial
    data, weight = found if uses(found[0].indices, [x.var]) else found[::-1]
    shape = [int(e) for e in data.source.shape]
    if len(shape) < 2 or uses(weight.indices, [y.var, x.var]):
        return None
    if uses(data.indices, [rows.var]) and not _are_places(data.indices[:-2], spatial[:-2]):
        return None
    down, along = (_steps(index, own, reduced) for index, own in zip(data.indices[-2:], (y, x), strict=True))
    if down is None or along is None or uses(data.indices[:-2], [y.var, x.var]):
        return None
    slide = Slide(data, weight, y, x, rows, (down[0], along[0]), down[1:], along[1:])
    return slide if any(slide.last(reduced)) else None


def _are_places(indices: Sequence[Any], axes: Sequence[Axis]) -> bool:
    """Whether each index is one of the axes, or constant."""
    return all(hasattr(i, "value") or any(i.same_as(a.var) for a in axes) for i in indices)


def _steps(index: Any, own: Axis, reduced: Sequence[Axis]) -> tuple[int, ...] | None:
    """How far an index moves with `own` and with each reduced axis, if it is their sum; else None."""
    factors = detect_linear_equation(index, [own.var, *(a.var for a in reduced)])
    if not factors or not all(hasattr(f, "value") for f in factors):
        return None
    *steps, offset = (int(f.value) for f in factors)
    return tuple(steps) if 1 <= steps[0] <= _MAX_STRIDE and offset == 0 and min(steps) >= 0 else None


def _flattened(
    func: Any, block: Any, last: Any, info: BlockInfo, slide: Slide, tile: Tile, inside: Sequence[int]
) -> Any:
    """Return the function with the convolution `block`, and `last` if another follows it, made of three blocks.

    The sums of a tile of channels and what follows them are in one loop; by channel, the image is too. `inside`: the
    leading axes of the data whose loops are around the image.
    """
    stages = [(s, str(b.name_hint) if (b := block_in(s)) is not None else "") for s in stages_of(func)]
    gone = {str(b.name_hint) for b in (block, last) if b is not None}
    dtype = str(block.writes[0].source.dtype)
    length = _whole(slide.positions, tile.columns)
    num_rows = math.ceil((length + slide.reach(_reduced(info))) / slide.row)
    *outer, _, _ = (int(e) for e in slide.data.source.shape)
    image = _buffer([*outer, *slide.strides, num_rows * slide.row], dtype, _IMAGE)
    batch = [a for a in info.axes if not a.reduced][:-3]
    sums = _buffer([*(a.extent for a in batch), slide.rows.extent, length], dtype, _SUMS)
    *loops, tiles = [axis(f"o{i}") for i in range(len(batch) + 1)]
    bound = {i: (loop, 0) for i, loop in enumerate(loops)} | {len(batch): (tiles * tile.rows, tile.rows)}
    parts = [_slide_over(info, slide, image, sums, bound), _finish(info, block, last, sums, slide.row, bound)]
    kept = [s for s, name in stages if name not in gone]
    outside = {a.var: loop for a, loop in zip([*batch, slide.rows], [*loops, tiles], strict=True)}
    laid = _lay_out(slide, image, num_rows, {i: (replaced(slide.data.indices[i], outside), 0) for i in inside})
    if slide.by_channel:
        parts.insert(0, laid)
    elif not inside:
        kept.append(laid)
    made = over(tiles, slide.rows.extent // tile.rows, tirx.SeqStmt(parts))
    if inside and not slide.by_channel:
        made = tirx.SeqStmt([laid, made])
    for loop, a in reversed([*zip(loops, batch, strict=True)]):
        made = over(loop, a.extent, made)
    unused = {str(block.writes[0].source.name)} if last is not None else set()
    return with_stages(func, [*kept, made], [image, sums], unused)


def _reduced(info: BlockInfo) -> list[Axis]:
    return [a for a in info.axes if a.reduced]


def _buffer(shape: Sequence[int], dtype: str, name: str) -> Any:
    return tirx.decl_buffer([tirx.const(int(e), "int64") for e in shape], dtype, name)


def _lay_out(slide: Slide, image: Any, num_rows: int, bound: Mapping[int, tuple[Any, int]]) -> Any:
    """Copy the data row by row, every s-th one apart if the window moves by s, with zeros around it.

    `bound` places its leading axes in loops outside, as `nest` takes it.
    """
    source = slide.data.source
    *outer, height, width = (int(e) for e in source.shape)
    *before, a, b, h, x = axes = [axis(f"v_{i}") for i in range(len(outer) + 4)]
    down, along = slide.strides
    y, place = (h, x) if slide.strides == (1, 1) else (h * down + a, x * along + b)
    inside = [
        i < limit
        for i, limit, most in ((y, height, num_rows * down), (place, width, slide.row * along))
        if most > limit
    ]
    value = tirx.BufferLoad(source, [*before, y, place])
    if inside:
        value = tirx.if_then_else(tirx.all(*inside), value, tirx.const(0, str(source.dtype)))
    store = tirx.BufferStore(image, value, [*before, a, b, h * slide.row + x])
    return nest(_IMAGE, axes, [*outer, *slide.strides, num_rows, slide.row], [SPATIAL] * len(axes), store, None, bound)


def _slide_over(info: BlockInfo, slide: Slide, image: Any, sums: Any, bound: Mapping[int, tuple[Any, int]]) -> Any:
    """Sum up at every position, those between rows included."""
    spatial, reduced = [a for a in info.axes if not a.reduced], _reduced(info)
    new = {a.var: axis(f"v_{a.var.name}") for a in (*spatial[:-2], *reduced)}
    place, zero = axis("v_place"), tirx.const(0, "int64")
    down, along = (
        sum((new[a.var] * s for s, a in zip(steps, reduced, strict=True) if s), start=zero)
        for steps in (slide.row_steps, slide.place_steps)
    )
    which = [i % s if s > 1 else zero for i, s in zip((down, along), slide.strides, strict=True)]
    offset = place + down // slide.strides[0] * slide.row + along // slide.strides[1]
    outer = [replaced(i, new) for i in slide.data.indices[:-2]]
    data = tirx.BufferLoad(image, [*outer, *which, offset])
    weight = tirx.BufferLoad(slide.weight.source, [replaced(i, new) for i in slide.weight.indices])
    where = [*(new[a.var] for a in spatial[:-2]), place]
    store = tirx.BufferStore(sums, tirx.BufferLoad(sums, where) + data * weight, where)
    init = tirx.BufferStore(sums, tirx.const(0, str(sums.dtype)), where)
    axes = [*where, *(new[a.var] for a in reduced)]
    extents = [int(e) for e in sums.shape] + [a.extent for a in reduced]
    kinds = [SPATIAL] * len(where) + [REDUCE] * len(reduced)
    return nest(_SUMS, axes, extents, kinds, store, init, bound)


def _finish(info: BlockInfo, block: Any, last: Any, sums: Any, row: int, bound: Mapping[int, tuple[Any, int]]) -> Any:
    """Write the sums, through what follows them, to where the kernel's result is."""
    spatial = [a for a in info.axes if not a.reduced]
    axes = [axis(f"v_{i}") for i in range(len(spatial))]
    *before, y, x = axes
    value = tirx.BufferLoad(sums, [*before, y * row + x])
    buffer, to = block.body.buffer, dict(zip([a.var for a in spatial], axes, strict=True))
    indices = [replaced(i, to) for i in block.body.indices]
    if last is not None:
        to = dict(zip([v.var for v in last.iter_vars], axes, strict=True))
        buffer, indices = last.body.buffer, [replaced(i, to) for i in last.body.indices]

        def read(load: Any) -> Any:
            return value if load.source.same_as(block.body.buffer) else load

        value = tvm_ffi.structural_map(replaced(last.body.value, to), (TensorLoad, read))
    store = tirx.BufferStore(buffer, value, indices)
    return nest(_LAST, axes, [a.extent for a in spatial], [SPATIAL] * len(axes), store, None, bound)


def _tile_loops(sch: Schedule, tile: Tile, by_channel: bool, inside: Sequence[int], cpu: CpuTarget) -> Schedule:
    sums, last, image = (sch.get_sblock(name) for name in (_SUMS, _LAST, _IMAGE))
    own = [p for p in sch.get_producers(image) if len(sch.get_consumers(p)) == 1]
    own = [p for p in own if not isinstance(sch.get(p).body.value, TensorLoad)]
    for producer in () if by_channel else own:
        sch.compute_inline(producer)
    num_reduced = sum(int(v.iter_type) == REDUCE for v in sch.get(sums).iter_vars)
    loops = list(sch.get_loops(sums))
    *outer, rows, places = loops[: len(loops) - num_reduced]
    reduced = loops[len(loops) - num_reduced :]
    place_outer, inner = sch.split(places, [None, tile.columns])
    sch.reorder(place_outer, *reduced, rows, inner)
    written = sch.cache_write(sums, 0, "local")
    sch.reverse_compute_at(written, place_outer)
    vectors, lane = sch.split(inner, [None, tile.lanes])
    for loop in (rows, vectors):
        sch.unroll(loop)
    sch.vectorize(lane)
    _vectorize_last(sch, written, tile.lanes, tile.columns)
    _vectorize_last(sch, last, tile.lanes, 4 * tile.lanes)
    around = parallelize(sch, outer[:-1] if inside and not by_channel else outer, cpu)
    for producer in own if by_channel else ():
        sch.compute_at(producer, around, preserve_unit_loops=False)
    sch.decompose_reduction(sums, reduced[0])
    return sch


def _vectorize_last(sch: Schedule, block: Any, lanes: int, most: int) -> None:
    loop = sch.get_loops(block)[-1]
    length = vector_length(int(sch.get(loop).extent), lanes, most)
    if length > 1:
        sch.vectorize(sch.split(loop, [None, length])[1])
