"""The natural logarithm of float32, and that of 1 + x, as arithmetic.

    x = 2^e * m, m within sqrt(1/2) and sqrt(2), f = m - 1, s = f / (2 + f)
    log(x) = e * ln 2 + f - f^2/2 + s * (f^2/2 + R(s^2))            where log(m) = 2 * atanh(s)

R was fitted for the least relative error of log(m), as in `fast_math.py`: 8e-10 of it. Numbers below the smallest
normal one are scaled up first; 0 gives minus infinity, what is negative NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx

from tvmhet.emit.cpu.polynomials import LN2_HIGH, LN2_LOW, Expr, bind, f32, i32, polynomial

_R = (0.6666677594184875, 0.39977526664733887, 0.2987228035926819)  # of s^2, s^4, s^6
_ROOT_HALF_BITS = 0x3F3504F3
_SMALLEST, _LARGEST = 1.1754943508222875e-38, 3.4028234663852886e38  # normal and finite numbers
_SMALL = 0.29  # what is left of m is fitted for so much around 1
_SHIFT = 23  # of subnormal numbers, and the bits of a fraction


def log(x: Expr) -> Expr:
    """Return log(x)."""
    return bind("x", x, _of_any)


def log1p(x: Expr) -> Expr:
    """Return log(1 + x), which keeps the digits of a small x."""

    def of(x: Expr) -> Expr:
        is_small = tirx.all(x > f32(-_SMALL), x < f32(_SMALL))
        return tirx.Select(is_small, _near_one(x, lambda half, rest: x - (half - rest)), log(x + f32(1.0)))

    return bind("x", x, of)


def _of_any(x: Expr) -> Expr:
    is_small = x < f32(_SMALLEST)

    def of_normal(bits: Expr) -> Expr:
        exponent = tirx.shift_right(bits - i32(_ROOT_HALF_BITS), i32(_SHIFT))
        return bind("k", exponent, lambda k: parts(bits, k), "int32")

    def parts(bits: Expr, k: Expr) -> Expr:
        e = tirx.Cast("float32", k) - tirx.Select(is_small, f32(_SHIFT), f32(0.0))
        f = tirx.reinterpret("float32", bits - tirx.shift_left(k, i32(_SHIFT))) - f32(1.0)
        return bind("e", e, lambda e: bind("f", f, lambda f: _of_parts(e, f)))

    scaled = tirx.reinterpret("int32", tirx.Select(is_small, x * f32(1 << _SHIFT), x))
    value = tirx.Select(x <= f32(_LARGEST), bind("bits", scaled, of_normal, "int32"), x)
    otherwise = tirx.Select(x.equal(f32(0.0)), f32(-math.inf), f32(math.nan))
    return tirx.Select(x > f32(0.0), value, otherwise)


def _of_parts(e: Expr, f: Expr) -> Expr:
    """e * ln 2 + log(1 + f), small terms first."""

    def total(half: Expr, rest: Expr) -> Expr:
        return e * f32(LN2_HIGH) - ((half - (rest + e * f32(LN2_LOW))) - f)

    return _near_one(f, total)


def _near_one(f: Expr, total: Callable[[Expr, Expr], Expr]) -> Expr:
    """Return `total` of f^2/2 and of what is missing in f - f^2/2 as the log of 1 + f."""
    half = f * f * f32(0.5)

    def of(s: Expr) -> Expr:
        rest = bind("t", s * s, lambda t: t * polynomial(_R, t))
        return bind("half", half, lambda half: total(half, s * (half + rest)))

    return bind("s", f / (f32(2.0) + f), of)
