"""Neighbouring axes along which every block of a function moves as along one become one.

Before:  for y, x, c: t[y, x, c] = image[c, y, x]        After:  for p, c: t[p, c] = image[c, p]
         for y, x, c: s[y, x] += t[y, x, c]                      for p, c: s[p] += t[p, c]

Squares that are turned in registers then end where the image does, not where each of its rows does: of a row of 28
pixels, 16 lanes take 16 and lesser squares the rest. Axes of a sum that become one are a row of it: vectors
of an image's mean do not end with its rows. Parameters keep their shapes: the function declares views of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvmhet._tvm import TensorLoad
from tvmhet.emit.cpu.blocks import Axis, Schedule, blocks_of, loads_of, uses
from tvmhet.emit.cpu.nests import REDUCE, SPATIAL, axis, held, in_order, nest, number


@dataclass(frozen=True, slots=True)
class _Block:
    name: str
    axes: tuple[Axis, ...]
    body: Any
    init: Any

    def statements(self) -> list[Any]:
        return [s for s in (self.body, self.init) if s is not None]

    def accesses(self) -> list[tuple[Any, Sequence[Any]]]:
        """Every tensor that is stored to or loaded from, and where."""
        stores = [(s.buffer, s.indices) for s in self.statements()]
        return [*stores, *((x.source, x.indices) for s in self.statements() for x in loads_of(s.value))]

    def nest(self) -> Any:
        kinds = [REDUCE if a.reduced else SPATIAL for a in self.axes]
        extents = [a.extent for a in self.axes]
        return nest(self.name, [a.var for a in self.axes], extents, kinds, self.body, self.init)


@dataclass(frozen=True, slots=True)
class MergedAxes:
    """A function of fewer axes than another, and how a schedule of it becomes one of the other."""

    original: Any
    func: Any

    def restored(self, sch: Schedule) -> Schedule:
        """Return the schedule with the parameters of the original, of which those of the function are views."""
        pairs = zip(self.func.params, self.original.params, strict=True)
        views = [tirx.DeclBuffer(view, data=param.data) for view, param in pairs if not view.same_as(param)]
        root = sch.mod["main"].body.block
        body = in_order([*views, root.body])
        return tvm.s_tir.Schedule(self.original.with_body(held(body, root.alloc_buffers, root.name_hint)))


def merged_axes(sch: Schedule, places: range) -> MergedAxes | None:
    """Merge what can be of the axes at `places` of all blocks that have them; None if nothing can."""
    func, infos = sch.mod["main"], blocks_of(sch) or ()
    read = [(sch.get(info.block), info.axes) for info in infos]
    if any(not isinstance(block.body, tirx.BufferStore) for block, _ in read):
        return None
    blocks = [_Block(str(block.name_hint), axes, block.body, block.init) for block, axes in read]
    buffers = before = [*func.params, *func.body.block.alloc_buffers]
    for place in reversed(places[:-1]):
        blocks, buffers = _merged(blocks, buffers, place) or (blocks, buffers)
    if all(new.same_as(old) for new, old in zip(buffers, before, strict=True)):
        return None
    params, own = buffers[: len(func.params)], buffers[len(func.params) :]
    body = held(in_order([b.nest() for b in blocks]), own, func.body.block.name_hint)
    return MergedAxes(func, tirx.PrimFunc(params, body, attrs=func.attrs))


def _merged(blocks: Sequence[_Block], buffers: Sequence[Any], place: int) -> tuple[list[_Block], list[Any]] | None:
    """Merge the axes at `place` and after it; None where something does not move along both as along one."""
    pairs = [b.axes[place : place + 2] for b in blocks]
    whole = [pair for pair in pairs if pair]
    if any(len(p) == 1 for p in whole) or len({tuple(a.extent for a in p) for p in whole}) > 1:
        return None
    dims: list[int | None] = [None] * len(buffers)
    for block, pair in zip(blocks, pairs, strict=True):
        for tensor, indices in block.accesses():
            i, dim = _place(buffers, tensor), _dim(tensor, indices, pair)
            if dim is None or dims[i] not in (None, dim):
                return None
            dims[i] = dim
    views = [_view(b, d) if d is not None and d >= 0 else b for b, d in zip(buffers, dims, strict=True)]

    def merged(block: _Block, pair: Sequence[Axis]) -> _Block:
        if not pair:
            return block
        one = Axis(axis("p"), pair[0].extent * pair[1].extent, pair[0].reduced)

        def there(tensor: Any, indices: Sequence[Any]) -> tuple[Any, list[Any]]:
            i = _place(buffers, tensor)
            d = dims[i]
            assert d is not None
            return views[i], [*indices[:d], one.var, *indices[d + 2 :]] if d >= 0 else list(indices)

        def load(x: Any) -> Any:
            return tirx.BufferLoad(*there(x.source, x.indices))

        def store(x: Any) -> Any:
            tensor, indices = there(x.buffer, x.indices)
            return tirx.BufferStore(tensor, tvm_ffi.structural_map(x.value, (TensorLoad, load)), indices)

        axes = (*block.axes[:place], one, *block.axes[place + 2 :])
        return _Block(block.name, axes, store(block.body), None if block.init is None else store(block.init))

    made = [merged(b, pair) for b, pair in zip(blocks, pairs, strict=True)]
    left = [uses(b.statements(), [a.var for a in pair]) for b, pair in zip(made, pairs, strict=True)]
    return None if any(left) else (made, views)


def _place(buffers: Sequence[Any], tensor: Any) -> int:
    return next(i for i, b in enumerate(buffers) if b.same_as(tensor))


def _dim(tensor: Any, indices: Sequence[Any], pair: Sequence[Axis]) -> int | None:
    """The dimension along which a tensor is read by the first axis, and then by the second; -1 if by neither."""
    variables = [a.var for a in pair]
    if not uses(list(indices), variables):
        return -1
    found = [d for d in range(len(indices) - 1) if all(indices[d + i].same_as(v) for i, v in enumerate(variables))]
    whole = [d for d in found if [int(e) for e in tensor.shape[d : d + 2]] == [a.extent for a in pair]]
    others = [index for d, index in enumerate(indices) if not whole or d not in (whole[0], whole[0] + 1)]
    return whole[0] if whole and not uses(others, variables) else None


def _view(buffer: Any, dim: int) -> Any:
    """The same elements with dimension `dim` and the one after it as one."""
    shape = [int(e) for e in buffer.shape]
    merged = [*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]]
    return tirx.decl_buffer([number(e) for e in merged], str(buffer.dtype), buffer.name, layout=None)
