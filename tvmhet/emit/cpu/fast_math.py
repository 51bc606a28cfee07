"""Write float32 functions and small powers out as polynomials, so that loops over them become vectors.

Before:  y[i] = T.erf(x[i])               After:  y[i] = x * P(x * x) / Q(x * x), clamped, as nested T.Let

LLVM has no vector form of these functions without an extra library: a loop over them runs one libm call an element
(128 x 3072 elements of erf: 3.7 ms; a multiplication of as many: 0.14 ms). Other dtypes and functions are left alone.

Coefficients were fitted for the least relative error (Lawson's iteration over rational functions, in float64). Errors
of the float32 evaluation, over every magnitude, which `tests/emit/cpu/test_fast_math.py` holds them to:

    exp      2e-7 relative; results below 2e-38 become 0
    erf      6e-7 relative, within +-1
    tanh     6e-7 relative, within +-1
    sigmoid  3e-7 relative; results below 2e-38 become 0
    log      2e-7 relative, of 1 + x, too (`logarithm.py`)
    sin, cos 2e-7 relative, tan 4e-7; NaN beyond 3e9 (`sines.py`)
    arcs     3e-7 relative: asin, acos, atan, atan2 (`arcs.py`)
    sinh     4e-7 relative, and cosh
    x ** n   n = 2, 3, 4: products, 2e-7 relative

NaN and infinities give what libm gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvmhet._tvm import PrimFunc, TensorLoad
from tvmhet.emit.cpu.arcs import acos, asin, atan, atan2, magnitude, with_sign
from tvmhet.emit.cpu.logarithm import log, log1p
from tvmhet.emit.cpu.nested_calls import are_deep, values_apart
from tvmhet.emit.cpu.polynomials import LN2_HIGH, LN2_LOW, Expr, bind, f32, polynomial
from tvmhet.emit.cpu.sines import cos, sin, tan

_EXP = (1.0, 1.0, 0.499992303049013, 0.1666711538958332, 0.04189033218278574, 0.008312501431779234)
_ERF_LIMIT = 3.92  # beyond, erf is 1 in float32
_ERF_P = (
    1.128379146157666,
    0.1904057356153085,
    0.05274863885955926,
    0.0037655897187860504,
    2.848827966297682e-4,
    2.050101186222498e-6,
)
_ERF_Q = (
    1.0,
    0.5020754306573821,
    0.11410882095174295,
    0.014969160585766136,
    0.0011625302454053804,
    3.809186458085178e-05,
)
_TANH_LIMIT = 9.0  # beyond, tanh is 1 in float32, or the number below it
_TANH_P = (
    0.9999999794767012,
    0.13381025025904128,
    0.0034955874025787846,
    2.060907097748795e-05,
    1.3354647141977755e-08,
)
_TANH_Q = (1.0, 0.4671434062378089, 0.025876979421217163, 0.00032856336566692285, 7.776552132767332e-07)

_SINH = (0.1666671633720398, 0.008330271579325199, 0.00020373260485939682)  # of x^3, x^5, x^7 for x up to 1

_EXP_HIGH, _EXP_LOW = 89.0, -87.33654  # beyond them 2^n is infinite, or zero
_ROUND = 12582912.0  # 1.5 * 2^23: a sum with it has no fraction left, and its last bits are the integer


def _clamp(x: Expr, low: float, high: float) -> Expr:
    """`x` within bounds; NaN stays NaN where the constant comes first (`keep_nan.py`), and x is written once."""
    return tirx.Min(f32(high), tirx.Max(f32(low), x))


def _exp(x: Expr) -> Expr:
    """2^n * e^r with n = round(x / ln 2): e^r doubled, times 2^(n - 1) in exponent bits, which reach 0 and infinity."""

    def split(c: Expr) -> Expr:
        return bind("z", c * f32(1 / math.log(2)) + f32(_ROUND), lambda z: reduced(c, z))

    def reduced(c: Expr, z: Expr) -> Expr:
        r = bind("n", z - f32(_ROUND), lambda n: c - n * f32(LN2_HIGH) - n * f32(LN2_LOW))
        doubled = bind("r", r, lambda r: polynomial([2 * k for k in _EXP], r))
        bits = tirx.shift_left(tirx.reinterpret("int32", z), tirx.const(23, "int32")) + tirx.const(126 << 23, "int32")
        return doubled * tirx.reinterpret("float32", bits)

    return bind("c", _clamp(x, _EXP_LOW, _EXP_HIGH), split)


def _odd_rational(limit: float, above: Sequence[float], below: Sequence[float]) -> Callable[[Expr], Expr]:
    """x * P(t) / Q(t) where t = x^2, at most limit^2, beyond which it is 1 and more; clamped to +-1, exactly."""

    def quotient(x: Expr) -> Expr:
        square = tirx.Min(f32(limit**2), x * x)
        return _clamp(bind("t", square, lambda t: x * polynomial(above, t) / polynomial(below, t)), -1.0, 1.0)

    return lambda x: bind("x", x, quotient)


def _hyperbolic(x: Expr) -> tuple[Expr, Expr]:
    """Half of e^|x| and of its inverse; the square of e^(|x|/2) is infinite where the half is, not before."""
    root = _exp(magnitude(x) * f32(0.5))
    return bind("root", root, lambda r: r * f32(0.5) * r), bind("root", root, lambda r: f32(0.5) / r / r)


def _sinh(x: Expr) -> Expr:
    def of(x: Expr) -> Expr:
        growing, falling = _hyperbolic(x)
        near = bind("t", x * x, lambda t: x + x * t * polynomial(_SINH, t))
        return tirx.Select(magnitude(x) < f32(1.0), near, with_sign(growing - falling, x))

    return bind("x", x, of)


def _cosh(x: Expr) -> Expr:
    return bind("x", x, lambda x: sum(_hyperbolic(x), start=f32(0.0)))


def _sigmoid(x: Expr) -> Expr:
    return f32(1.0) / (f32(1.0) + _exp(f32(0.0) - x))


_POWERS = (2.0, 3.0, 4.0)


def _log(x: Expr) -> Expr:
    """log(x); of a sum with 1, log1p: that is how TVM writes it, and softplus."""
    if isinstance(x, tirx.Add):
        for one, other in ((x.a, x.b), (x.b, x.a)):
            if getattr(one, "value", None) == 1.0:
                return log1p(other)
    return log(x)


_REWRITES: dict[str, Callable[..., Expr]] = {
    "tirx.exp": _exp,
    "tirx.erf": _odd_rational(_ERF_LIMIT, _ERF_P, _ERF_Q),
    "tirx.tanh": _odd_rational(_TANH_LIMIT, _TANH_P, _TANH_Q),
    "tirx.sigmoid": _sigmoid,
    "tirx.log": _log,
    "tirx.sin": sin,
    "tirx.cos": cos,
    "tirx.tan": tan,
    "tirx.asin": asin,
    "tirx.acos": acos,
    "tirx.atan": atan,
    "tirx.atan2": atan2,
    "tirx.sinh": _sinh,
    "tirx.cosh": _cosh,
}


def _holds_narrow_floats(func: tvm.tirx.PrimFunc) -> bool:
    found: list[str] = []

    def visit(value: Any) -> None:
        found.append(str(value.ty))

    tvm_ffi.structural_walk(func.body, ((TensorLoad, tirx.Cast), visit))
    return any(dtype.startswith(("bfloat16", "float8")) for dtype in found)


def _power(call: Any) -> Any:
    """x ** n with a constant n of 2, 3 or 4; others are left alone."""
    exponent = getattr(call.args[1], "value", None)
    if exponent not in _POWERS:
        return call
    return bind("x", call.args[0], lambda x: math.prod([x] * (int(exponent) - 1), start=x))


def _rewrite(call: Any) -> Any:
    name = getattr(call.op, "name", "")
    if str(call.ty) != "float32":
        return call
    if name == "tirx.pow":
        return _power(call)
    make = _REWRITES.get(name)
    return call if make is None else make(*call.args)


def _is_written_out(call: Any) -> bool:
    return getattr(call.op, "name", "") in _REWRITES and str(call.ty) == "float32"


def fast_math(func: tvm.tirx.PrimFunc) -> tvm.tirx.PrimFunc:
    """Return `func` with its float32 calls of exp, erf, tanh, sigmoid and powers written out as polynomials.

    A kernel that also holds bfloat16 or float8 values is returned as it is. TVM computes those through their bits, and
    in vectors the conversion of a value that a T.Let binds is wrong (exp of a bfloat16 operand came out infinite). So
    is one with more than two of them in each other under a condition, see `nested_calls.py`.
    """
    if _holds_narrow_floats(func):
        return func
    func = values_apart(func, _is_written_out)
    if are_deep(func, _is_written_out):
        return func
    return func.with_body(tvm_ffi.structural_map(func.body, (tvm.ir.Call, _rewrite)))


@tirx.transform.prim_func_pass(opt_level=0, name="tvmhet.FastMath")
class FastMath:
    """Apply `fast_math` to every PrimFunc of a module. Runs after scheduling; Relax functions are untouched."""

    def transform_function(self, func: PrimFunc, _mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> PrimFunc:
        return fast_math(func)
