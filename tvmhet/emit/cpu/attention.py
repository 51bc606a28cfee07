"""Attention in one kernel: the scores of a few queries at a time, which never leave the cache.

Before:  for i, j, k: s[i, j] += q[i, k] * kt[k, j]        After, for each head:
         for i, j:    m[i] = max(m[i], f(s[i, j]))           keys to panels, values to rows
         for i, j:    e[i, j] = exp(f(s[i, j]) - m[i])       for some rows i at a time:
         for i, j:    t[i] += e[i, j]                          s of these rows, tile by tile
         for i, d, j: o[i, d] += e[i, j] / t[i] * v[j, d]      m, e and t of each row, in vectors
                                                               o of these rows, tile by tile, times 1 / t

f is what stands between the product and the softmax: a scale, a mask. Operands may be permuted, cut and reshaped, and
so may the result: they are read and written where they lie. This module reads a kernel; `attention_loops.py` makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvmhet._tvm import TensorLoad, structural_equal
from tvmhet.emit.cpu.attention_loops import Attention, all_heads
from tvmhet.emit.cpu.blocks import (
    Axis,
    BlockInfo,
    CpuTarget,
    Schedule,
    blocks_of,
    inline_injective,
    loads_of,
    num_reductions,
    replaced,
    stride_along,
    uses,
)
from tvmhet.emit.cpu.contraction import factors

_DTYPE = "float32"
_MASKED = -3e38  # at most, what takes a score out
_NUM_BLOCKS, _NUM_REDUCTIONS = 5, 4  # before one that moves the result


def attention(func: Any, cpu: CpuTarget) -> Schedule | None:
    """Schedule a kernel of attention over float32; None for any other."""
    if num_reductions(func) != _NUM_REDUCTIONS:
        return None
    sch = tvm.s_tir.Schedule(func)
    inline_injective(sch)
    infos = blocks_of(sch) or ()
    found = _attention_of(sch, infos)
    body = all_heads(found, cpu.for_products([infos[0], infos[4]])) if found is not None else None
    if body is None:
        return None
    made = sch.mod["main"].with_body(body)
    return tvm.s_tir.Schedule(tvm.s_tir.transform.StmtSimplify()(tvm.IRModule({"main": made})))


@dataclass(frozen=True, slots=True)
class _Place:
    """An expression of some axes."""

    expr: Any
    axes: tuple[Any, ...]

    def at(self, *values: Any) -> Any:
        """The expression where the axes are `values`."""
        return replaced(self.expr, dict(zip(self.axes, values, strict=True)))


def _attention_of(sch: Schedule, infos: Sequence[BlockInfo]) -> Attention | None:
    """Read blocks as attention; None if they are not."""
    kinds = [i.is_reduction for i in infos]
    if kinds[:_NUM_BLOCKS] != [True, True, False, True, True] or kinds[_NUM_BLOCKS:] not in ([], [False]):
        return None
    bodies = [sch.get(i.block).body for i in infos]
    if not all(isinstance(b, tirx.BufferStore) and str(b.buffer.dtype) == _DTYPE for b in bodies):
        return None
    extents = [[a.extent for a in i.axes] for i in infos]
    *heads, m, n, depth = extents[0] if len(extents[0]) > 2 else (0, 0, 0)
    width = extents[4][-2]
    if extents[1:_NUM_BLOCKS] != [[*heads, m, n]] * 3 + [[*heads, m, width, n]]:
        return None
    found = factors(sch, infos[0])
    score = _score(bodies, [i.axes for i in infos])
    value = _value(bodies, infos[4].axes)
    store = _store(bodies, [i.axes for i in infos])
    if found is None or score is None or value is None or store is None:
        return None
    axes = tuple(a.var for a in infos[0].axes)
    *places, i, j, k = axes
    query, key = found if uses(found[0].indices, [i]) else reversed(found)
    if uses(query.indices, [j]) or not uses(query.indices, [i]) or uses(key.indices, [i]):
        return None
    last = tuple(a.var for a in infos[4].axes)
    return Attention(
        heads=tuple(heads),
        queries=m,
        keys=n,
        depth=depth,
        width=width,
        query=_Place(query, (*places, i, k)).at,
        key=_Place(key, (*places, j, k)).at,
        score=score,
        value=_Place(value, (*last[:-3], last[-1], last[-2])).at,
        store=store,
        turns_keys=stride_along(key.indices[-1], k) == 1,
        visible=_visible(bodies, infos[1].axes),
    )


def _score(bodies: Sequence[Any], axes: Sequence[Sequence[Axis]]) -> Callable[..., Any] | None:
    """Return f of a product, at (head..., i, j, the product), of max(m, f), exp(f - m) and t + exp."""
    made, highest, exponential, total = bodies[:4]
    largest, e, t = highest.value, exponential.value, total.value
    if not isinstance(largest, tirx.Max) or not isinstance(t, tirx.Add) or not hasattr(e, "args"):
        return None
    shifted = e.args[0] if str(e.op.name) == "tirx.exp" else None
    score = largest.b
    if not isinstance(shifted, tirx.Sub) or not _is_at(shifted.b, highest.buffer, axes[2][:-1]):
        return None
    to = {b.var: a.var for a, b in zip(axes[1], axes[2], strict=True)}
    same = structural_equal(replaced(shifted.a, to), score)
    own = _is_at(largest.a, highest.buffer, axes[1][:-1]) and _is_at(t.a, total.buffer, axes[3][:-1])
    products = [load for load in loads_of(score) if load.source.same_as(made.buffer)]
    if not same or not own or not _is_at(t.b, exponential.buffer, axes[3]):
        return None
    if not products or not all(_is_at(load, made.buffer, axes[1]) for load in products):
        return None
    place = _Place(score, tuple(a.var for a in axes[1]))

    def at(*values: Any) -> Any:
        *own, product = values
        swap = lambda load: product if load.source.same_as(made.buffer) else load  # noqa: E731
        return tvm_ffi.structural_map(place.at(*own), (TensorLoad, swap))

    return at


def _visible(bodies: Sequence[Any], axes: Sequence[Axis]) -> Callable[..., Any] | None:
    """Return, at (i, j), whether a mask lets a score count; None if there is none, or if it depends on the head.

    A score that is the lowest number, or minus infinity, is nothing beside any other of its row.
    """
    made, highest = bodies[:2]
    condition = _unmasked(highest.value.b, made.buffer)
    *heads, i, j = (a.var for a in axes)
    return None if condition is None or uses(condition, heads) else _Place(condition, (i, j)).at


def _unmasked(score: Any, product: Any) -> Any | None:
    """Read a mask out of an expression of a product: whether it leaves the product what it is; None without a mask."""

    def has_product(expr: Any) -> bool:
        return any(load.source.same_as(product) for load in loads_of(expr))

    if isinstance(score, tirx.Select):
        chosen = [has_product(x) for x in (score.condition, score.true_value, score.false_value)]
        if chosen == [False, True, False]:
            return tirx.any(score.condition, score.false_value > _MASKED)
        if chosen == [False, False, True]:
            return tirx.any(tirx.Not(score.condition), score.true_value > _MASKED)
        return None
    if isinstance(score, tirx.Add) and has_product(score.a) != has_product(score.b):
        inside, added = (score.a, score.b) if has_product(score.a) else (score.b, score.a)
        beside = _unmasked(inside, product)
        return added > _MASKED if beside is None else tirx.all(beside, added > _MASKED)
    return None


def _value(bodies: Sequence[Any], axes: Sequence[Axis]) -> Any | None:
    """Return the load of v in o + e / t * v."""
    _, _, exponential, total, last = bodies[:_NUM_BLOCKS]
    product = getattr(last.value, "b", None)
    if not isinstance(last.value, tirx.Add) or not isinstance(product, tirx.Mul):
        return None
    weight, value = (product.a, product.b) if isinstance(product.a, tirx.Div) else (product.b, product.a)
    if not isinstance(weight, tirx.Div) or not isinstance(value, TensorLoad):
        return None
    *rows, width, j = axes
    fits = (
        _is_at(last.value.a, last.buffer, [*rows, width])
        and _is_at(weight.a, exponential.buffer, [*rows, j])
        and _is_at(weight.b, total.buffer, rows)
        and not uses(value.indices, [rows[-1].var])
    )
    return value if fits else None


def _store(bodies: Sequence[Any], axes: Sequence[Sequence[Axis]]) -> Callable[..., Any] | None:
    """Return the store of the result at (head..., i, d, its value): of the last product, or of what moves that."""
    last, made = bodies[_NUM_BLOCKS - 1], axes[_NUM_BLOCKS - 1][:-1]
    if len(bodies) == _NUM_BLOCKS:
        place = _Place(tvm_ffi.Array(last.indices), tuple(a.var for a in made))
        return lambda *values: tirx.BufferStore(last.buffer, values[-1], place.at(*values[:-1]))
    moved, own = bodies[_NUM_BLOCKS], axes[_NUM_BLOCKS]
    if not isinstance(moved.value, TensorLoad) or not moved.value.source.same_as(last.buffer):
        return None
    read = [i for i, e in zip(moved.value.indices, last.buffer.shape, strict=True) if int(e) > 1]
    if len(read) != len(made):
        return None
    inverse = tirx.IndexMap([a.var for a in own], read, None).inverse([a.extent for a in own])

    def at(*values: Any) -> Any:
        to = dict(zip((a.var for a in own), inverse.map_indices(list(values[:-1])), strict=True))
        return tirx.BufferStore(moved.buffer, values[-1], [replaced(i, to) for i in moved.indices])

    return at


def _is_at(load: Any, buffer: Any, axes: Sequence[Axis]) -> bool:
    """Whether an expression is the element of `buffer` at `axes`, one for each of its extents but those of 1."""
    if not isinstance(load, TensorLoad) or not load.source.same_as(buffer):
        return False
    read = [i for i, e in zip(load.indices, buffer.shape, strict=True) if int(e) > 1]
    return len(read) == len(axes) and all(a.var.same_as(i) for a, i in zip(axes, read, strict=True))
