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
with many channels, `contraction` gets the kernel. Of three axes, planes follow one another as rows do; of one,
positions are the results' own, and only what is convolved by channel slides. Where the images of a batch are enough for
the cores, each is laid out just before it is slid over, so that it is still in the cache. Larger images are laid out
and slid over in bands of B rows, or planes:

         for band:  for c, h, x:  image[c, h * W + x] = d[c, band * B + h, x]       h: up to B and what a window reads
                    for o tile:   as above, z[o, band * B + y, x] = max(sums[o, y * W + x] + b[o], 0)

A convolution by channel (depthwise) is taken where its window steps or its rows are no vectors, else `windows` is
faster. Its image, and the padding before it, are made channel by channel, so that they stay in the cache:

         for o:  for h, x:   image[h * W + x] = d[o, h, x]
                 for p tile, ry, rx:  tile[p] += image[p + ry * W + rx] * w[o, ry, rx]
                 for y, x:   z[o, y, x] = max(sums[y * W + x] + b[o], 0)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
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
#: Of an element of a window in `contraction`, by how many axes a result has and how many of them the window spans:
#: measured on an AMD EPYC (of two axes 1.5 to 5).
_GATHER_CYCLES = {1: (0,), 2: (2, 2), 3: (0, 2, 7)}
_MAX_STRIDE = 4
_LINE = 16  # elements of a line of cache
_BYTES = 4
_MAX_IMAGE_BYTES = 1 << 20  # of what is slid over whole: 2 to 3 MB take up to a sixth longer so, 8 MB three times
_BAND_BYTES = 192 << 10  # of larger ones: from 128 to 256 KiB are as fast, 512 KiB slower (AMD EPYC, as above)
_BUSY = 0.75  # of the cores at least, on average
_MAX_PLACES = 3


@dataclass(frozen=True, slots=True)
class Slide:
    """A convolution's data and what its window reads of it.

    `places` are the axes of the block that the data's last ones move with, one to three, `strides` how far the window
    moves with each of them; `steps` are how far it moves along each with each reduced axis. `band` is how many results
    along the first of `places` are made of one image.
    """

    data: Any  # loads
    weight: Any
    rows: Axis  # output channels
    reduced: tuple[Axis, ...]
    places: tuple[Axis, ...]
    strides: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    band: int

    @property
    def by_channel(self) -> bool:
        """Whether each output channel has a channel of the data of its own."""
        return uses(self.data.indices, [self.rows.var])

    @property
    def shape(self) -> tuple[int, ...]:
        """The data's."""
        return tuple(int(e) for e in self.data.source.shape)

    @property
    def extents(self) -> tuple[int, ...]:
        """The extents of an image along `places`."""
        shape = self.shape[-len(self.places) :]
        return tuple(-(-e // s) for e, s in zip(shape, self.strides, strict=True))

    @property
    def pitches(self) -> tuple[int, ...]:
        """How many positions apart two elements of an image are that follow one another along each axis."""
        return tuple(math.prod(self.extents[i + 1 :]) for i in range(len(self.places)))

    @property
    def positions(self) -> int:
        """How many positions there are from the first result of a band to the last."""
        extents = (self.band, *(a.extent for a in self.places[1:]))
        return 1 + sum((e - 1) * p for e, p in zip(extents, self.pitches, strict=True))

    @property
    def num_bands(self) -> int:
        """How many bands there are."""
        return math.ceil(self.places[0].extent / self.band)

    @property
    def reach(self) -> int:
        """How far behind a position the window's last element lies."""
        return sum(i // s * p for i, s, p in zip(self.last, self.strides, self.pitches, strict=True))

    @property
    def last(self) -> tuple[int, ...]:
        """Where the window's last element is along each axis."""
        return tuple(sum(s * (a.extent - 1) for s, a in zip(steps, self.reduced, strict=True)) for steps in self.steps)


def sliding(func: Any, cpu: CpuTarget) -> Schedule | None:
    """Schedule a kernel with one convolution and what follows it element by element; None for any other."""
    found = around_reduction(func)
    if found is None:
        return None
    sch, infos, place = found
    sch, infos = groups_apart(sch, infos, place)
    info, after = infos[place], infos[place + 1 :]
    slide = slide_of(sch, info)
    if slide is None or len(after) > 1:
        return None
    if after and not follows(sch, info, after[0]):
        return None
    cpu = cpu.for_products([info])
    lanes = cpu.lanes(str(sch.get(info.block).writes[0].source.dtype))
    slide, inside = _in_bands(info, slide, cpu)
    tile = _tile_by_channel(slide, cpu, lanes) if slide.by_channel else _tile(slide, cpu, lanes)
    if tile is None:
        return None
    last = sch.get(after[0].block) if after else None
    sch = tvm.s_tir.Schedule(_flattened(sch.mod["main"], sch.get(info.block), last, info, slide, tile, inside))
    return _tile_loops(sch, tile, slide.by_channel, inside, cpu)


def _in_bands(info: BlockInfo, slide: Slide, cpu: CpuTarget) -> tuple[Slide, tuple[int, ...] | None]:
    """Cut images in bands that fit the cache; return the leading axes of the data whose loops are around the image.

    None instead of these where one image is laid out before all else.
    """
    leading = slide.data.indices[: -len(slide.places)]
    if slide.by_channel:
        return slide, tuple(range(len(leading)))
    batch = _batch(info, slide)
    found = [next((i for i, x in enumerate(leading) if x.same_as(a.var)), None) for a in batch]
    inside = tuple(i for i in found if i is not None)
    if None in found:
        return slide, None
    num_images = math.prod(a.extent for a in batch)
    outer = [e for i, e in enumerate(slide.shape[: len(leading)]) if i not in inside]
    row_bytes = _BYTES * math.prod([*outer, *slide.strides]) * slide.pitches[0]
    halo = slide.reach // slide.pitches[0]
    slide = replace(slide, band=_band(slide.band, halo, row_bytes, num_images, cpu.num_cores))
    shares = num_images % cpu.num_cores == 0 and num_images > 1
    return slide, inside if slide.num_bands > 1 or shares else None


def _band(num_rows: int, halo: int, row_bytes: int, num_images: int, num_cores: int) -> int:
    """How many rows of results are made of one part of an image, which has `halo` rows more: all, if it is small."""
    if (num_rows + halo) * row_bytes <= _MAX_IMAGE_BYTES:
        return num_rows
    most = max(_BAND_BYTES // row_bytes - halo, halo, 1)
    num_steps = math.ceil(math.ceil(num_rows / most) * num_images / num_cores) * num_cores
    band = math.ceil(num_rows * num_images / num_steps)
    made = math.ceil(num_rows / band) * num_images
    return band if made >= _BUSY * math.ceil(made / num_cores) * num_cores else num_rows


def _tile(slide: Slide, cpu: CpuTarget, lanes: int) -> Tile | None:
    """Choose the tile of positions and of channels, whose number it divides; None where gathering is faster."""
    channels = slide.rows.extent
    rows = [r for r in range(1, MAX_ROWS + 1) if channels % r == 0]
    tile = choose_tile(channels, slide.positions, cpu, lanes, rows)
    return tile if _pays(slide, tile, cpu) else None


def _tile_by_channel(slide: Slide, cpu: CpuTarget, lanes: int) -> Tile | None:
    """Choose the tile of one channel's positions; None where vectors along its rows are faster."""
    if max(slide.strides) == 1 and vector_length(slide.places[-1].extent, lanes, VECTORS * lanes) > 1:
        return None
    return choose_tile(1, slide.positions, cpu, lanes, [1])


def _pays(slide: Slide, tile: Tile, cpu: CpuTarget) -> bool:
    """Whether sums that nobody uses take less time than gathering windows would."""
    channels, places = slide.rows.extent, math.prod(a.extent for a in slide.places)
    columns = choose_tile(channels, places, cpu, tile.lanes).columns
    multiply = channels / (FMA_PER_CYCLE * tile.lanes)  # cycles of one element with every channel's weight
    gather = _GATHER_CYCLES[len(slide.places)][sum(e > 0 for e in slide.last) - 1]
    slid = multiply * _whole(slide.positions, tile.columns) * slide.num_bands
    return slid < (multiply + gather) * _whole(places, columns)


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
    if found is None or not spatial or not reduced:
        return None
    data, weight = found if uses(found[0].indices, [spatial[-1].var]) else found[::-1]
    num_places = _num_places(data, weight, spatial)
    *_, rows = spatial[: len(spatial) - num_places] or (None,)
    if not num_places or rows is None:
        return None
    leading, places = data.indices[:-num_places], spatial[-num_places:]
    if uses(data.indices, [rows.var]) and not _are_places(leading, spatial[:-num_places]):
        return None
    steps = [_steps(i, own, reduced) for i, own in zip(data.indices[-num_places:], places, strict=True)]
    if None in steps or uses(leading, [a.var for a in places]):
        return None
    strides, moves = zip(*((own, by) for own, *by in (s for s in steps if s is not None)), strict=True)
    slide = Slide(
        data, weight, rows, tuple(reduced), tuple(places), strides, tuple(tuple(by) for by in moves), places[0].extent
    )
    return slide if any(slide.last) else None


def _num_places(data: Any, weight: Any, spatial: Sequence[Axis]) -> int:
    """How many of the last axes the data has in their places, and the weight has not."""
    pairs = zip(reversed(data.indices), reversed(spatial), range(_MAX_PLACES), strict=False)
    return sum(1 for _ in takewhile(lambda p: uses([p[0]], [p[1].var]) and not uses(weight.indices, [p[1].var]), pairs))


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
    func: Any, block: Any, last: Any, info: BlockInfo, slide: Slide, tile: Tile, inside: Sequence[int] | None
) -> Any:
    """Return the function with the convolution `block`, and `last` if another follows it, made of three blocks.

    The sums of a tile of channels and what follows them are in one loop; by channel, the image is too. `inside`: the
    leading axes of the data whose loops are around the image; None where it is made before all else.
    """
    stages = [(s, str(b.name_hint) if (b := block_in(s)) is not None else "") for s in stages_of(func)]
    gone = {str(b.name_hint) for b in (block, last) if b is not None}
    dtype = str(block.writes[0].source.dtype)
    length = _whole(slide.positions, tile.columns)
    num_rows = math.ceil((length + slide.reach) / slide.pitches[0])
    outer = slide.shape[: -len(slide.places)]
    image = _buffer([slide.num_bands, *outer, *slide.strides, _apart(num_rows * slide.pitches[0])], dtype, _IMAGE)
    batch = _batch(info, slide)
    extents = [*(a.extent for a in batch), slide.num_bands]
    sums = _buffer([*extents, slide.rows.extent, length], dtype, _SUMS)
    *loops, tiles = [axis(f"o{i}") for i in range(len(extents) + 1)]
    *images, band = loops
    at, channels = [(loop, 0) for loop in images], (tiles * tile.rows, tile.rows)
    parts = [
        _slide_over(info, slide, image, sums, [*at, (band, 0), channels]),
        _finish(info, block, last, sums, slide, [*at, channels, (band * slide.band, slide.band)]),
    ]
    kept = [s for s, name in stages if name not in gone]
    outside = {a.var: loop for a, loop in zip([*batch, slide.rows], [*images, tiles], strict=True)}
    places = {i + 1: (replaced(slide.data.indices[i], outside), 0) for i in inside or ()}
    laid = _lay_out(slide, image, num_rows, {} if inside is None else {0: (band, 0), **places})
    if slide.by_channel:
        parts.insert(0, laid)
    elif inside is None:
        kept.append(laid)
    made = over(tiles, slide.rows.extent // tile.rows, tirx.SeqStmt(parts))
    if inside is not None and not slide.by_channel:
        made = tirx.SeqStmt([laid, made])
    for loop, extent in reversed([*zip(loops, extents, strict=True)]):
        made = over(loop, extent, made)
    unused = {str(block.writes[0].source.name)} if last is not None else set()
    return with_stages(func, [*kept, made], [image, sums], unused)


def _apart(length: int) -> int:
    """Make images an odd number of cache lines long, so that those of all channels do not share a few of its sets."""
    return length + (_LINE - length) % (2 * _LINE)


def _batch(info: BlockInfo, slide: Slide) -> list[Axis]:
    """The axes before the output channels."""
    return [a for a in info.axes if not a.reduced][: -len(slide.places) - 1]


def _buffer(shape: Sequence[int], dtype: str, name: str) -> Any:
    return tirx.decl_buffer([tirx.const(int(e), "int64") for e in shape], dtype, name)


def _lay_out(slide: Slide, image: Any, num_rows: int, bound: Mapping[int, tuple[Any, int]]) -> Any:
    """Copy the data row by row, every s-th one apart if the window moves by s, with zeros around it.

    `bound` places the band and the leading axes in loops outside, as `nest` takes it.
    """
    source, num_places = slide.data.source, len(slide.places)
    outer, lengths = slide.shape[:-num_places], (num_rows, *slide.extents[1:])
    band, *axes = [axis(f"v_{i}") for i in range(1 + len(outer) + 2 * num_places)]
    before, which, at = axes[: len(outer)], axes[len(outer) : -num_places], axes[-num_places:]
    rows = [band * slide.band + at[0], *at[1:]]
    places = [a if s == 1 else a * s + w for a, w, s in zip(rows, which, slide.strides, strict=True)]
    ends = ((slide.num_bands - 1) * slide.band + num_rows, *lengths[1:])
    inside = [
        place < limit
        for place, limit, end, s in zip(places, slide.shape[-num_places:], ends, slide.strides, strict=True)
        if end * s > limit
    ]
    value = tirx.BufferLoad(source, [*before, *places])
    if inside:
        value = tirx.if_then_else(tirx.all(*inside), value, tirx.const(0, str(source.dtype)))
    store = tirx.BufferStore(image, value, [band, *before, *which, _position(at, slide.pitches)])
    extents = [slide.num_bands, *outer, *slide.strides, *lengths]
    return nest(_IMAGE, [band, *axes], extents, [SPATIAL] * len(extents), store, None, bound)


def _position(at: Sequence[Any], pitches: Sequence[int]) -> Any:
    """The position of an element of an image."""
    return sum((a * p for a, p in zip(at[:-1], pitches[:-1], strict=True)), start=tirx.const(0, "int64")) + at[-1]


def _slide_over(info: BlockInfo, slide: Slide, image: Any, sums: Any, bound: Sequence[tuple[Any, int]]) -> Any:
    """Sum up at every position, those between rows included."""
    spatial, reduced = [a for a in info.axes if not a.reduced], slide.reduced
    new = {a.var: axis(f"v_{a.var.name}") for a in (*spatial[: -len(slide.places)], *reduced)}
    band, place, zero = axis("v_band"), axis("v_place"), tirx.const(0, "int64")
    taps = [
        sum((new[a.var] * s for s, a in zip(steps, reduced, strict=True) if s), start=zero) for steps in slide.steps
    ]
    which = [i % s if s > 1 else zero for i, s in zip(taps, slide.strides, strict=True)]
    offset = place + _position([i // s for i, s in zip(taps, slide.strides, strict=True)], slide.pitches)
    outer = [replaced(i, new) for i in slide.data.indices[: -len(slide.places)]]
    data = tirx.BufferLoad(image, [band, *outer, *which, offset])
    weight = tirx.BufferLoad(slide.weight.source, [replaced(i, new) for i in slide.weight.indices])
    *batch, rows = [new[a.var] for a in spatial[: -len(slide.places)]]
    where = [*batch, band, rows, place]
    store = tirx.BufferStore(sums, tirx.BufferLoad(sums, where) + data * weight, where)
    init = tirx.BufferStore(sums, tirx.const(0, str(sums.dtype)), where)
    axes = [*where, *(new[a.var] for a in reduced)]
    extents = [int(e) for e in sums.shape] + [a.extent for a in reduced]
    kinds = [SPATIAL] * len(where) + [REDUCE] * len(reduced)
    return nest(_SUMS, axes, extents, kinds, store, init, dict(enumerate(bound)))


def _finish(info: BlockInfo, block: Any, last: Any, sums: Any, slide: Slide, bound: Sequence[tuple[Any, int]]) -> Any:
    """Write the sums, through what follows them, to where the kernel's result is."""
    spatial = [a for a in info.axes if not a.reduced]
    axes = [axis(f"v_{i}") for i in range(len(spatial))]
    *batch, rows = axes[: -len(slide.places)]
    first, *others = axes[-len(slide.places) :]
    place = _position([first % slide.band, *others], slide.pitches)
    value = tirx.BufferLoad(sums, [*batch, first // slide.band, rows, place])
    buffer, to = block.body.buffer, dict(zip([a.var for a in spatial], axes, strict=True))
    indices = [replaced(i, to) for i in block.body.indices]
    if last is not None:
        to = dict(zip([v.var for v in last.iter_vars], axes, strict=True))
        buffer, indices = last.body.buffer, [replaced(i, to) for i in last.body.indices]

        def read(load: Any) -> Any:
            return value if load.source.same_as(block.body.buffer) else load

        value = tvm_ffi.structural_map(replaced(last.body.value, to), (TensorLoad, read))
    store = tirx.BufferStore(buffer, value, indices)
    return nest(_LAST, axes, [a.extent for a in spatial], [SPATIAL] * len(axes), store, None, dict(enumerate(bound)))


def _tile_loops(sch: Schedule, tile: Tile, by_channel: bool, inside: Sequence[int] | None, cpu: CpuTarget) -> Schedule:
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
    around = parallelize(sch, outer[:-1] if inside is not None and not by_channel else outer, cpu)
    if inside is None:  # nothing is around it
        *before, _ = sch.get_loops(image)
        parallelize(sch, before, cpu)
    for producer in own if by_channel else ():
        sch.compute_at(producer, around, preserve_unit_loops=False)
    sch.decompose_reduction(sums, reduced[0])
    return sch


def _vectorize_last(sch: Schedule, block: Any, lanes: int, most: int) -> None:
    loop = sch.get_loops(block)[-1]
    length = vector_length(int(sch.get(loop).extent), lanes, most)
    if length > 1:
        sch.vectorize(sch.split(loop, [None, length])[1])
