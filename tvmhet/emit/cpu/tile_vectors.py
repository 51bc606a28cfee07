"""Whole vectors at both ends of a product: panels are filled, and tiles are written, without a condition per element.

Before:  for k, c in 96, 40:                         After:  if the panel is whole:
             panel[k, c] = x[k, first + c] * g[k]                for k, v in 96, 5: panel[k, 8 of them] = ..
                           if first + c < 196 else 0         else:
         ..                                                      for k, v in 96, 4: ..; the last 4, and 4 zeros
         for r, c in 4, 40:                                  ..
             if first + c < 196:                             the same of y, as a function of its own
                 y[r, first + c] = silu(tile[r, c] + b[r])

TVM makes no vectors of what stands under a condition: the exponential of such an element takes eight times as long. And
LLVM takes the constants of an exponential out of all loops of a function, so that they occupy registers that the tile
needs: on an AMD EPYC (AVX-512) a GELU after 3136 x 96 x 384 took twice what it takes by itself. Panels that are
gathered from a window stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import tirx

from tvmhet._tvm import Analyzer, SBlockRealize, detect_linear_equation
from tvmhet.emit.cpu.blocks import calls, conditions_of, loads_of, replaced, stride_along, uses
from tvmhet.emit.cpu.nests import apart, in_order, number, over, vector

_TILE_SCOPE = "local"


def tile_vectors(func: Any, lanes: int, num_columns: int) -> Any:
    """Return a scheduled product's function with vectors of `lanes` columns, of `num_columns` in all.

    In each nest that fills a panel or writes a tile the innermost loop goes through the columns of one.
    """

    def visit(sequence: Any) -> Any:
        stages = [_Nest.of(stage) for stage in sequence.seq]
        made = [nest and (_written(nest, lanes, num_columns) or _packed(nest, lanes, num_columns)) for nest in stages]
        return tirx.SeqStmt([new or old for new, old in zip(made, sequence.seq, strict=True)])

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.SeqStmt, visit)))


@dataclass(frozen=True, slots=True)
class _Nest:
    """Loops around one store, in terms of their variables, and the conditions under which it is done."""

    loops: tuple[Any, ...]
    store: Any
    conditions: tuple[Any, ...]

    @staticmethod
    def of(stage: Any) -> _Nest | None:
        """Read a statement; None if it is something else."""
        loops, inner = [], stage
        while isinstance(inner, tirx.For):
            loops.append(inner)
            inner = inner.body
        if not loops or not isinstance(inner, SBlockRealize) or not isinstance(inner.block.body, tirx.BufferStore):
            return None
        if inner.block.init is not None or any(loop.kind != tirx.ForKind.SERIAL for loop in loops):
            return None
        axes = {v.var: value for v, value in zip(inner.block.iter_vars, inner.iter_values, strict=True)}
        return _Nest(tuple(loops), replaced(inner.block.body, axes), tuple(_conjunction(inner.predicate)))

    @property
    def column(self) -> Any:
        """The variable of the innermost loop."""
        return self.loops[-1].loop_var

    @property
    def width(self) -> int:
        """The extent of the innermost loop."""
        return int(self.loops[-1].extent)

    def around(self, make: Callable[[Callable[[Any], Any]], Sequence[Any]]) -> Any:
        """Return the outer loops over `make(store at a column)`, under the conditions on other axes."""
        own = {loop.loop_var: tirx.Var(str(loop.loop_var.name), loop.loop_var.ty) for loop in self.loops[:-1]}
        made = in_order([*make(lambda column: replaced(self.store, {**own, self.column: column}))])
        for condition in self.conditions:
            if not uses(condition, [self.column]):
                made = tirx.IfThenElse(replaced(condition, own), made, None)
        for loop in reversed(self.loops[:-1]):
            made = over(own[loop.loop_var], int(loop.extent), made)
        return made


def _written(nest: _Nest, lanes: int, num_columns: int) -> Any | None:
    """Return a nest that writes a tile in vectors; None for any other."""
    if str(nest.store.buffer.scope()) == _TILE_SCOPE:
        return None
    if not any(str(load.source.scope()) == _TILE_SCOPE for load in loads_of(nest.store.value)):
        return None
    bounds = [c for c in nest.conditions if uses(c, [nest.column])]
    if not all(_ends_at(nest, c, num_columns) for c in bounds) or len(bounds) > 1:
        return None
    made = nest.around(lambda at: _in_vectors(at, nest.width, lanes))
    if bounds:
        rest = nest.around(lambda at: _in_vectors(at, num_columns % nest.width, lanes))
        made = tirx.IfThenElse(replaced(bounds[0], {nest.column: number(nest.width - 1)}), made, rest)
    return apart("after", made) if any(True for _ in calls(nest.store)) else made


def _packed(nest: _Nest, lanes: int, num_columns: int) -> Any | None:
    """Return a nest that fills a panel, in vectors of what lies side by side; None for any other."""
    store, width = nest.store, nest.width
    bounds = conditions_of(store.value)
    value, nothing = _chosen(store.value)
    if nest.conditions or width == 1 or conditions_of(value) or not all(_ends_at(nest, c, num_columns) for c in bounds):
        return None
    if not all(_is_contiguous(load, nest.column) for load in loads_of(value)):
        return None
    inside = _Nest(nest.loops, tirx.BufferStore(store.buffer, value, store.indices), ())
    valid = num_columns % width

    def partly(at: Callable[[Any], Any]) -> Sequence[Any]:
        column = tirx.Var("c", "int64")
        zeros = tirx.BufferStore(store.buffer, nothing, at(column + valid).indices)
        return [*_in_vectors(at, valid, lanes), over(column, width - valid, zeros)]

    made = inside.around(lambda at: _in_vectors(at, width, lanes))
    if bounds:
        is_whole = replaced(bounds[0], {nest.column: number(width - 1)})
        made = tirx.IfThenElse(is_whole, made, inside.around(partly))
    return apart("before", made) if any(True for _ in calls(value)) else made


def _ends_at(nest: _Nest, condition: Any, num_columns: int) -> bool:
    """Whether a condition is that a place is one of so many columns, and the nest begins at a multiple of its width."""
    if not isinstance(condition, tirx.LT) or not hasattr(condition.b, "value") or int(condition.b.value) != num_columns:
        return False
    first = Analyzer().simplify(replaced(condition.a, {nest.column: number(0)}) % nest.width)
    return stride_along(condition.a, nest.column) == 1 and hasattr(first, "value") and int(first.value) == 0


def _chosen(value: Any) -> tuple[Any, Any]:
    """What a value is where its condition holds, and where not."""
    if str(getattr(getattr(value, "op", None), "name", "")).endswith(".if_then_else"):
        return value.args[1], value.args[2]
    return value, None


def _is_contiguous(load: Any, column: Any) -> bool:
    """Whether a load moves by one element with each column, or not at all."""
    place: Any = number(0)
    for index, extent in zip(load.indices, load.source.shape, strict=True):
        place = place * extent + index
    found = detect_linear_equation(Analyzer().simplify(place), [column])
    return bool(found) and hasattr(found[0], "value") and int(found[0].value) in (0, 1)


def _in_vectors(at: Callable[[Any], Any], columns: int, lanes: int) -> list[Any]:
    """Return what is to be done for columns from 0 on, in vectors, the last of fewer lanes."""
    v, lane, rest = (tirx.Var(name, "int64") for name in ("v", "lane", "lane"))
    whole, length = divmod(columns, lanes)
    made = []
    if whole:
        made.append(over(v, whole, vector(lane, lanes, at(v * lanes + lane))))
    if length:
        made.append((vector if length > 1 else over)(rest, length, at(rest + whole * lanes)))
    return made


def _conjunction(condition: Any) -> list[Any]:
    """The conditions that all must hold; none where the one is known to."""
    if isinstance(condition, tirx.And):
        return [*_conjunction(condition.a), *_conjunction(condition.b)]
    return [] if hasattr(condition, "value") and condition.value else [condition]
