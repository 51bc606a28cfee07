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

from tvmhet._tvm import Analyzer, SBlockRealize, TensorLoad, detect_linear_equation
from tvmhet.emit.cpu.blocks import calls, conditions_of, loads_of, replaced, stride_along, uses
from tvmhet.emit.cpu.nests import apart, in_order, number, over, vector
from tvmhet.emit.cpu.transposing import in_squares

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
    turned = _is_turned(nest, value)
    if not turned and any(_step(load, nest.column) not in (0, 1) for load in loads_of(value)):
        return None
    inside = _Nest(nest.loops, tirx.BufferStore(store.buffer, value, store.indices), ())

    def filled(columns: int) -> Any:
        if turned:
            return in_order(_in_squares(inside, columns, lanes))
        return inside.around(lambda at: _in_vectors(at, columns, lanes))

    def empty(first: int) -> Any:
        column = tirx.Var("c", "int64")
        return inside.around(
            lambda at: [
                over(column, width - first, tirx.BufferStore(store.buffer, nothing, at(column + first).indices))
            ]
        )

    made = filled(width)
    if bounds:
        is_whole = replaced(bounds[0], {nest.column: number(width - 1)})
        valid = num_columns % width
        made = tirx.IfThenElse(is_whole, made, in_order([filled(valid), empty(valid)]))
    return apart("before", made) if turned or any(True for _ in calls(value)) else made


def _is_turned(nest: _Nest, value: Any) -> bool:
    """Whether a panel is filled from a tensor that is contiguous along the steps of the product."""
    if not isinstance(value, TensorLoad) or len(nest.loops) != 2 or str(value.source.dtype) != "float32":
        return False
    steps = nest.loops[0]
    return _step(value, steps.loop_var) == 1 and _step(value, nest.column) not in (0, 1) and int(steps.extent) > 1


def _in_squares(nest: _Nest, columns: int, lanes: int) -> list[Any]:
    """Return the loops that fill so many columns of a panel, in squares that are turned in registers."""
    steps = nest.loops[0]

    def at(step: Any, column: Any) -> Any:
        return replaced(nest.store, {steps.loop_var: step, nest.column: column})

    def load(_: int, step: Any, column: Any) -> Any:
        return at(step, column).value

    def store(step: Any, column: Any, known: Sequence[Any]) -> Any:
        made = at(step, column)
        return tirx.BufferStore(made.buffer, known[0] if known else made.value, made.indices)

    return in_squares(1, int(steps.extent), columns, lanes, load, store)


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


def _step(load: Any, var: Any) -> int | None:
    """How many elements a load moves by with a variable; None if that is no constant."""
    place: Any = number(0)
    for index, extent in zip(load.indices, load.source.shape, strict=True):
        place = place * extent + index
    found = detect_linear_equation(Analyzer().simplify(place), [var])
    return int(found[0].value) if found and hasattr(found[0], "value") else None


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
