"""Keep the value of a function that another function is taken of in a register of its own.

Before:  for i in vector:  y[i] = tanh(erf(x[i]))      After:  for i in vector:  t[i] = erf(x[i])
                                                               for i in vector:  y[i] = tanh(t[i])

TVM writes whatever a `T.Let` binds back in where it simplifies an index or a value, and it does so again at every
level: three of the polynomials of `fast_math.py` in each other took minutes to compile, four no end. It does not look
into a buffer, and LLVM keeps one of a vector's length in registers. A value that is used twice is computed once.

Runs inside FastMath, on scheduled functions. What a condition guards stays where it is, since its loads may lie outside
their tensor; `are_deep` says where that is too much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvmhet._tvm import SBlock, SBlockRealize, access_regions, structural_equal
from tvmhet.emit.cpu.blocks import loads_of, replaced
from tvmhet.emit.cpu.nests import SPATIAL, axis

IsCostly = Callable[[Any], bool]
_MAX_DEPTH = 2  # calls in each other


def values_apart(func: Any, is_costly: IsCostly) -> Any:
    """Return `func` with the calls that `is_costly` names, and that stand in another such call, in buffers."""
    buffers: list[Any] = []

    def of_loop(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.VECTORIZED or not isinstance(loop.body, SBlockRealize):
            return loop
        stages = _stages(loop.body, loop, is_costly, buffers)
        return loop if len(stages) == 1 else tirx.SeqStmt(stages)

    body = tvm_ffi.structural_map(func.body, (tirx.For, of_loop))
    in_vectors = _blocks_in_vectors(body)

    def of_block(realize: Any) -> Any:
        if any(realize.block.same_as(block) for block in in_vectors):
            return realize
        stages = _stages(realize, None, is_costly, buffers)
        return realize if len(stages) == 1 else tirx.SeqStmt(stages)

    body = tvm_ffi.structural_map(body, (SBlockRealize, of_block))
    if not buffers:
        return func
    root = body.block
    held = [*root.alloc_buffers, *buffers]
    return func.with_body(
        SBlockRealize([], True, SBlock([], [], [], root.name_hint, root.body, alloc_buffers=held)),
    )


def are_deep(func: Any, is_costly: IsCostly) -> bool:
    """Whether a function holds more such calls in each other than TVM compiles in a second or two."""
    return any(_depth(call, is_costly) > _MAX_DEPTH for call in _costly(func.body, is_costly))


def _depth(call: Any, is_costly: IsCostly) -> int:
    return 1 + max((_depth(inner, is_costly) for inner in _inside(call, is_costly)), default=0)


def _inside(call: Any, is_costly: IsCostly) -> list[Any]:
    return [c for a in call.args for c in _costly(a, is_costly)]


def _blocks_in_vectors(body: Any) -> list[Any]:
    found: list[Any] = []

    def visit(loop: Any) -> None:
        if loop.kind == tirx.ForKind.VECTORIZED:
            tvm_ffi.structural_walk(loop.body, (SBlock, found.append))

    tvm_ffi.structural_walk(body, (tirx.For, visit))
    return found


def _stages(realize: Any, loop: Any, is_costly: IsCostly, buffers: list[Any]) -> list[Any]:
    """One statement for each value that a block's store holds in another one, then the store; with `loop` around each.

    The buffers of the values are added to `buffers`.
    """
    block = realize.block
    if not isinstance(block.body, tirx.BufferStore):
        return [realize]
    value, stages = block.body.value, []
    length = 1 if loop is None else int(loop.extent)
    place = axis("v_value")
    while (call := _innermost(value, block.body.buffer, is_costly)) is not None:
        buffer = tirx.decl_buffer([length], str(call.ty), f"value{len(buffers)}", scope="local")
        buffers.append(buffer)
        stages.append(_stage(realize, loop, place, length, tirx.BufferStore(buffer, call, [place]), None))
        load = tirx.BufferLoad(buffer, [place])
        value = _with_load(value, call, load)
    store = tirx.BufferStore(block.body.buffer, value, block.body.indices)
    return [*stages, _stage(realize, loop, place, length, store, block.init)] if stages else [realize]


def _innermost(value: Any, own: Any, is_costly: IsCostly) -> Any | None:
    """The first costly call in a value that holds none, but stands in one, and in no condition."""
    guarded = _guarded(value)
    for outer in _costly(value, is_costly):
        for call in _inside(outer, is_costly):
            if (
                not _inside(call, is_costly)
                and not any(call.same_as(g) for g in guarded)
                and not any(load.source.same_as(own) for load in loads_of(call))
            ):
                return call
    return None


def _costly(value: Any, is_costly: IsCostly) -> list[Any]:
    found: list[Any] = []
    tvm_ffi.structural_walk(value, (tvm.ir.Call, lambda call: found.append(call) if is_costly(call) else None))
    return found


def _guarded(value: Any) -> list[Any]:
    """Every call under a condition."""
    found: list[Any] = []

    def visit(call: Any) -> None:
        if str(getattr(call.op, "name", "")).endswith(".if_then_else"):
            tvm_ffi.structural_walk(call.args, (tvm.ir.Call, found.append))

    tvm_ffi.structural_walk(value, (tvm.ir.Call, visit))
    return found


def _with_load(value: Any, call: Any, load: Any) -> Any:
    return tvm_ffi.structural_map(value, (tvm.ir.Call, lambda c: load if structural_equal(c, call) else c))


def _stage(realize: Any, loop: Any, place: Any, length: int, store: Any, init: Any) -> Any:
    """The block with another store, variables of its own, and the place in the vector as a further axis."""
    block = realize.block
    again = None if loop is None else tirx.Var(str(loop.loop_var.name), loop.loop_var.ty)
    moved = {} if loop is None else {loop.loop_var: again}
    fresh = {v.var: axis(str(v.var.name)) for v in block.iter_vars} | {place: axis("v_value")}
    axes = [tirx.IterVar(v.dom, fresh[v.var], int(v.iter_type)) for v in block.iter_vars]
    axes.append(tirx.IterVar(_range(length), fresh[place], SPATIAL))
    values = [replaced(v, moved) for v in realize.iter_values]
    values.append(tirx.const(0, "int64") if again is None else tirx.Cast("int64", again))
    body = replaced(store, fresh)
    own = replaced(init, fresh) if init is not None else None
    used = {b: b for b in [body.buffer, *(load.source for load in loads_of(body.value))]}
    reads, writes, _ = access_regions(SBlock(axes, [], [], block.name_hint, body, own), used)
    made = SBlock(axes, reads, writes, block.name_hint, body, own)
    inside = SBlockRealize(values, replaced(realize.predicate, moved), made)
    return inside if loop is None else tirx.For(again, loop.min, loop.extent, loop.kind, inside)


def _range(length: int) -> Any:
    return tvm.ir.Range(tirx.const(0, "int64"), tirx.const(length, "int64"))
