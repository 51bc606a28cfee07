"""Cut a reduction whose extent no vector divides into whole vectors and a short rest.

Before:  for i, k in 197: s[i] += f(i, k)       After:  for i, l in 16, o in 12: s_rf[i, l] += f(i, o * 16 + l)
                                                        for i, j in 21: s[i] += s_rf[i, j] if j < 16 else f(i, 176 + j)

The first block is a partial reduction as `rfactor` makes it ("_rf"); the second, unrolled, has no conditions left. A
split with a predicate would say the same, but TVM makes scalar code of a vector under a condition. Runs inside the
`rows` rule, on a function whose blocks' loops are their axes. Other blocks are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

from tvmhet.emit.cpu.blocks import CpuTarget, replaced, vector_length
from tvmhet.emit.cpu.nests import REDUCE, SPATIAL, axis, block_in, nest, stages_of, with_stages

PARTIAL, REST = "_rf", "_rest"
_VECTORS = 4  # registers of partial results that the rows rule would take, if their length divided the extent

_COMBINERS = (tirx.Add, tirx.Mul, tirx.Max, tirx.Min)


def cut_remainders(func: Any, cpu: CpuTarget) -> Any:
    """Return `func` with every such reduction of its root block cut in two; `func` itself if there is none."""
    stages = stages_of(func)
    made: list[Any] = []
    buffers: list[Any] = []
    for stage in stages:
        cut = _cut(stage, cpu)
        made += [stage] if cut is None else cut[:2]
        buffers += [] if cut is None else [cut[2]]
    return func if len(made) == len(stages) else with_stages(func, made, buffers)


def _cut(stage: Any, cpu: CpuTarget) -> tuple[Any, Any, Any] | None:
    """Return the two loop nests of a stage and the buffer between them; None for a stage that stays as it is."""
    block = block_in(stage)
    if block is None or not _is_plain_reduction(block):
        return None
    *spatial, last = block.iter_vars
    if int(last.iter_type) != REDUCE or any(int(v.iter_type) != SPATIAL for v in spatial):
        return None
    dtype = str(block.writes[0].source.dtype)
    extent, lanes = int(last.dom.extent), cpu.lanes(dtype)
    if extent < 2 * lanes or vector_length(extent, lanes, _VECTORS * lanes) > 1:
        return None
    shape = [v.dom.extent for v in spatial]
    partial = tirx.decl_buffer([*shape, tirx.const(lanes, "int64")], dtype, f"{block.writes[0].source.name}{PARTIAL}")
    return _whole_vectors(block, partial, extent, lanes), _rest(block, partial, extent, lanes), partial


def _is_plain_reduction(block: Any) -> bool:
    """Whether the body is `w[i] = w[i] + f`, or with *, min or max for +."""
    store = block.body
    if block.init is None or not isinstance(store, tirx.BufferStore) or type(store.value) not in _COMBINERS:
        return False
    own = store.value.a
    return hasattr(own, "source") and own.source.same_as(store.buffer) and len(block.writes) == 1


def _whole_vectors(block: Any, partial: Any, extent: int, lanes: int) -> Any:
    axes = [*_copies(block), axis("v_lane"), axis("v_step")]
    *spatial, lane, step = axes
    value = _at(block, spatial, step * lanes + lane)
    combined = type(block.body.value)(tirx.BufferLoad(partial, [*spatial, lane]), value)
    extents = [*(v.dom.extent for v in block.iter_vars[:-1]), lanes, extent // lanes]
    kinds = [SPATIAL] * (len(spatial) + 1) + [REDUCE]
    body = tirx.BufferStore(partial, combined, [*spatial, lane])
    init = tirx.BufferStore(partial, block.init.value, [*spatial, lane])
    return nest(f"{block.name_hint}{PARTIAL}", axes, extents, kinds, body, init)


def _rest(block: Any, partial: Any, extent: int, lanes: int) -> Any:
    axes = [*_copies(block), axis("v_rest")]
    *spatial, j = axes
    rest = extent % lanes
    made = tirx.BufferLoad(partial, [*spatial, tirx.min(j, lanes - 1)])
    value = tirx.if_then_else(j < lanes, made, _at(block, spatial, j + (extent - rest - lanes)))
    where = _at_indices(block, spatial)
    buffer = block.body.buffer
    combined = type(block.body.value)(tirx.BufferLoad(buffer, where), value)
    extents = [*(v.dom.extent for v in block.iter_vars[:-1]), lanes + rest]
    kinds = [SPATIAL] * len(spatial) + [REDUCE]
    init = tirx.BufferStore(buffer, block.init.value, where)
    name = f"{block.name_hint}{REST}"
    return nest(name, axes, extents, kinds, tirx.BufferStore(buffer, combined, where), init)


def _copies(block: Any) -> list[Any]:
    return [axis(str(v.var.name)) for v in block.iter_vars[:-1]]


def _at(block: Any, spatial: Sequence[Any], k: Any) -> Any:
    """The operand that the block adds up, at other axes."""
    old = [v.var for v in block.iter_vars]
    return replaced(block.body.value.b, dict(zip(old, [*spatial, k], strict=True)))


def _at_indices(block: Any, spatial: Sequence[Any]) -> list[Any]:
    to = dict(zip([v.var for v in block.iter_vars[:-1]], spatial, strict=True))
    return [replaced(i, to) for i in block.body.indices]
