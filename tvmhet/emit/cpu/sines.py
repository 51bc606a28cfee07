"""Sine, cosine and tangent of float32 as arithmetic.

    n = round(x * 2/pi), r = x - n * pi/2 within +-pi/4, in float64 with pi/2 in three parts
    sin(x) = +-sin(r) where n is even, +-cos(r) where it is odd             cos(x) = sin of a quarter turn further

Errors over |x| < 3e9, fitted as in `fast_math.py`: 2e-7 of the value, near zeros too. Beyond, where the numbers of
float32 are 256 and more apart, the result is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx

from tvmhet.emit.cpu.polynomials import Expr, bind, f32, i32, polynomial

_SIN = (-0.16666655242443085, 0.008332159370183945, -0.00019515152962412685)  # of r^3, r^5, r^7
_COS = (0.04166664555668831, -0.0013887315290048718, 2.443300763843581e-05)  # of r^4, r^6, r^8
_TWO_OVER_PI = 0.6366197723675814
_HALF_PI = (1.570796012878418, 3.139164164167596e-07, 6.223372171896613e-14)  # the first two have 22 bits
_LIMIT = 3e9  # where n still fits into 31 bits


def sin(x: Expr) -> Expr:
    """Return sin(x)."""
    return _reduced(x, lambda r, n: _turned(r, n))


def cos(x: Expr) -> Expr:
    """Return cos(x)."""
    return _reduced(x, lambda r, n: _turned(r, n + i32(1)))


def tan(x: Expr) -> Expr:
    """Return tan(x)."""

    def quotient(r: Expr, n: Expr) -> Expr:
        def of(sine: Expr, cosine: Expr) -> Expr:
            return tirx.Select(_is_even(n), sine / cosine, f32(0.0) - cosine / sine)

        return bind("sine", _sine(r), lambda s: bind("cosine", _cosine(r), lambda c: of(s, c)))

    return _reduced(x, quotient)


def _reduced(x: Expr, body: Callable[[Expr, Expr], Expr]) -> Expr:
    """Return `body` of what is left of x, and of the number of quarter turns."""

    def f64(value: float) -> Expr:
        return tirx.const(value, "float64")

    def rest(wide: Expr, n: Expr) -> Expr:
        r = wide
        for part in _HALF_PI:
            r = r - n * f64(part)
        turns = tirx.Cast("int32", n)
        return bind("r", tirx.Cast("float32", r), lambda r: bind("turns", turns, lambda k: body(r, k), "int32"))

    def rounded(wide: Expr) -> Expr:
        n = tirx.floor(wide * f64(_TWO_OVER_PI) + f64(0.5))
        return bind("n", n, lambda n: rest(wide, n), "float64")

    def known(x: Expr) -> Expr:
        value = bind("wide", tirx.Cast("float64", x), rounded, "float64")
        is_near = tirx.all(x <= f32(_LIMIT), x >= f32(-_LIMIT))
        return tirx.Select(is_near, value, f32(math.nan))

    return bind("x", x, known)


def _is_even(n: Expr) -> Expr:
    return tirx.bitwise_and(n, i32(1)).equal(i32(0))


def _turned(r: Expr, n: Expr) -> Expr:
    """The sine of r and n quarter turns: its sign is the second bit of n."""
    value = tirx.Select(_is_even(n), _sine(r), _cosine(r))
    sign = tirx.shift_left(tirx.bitwise_and(n, i32(2)), i32(30))
    return tirx.reinterpret("float32", tirx.bitwise_xor(tirx.reinterpret("int32", value), sign))


def _sine(r: Expr) -> Expr:
    return bind("t", r * r, lambda t: r + r * t * polynomial(_SIN, t))


def _cosine(r: Expr) -> Expr:
    return bind("t", r * r, lambda t: (t * t * polynomial(_COS, t) - t * f32(0.5)) + f32(1.0))
