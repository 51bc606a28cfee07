"""The loops of attention: keys and values of a head laid out once, then rows of scores that stay in the cache.

    keys ──► panel [n / T, k, T]  ─┐
    values ─► rows [n, d]         ─┤  for some queries:  q · panel ─► scores ─► softmax ─► · values ─► times 1 / sum
                                   └─ (64 KiB of scores)

Products are those of `contraction`, tile by tile in registers, with its choice of tiles. Keys are turned in registers
where they are contiguous along k. In a model of 768 channels the values of a head lie 3 KiB apart, where the first
cache has room for few: so they are copied, too. Keys beyond the last one, up to a whole vector, count for nothing.

Keeping scores in the cache is FlashAttention's idea (Dao et al., NeurIPS 2022). As the second cache of a core holds the
scores of several queries and all keys, nothing is corrected on the way; a row is divided by its sum after the product
with the values: d multiplications instead of n.

What no query of a block may look at, after the last key that one of them may, is left out: of a sentence that is read
from left to right nearly half. It is the mask that is run with that decides, looked through once for all heads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx

from tvmhet.emit.cpu.blocks import CpuTarget
from tvmhet.emit.cpu.contraction import Tile, choose_tile
from tvmhet.emit.cpu.nests import apart, held, in_order, number, on_cores, over, places_of, unrolled, vector
from tvmhet.emit.cpu.transposing import in_squares

_DTYPE = "float32"
_INDEX = "int32"
_BYTES = 4
_LOWEST = -3.4028234663852886e38
_SCORES_BYTES = 64 << 10  # of the rows that are taken at a time
_LEAST_LANES = 4  # of a vector of values
_MASKED_BLOCKS = 8  # at least, of queries that a mask leaves with keys of their own


@dataclass(frozen=True, slots=True)
class Attention:
    """A kernel of attention: its sizes, and expressions at a head's place, a query i, a key j, and channels k and d."""

    heads: tuple[int, ...]
    queries: int
    keys: int
    depth: int  # channels of a query and a key
    width: int  # channels of a value
    query: Callable[..., Any]  # (head..., i, k)
    key: Callable[..., Any]  # (head..., j, k)
    score: Callable[..., Any]  # (head..., i, j, product)
    value: Callable[..., Any]  # (head..., j, d)
    store: Callable[..., Any]  # (head..., i, d, value): a statement
    turns_keys: bool  # whether keys are contiguous along k
    visible: Callable[..., Any] | None  # (i, j): whether a score counts at all; None where all do, or heads differ


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Register tiles of both products, the rows that are taken at a time, and the lanes of a vector of scores."""

    scores: Tile
    values: Tile
    rows: int
    lanes: int


def _tiles(found: Attention, cpu: CpuTarget) -> _Tiles | None:
    """Choose them; None where no vector divides the channels of a value."""
    lanes = cpu.lanes(_DTYPE)
    fitting = math.gcd(found.width, lanes)
    if fitting < _LEAST_LANES:
        return None
    scores = choose_tile(found.queries, found.keys, cpu, lanes)
    values = choose_tile(found.queries, found.width, cpu, fitting, within=found.width)
    tile_bytes = scores.rows * math.ceil(found.keys / scores.columns) * scores.columns * _BYTES
    rows = scores.rows * max(1, _SCORES_BYTES // tile_bytes)
    if found.visible is not None:
        rows = min(rows, scores.rows * math.ceil(found.queries / (scores.rows * _MASKED_BLOCKS)))
    return _Tiles(scores, values, min(rows, found.queries), lanes)


def all_heads(found: Attention, cpu: CpuTarget) -> Any | None:
    """Return the body of the kernel, a loop over heads on the target's cores; None where no tile fits."""
    tiles = _tiles(found, cpu)
    if tiles is None:
        return None
    head, num_heads = _var("head"), math.prod(found.heads)
    seen = None if found.visible is None else _Seen(found.queries, found.keys, tiles.rows, found.visible)
    body = _Head(found, tiles, tuple(places_of(head, found.heads)), seen).body()
    loop = on_cores if cpu.num_cores > 1 else over
    made = loop(head, num_heads, body)
    return held(made, [], "root") if seen is None else held(in_order([seen.body(), made]), [seen.keys], "root")


class _Seen:
    """How many keys the queries of a block may look at: up to the last that one of them may.

    All of them where a query may look at none: its scores are all as low, so each of them counts.
    """

    def __init__(self, queries: int, keys: int, rows: int, visible: Callable[..., Any]) -> None:
        self.num_queries = queries
        self.num_keys = keys
        self.rows = rows
        self.visible = visible
        self.keys = tirx.decl_buffer((number(math.ceil(queries / rows)),), _INDEX, "seen")

    def by(self, block: Any) -> Any:
        """The number for the queries of a block."""
        return tirx.Cast("int64", tirx.BufferLoad(self.keys, [block]))

    def body(self) -> Any:
        """Look through the mask."""
        whole, rest = divmod(self.num_queries, self.rows)
        block = _var("block")
        blocks = [over(block, whole, self._block(block, self.rows))]
        return in_order([*blocks, self._block(number(whole), rest)] if rest else blocks)

    def _block(self, block: Any, rows: int) -> Any:
        row, j = _var("row"), _var("j")
        last = tirx.decl_buffer((number(1),), _INDEX, "last", scope="local")
        of_row, none = tirx.BufferLoad(last, [number(0)]), tirx.const(-1, _INDEX)
        found = tirx.Select(self.visible(block * self.rows + row, j), tirx.Cast(_INDEX, j), none)
        num_seen = tirx.Select(of_row < 0, tirx.const(self.num_keys, _INDEX), of_row + 1)
        most = tirx.max(tirx.BufferLoad(self.keys, [block]), num_seen)
        of_rows = in_order(
            [
                tirx.BufferStore(last, none, [number(0)]),
                over(j, self.num_keys, tirx.BufferStore(last, tirx.max(of_row, found), [number(0)])),
                tirx.BufferStore(self.keys, most, [block]),
            ]
        )
        start = tirx.BufferStore(self.keys, tirx.const(0, _INDEX), [block])
        return held(in_order([start, over(row, rows, of_rows)]), [last], "seen")


class _Head:
    """What is computed for one head."""

    def __init__(self, found: Attention, tiles: _Tiles, head: tuple[Any, ...], seen: _Seen | None) -> None:
        self.of = found
        self.tiles = tiles
        self.head = head
        self.seen = seen
        columns = tiles.scores.columns
        self.num_panels = math.ceil(found.keys / columns)
        self.padded = self.num_panels * columns
        self.panel = _buffer("keys", self.num_panels, found.depth, columns)
        self.rows = _buffer("values", found.keys, found.width)
        self.scores = _buffer("scores", tiles.rows, self.padded)
        self.reciprocal = _buffer("reciprocal", tiles.rows)

    def body(self) -> Any:
        """Lay out keys and values, then take the queries in blocks."""
        whole, rest = divmod(self.of.queries, self.tiles.rows)
        step = _var("block")
        blocks = [over(step, whole, self._block(step, self.tiles.rows))]
        if rest:
            blocks.append(self._block(number(whole), rest))
        made = in_order([apart("lay_out", in_order([*self._keys(), self._values()])), *blocks])
        return held(made, [self.panel, self.rows, self.scores, self.reciprocal], "head")

    def _keys(self) -> list[Any]:
        columns = self.tiles.scores.columns
        whole, rest = divmod(self.of.keys, columns)
        panel = _var("panel")
        made = [over(panel, whole, in_order(self._panel(panel, columns)))] if whole else []
        if rest:
            k, j = _var("k"), _var("j")
            zeros = tirx.BufferStore(self.panel, tirx.const(0.0, _DTYPE), [number(whole), k, j + rest])
            made += self._panel(number(whole), rest)
            made.append(over(k, self.of.depth, over(j, columns - rest, zeros)))
        return made

    def _panel(self, panel: Any, columns: int) -> list[Any]:
        """Copy the keys of one panel; what is contiguous along k is turned in squares."""
        first = panel * self.tiles.scores.columns

        def load(_: int, k: Any, j: Any) -> Any:
            return self.of.key(*self.head, first + j, k)

        def store(k: Any, j: Any, known: Sequence[Any]) -> Any:
            return tirx.BufferStore(self.panel, known[0] if known else load(0, k, j), [panel, k, j])

        if self.of.turns_keys:
            return in_squares(1, self.of.depth, columns, self.tiles.lanes, load, store)
        k, j = _var("k"), _var("j")
        return [over(k, self.of.depth, over(j, columns, store(k, j, ())))]

    def _values(self) -> Any:
        j, v, lane = _var("j"), _var("v"), _var("lane")
        lanes = self.tiles.values.lanes
        d = v * lanes + lane
        copy = tirx.BufferStore(self.rows, self.of.value(*self.head, j, d), [j, d])
        return over(j, self.of.keys, over(v, self.of.width // lanes, vector(lane, lanes, copy)))

    def _block(self, block: Any, num_rows: int) -> Any:
        """Scores of some rows, their softmax but for the division, and their results."""
        panel, part, row = _var("panel"), _var("part"), _var("row")
        tiles = self.tiles
        first = block * tiles.rows
        keys = self.of.keys if self.seen is None else self.seen.by(block)

        def scores(r: Any, rows: int) -> Any:
            return _tile_product(
                replace(tiles.scores, rows=rows),
                self.of.depth,
                lambda i, k: self.of.query(*self.head, first + r + i, k),
                lambda k, j: tirx.BufferLoad(self.panel, [panel, k, j]),
                lambda i, j, made: tirx.BufferStore(self.scores, made, [r + i, panel * tiles.scores.columns + j]),
            )

        def results(r: Any, rows: int) -> Any:
            columns = part * tiles.values.columns
            return _tile_product(
                replace(tiles.values, rows=rows),
                keys,
                lambda i, j: tirx.BufferLoad(self.scores, [r + i, j]),
                lambda j, d: tirx.BufferLoad(self.rows, [j, columns + d]),
                lambda i, d, made: self.of.store(
                    *self.head, first + r + i, columns + d, made * tirx.BufferLoad(self.reciprocal, [r + i])
                ),
            )

        num_parts = self.of.width // tiles.values.columns
        return in_order(
            [
                over(panel, _parts(keys, tiles.scores.columns), _in_tiles(num_rows, tiles.scores.rows, scores)),
                apart("softmax", over(row, num_rows, self._softmax(first, row, keys))),
                over(part, num_parts, _in_tiles(num_rows, tiles.values.rows, results)),
            ]
        )

    def _softmax(self, first: Any, row: Any, seen: Any) -> Any:
        """Make a row of scores exponentials, and keep the reciprocal of their sum."""
        lanes, keys = self.tiles.lanes, self.of.keys
        whole, rest = divmod(keys, lanes)
        vectors = _parts(seen, lanes)
        inner = min(vectors, whole) if isinstance(vectors, int) else tirx.min(vectors, number(whole))
        highest, total = _Lanes("highest", lanes), _Lanes("total", lanes)

        def at(j: Any) -> Any:
            return tirx.BufferLoad(self.scores, [row, j])

        def score(first_j: Any, made: Callable[[Any], Any]) -> Any:
            lane = _var("lane")
            j = first_j + lane
            store = tirx.BufferStore(self.scores, made(j), [row, j])
            return vector(lane, lanes, in_order([store, highest.combine(tirx.max, lane, at(j))]))

        def inside(j: Any) -> Any:
            return self.of.score(*self.head, first + row, j, at(j))

        def partly(j: Any) -> Any:
            """The score, minus infinity where no key is; what is read beside it, such as a mask, ends with the keys."""
            made = self.of.score(*self.head, first + row, tirx.min(j, number(keys - 1)), at(j))
            return tirx.Select(j < keys, made, tirx.const(float("-inf"), _DTYPE))

        v, lane = _var("v"), _var("lane")
        highest_of_row, reduce_highest = highest.reduced(tirx.max)
        total_of_row, reduce_total = total.reduced(_add)
        j = v * lanes + lane
        exponential = tirx.BufferStore(self.scores, tirx.exp(at(j) - highest_of_row), [row, j])
        exponentials = vector(lane, lanes, in_order([exponential, total.combine(_add, lane, at(j))]))
        step = _var("v")
        statements = [
            highest.fill(_LOWEST),
            *([over(step, inner, score(step * lanes, inside))] if whole else []),
            *([_where(vectors > whole, score(number(whole * lanes), partly))] if rest else []),
            *reduce_highest,
            total.fill(0.0),
            over(v, vectors, exponentials),
            *reduce_total,
            tirx.BufferStore(self.reciprocal, tirx.const(1.0, _DTYPE) / total_of_row, [row]),
        ]
        return held(in_order(statements), [*highest.buffers, *total.buffers], "softmax")


def _add(a: Any, b: Any) -> Any:
    return a + b


class _Lanes:
    """A vector of partial results, and what it is reduced by halves to."""

    def __init__(self, name: str, lanes: int) -> None:
        self.lanes = lanes
        sizes = [lanes >> i for i in range(lanes.bit_length())]
        self.buffers = [_buffer(name, size, scope="local") for size in sizes]

    def fill(self, value: float) -> Any:
        lane = _var("lane")
        store = tirx.BufferStore(self.buffers[0], tirx.const(value, _DTYPE), [lane])
        return vector(lane, self.lanes, store)

    def combine(self, operation: Callable[[Any, Any], Any], lane: Any, value: Any) -> Any:
        made = operation(tirx.BufferLoad(self.buffers[0], [lane]), value)
        return tirx.BufferStore(self.buffers[0], made, [lane])

    def reduced(self, operation: Callable[[Any, Any], Any]) -> tuple[Any, list[Any]]:
        """Return the one value that is left, and the statements that make it.

        Halves are taken out of a register: LLVM keeps a vector in memory of which parts are read apart.
        """
        statements = []
        for whole, half in itertools.pairwise(self.buffers):
            size = int(half.shape[0])
            made = operation(*(_lanes(whole, range(first, first + size)) for first in (0, size)))
            statements.append(tirx.BufferStore(half, made, [_ramp(size)]))
        return tirx.BufferLoad(self.buffers[-1], [number(0)]), statements


def _lanes(buffer: Any, chosen: Sequence[int]) -> Any:
    whole = tirx.BufferLoad(buffer, [_ramp(int(buffer.shape[0]))])
    return tirx.Shuffle([whole], [tirx.const(i, "int32") for i in chosen])


def _ramp(length: int) -> Any:
    return tirx.Ramp(number(0), number(1), length) if length > 1 else number(0)


def _in_tiles(num_rows: int, rows: int, make: Callable[[Any, int], Any]) -> Any:
    """Return `make(first row, rows)` for all rows, in tiles and one of the rest."""
    whole, rest = divmod(num_rows, rows)
    tile = _var("tile")
    made = [over(tile, whole, make(tile * rows, rows))] if whole else []
    return in_order([*made, make(number(whole * rows), rest)] if rest else made)


def _where(condition: Any, body: Any) -> Any:
    """Return a statement that runs where a condition holds, which may be known here."""
    return body if isinstance(condition, bool) else tirx.IfThenElse(condition, body, None)


def _parts(extent: Any, size: int) -> Any:
    """How many parts of a size hold so many."""
    return math.ceil(extent / size) if isinstance(extent, int) else (extent + (size - 1)) // size


def _tile_product(
    tile: Tile,
    steps: Any,
    left: Callable[[Any, Any], Any],
    right: Callable[[Any, Any], Any],
    store: Callable[[Any, Any, Any], Any],
) -> Any:
    """Return the loops of a register tile: left(row, step) spread over a vector, times right(step, column)."""
    sums = _buffer("sums", tile.rows, tile.columns, scope="local")

    def each(statement: Callable[[Any, Any], Any]) -> Any:
        i, v, lane = _var("i"), _var("v"), _var("lane")
        column = v * tile.lanes + lane
        body = vector(lane, tile.lanes, statement(i, column))
        return unrolled(i, tile.rows, unrolled(v, tile.columns // tile.lanes, body))

    def at(i: Any, column: Any) -> Any:
        return tirx.BufferLoad(sums, [i, column])

    step = _var("step")
    zero = each(lambda i, c: tirx.BufferStore(sums, tirx.const(0.0, _DTYPE), [i, c]))
    add = each(lambda i, c: tirx.BufferStore(sums, at(i, c) + left(i, step) * right(step, c), [i, c]))
    write = each(lambda i, c: store(i, c, at(i, c)))
    return held(in_order([zero, over(step, steps, add), write]), [sums], "tile")


def _buffer(name: str, *shape: int, scope: str = "global") -> Any:
    return tirx.decl_buffer(tuple(number(e) for e in shape), _DTYPE, name, scope=scope)


def _var(name: str) -> Any:
    return tirx.Var(name, "int64")
