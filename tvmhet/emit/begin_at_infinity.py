"""Let maxima and minima of floats begin at infinity, as torch's do; TVM's begin at the largest finite number.

Before:  with T.init():                                        After:  with T.init():
             m[i] = T.float32(-3.4028235e38)                               m[i] = T.float32("-inf")
         m[i] = T.max(m[i], x[i, k])                                   m[i] = T.max(m[i], x[i, k])

         p[i] = T.if_then_else(1 <= i, x[i - 1], -3.4028235e38)        p[i] = T.if_then_else(1 <= i, x[i - 1], -inf)
         y[j] = T.max(y[j], p[j + k])                                  y[j] = T.max(y[j], p[j + k])

A row that masks have filled with -inf has the maximum -inf then: ONNX's attention finds rows without a key by it. What
pads a window may not be larger either. Constants of a model are left alone: a number is replaced where a running
maximum is set to it, and where a condition on indices alone puts it beside values that only maxima read.

On CUDA TVM knows the reductions that threads do together by their first number. They are written out before it is
replaced (by TVM's LowerCrossThreadReduction, which then finds nothing more to do), and so is what threads without
values add. Runs on scheduled functions; integers, and maxima that come with their places, are left alone.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from tvmhet._tvm import PrimFunc, TensorLoad

_EXTREMES = (tirx.Max, tirx.Min)
#: Writes out what threads do together. It raises where loops lie inside those of threads that share a reduction.
WRITE_OUT = tvm.transform.Sequential([s_tir.transform.CanonicalizeLoop(), s_tir.transform.LowerCrossThreadReduction()])


def begin_at_infinity(func: Any) -> Any:
    """Return `func` with running maxima and minima of floats that begin at an infinity."""
    running = _running(func.body)
    padded = _read_by_extremes(func.body, running)

    def reducer(node: Any) -> Any:
        kind = type(node.result[0])
        if len(node.result) > 1 or kind not in _EXTREMES:
            return node
        return tirx.CommReducer(node.lhs, node.rhs, node.result, [_infinite(node.identity_element[0], kind)])

    def store(node: Any) -> Any:
        kind, value = running.get(node.buffer), node.value
        if kind is None and node.buffer in padded:
            value = _beside(value, padded[node.buffer])
        elif kind is not None and (other := _taken(node)) is not None:
            read = value.a if other.same_as(value.b) else value.b
            value = kind(read, _beside(other, kind))
        elif kind is not None:
            value = _infinite(value, kind)
        return tirx.BufferStore(node.buffer, value, node.indices)

    return func.with_body(tvm_ffi.structural_map(func.body, [(tirx.CommReducer, reducer), (tirx.BufferStore, store)]))


def _running(body: Any) -> dict[Any, type]:
    """Tensors that collect a maximum or a minimum: `m[i] = T.max(m[i], ...)`."""
    found: dict[Any, type] = {}

    def visit(store: Any) -> None:
        if str(store.value.ty).startswith(("float", "bfloat")) and _taken(store) is not None:
            found[store.buffer] = type(store.value)

    tvm_ffi.structural_walk(body, (tirx.BufferStore, visit))
    return found


def _read_by_extremes(body: Any, running: dict[Any, type]) -> dict[Any, type]:
    """Tensors of which every reading goes into running maxima, or every one into minima."""
    readers: dict[Any, set[type | None]] = {}

    def visit(store: Any) -> None:
        kind = running.get(store.buffer)
        taken = _taken(store) if kind is not None else None
        own = taken.source if isinstance(taken, TensorLoad) else None

        def read(load: Any) -> None:
            readers.setdefault(load.source, set()).add(kind if load.source.same_as(own) else None)

        tvm_ffi.structural_walk(store.value, (TensorLoad, read))

    tvm_ffi.structural_walk(body, (tirx.BufferStore, visit))
    return {tensor: kind for tensor, (kind, *more) in readers.items() if kind is not None and not more}


def _taken(store: Any) -> Any:
    """What a store takes into its running maximum; None for other stores."""
    value = store.value
    if not isinstance(value, _EXTREMES):
        return None
    for own, other in ((value.a, value.b), (value.b, value.a)):
        if isinstance(own, TensorLoad) and own.source.same_as(store.buffer):
            return other
    return None


def _beside(value: Any, kind: type) -> Any:
    """`value` with infinity where a condition on indices puts the first number of TVM."""
    if not str(getattr(getattr(value, "op", None), "name", "")).endswith(".if_then_else"):
        return value
    condition, inside, outside = value.args
    loads: list[Any] = []
    tvm_ffi.structural_walk(condition, (TensorLoad, loads.append))
    return value if loads else tirx.if_then_else(condition, inside, _infinite(outside, kind))


def _infinite(value: Any, kind: type) -> Any:
    """Infinity for the number at which TVM's maxima or minima begin; `value` where it is another."""
    if not isinstance(value, tirx.FloatImm):
        return value
    dtype = str(value.ty)
    first, infinity = (tirx.min_value, -math.inf) if kind is tirx.Max else (tirx.max_value, math.inf)
    return tirx.const(infinity, dtype) if value.value == first(dtype).value else value


@tirx.transform.prim_func_pass(opt_level=0, name="tvmhet.BeginAtInfinity")
class BeginAtInfinity:
    """Apply `begin_at_infinity` to every PrimFunc of a module that takes extremes; Relax functions are untouched."""

    def __init__(self, is_cuda: bool) -> None:
        self._is_cuda = is_cuda

    def transform_function(self, func: PrimFunc, _mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> PrimFunc:
        if not _has_extremes(func):
            return func
        return begin_at_infinity(_written_out(func) if self._is_cuda else func)


def _written_out(func: Any) -> Any:
    return WRITE_OUT(tvm.IRModule({"main": func}))["main"]


def _has_extremes(func: Any) -> bool:
    found: list[Any] = []
    tvm_ffi.structural_walk(func.body, (_EXTREMES, found.append))
    return bool(found)
