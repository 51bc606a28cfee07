"""Convolutions by channel: as many channels as a vector has lanes side by side, turned when they are read and written.

Before:  for c, y, x, ry, rx: s[c, y, x] += p[c, y + ry, x + rx] * w[c, ry, rx]           p: the image, padded
         for c, y, x:         z[c, y, x] = max(s[c, y, x] + b[c], 0)

After:   for 16 channels c:   image[p, c] = d[c, p]      w[r, c] = w[c, r]                turned in registers
                              for y, some x:  sums[x] += image[y + ry, x + rx] * w[ry, rx]    for c in a vector
                              z[c, p] = max(sums[p, c] + b[c], 0)                         turned back

Vectors along an image's rows, as `windows` and `sliding` take them, do not fill 16 lanes with rows of 7 or 14, begin
anywhere in a cache line, and multiply the zeros of a padding. Here every vector is whole and lies where it should, and
what lies outside the image is left out. Turning takes as long as about eight multiplications of each element (AVX2
three): where the window is small and rows are long, the others are faster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvmhet._tvm import TensorLoad, structural_equal
from tvmhet.emit.cpu.blocks import (
    Axis,
    BlockInfo,
    CpuTarget,
    Schedule,
    around_reduction,
    conditions_of,
    loads_of,
    uses,
    vector_length,
)
from tvmhet.emit.cpu.nests import apart, axis, held, in_order, number, on_cores, over, places_of, vector
from tvmhet.emit.cpu.sliding import Slide, follows, slide_of
from tvmhet.emit.cpu.transposing import Access, Views, access_of, in_squares, rows_at_a_time, steps_of, with_element
from tvmhet.emit.cpu.windows import VECTORS

_DTYPE = "float32"
_BYTES = 4
_MAX_IMAGE_BYTES = 1024 << 10  # of as many channels as a vector has lanes: 112 x 112 pixels of 16
_FEW_TAPS, _LONG_ROW = 9, 28  # of a window that moves by one: below and beyond, `windows` is as fast or a sixth faster


def depthwise(func: Any, cpu: CpuTarget) -> Schedule | None:
    """Schedule a kernel with one convolution by channel and what follows it element by element; None for any other."""
    found = around_reduction(func)
    if found is None:
        return None
    sch, infos, place = found
    conv = _conv_of(sch, infos, place)
    if conv is None:
        return None
    cpu = cpu.for_products([infos[place]])
    lanes = cpu.lanes(_DTYPE)
    if conv.channels < lanes or conv.pixels * lanes * _BYTES > _MAX_IMAGE_BYTES or not _pays(conv, cpu):
        return None
    func = sch.mod["main"]
    views = Views()
    steps = [*conv.batch, -(-conv.channels // lanes)]
    step = axis("step")
    *batch, group = places_of(step, steps)
    first = tirx.min(group * lanes, number(conv.channels - lanes))
    body = _Group(conv, cpu, batch, first, views).body()
    loop = on_cores if cpu.num_cores > 1 else over
    made = loop(step, math.prod(steps), body)
    return tvm.s_tir.Schedule(func.with_body(held(views.declared(made), [], "root")))


@dataclass(frozen=True, slots=True)
class _Window:
    """The taps of a row of a window: how far each is from the first, and its place among the weights of a channel."""

    down: int
    along: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Conv:
    """A convolution by channel: its image, its window, and what is made of its sums.

    `begin` is where the image begins in the padded one. Accesses have an axis for the batch (if there is any) and for
    the channel; the image's, the result's and those of `beside` have one more for the pixel, the weight's for the tap.
    """

    batch: tuple[int, ...]
    channels: int
    height: int
    width: int
    begin: tuple[int, int]
    strides: tuple[int, int]
    rows: int  # of the result
    columns: int
    window: tuple[_Window, ...]
    image: Access
    element: Any  # an expression of one load of the image
    weight: Access
    result: Access
    value: Any  # an expression of loads of the sums and others
    sums: Any
    beside: tuple[tuple[Any, Access], ...]  # other loads

    @property
    def pixels(self) -> int:
        """Of the image."""
        return self.height * self.width

    @property
    def taps(self) -> int:
        """Of the window."""
        return sum(len(row.along) for row in self.window)


def _conv_of(sch: Schedule, infos: Sequence[BlockInfo], place: int) -> _Conv | None:
    info = infos[place]
    slide = slide_of(sch, info)
    if slide is None or len(slide.places) != 2 or not slide.by_channel or place > 1 or len(infos) - place > 2:
        return None
    body = sch.get(info.block).body
    spatial = [a for a in info.axes if not a.reduced]
    *leading, y, x = spatial
    if str(body.buffer.dtype) != _DTYPE or not leading or not leading[-1].var.same_as(slide.rows.var):
        return None
    image = _image_of(sch, infos[0] if place else None, slide, info, len(leading))
    weight = _weight_of(slide, info, len(leading))
    after = infos[place + 1] if len(infos) > place + 1 else None
    if image is None or weight is None or (after is not None and not follows(sch, info, after)):
        return None
    end = sch.get((after or info).block).body
    axes = after or BlockInfo(info.block, tuple(spatial))
    value = end.value if after is not None else None
    if value is not None and uses([with_element(value, number(0))], [a.var for a in axes.axes]):
        return None
    beside = [] if value is None else [load for load in loads_of(value) if not load.source.same_as(body.buffer)]
    accesses = [_flat(access_of(load.source, load.indices, axes), x.extent) for load in beside]
    result = _flat(access_of(end.buffer, end.indices, axes), x.extent)
    if result is None or result.factors[-1] != 1 or None in accesses or str(end.buffer.dtype) != _DTYPE:
        return None
    access, element, (height, width), begin = image
    return _Conv(
        batch=tuple(a.extent for a in leading[:-1]),
        channels=leading[-1].extent,
        height=height,
        width=width,
        begin=begin,
        strides=(slide.strides[0], slide.strides[1]),
        rows=y.extent,
        columns=x.extent,
        window=weight[1],
        image=access,
        element=element,
        weight=weight[0],
        result=result,
        value=value,
        sums=body.buffer,
        beside=tuple((load, a) for load, a in zip(beside, accesses, strict=True) if a is not None),
    )


def _flat(access: Access | None, row: int) -> Access | None:
    """An access over pixels instead of rows and columns; None where pixels do not lie one after the other."""
    if access is None or access.factors[-2] != row * access.factors[-1]:
        return None
    return Access(access.buffer, (*access.factors[:-2], access.factors[-1]), access.offset)


def _image_of(
    sch: Schedule, pad: BlockInfo | None, slide: Slide, info: BlockInfo, num_leading: int
) -> tuple[Access, Any, tuple[int, int], tuple[int, int]] | None:
    """The image, an element of it, its height and width, and where it begins in the padded one."""
    source = slide.data.source
    height, width = (int(e) for e in source.shape[-2:])
    if pad is None:
        leading = BlockInfo(info.block, info.axes[:num_leading])
        access = access_of(source, [*slide.data.indices[:-2], number(0), number(0)], leading)
        if access is None or str(source.dtype) != _DTYPE:
            return None
        return Access(source, (*access.factors, 1), access.offset), slide.data, (height, width), (0, 0)
    stmt = sch.get(pad.block)
    leading_axes = [a.var for a in info.axes[:num_leading]]
    long = [i for i, e in zip(slide.data.indices[:-2], source.shape, strict=False) if int(e) > 1]
    if not stmt.writes[0].source.same_as(source) or len(pad.axes) != num_leading + 2 or len(long) != num_leading:
        return None
    if not all(i.same_as(v) for i, v in zip(long, leading_axes, strict=True)):
        return None
    inside = _inside(stmt.body.value, pad.axes)
    if inside is None:
        return None
    element, (top, bottom), (left, right) = inside
    loads = loads_of(element)
    access = access_of(loads[0].source, loads[0].indices, pad) if len(loads) == 1 else None
    if access is None or uses([with_element(element, number(0))], [a.var for a in pad.axes]):
        return None
    if access.factors[-2:] != (right - left, 1) or str(access.buffer.dtype) != _DTYPE:
        return None
    if not any(access.buffer.same_as(p) for p in sch.mod["main"].params):
        return None
    offset = access.offset + top * access.factors[-2] + left
    flat = Access(access.buffer, (*access.factors[:-2], 1), offset)
    return flat, element, (bottom - top, right - left), (top, left)


def _inside(value: Any, axes: Sequence[Axis]) -> tuple[Any, tuple[int, int], tuple[int, int]] | None:
    """Read `e where a <= y < b and c <= x < d, else 0`: e, (a, b) and (c, d)."""
    conditions = conditions_of(value)
    if len(conditions) != 1 or not str(getattr(getattr(value, "op", None), "name", "")).endswith(".if_then_else"):
        return None
    condition, element, zero = value.args
    if getattr(zero, "value", None) != 0:
        return None
    bounds = {i: [0, a.extent] for i, a in enumerate(axes)}
    for part in _parts(condition):
        found = [(i, a.var) for i, a in enumerate(axes) if uses(part, [a.var])]
        if len(found) != 1 or found[0][0] < len(axes) - 2:
            return None
        i, var = found[0]
        if isinstance(part, tirx.LE) and part.b.same_as(var) and hasattr(part.a, "value"):
            bounds[i][0] = max(bounds[i][0], int(part.a.value))
        elif isinstance(part, tirx.LT) and part.a.same_as(var) and hasattr(part.b, "value"):
            bounds[i][1] = min(bounds[i][1], int(part.b.value))
        else:
            return None
    rows, columns = (tuple(bounds[len(axes) - n]) for n in (2, 1))
    return element, rows, columns  # type: ignore[return-value]


def _parts(condition: Any) -> list[Any]:
    if isinstance(condition, tirx.And):
        return [*_parts(condition.a), *_parts(condition.b)]
    return [condition]


def _weight_of(slide: Slide, info: BlockInfo, num_leading: int) -> tuple[Access, tuple[_Window, ...]] | None:
    """The weight over channels and taps, and the window's rows."""
    access = access_of(slide.weight.source, slide.weight.indices, info)
    reduced = [a for a in info.axes if a.reduced]
    if access is None or str(access.buffer.dtype) != _DTYPE or any(access.factors[num_leading : num_leading + 2]):
        return None
    steps = access.factors[len(info.axes) - len(reduced) :]
    rows: dict[int, list[tuple[int, int]]] = {}
    for at in itertools.product(*(range(a.extent) for a in reduced)):
        down, along, tap = (sum(s * i for s, i in zip(by, at, strict=True)) for by in (*slide.steps, steps))
        rows.setdefault(down, []).append((along, tap))
    taps = sorted(tap for row in rows.values() for _, tap in row)
    window = tuple(_Window(down, tuple(row)) for down, row in sorted(rows.items()))
    if taps != list(range(len(taps))) or not _are_alike(window):
        return None
    return Access(access.buffer, (*access.factors[:num_leading], 1), access.offset), window


def _are_alike(window: Sequence[_Window]) -> bool:
    """Whether rows are equally far from each other, and their taps too."""
    steps = {(b.down - a.down, b.along[0][1] - a.along[0][1]) for a, b in itertools.pairwise(window)}
    alike = {tuple((dx, tap - row.along[0][1]) for dx, tap in row.along) for row in window}
    return len(steps) < 2 and len(alike) == 1


def _pays(conv: _Conv, cpu: CpuTarget) -> bool:
    """Whether turning costs less than what vectors along the rows of images waste."""
    lanes = cpu.lanes(_DTYPE)
    in_vectors = conv.strides == (1, 1) and vector_length(conv.columns, lanes, VECTORS * lanes) > 1
    return not in_vectors or conv.taps > _FEW_TAPS or conv.columns < _LONG_ROW


class _Group:
    """What is computed for as many channels as a vector has lanes."""

    def __init__(self, conv: _Conv, cpu: CpuTarget, batch: Sequence[Any], first: Any, views: Views) -> None:
        self.of = conv
        self.lanes = cpu.lanes(_DTYPE)
        self.at = (*batch, first)
        self.views = views
        row_bytes = conv.columns * self.lanes * _BYTES
        self.band = rows_at_a_time(conv.rows, row_bytes, lambda rows: steps_of(rows * conv.columns, self.lanes))
        self.tile = _even(conv.columns, cpu.num_registers // 2 if cpu.num_registers > 16 else 10)
        self.image = _buffer("image", conv.pixels * self.lanes)
        self.weight = _buffer("weight", conv.taps * self.lanes)
        self.sums = _buffer("sums", self.band * conv.columns * self.lanes)

    def body(self) -> Any:
        """Turn the image and the weights, then sum up, and write, some rows at a time."""
        band, row = axis("band"), axis("row")
        place = band * self.band + row
        rows = over(row, self.band, in_order([self._tiles(row, place)]))
        bands = over(band, self.of.rows // self.band, in_order([rows, apart("write", self._write(band))]))
        lay_out = [self._turned(self.of.weight, self.of.taps, self.weight, None)]
        lay_out.append(self._turned(self.of.image, self.of.pixels, self.image, self.of.element))
        made = in_order([apart("lay_out", in_order(lay_out)), bands])
        return held(made, [self.image, self.weight, self.sums], "channels")

    def _turned(self, source: Access, length: int, buffer: Any, element: Any) -> Any:
        def load(_: int, place: Any, lane: Any) -> Any:
            return self.views.load(source, [*self.at[:-1], self.at[-1] + lane, place])

        def store(place: Any, lane: Any, known: Sequence[Any]) -> Any:
            value = known[0] if known else load(0, place, lane)
            value = value if element is None else with_element(element, value)
            return tirx.BufferStore(buffer, value, [place * self.lanes + lane])

        return in_order(in_squares(1, length, self.lanes, self.lanes, load, store))

    def _tiles(self, row: Any, place: Any) -> Any:
        """Sum up a row of the result, some pixels at a time; what is alike of them in a loop."""
        made = []
        firsts = range(0, self.of.columns, self.tile)
        for whole, group in itertools.groupby(firsts, self._is_whole):
            found = list(group)
            if whole and len(found) > 1:
                i = axis("tile")
                made.append(over(i, len(found), self._tile(row, place, i * self.tile + found[0], found[0])))
            else:
                made += [self._tile(row, place, number(first), first) for first in found]
        return in_order(made)

    def _is_whole(self, first: int) -> bool:
        """Whether all of the window lies beside each pixel of a tile, and it is as long as others."""
        along = [dx for dx, _ in self.of.window[0].along]
        last = min(first + self.tile, self.of.columns) - 1
        inside = self._column(first) + min(along) >= 0 and self._column(last) + max(along) < self.of.width
        return inside and first + self.tile <= self.of.columns

    def _column(self, x: int) -> int:
        return x * self.of.strides[1] - self.of.begin[1]

    def _tile(self, row: Any, place: Any, first: Any, known: int) -> Any:
        """Sum up some pixels of a row, in registers; `known` is where tiles that are alike begin."""
        pixels = min(self.tile, self.of.columns - known)
        sums = tirx.decl_buffer((number(pixels * self.lanes),), _DTYPE, "tile", scope="local")
        r = axis("r")
        step = self.of.window[1].down - self.of.window[0].down if len(self.of.window) > 1 else 1
        above = place * self.of.strides[0] - self.of.begin[0]  # of the first tap's row
        begin = tirx.max(number(0), (number(step - 1) - above) // step)
        end = tirx.min(number(len(self.of.window)), (number(self.of.height + step - 1) - above) // step)
        line = (above + (begin + r) * step) * self.of.width
        column = first * self.of.strides[1] - self.of.begin[1]

        def each(count: int, statement: Callable[[int, Any], Any]) -> list[Any]:
            made = []
            for i in range(count):
                lane = axis("lane")
                made.append(vector(lane, self.lanes, statement(i, lane)))
            return made

        def at(i: int, lane: Any) -> Any:
            return tirx.BufferLoad(sums, [number(i * self.lanes) + lane])

        zero = each(pixels, lambda i, lane: tirx.BufferStore(sums, tirx.const(0.0, _DTYPE), [i * self.lanes + lane]))
        adds = []
        for dx, tap in self.of.window[0].along:
            for i in range(pixels):
                if not 0 <= self._column(known + i) + dx < self.of.width:
                    continue
                lane = axis("lane")
                pixel = line + column + (i * self.of.strides[1] + dx)
                weight = (begin + r) * self._row_taps() + tap
                product = tirx.BufferLoad(self.image, [pixel * self.lanes + lane]) * tirx.BufferLoad(
                    self.weight, [weight * self.lanes + lane]
                )
                store = tirx.BufferStore(sums, at(i, lane) + product, [i * self.lanes + lane])
                adds.append(vector(lane, self.lanes, store))
        target = (row * self.of.columns + first) * self.lanes
        write = each(
            pixels, lambda i, lane: tirx.BufferStore(self.sums, at(i, lane), [target + (i * self.lanes + lane)])
        )
        steps = [over(r, end - begin, in_order(adds))] if adds else []
        return held(in_order([*zero, *steps, *write]), [sums], "tile")

    def _row_taps(self) -> int:
        """How far the weights of one row of the window are from those of the next."""
        rows = self.of.window
        return rows[1].along[0][1] - rows[0].along[0][1] if len(rows) > 1 else 0

    def _write(self, band: Any) -> Any:
        count = self.band * self.of.columns

        def load(_: int, lane: Any, pixel: Any) -> Any:
            return tirx.BufferLoad(self.sums, [pixel * self.lanes + lane])

        def store(lane: Any, pixel: Any, known: Sequence[Any]) -> Any:
            value = known[0] if known else load(0, lane, pixel)
            place = [*self.at[:-1], self.at[-1] + lane, band * count + pixel]

            def element(x: Any) -> Any:
                if x.source.same_as(self.of.sums):
                    return value
                return self.views.load(next(a for y, a in self.of.beside if structural_equal(y, x)), place)

            made = value if self.of.value is None else tvm_ffi.structural_map(self.of.value, (TensorLoad, element))
            return tirx.BufferStore(self.views.of(self.of.result.buffer), made, [self.of.result.at(place)])

        return in_order(in_squares(1, self.lanes, count, self.lanes, load, store))


def _even(extent: int, most: int) -> int:
    """Cut an extent into equal parts of at most so many, the last of which may be shorter."""
    return -(-extent // -(-extent // most))


def _buffer(name: str, size: int) -> Any:
    return tirx.decl_buffer((number(size),), _DTYPE, name)
