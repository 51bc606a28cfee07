"""Norms of rows that lie across: sums of a vector of rows side by side, and rows turned when they are written.

    image [c, p] ─► permute_dims ─► layer_norm          for some pixels p:  for c: s[p] += x[c, p]       in registers
                                                                            for c: v[p] += (x[c, p] - s[p] / n)^2
                                                                            r[p] = 1 / sqrt(v[p] / n)
                                                                            y[p, c] = (turned[p, c] - s[p]) * r[p] ..

A row that is laid out first is then summed in vectors of its own, whose lanes have to be added up at the end of each
sum. Here no lane meets another one before the result is written, in squares that are turned in registers, see
`transposing.py`. What depends on the row alone is computed once for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvmhet._tvm import TensorLoad
from tvmhet.emit.cpu.blocks import (
    BlockInfo,
    CpuTarget,
    Schedule,
    blocks_of,
    calls,
    conditions_of,
    inline_injective,
    is_output,
    loads_of,
    long_indices,
    num_reductions,
    replaced,
    uses,
)
from tvmhet.emit.cpu.merged_axes import merged_axes
from tvmhet.emit.cpu.nests import axis, held, in_order, number, on_cores, over, places_of, vector
from tvmhet.emit.cpu.transposing import Access, Views, access_of, in_squares, rows_at_a_time, steps_of

_DTYPE = "float32"
_BYTES = 4
_LATENCY = 4  # cycles of an addition: as many vectors of rows keep the adders busy
_MAX_VECTORS = 8  # sums in registers


def columns(func: Any, cpu: CpuTarget) -> Schedule | None:
    """Schedule a kernel of sums over rows that lie across, and one result that lies along them; None for any other."""
    if num_reductions(func) == 0:
        return None
    sch = tvm.s_tir.Schedule(func)
    inline_injective(sch)
    found = _norm_of(sch)
    if found is None:
        return None
    merged = merged_axes(sch, range(found.num_leading))
    flat = sch if merged is None else tvm.s_tir.Schedule(merged.func)
    norm = _norm_of(flat)
    made = None if norm is None else _scheduled(flat, norm, cpu)
    return made if made is None or merged is None else merged.restored(made)


@dataclass(frozen=True, slots=True)
class _Norm:
    """The sums of a kernel, in order, and its result; all have the same leading axes, the last of which is a row's."""

    sums: tuple[BlockInfo, ...]
    result: BlockInfo
    num_leading: int


def _norm_of(sch: Schedule) -> _Norm | None:
    *sums, result = blocks_of(sch) or (None,)
    if result is None or not sums or result.is_reduction or not is_output(sch, result.block):
        return None
    leading = sums[0].num_leading
    extents = [a.extent for a in result.axes[:leading]]
    if not leading or len(result.axes) != leading + 1:
        return None
    made = [sch.get(i.block).writes[0].source for i in sums]
    for info in sums:
        alike = info.num_leading == leading and [a.extent for a in info.axes[:leading]] == extents
        if not alike or not all(a.reduced for a in info.axes[leading:]) or not _suits(sch, info, leading, made):
            return None
    suits = _suits(sch, result, leading, made)
    return _Norm(tuple(sums), result, leading) if suits else None


def _suits(sch: Schedule, info: BlockInfo, leading: int, made: Sequence[Any]) -> bool:
    """Whether a block reads sums of its own row, and parameters that lie across, or that are the same for all rows.

    The result may read others, too, along its rows.
    """
    stmt = sch.get(info.block)
    body = stmt.body
    if not isinstance(body, tirx.BufferStore) or str(body.buffer.dtype) != _DTYPE or conditions_of(body.value):
        return False
    row = [a.var for a in info.axes[:leading]]
    across = False
    for load in loads_of(body.value):
        if any(load.source.same_as(m) for m in made):
            indices = long_indices(load)
            if len(indices) != len(row) or not all(i.same_as(v) for i, v in zip(indices, row, strict=True)):
                return False
            continue
        access = access_of(load.source, load.indices, info)
        if access is None:
            return False
        along, inside = access.factors[leading - 1], access.factors[leading:]
        across = across or (along == 1 and all(f > 1 for f in inside))
        if info.is_reduction and along > 1:
            return False
        if not info.is_reduction and inside[0] > 1 and (along != 1 or str(load.source.dtype) != _DTYPE):
            return False
    if info.is_reduction:
        return across and stmt.init is not None and not any(True for _ in calls(body.value))
    store = access_of(body.buffer, body.indices, info)
    return across and store is not None and store.factors[-1] == 1


def _scheduled(sch: Schedule, norm: _Norm, cpu: CpuTarget) -> Schedule | None:
    cpu = cpu.for_elements([*norm.sums, norm.result])
    rows = _rows_at_a_time(norm, cpu)
    if rows is None:
        return None
    func = sch.mod["main"]
    views = Views()
    *outer, extent = [a.extent for a in norm.result.axes[: norm.num_leading]]
    steps = [*outer, extent // rows]
    tile = axis("tile")
    body = _Tile(sch, norm, rows, places_of(tile, steps), views, cpu.lanes(_DTYPE)).body()
    loop = on_cores if cpu.num_cores > 1 else over
    made = loop(tile, math.prod(steps), body)
    return tvm.s_tir.Schedule(func.with_body(held(views.declared(made), [], "root")))


def _rows_at_a_time(norm: _Norm, cpu: CpuTarget) -> int | None:
    """How many rows are summed side by side: so that the fewest instructions are waited for, or need a square.

    None where that would be more than a few for each element, as of a prime number of rows.
    """
    *outer, extent, row = (a.extent for a in norm.result.axes)
    lanes = cpu.lanes(_DTYPE)

    def steps(rows: int) -> float:
        return steps_of(rows, lanes) + len(norm.sums) * max(_LATENCY, -(-rows // lanes))

    around, most = math.prod(outer), _MAX_VECTORS * lanes
    best = rows_at_a_time(extent, row * _BYTES, steps, most, around, cpu.num_cores)
    return best if steps(best) / best <= 2 * steps(lanes) / lanes else None


class _Tile:
    """What is computed for some rows."""

    def __init__(self, sch: Schedule, norm: _Norm, rows: int, places: Sequence[Any], views: Views, lanes: int) -> None:
        self.norm = norm
        self.rows = rows
        self.views = views
        self.lanes = lanes
        *self.outer, self.first = *places[:-1], places[-1] * rows
        self.row = axis("row")  # of these
        stores = [sch.get(i.block) for i in (*norm.sums, norm.result)]
        self.made = [(s.writes[0].source, self._buffer(f"sums{i}")) for i, s in enumerate(stores[:-1])]
        self.stores = [s.body for s in stores]
        self.starts = [s.init.value for s in stores[:-1]]

    def body(self) -> Any:
        """The sums, what the result needs once a row, and the result."""
        statements = []
        for info, store, start, (_, buffer) in zip(
            self.norm.sums, self.stores[:-1], self.starts, self.made, strict=True
        ):
            statements += self._sum(info, store.value, start, buffer)
        kept, squares = self._result()
        for buffer, value in kept:
            statements += self._filled(buffer, value, self.norm.result, {})
        buffers = [b for _, b in self.made] + [b for b, _ in kept]
        return held(in_order([*statements, *squares]), buffers, "rows")

    def _sum(self, info: BlockInfo, value: Any, start: Any, buffer: Any) -> list[Any]:
        steps = info.axes[self.norm.num_leading :]
        bound = {a.var: axis(f"k{i}") for i, a in enumerate(steps)}
        nest = in_order(self._filled(buffer, self._own(value), info, bound))
        for a in reversed(steps):
            nest = over(bound[a.var], a.extent, nest)
        return [*self._filled(buffer, start, info, {}), nest]

    def _result(self) -> tuple[list[tuple[Any, Any]], list[Any]]:
        """What depends on a row alone, each in a buffer, and the loops over squares that write the result."""
        info = self.norm.result
        column = info.axes[-1]
        value = self._own(self.stores[-1].value)
        found = _alone(value, column.var)
        kept = [(self._buffer(f"kept{i}"), part) for i, part in enumerate(found)]

        def keep(expr: Any) -> Any:
            known = next((b for b, part in kept if part.same_as(expr)), None)
            return expr if known is None else tirx.BufferLoad(known, [self.row])

        value = tvm_ffi.structural_map(value, ((tvm.ir.Call, tirx.Div), keep))
        across: list[Access] = []
        for x in loads_of(value):
            access = access_of(x.source, x.indices, info)
            if access is not None and access.factors[-1] > 1 and not any(access.is_same(a) for a in across):
                across.append(access)
        target = access_of(self.stores[-1].buffer, self.stores[-1].indices, info)
        assert target is not None

        def places(row: Any, c: Any) -> list[Any]:
            return [*self.outer, self.first + row, c]

        def load(i: int, row: Any, c: Any) -> Any:
            return self.views.load(across[i], places(row, c))

        def store(row: Any, c: Any, known: Sequence[Any]) -> Any:
            def element(x: Any) -> Any:
                access = access_of(x.source, x.indices, info)
                i = next((i for i, a in enumerate(across) if access is not None and access.is_same(a)), None)
                if i is None:
                    return x
                return known[i] if known else load(i, row, c)

            made = self._at(tvm_ffi.structural_map(value, (TensorLoad, element)), info, row, {column.var: c})
            return tirx.BufferStore(self.views.of(target.buffer), made, [target.at(places(row, c))])

        return kept, in_squares(len(across), self.rows, column.extent, self.lanes, load, store)

    def _own(self, value: Any) -> Any:
        """An expression that reads the sums of these rows."""

        def own(load: Any) -> Any:
            buffer = next((b for m, b in self.made if load.source.same_as(m)), None)
            return load if buffer is None else tirx.BufferLoad(buffer, [self.row])

        return tvm_ffi.structural_map(value, (TensorLoad, own))

    def _at(self, value: Any, info: BlockInfo, row: Any, bound: Mapping[Any, Any]) -> Any:
        """An expression of a block at a row of these."""
        leading = [a.var for a in info.axes[: self.norm.num_leading]]
        places = dict(zip(leading, [*self.outer, self.first + row], strict=True))
        return replaced(value, {**places, self.row: row, **bound})

    def _filled(self, buffer: Any, value: Any, info: BlockInfo, bound: Mapping[Any, Any]) -> list[Any]:
        """Store an expression of a block for each of these rows, in vectors."""
        made = []
        for first in range(0, self.rows, self.lanes):
            lane = axis("lane")
            place = lane + first
            store = tirx.BufferStore(buffer, self._at(value, info, place, bound), [place])
            made.append(vector(lane, min(self.lanes, self.rows - first), store))
        return made

    def _buffer(self, name: str) -> Any:
        return tirx.decl_buffer((number(self.rows),), _DTYPE, name)


def _alone(value: Any, column: Any) -> list[Any]:
    """Calls and divisions, none of them in another, that are the same for a whole row."""
    found: list[Any] = []

    def visit(expr: Any) -> None:
        if not uses(expr, [column]):
            found.append(expr)

    tvm_ffi.structural_walk(value, ((tvm.ir.Call, tirx.Div), visit))
    inside: list[Any] = []
    for expr in found:
        parts: list[Any] = []
        tvm_ffi.structural_walk(expr, ((tvm.ir.Call, tirx.Div), parts.append))
        inside += [p for p in parts if not p.same_as(expr)]
    return [e for e in found if not any(e.same_as(p) for p in inside)]
