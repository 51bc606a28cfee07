"""Let NaN through maxima, minima and comparisons of floats, as torch and the library do.

Before:  y[i] = T.max(x[i], 0.0)           After:  y[i] = T.max(0.0, x[i])
         z[i] = T.max(z[i], x[i, k])               z[i] = T.Select(x[i, k] <= inf, T.max(x[i, k], z[i]), x[i, k])
         b[i] = x[i] != 1.0                        b[i] = x[i] != 1.0 or T.isnan(x[i])
         c[i] = not x[i] < 1.0                     c[i] = x[i] >= 1.0 or T.isnan(x[i])

On CUDA: y[i] = T.Select(0.0 > x[i], 0.0, x[i]), and c[i] as on CPUs

TVM's `T.max(a, b)` is `a > b ? a : b` on CPUs: of a and NaN it makes NaN, of NaN and b it makes b. So a network whose
values are no numbers any more gave plain zeros behind its first relu, and its loss did not tell. A constant in front
costs nothing, else one comparison and one choice more. What is compared is the value that arrives, not the one that is
kept, so that a reduction does not wait for it.

CUDA's `max` drops NaN on either side. With a constant (relu, clip) the comparison is written out there; what is of two
values (pools, the largest of a row) is left: threads reduce together by its form, and a bfloat16 <= infinity is
ambiguous to NVRTC.

NaN is unlike every number, and no comparison with it holds. LLVM's code for `a != b` says that it is not unlike; TVM's
arithmetic makes `a >= b` of `not a < b`. Both say now what they mean before that happens.
Runs on scheduled functions; integers are left alone.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvmhet._tvm import PrimFunc, TensorLoad

_FLOATS = ("float", "bfloat")
_OPPOSITES = {tirx.EQ: tirx.NE, tirx.LT: tirx.GE, tirx.LE: tirx.GT, tirx.GT: tirx.LE, tirx.GE: tirx.LT}


def keep_nan(func: Any, is_cuda: bool) -> Any:
    """Return `func` with extremes of floats that are NaN where an operand is, and comparisons that do not hold then."""
    keeping = _keeping_cuda if is_cuda else _keeping_cpu

    def extreme(node: Any) -> Any:
        return keeping(node) if str(node.ty).startswith(_FLOATS) else node

    def unlike(node: Any) -> Any:
        return _or_nan(node) if str(node.a.ty).startswith(_FLOATS) else node

    def negation(node: Any) -> Any:
        opposite = _OPPOSITES.get(type(node.a))
        return node if opposite is None else unlike(opposite(node.a.a, node.a.b))

    mends = [((tirx.Max, tirx.Min), extreme), (tirx.Not, negation)]
    return func.with_body(tvm_ffi.structural_map(func.body, mends if is_cuda else [*mends, (tirx.NE, unlike)]))


def _or_nan(comparison: Any) -> Any:
    """`comparison` or one of its operands is NaN."""
    for operand in (comparison.a, comparison.b):
        if not _is_constant(operand):
            wide = operand if str(operand.ty) in ("float32", "float64") else operand.astype("float32")
            comparison = tirx.Or(comparison, tirx.isnan(wide))
    return comparison


def _keeping_cpu(node: Any) -> Any:
    first, second = node.a, node.b
    if _is_constant(second) or (isinstance(second, TensorLoad) and not _is_constant(first)):
        first, second = second, first
    chosen = type(node)(first, second)
    if _is_constant(first):
        return chosen
    return tirx.Select(first <= tirx.const(math.inf, str(node.ty)), chosen, first)


def _keeping_cuda(node: Any) -> Any:
    value, bound = (node.b, node.a) if _is_constant(node.a) else (node.a, node.b)
    if not _is_constant(bound):
        return node
    return tirx.Select(bound > value if isinstance(node, tirx.Max) else bound < value, bound, value)


def _is_constant(value: Any) -> bool:
    return isinstance(value, tirx.FloatImm)


@tirx.transform.prim_func_pass(opt_level=0, name="tvmhet.KeepNan")
class KeepNan:
    """Apply `keep_nan` to every PrimFunc of a module; Relax functions are untouched."""

    def __init__(self, is_cuda: bool) -> None:
        self._is_cuda = is_cuda

    def transform_function(self, func: PrimFunc, _mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> PrimFunc:
        return keep_nan(func, self._is_cuda)
