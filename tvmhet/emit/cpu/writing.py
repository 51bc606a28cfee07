"""Write a product's tile back in whole vectors, and what follows it as a function of its own where it is costly.

Before:  for r, c in 4, 40:                            After:  if the tile is whole:
             if first + c < 196:                                   for r, v in 4, 5: y[8 of them] = silu(tile[..] + b[r])
                 y[r, first + c] = silu(tile[r, c] + b[r])     else:
                                                                   for r, v in 4, 4: ...; the last 4 in one vector

TVM makes no vectors of what stands under a condition: an exponential of such an element takes eight times as long. And
LLVM takes the constants of an exponential out of all loops of a function, so that they occupy registers that the tile
needs: on an AMD EPYC (AVX-512) a GELU after 3136 x 96 x 384 took 1.6 times what it takes by itself.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx

from tvmhet._tvm import SBlockRealize
from tvmhet.emit.cpu.blocks import calls, loads_of, replaced, uses
from tvmhet.emit.cpu.nests import apart, in_order, number, over, vector

_TILE_SCOPE = "local"


def written_in_vectors(func: Any, lanes: int, num_columns: int) -> Any:
    """Return a scheduled product's function with the block that reads its tile in vectors of `lanes` columns.

    The block's innermost loop goes through the columns of a tile, of `num_columns` in all.
    """

    def visit(sequence: Any) -> Any:
        made = [_in_vectors(stage, lanes, num_columns) for stage in sequence.seq]
        return tirx.SeqStmt([stage if m is None else m for stage, m in zip(sequence.seq, made, strict=True)])

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.SeqStmt, visit)))


def _in_vectors(stage: Any, lanes: int, num_columns: int) -> Any | None:
    """Return the nest of a block that writes a tile in vectors; None for any other statement."""
    loops, inner = [], stage
    while isinstance(inner, tirx.For):
        loops.append(inner)
        inner = inner.body
    if not loops or not isinstance(inner, SBlockRealize) or not _reads_tile(inner.block.body):
        return None
    column, width = loops[-1].loop_var, int(loops[-1].extent)
    axes = {v.var: value for v, value in zip(inner.block.iter_vars, inner.iter_values, strict=True)}
    body = replaced(inner.block.body, axes)
    conditions = _conjunction(inner.predicate)
    rows = [c for c in conditions if not uses(c, [column])]
    if len(conditions) - len(rows) > 1:
        return None

    def nest(columns: int) -> Any:
        v, lane, rest = (tirx.Var(name, "int64") for name in ("v", "lane", "lane"))
        whole, length = divmod(columns, lanes)
        parts = []
        if whole:
            parts.append(over(v, whole, vector(lane, lanes, replaced(body, {column: v * lanes + lane}))))
        if length:
            place = whole * lanes + rest
            loop = vector if length > 1 else over
            parts.append(loop(rest, length, replaced(body, {column: place})))
        made = in_order(parts)
        for condition in rows:
            made = tirx.IfThenElse(condition, made, None)
        for loop in reversed(loops[:-1]):
            own = tirx.Var(str(loop.loop_var.name), loop.loop_var.ty)
            made = over(own, int(loop.extent), replaced(made, {loop.loop_var: own}))
        return made

    if len(rows) == len(conditions):
        made = nest(width)
    else:
        (bound,) = (c for c in conditions if uses(c, [column]))
        made = tirx.IfThenElse(replaced(bound, {column: number(width - 1)}), nest(width), nest(num_columns % width))
    return apart("after", made) if any(True for _ in calls(body)) else made


def _reads_tile(body: Any) -> bool:
    """Whether a statement writes, to a tensor that is no tile, what it makes of one."""
    if not isinstance(body, tirx.BufferStore) or str(body.buffer.scope()) == _TILE_SCOPE:
        return False
    return any(str(load.source.scope()) == _TILE_SCOPE for load in loads_of(body.value))


def _conjunction(condition: Any) -> list[Any]:
    """The conditions that all must hold; none where the one is known to."""
    if isinstance(condition, tirx.And):
        return [*_conjunction(condition.a), *_conjunction(condition.b)]
    return [] if hasattr(condition, "value") and condition.value else [condition]
