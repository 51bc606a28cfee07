"""Ask for a product's weights before they are read: all rows of the one operand go through a panel of the other.

Before:  for n tile:                           After:  for n tile:
             for m tile:                                   for m tile:
                 for k:                                        for k:
                     tile += x[m, k] * w[n, k]                     prefetch(m's and k's share of w[n + 1])
                                                                   tile += x[m, k] * w[n, k]

The first tile of rows waits for memory, which the others do not use: each of them brings an equal share of the next
panel to the second cache. Weights from memory, one core of an Intel Xeon (family 6, model 106, AVX-512), speed over
that without: 128 x 768 x 768 1.15, 128 x 768 x 3072 1.14, 128 x 3072 x 768 1.11, 32 x 768 x 3072 1.4, 8 x 768 x 3072
1.2, 2 x 768 x 3072 1.04 (medians of 25 rounds in turn; rounds differ by up to a third there). Asking for the next steps
of the same panel in the first cache as well gains nothing there, and loses 7 % of 1024 x 768 x 3072.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import tirx

from tvmhet._tvm import Analyzer, SBlockRealize, TensorLoad
from tvmhet.emit.cpu.blocks import conditions_of, replaced, stride_along, uses
from tvmhet.emit.cpu.nests import in_order, number, over

_LINE_BYTES, _FLOAT_BYTES = 64, 4
_READ, _SECOND_CACHE, _DATA = 0, 2, 1  # of llvm.prefetch
#: How far ahead at most: a panel of 576 KiB ahead 16 x 3072 x 768 gains 1 %, 256 KiB ahead 26. With one tile of rows
#: panels are read in line, each once, and 4 to 64 KiB are as good as each other (8 x 768 x 3072 1.22; by a panel 1.15).
_FARTHEST_BYTES, _FARTHEST_IN_LINE_BYTES = 320 << 10, 16 << 10
#: What is packed of rows along k: 128 x 512 x 32128 1.07, 128 x 768 x 50257 1.01 and 1.07, 32 x 768 x 3072 1.05 to 1.09
#: (8 tiles), 8 x 1024 x 4096 0.82 (one). Of short rows across k, each in a page of its own, nothing is gained.
_FEWEST_TILES_TO_PACK = 4


def prefetching(func: Any, rows: int, columns: int, num_tiles: int) -> Any:
    """Return a scheduled product with register tiles of `rows` x `columns`, whose panels are asked for in advance.

    A core goes through `num_tiles` tiles of rows with one panel: of a parameter that comes in panels, or one that it
    packs first, of a parameter that is contiguous along k.
    """

    def visit(loop: Any) -> Any:
        step = _Step.of(loop, columns)
        made = step.prefetches(func, rows, num_tiles) if step else []
        return over(loop.loop_var, int(loop.extent), in_order([*made, loop.body])) if made else loop

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, visit)))


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of the sums of a tile."""

    loop: Any  # over k
    panel: Any  # the load of a vector of it
    first: Mapping[Any, Any]  # the variables of its loops, at the first element of the first step
    row: Any  # where the tile begins among the rows

    @staticmethod
    def of(loop: Any, columns: int) -> _Step | None:
        """Read a loop over the steps of a tile; None if its vectors are not of panels [.., n tile, k, c] of float32."""
        inner, own = loop.body, []
        while isinstance(inner, tirx.For) and inner.kind in (tirx.ForKind.UNROLLED, tirx.ForKind.VECTORIZED):
            own.append(inner.loop_var)
            inner = inner.body
        if loop.kind != tirx.ForKind.SERIAL or not own or not isinstance(inner, SBlockRealize):
            return None
        store = _stored(inner)
        factors = store.value.b if isinstance(getattr(store, "value", None), tirx.Add) else None
        if not isinstance(factors, tirx.Mul):
            return None
        loads = [x for x in (factors.a, factors.b) if isinstance(x, TensorLoad) and uses(x.indices[-1:], own[-1:])]
        if len(loads) != 1 or len(loads[0].indices) < 3 or stride_along(loads[0].indices[-2], loop.loop_var) != 1:
            return None
        (load,) = loads
        if int(load.source.shape[-1]) != columns or str(load.source.dtype) != "float32":
            return None
        first = dict.fromkeys([loop.loop_var, *own], number(0))
        return _Step(loop, load, first, Analyzer().simplify(replaced(store.indices[-2], first)))

    def prefetches(self, func: Any, rows: int, num_tiles: int) -> list[Any]:
        """Return what asks for this step's share of what comes next; nothing where few of many tiles would have any."""
        columns = int(self.panel.source.shape[-1])
        if num_tiles > columns:
            return []
        share = math.ceil(columns / num_tiles)  # elements
        tile = Analyzer().simplify(self.row // rows % num_tiles)
        begin = (tile * self.loop.extent + self.loop.loop_var) * share
        elements = [begin + c for c in range(0, share, _LINE_BYTES // _FLOAT_BYTES)]
        if any(self.panel.source.same_as(p) for p in func.params):
            return self._given(elements, num_tiles)
        return self._packed(func, elements) if num_tiles >= _FEWEST_TILES_TO_PACK else []

    def _given(self, elements: Sequence[Any], num_tiles: int) -> list[Any]:
        """Ask for so many elements more than where the next panel begins, or what is as far as is of use."""
        shape = [int(e) for e in self.panel.source.shape]
        farthest = _FARTHEST_BYTES if num_tiles > 1 else _FARTHEST_IN_LINE_BYTES
        ahead = math.prod(shape[-2:]) if self._size_bytes <= farthest else farthest // _FLOAT_BYTES
        if ahead >= math.prod(shape):  # there is no next panel
            return []
        begin = Analyzer().simplify(_flat(self.panel, self.first)) + ahead
        return [_prefetch(self.panel.source, begin + e) for e in elements]

    def _packed(self, func: Any, elements: Sequence[Any]) -> list[Any]:
        """Ask for what the next panel will be packed from, if that lies in line along k."""
        found = next(_packing(func.body.block.body, self.panel.source), None)
        if found is None or self._size_bytes > _FARTHEST_BYTES:
            return []
        (*_, tile, k, column), load = found
        following = {tile.loop_var: tirx.min(tile.loop_var + 1, tile.extent - 1)}
        flat = _flat(load, following)
        if not any(load.source.same_as(p) for p in func.params) or stride_along(flat, k.loop_var) != 1:
            return []
        places = [{column.loop_var: e // k.extent, k.loop_var: e % k.extent} for e in elements]
        return [_prefetch(load.source, replaced(flat, place)) for place in places]

    @property
    def _size_bytes(self) -> int:
        """Of the part of a panel that a tile goes through."""
        return int(self.loop.extent) * int(self.panel.source.shape[-1]) * _FLOAT_BYTES


def _packing(stmt: Any, panel: Any, loops: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The loops around what fills a panel, three at least, and what it is filled from: one load."""
    if isinstance(stmt, tirx.SeqStmt):
        for part in stmt.seq:
            yield from _packing(part, panel, loops)
    elif isinstance(stmt, tirx.For):
        yield from _packing(stmt.body, panel, (*loops, stmt))
    elif isinstance(stmt, SBlockRealize) and len(loops) >= 3:
        store = _stored(stmt)
        if isinstance(store, tirx.BufferStore) and store.buffer.same_as(panel):
            value = store.value.args[1] if conditions_of(store.value) else store.value
            if isinstance(value, TensorLoad):
                yield loops, value


def _stored(realize: Any) -> Any:
    """What a block does, in terms of the loops around it."""
    axes = {v.var: value for v, value in zip(realize.block.iter_vars, realize.iter_values, strict=True)}
    return replaced(realize.block.body, axes)


def _flat(load: Any, to: Mapping[Any, Any]) -> Any:
    """Where a load reads, in elements, with variables replaced."""
    place: Any = number(0)
    for index, extent in zip(load.indices, load.source.shape, strict=True):
        place = place * extent + replaced(index, to)
    return place


def _prefetch(tensor: Any, element: Any) -> Any:
    """Bring the line of an element to the second cache, or that of the last one if there are no so many."""
    last = math.prod(int(e) for e in tensor.shape) - 1
    place = [*[number(0)] * (len(tensor.shape) - 1), tirx.min(element, number(last))]
    address = tirx.address_of(tirx.BufferLoad(tensor, place))
    return tirx.Evaluate(tirx.call_intrin("void", "tirx.prefetch", address, _READ, _SECOND_CACHE, _DATA))
