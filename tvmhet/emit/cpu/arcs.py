"""Inverse sines, cosines and tangents of float32 as arithmetic, each on the part where its series is short.

    atan(x) = atan(|x|) with the sign of x,   atan(a) = pi/2 - atan(1/a) for a > 1
    asin(x) = asin(|x|) with the sign of x,   asin(a) = pi/2 - 2 * asin(sqrt((1 - a)/2)) for a > 1/2
    acos(x) = pi/2 - asin(x) for |x| <= 1/2,  acos(x) = 2 * asin(sqrt((1 - a)/2)), from pi for x < 0

Fitted as in `fast_math.py`: errors of 3e-7 of the value. Beyond +-1 asin and acos are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx

from tvmhet.emit.cpu.polynomials import Expr, bind, f32, i32, polynomial

_ATAN = (
    -0.33333152532577515,
    0.19993773102760315,
    -0.14211055636405945,
    0.10666004568338394,
    -0.07552214711904526,
    0.04321186617016792,
    -0.01636793091893196,
    0.0029206927865743637,
)  # of u^3, u^5, ... for u up to 1
_ASIN = (
    0.16666753590106964,
    0.07495252788066864,
    0.04547654837369919,
    0.024146631360054016,
    0.04222599044442177,
)  # of s^3, s^5, ... for s up to 1/2
_SIGN = -(1 << 31)


def atan(x: Expr) -> Expr:
    """Return atan(x)."""

    def of(x: Expr, a: Expr) -> Expr:
        is_far = a > f32(1.0)
        u = tirx.Select(is_far, f32(1.0) / a, a)
        return bind("y", _atan_up_to_one(u), lambda y: with_sign(tirx.Select(is_far, f32(math.pi / 2) - y, y), x))

    return bind("x", x, lambda x: bind("a", magnitude(x), lambda a: of(x, a)))


def atan2(y: Expr, x: Expr) -> Expr:
    """Return the angle of the point (x, y)."""

    def of(y: Expr, x: Expr, b: Expr, a: Expr) -> Expr:
        is_steep = b > a
        long, short = tirx.Select(is_steep, b, a), tirx.Select(is_steep, a, b)
        ratio = tirx.Select(a.equal(b), tirx.Select(a.equal(f32(0.0)), f32(0.0), f32(1.0)), short / long)
        is_back = tirx.reinterpret("int32", x) < i32(0)

        def turned(angle: Expr) -> Expr:
            half = tirx.Select(is_steep, f32(math.pi / 2) - angle, angle)
            return bind("half", half, lambda h: with_sign(tirx.Select(is_back, f32(math.pi) - h, h), y))

        is_number = tirx.all(a <= f32(math.inf), b <= f32(math.inf))
        return tirx.Select(is_number, bind("angle", _atan_up_to_one(ratio), turned), f32(math.nan))

    def named(y: Expr, x: Expr) -> Expr:
        return bind("b", magnitude(y), lambda b: bind("a", magnitude(x), lambda a: of(y, x, b, a)))

    return bind("y", y, lambda y: bind("x", x, lambda x: named(y, x)))


def asin(x: Expr) -> Expr:
    """Return asin(x)."""

    def of(x: Expr, a: Expr) -> Expr:
        return with_sign(_by_half(a, lambda s: f32(math.pi / 2) - s * f32(2.0), lambda s: s), x)

    return bind("x", x, lambda x: bind("a", magnitude(x), lambda a: of(x, a)))


def acos(x: Expr) -> Expr:
    """Return acos(x)."""

    def of(x: Expr, a: Expr) -> Expr:
        def far(s: Expr) -> Expr:
            return tirx.Select(x < f32(0.0), f32(math.pi) - s * f32(2.0), s * f32(2.0))

        return _by_half(a, far, lambda s: f32(math.pi / 2) - with_sign(s, x))

    return bind("x", x, lambda x: bind("a", magnitude(x), lambda a: of(x, a)))


def magnitude(x: Expr) -> Expr:
    """Return |x|."""
    return tirx.reinterpret("float32", tirx.bitwise_and(tirx.reinterpret("int32", x), i32(~_SIGN)))


def with_sign(value: Expr, x: Expr) -> Expr:
    """Return `value`, which is not negative, with the sign of `x`."""
    sign = tirx.bitwise_and(tirx.reinterpret("int32", x), i32(_SIGN))
    return tirx.reinterpret("float32", tirx.bitwise_or(tirx.reinterpret("int32", value), sign))


def _atan_up_to_one(u: Expr) -> Expr:
    return bind("u", u, lambda u: bind("t", u * u, lambda t: u + u * t * polynomial(_ATAN, t)))


def _by_half(a: Expr, far: Callable[[Expr], Expr], near: Callable[[Expr], Expr]) -> Expr:
    """`near` of asin(a) up to 1/2, `far` of asin(sqrt((1 - a)/2)) above."""
    is_far = a > f32(0.5)

    def of(t: Expr) -> Expr:
        s = tirx.Select(is_far, tirx.sqrt(t), a)
        arc = bind("s", s, lambda s: s + s * t * polynomial(_ASIN, t))
        return bind("arc", arc, lambda arc: tirx.Select(is_far, far(arc), near(arc)))

    return bind("t", tirx.Select(is_far, (f32(1.0) - a) * f32(0.5), a * a), of)
