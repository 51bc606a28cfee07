"""What functions that are written out in arithmetic are made of: constants, values with a name, polynomials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

Expr = Any  # tirx expressions have no common typed base

#: ln 2 in two parts: the first has 10 bits, so that its product with any exponent is exact.
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4


def f32(value: float) -> Expr:
    """Return a float32 constant."""
    return tirx.const(value, "float32")


def i32(value: int) -> Expr:
    """Return an int32 constant."""
    return tirx.const(value, "int32")


def bind(name: str, value: Expr, body: Callable[[Expr], Expr], dtype: str = "float32") -> Expr:
    """Return `body` of `value`, which is computed once."""
    var = tirx.Var(name, dtype)
    return tirx.Let(var, value, body(var))


def polynomial(coefficients: Sequence[float], x: Expr) -> Expr:
    """Horner's form, lowest coefficient first."""
    result = f32(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result = result * x + f32(c)
    return result
