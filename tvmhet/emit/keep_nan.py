"""Let NaN through maxima and minima of floats, as torch and the library do.

Before:  y[i] = T.max(x[i], 0.0)           After:  y[i] = T.max(0.0, x[i])
         z[i] = T.max(z[i], x[i, k])               z[i] = T.Select(x[i, k] <= inf, T.max(x[i, k], z[i]), x[i, k])

TVM's `T.max(a, b)` is `a > b ? a : b` on CPUs: of a and NaN it makes NaN, of NaN and b it makes b. So a network whose
values are no numbers any more gave plain zeros behind its first relu, and its loss did not tell. A constant in front
costs nothing, else one comparison and one choice more. CUDA's `max` drops either, so there the comparison is written.

What is compared is the value that arrives, not the one that is kept, so that a reduction does not wait for it.
Runs on scheduled functions. Integers are left alone, and what threads of a GPU reduce together: TVM knows such a
reduction by its form, so that the largest of a row still drops NaN there. A softmax has it in its sum.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvmhet._tvm import PrimFunc, SBlockRealize, TensorLoad
from tvmhet.emit.cpu.blocks import uses
from tvmhet.emit.cpu.nests import REDUCE

_FLOATS = ("float", "bfloat")


def keep_nan(func: Any, is_cuda: bool) -> Any:
    """Return `func` with maxima and minima of floats that are NaN where an operand is."""
    by_threads = _reduced_by_threads(func) if is_cuda else []

    def keeping(node: Any) -> Any:
        into_shared = isinstance(node.a, TensorLoad) and any(node.a.source.same_as(b) for b in by_threads)
        return node if into_shared or not str(node.ty).startswith(_FLOATS) else _keeping(node, is_cuda)

    return func.with_body(tvm_ffi.structural_map(func.body, ((tirx.Max, tirx.Min), keeping)))


def _reduced_by_threads(func: Any) -> list[Any]:
    """The buffers that several threads reduce into, for which TVM has to know the reduction by its form."""
    threads: list[Any] = []
    realized: list[Any] = []

    def visit(loop: Any) -> None:
        if loop.kind == tirx.ForKind.THREAD_BINDING:
            threads.append(loop.loop_var)

    tvm_ffi.structural_walk(func.body, ((tirx.For, visit), (SBlockRealize, realized.append)))
    return [
        write.source
        for realize in realized
        for axis, value in zip(realize.block.iter_vars, realize.iter_values, strict=True)
        if int(axis.iter_type) == REDUCE and uses(value, threads)
        for write in realize.block.writes
    ]


def _keeping(node: Any, is_cuda: bool) -> Any:
    first, second = node.a, node.b
    if _is_constant(second) or (isinstance(second, TensorLoad) and not _is_constant(first)):
        first, second = second, first
    if is_cuda:
        chosen = tirx.Select(first > second if isinstance(node, tirx.Max) else first < second, first, second)
    else:
        chosen = type(node)(first, second)
    if _is_constant(first):
        return chosen
    return tirx.Select(first <= tirx.const(math.inf, str(node.ty)), chosen, first)


def _is_constant(value: Any) -> bool:
    return isinstance(value, tirx.FloatImm) or (isinstance(value, tirx.Broadcast) and _is_constant(value.value))


@tvm.transform.module_pass(opt_level=0, name="tvmhet.KeepNan")
class KeepNan:
    """Apply `keep_nan` to every PrimFunc of a module; Relax functions are untouched."""

    def __init__(self, is_cuda: bool) -> None:
        self._is_cuda = is_cuda

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        out = mod.clone()
        for gvar, func in mod.functions_items():
            if isinstance(func, PrimFunc):
                out.update_func(gvar, keep_nan(func, self._is_cuda))
        return out
