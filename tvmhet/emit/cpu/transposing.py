"""Transpositions in registers: squares of values are read row by row, turned by shuffles, and written row by row.

Before:  for c, r: y[c, r] = f(x[r, c], b[c])      After:  for squares of 16 x 16:
                                                               16 vectors x[r, c .. + 16] of 16 rows
                                                               4 times: vectors exchange halves, quarters, ..., elements
                                                               16 vectors y[c, r .. + 16] = f(turned[c], b[c])

Read one by one, the elements of a column are as many loads and stores, and few of the lines in which they lie are asked
for at a time: a key of 128 x 768, cut out of 2304 columns, took 110 to 170 us within BERT-base (AVX-512), and takes 22.
`c` is the axis along which a load is contiguous, `r` the result's innermost; axes along which every operand moves as
along one are one. What makes no whole square is copied one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import tvm_ffi
from tvm import tirx

from tvmhet._tvm import SBlockRealize, TensorLoad, detect_linear_equation
from tvmhet.emit.cpu.blocks import (
    NEAR_BYTES,
    BlockInfo,
    CpuTarget,
    Schedule,
    conditions_of,
    loads_of,
    replaced,
    stride_along,
    uses,
)
from tvmhet.emit.cpu.nests import apart, held, in_order, number, on_cores, over, vector

_DTYPE = "float32"
_LEAST_SIDE = 4  # of a square: fewer elements are copied one by one


@dataclass(frozen=True, slots=True)
class Access:
    """A load or the store: its tensor, and how far its place moves with each axis, in elements."""

    buffer: Any
    factors: tuple[int, ...]
    offset: int

    def at(self, places: Sequence[Any]) -> Any:
        """The place of the element at `places` along the axes."""
        place: Any = number(self.offset)
        for factor, index in zip(self.factors, places, strict=True):
            place = place + index * factor if factor else place
        return place

    def is_same(self, other: Access) -> bool:
        """Whether both are one place of one tensor."""
        return self.buffer.same_as(other.buffer) and (self.factors, self.offset) == (other.factors, other.offset)


@dataclass(frozen=True, slots=True)
class Turn:
    """A block as a transposition of axes that are as few as they can be: the last, and `column`, change places.

    `value` is what it stores, with a variable of `slots` for each of its `loads`.
    """

    value: Any
    slots: tuple[Any, ...]
    extents: tuple[int, ...]
    store: Access
    loads: tuple[Access, ...]
    column: int

    @property
    def turned(self) -> tuple[Access, ...]:
        """Loads that move in longer steps along the last axis, contiguous along `column`."""
        return tuple(load for load in self.loads if load.factors[-1] > 1)

    @property
    def rows(self) -> int:
        """Extent of the last axis."""
        return self.extents[-1]

    @property
    def columns(self) -> int:
        """Extent of `column`."""
        return self.extents[self.column]


def turn_of(sch: Schedule, info: BlockInfo, cpu: CpuTarget) -> Turn | None:
    """Read a block as a transposition; None if it is none of which whole vectors are made."""
    body = sch.get(info.block).body
    if not isinstance(body, tirx.BufferStore) or conditions_of(body.value):
        return None
    store = access_of(body.buffer, body.indices, info)
    read = [access_of(load.source, load.indices, info) for load in loads_of(body.value)]
    if store is None or None in read:
        return None
    slots: list[Any] = []
    loads: list[Access] = []

    def slot(load: Any) -> Any:
        access = access_of(load.source, load.indices, info)
        assert access is not None
        for known, var in zip(loads, slots, strict=True):
            if access.is_same(known):
                return var
        loads.append(access)
        slots.append(tirx.Var(f"load{len(slots)}", str(load.source.dtype)))
        return slots[-1]

    value = tvm_ffi.structural_map(body.value, (TensorLoad, slot))
    if uses([value], [a.var for a in info.axes]):
        return None
    extents, (store, *loads) = _merged([a.extent for a in info.axes], [store, *loads])
    if not extents:
        return None
    (column, *others) = {_column(x) for x in loads if x.factors[-1] > 1} or {None}
    if others or column is None or store.factors[-1] != 1:
        return None
    made = Turn(value, tuple(slots), extents, store, tuple(loads), column)
    floats = all(str(a.buffer.dtype) == _DTYPE for a in (store, *made.turned))
    return made if floats and min(made.rows, made.columns) >= _LEAST_SIDE else None


def access_of(buffer: Any, indices: Sequence[Any], info: BlockInfo) -> Access | None:
    """Read a place in a tensor as a sum of the axes; None if it is none."""
    place: Any = number(0)
    for index, extent in zip(indices, buffer.shape, strict=True):
        place = place * extent + index
    found = detect_linear_equation(place, [a.var for a in info.axes])
    if not found or not all(hasattr(c, "value") for c in found):
        return None
    *factors, offset = (int(c.value) for c in found)
    return Access(buffer, tuple(factors), offset) if min(factors, default=0) >= 0 else None


def _merged(extents: Sequence[int], accesses: Sequence[Access]) -> tuple[tuple[int, ...], list[Access]]:
    """Make one axis of neighbours along which every access moves as along one, and none of those of one place."""
    kept = [i for i, e in enumerate(extents) if e > 1]
    sizes = [extents[i] for i in kept]
    factors = [[a.factors[i] for i in kept] for a in accesses]
    for i in reversed(range(len(sizes) - 1)):
        if all(f[i] == f[i + 1] * sizes[i + 1] for f in factors):
            sizes[i] *= sizes.pop(i + 1)
            for f in factors:
                f.pop(i)
    made = [Access(a.buffer, tuple(f), a.offset) for a, f in zip(accesses, factors, strict=True)]
    return tuple(sizes), made


def _column(load: Access) -> int | None:
    """The axis along which a load is contiguous."""
    return next((i for i, factor in enumerate(load.factors) if factor == 1), None)


def transposed(func: Any, turn: Turn, cpu: CpuTarget) -> Any:
    """Return the function of one block with loops over squares, on the target's cores, for its own."""
    views = Views()
    loops = [tirx.Var(f"i{i}", "int64") for i in range(len(turn.extents) - 1)]

    def places(column: Any, row: Any) -> list[Any]:
        return [*(column if i == turn.column else loop for i, loop in enumerate(loops)), row]

    def load(i: int, column: Any, row: Any) -> Any:
        return views.load(turn.turned[i], places(column, row))

    def store(column: Any, row: Any, known: Sequence[Any]) -> Any:
        at, values = places(column, row), iter(known)
        read = [next(values) if known and x.factors[-1] > 1 else views.load(x, at) for x in turn.loads]
        made = replaced(turn.value, dict(zip(turn.slots, read, strict=True)))
        return tirx.BufferStore(views.of(turn.store.buffer), made, [turn.store.at(at)])

    nests = in_squares(len(turn.turned), turn.columns, turn.rows, cpu.lanes(_DTYPE), load, store)
    for i in reversed([i for i in range(len(loops)) if i != turn.column]):
        nests = [over(loops[i], turn.extents[i], in_order(nests))]
    if cpu.num_cores > 1:
        nests[0] = on_cores(nests[0].loop_var, int(nests[0].extent), nests[0].body)
    return func.with_body(held(views.declared(in_order(nests)), [], "root"))


def in_squares(
    num_loads: int,
    columns: int,
    rows: int,
    lanes: int,
    load: Callable[[int, Any, Any], Any],
    store: Callable[[Any, Any, Sequence[Any]], Any],
) -> list[Any]:
    """Return loops over `columns` and `rows`, in squares as large as registers allow, then of the rest, one by one.

    `load(i, column, row)` is the i-th turned load, contiguous along columns; `store(column, row, values)` writes an
    element, contiguous along rows, from the values of those loads, or if there are none, from memory.
    """
    nests = []
    for first_r, length_r, size_r in _pieces(rows, lanes):
        for first_c, length_c, size_c in _pieces(columns, lanes):
            size = min(size_r, size_c)
            c, r = tirx.Var("c", "int64"), tirx.Var("r", "int64")
            if size > 1:
                body = _square(num_loads, size, load, store, c * size + first_c, r * size + first_r)
                nests.append(over(r, length_r // size, over(c, length_c // size, body)))
            else:
                nests.append(over(c, length_c, over(r, length_r, store(c + first_c, r + first_r, ()))))
    return nests


@cache
def _pieces(extent: int, lanes: int) -> tuple[tuple[int, int, int], ...]:
    """Cut an extent: where a piece begins, its length, and the side of its squares, 1 of the last few elements.

    A rest is a square that begins before it where that takes no more steps than lesser ones: its elements are written
    twice, the same each time.

    >>> _pieces(61, 16)
    ((0, 48, 16), (45, 16, 16))
    >>> _pieces(57, 16)
    ((0, 48, 16), (48, 8, 8), (56, 1, 1))
    """
    return _cut(0, extent, lanes)


def _cut(begin: int, end: int, size: int) -> tuple[tuple[int, int, int], ...]:
    if size < _LEAST_SIDE or end - begin == 0:
        return ((begin, end - begin, 1),) if end > begin else ()
    whole = (end - begin) // size * size
    first = ((begin, whole, size),) if whole else ()
    lesser = _cut(begin + whole, end, size // 2)
    again = ((end - size, size, size),)
    return (*first, *(again if lesser and end >= size and _steps(again) <= _steps(lesser) else lesser))


def _steps(pieces: Sequence[tuple[int, int, int]]) -> float:
    return sum(length * (2 + math.log2(size)) / size for _, length, size in pieces)


def steps_of(extent: int, lanes: int) -> float:
    """Loads, shuffles and stores of vectors, or of single elements, that turn one column of `extent` elements.

    >>> steps_of(16, 16), steps_of(28, 16), steps_of(7, 16)
    (6.0, 12.0, 8.0)
    """
    return _steps(_pieces(extent, lanes))


def rows_at_a_time(
    extent: int, row_bytes: int, steps: Callable[[int], float], most: int | None = None, around: int = 1, cores: int = 1
) -> int:
    """How many rows of `extent` to take at a time: a divisor up to `most` that takes the fewest steps for each row.

    `steps` says how many so many rows take. Of equal ones the one whose rows leave room in the first cache; with
    `around` repetitions of it all there are steps for all cores, where any allows it.
    """
    divisors = [d for d in range(1, min(extent, most or extent) + 1) if extent % d == 0]
    shared = [d for d in divisors if around * (extent // d) >= cores] or divisors
    return min(shared, key=lambda d: (steps(d) / d, abs(d * row_bytes - NEAR_BYTES)))


def _square(
    num_loads: int,
    size: int,
    load: Callable[[int, Any, Any], Any],
    store: Callable[[Any, Any, Sequence[Any]], Any],
    column: Any,
    row: Any,
) -> Any:
    """Read a square of each turned load, turn it, and write the square of the result."""
    statements: list[Any] = []
    buffers: list[Any] = []
    squares = []
    for i in range(num_loads):
        pair = [tirx.decl_buffer((number(size * size),), _DTYPE, name, scope="local") for name in ("square", "turned")]
        buffers += pair
        for r in range(size):
            lane = tirx.Var("lane", "int64")
            read = load(i, column + lane, row + r)
            statements.append(vector(lane, size, tirx.BufferStore(pair[0], read, [lane + r * size])))
        made, shuffles = _shuffles(pair, size)
        statements += shuffles
        squares.append(made)
    for c in range(size):
        lane = tirx.Var("lane", "int64")
        known = [tirx.BufferLoad(square, [lane + c * size]) for square in squares]
        statements.append(vector(lane, size, store(column + c, row + lane, known)))
    return held(tirx.SeqStmt(statements), buffers, "square")


def _shuffles(pair: Sequence[Any], size: int) -> tuple[Any, list[Any]]:
    """Turn the square in the first of two buffers; return in which it is then, and how.

    For each bit of a place: of two vectors whose numbers differ in it, each keeps the elements that have the bit as its
    number has, and takes the others from where the other vector has them (Eklundh, IEEE Trans. Computers, 1972).
    """
    made, other = pair
    statements = []
    bit = size // 2
    while bit:
        for i in (i for i in range(size) if not i & bit):
            vectors = [_whole(made, i, size), _whole(made, i | bit, size)]
            low = [k if not k & bit else size + (k ^ bit) for k in range(size)]
            high = [k | bit if not k & bit else size + k for k in range(size)]
            for j, chosen in ((i, low), (i | bit, high)):
                shuffled = tirx.Shuffle(vectors, [tirx.const(k, "int32") for k in chosen])
                statements.append(tirx.BufferStore(other, shuffled, [tirx.Ramp(number(j * size), number(1), size)]))
        made, other = other, made
        bit //= 2
    return made, statements


def _whole(buffer: Any, row: int, size: int) -> Any:
    return tirx.BufferLoad(buffer, [tirx.Ramp(number(row * size), number(1), size)])


def turned_moves(func: Any, names: Collection[str], cpu: CpuTarget) -> Any | None:
    """Return a scheduled function with loops of blocks that are made of one parameter in squares; None if none goes.

    The block's own loops are those right around it; what they write may be part of a larger tensor. They are a function
    of their own: among the loops that read what they write, LLVM has too few registers (AVX2: 137 us instead of 86).
    """
    views = Views()

    def visit(loop: Any) -> Any:
        made = _turned_move(loop, names, views, func, cpu)
        return loop if made is None else made

    body = tvm_ffi.structural_map(func.body, (tirx.For, visit))
    if not views.made:
        return None
    root = body.block
    return func.with_body(held(views.declared(root.body), root.alloc_buffers, root.name_hint))


def _turned_move(loop: Any, names: Collection[str], views: Views, func: Any, cpu: CpuTarget) -> Any | None:
    loops, inner = [], loop
    while isinstance(inner, tirx.For) and int(inner.kind) == tirx.ForKind.SERIAL:
        loops.append(inner)
        inner = inner.body
    if not isinstance(inner, SBlockRealize) or str(inner.block.name_hint) not in names or len(loops) < 2:
        return None
    if not hasattr(inner.predicate, "value") or not inner.predicate.value:
        return None
    bound = dict(zip((v.var for v in inner.block.iter_vars), inner.iter_values, strict=True))
    indices = [replaced(i, bound) for i in inner.block.body.indices]
    value, loads = inner.block.body.value, loads_of(inner.block.body.value)
    if len(loads) != 1 or uses([with_element(value, number(0))], list(bound)):
        return None
    read = loads[0]
    source = [replaced(i, bound) for i in read.indices]
    own = [x.loop_var for x in loops]
    place: Any = number(0)
    for index, extent in zip(source, read.source.shape, strict=True):
        place = place * extent + index
    factors = detect_linear_equation(place, own)
    along = [stride_along(indices[-1], v) for v in own]
    if not factors or along[-1] != 1 or uses(indices[:-1], [own[-1]]):
        return None
    column = next((i for i, f in enumerate(factors[:-2]) if hasattr(f, "value") and int(f.value) == 1), None)
    is_parameter = any(read.source.same_as(p) for p in func.params)
    if column is None or not is_parameter or str(read.source.dtype) != _DTYPE:
        return None

    def at(values: Sequence[Any], c: Any, r: Any) -> list[Any]:
        return [replaced(v, {own[column]: c, own[-1]: r}) for v in values]

    def load(_: int, c: Any, r: Any) -> Any:
        return tirx.BufferLoad(views.of(read.source), at([place], c, r))

    def store(c: Any, r: Any, known: Sequence[Any]) -> Any:
        made = with_element(value, known[0] if known else load(0, c, r))
        return tirx.BufferStore(inner.block.body.buffer, made, at(indices, c, r))

    columns, rows = (int(loops[i].extent) for i in (column, -1))
    nest = in_order(in_squares(1, columns, rows, cpu.lanes(_DTYPE), load, store))
    for i in reversed([i for i in range(len(loops) - 1) if i != column]):
        nest = over(own[i], int(loops[i].extent), nest)
    return apart("turned", nest)


def with_element(value: Any, element: Any) -> Any:
    """Return an expression of one load with an element in its place."""
    return tvm_ffi.structural_map(value, (TensorLoad, lambda _: element))


class Views:
    """Tensors as one row of elements each, so that a place is a number."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, Any]] = []

    def load(self, access: Access, places: Sequence[Any]) -> Any:
        """The element of a load at `places`."""
        return tirx.BufferLoad(self.of(access.buffer), [access.at(places)])

    def of(self, buffer: Any) -> Any:
        """The view of a tensor, which is then among those that are declared."""
        view = next((v for b, v in self.made if b.same_as(buffer)), None)
        if view is None:
            size = math.prod(int(e) for e in buffer.shape)
            view = tirx.decl_buffer((number(size),), str(buffer.dtype), f"{buffer.name}_row", data=buffer.data)
            self.made.append((buffer, view))
        return view

    def declared(self, body: Any) -> Any:
        """Return `body` after the declarations of what it uses."""
        return tirx.SeqStmt([*(tirx.DeclBuffer(view, data=buffer.data) for buffer, view in self.made), body])
