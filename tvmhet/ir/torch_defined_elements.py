"""Functions of single elements, written out in simpler ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten


def _fmax(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(b.isnan() | (a > b), a, b)


def _fmin(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(b.isnan() | (a < b), a, b)


def _hypot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of equal values, 0 and infinity among them, the ratio is 1."""
    big, small = torch.maximum(a.abs(), b.abs()), torch.minimum(a.abs(), b.abs())
    ratio = torch.where(small == big, torch.ones((), dtype=big.dtype), small / big)
    return big * (1 + ratio * ratio).sqrt()


def _heaviside(x: torch.Tensor, at_zero: torch.Tensor) -> torch.Tensor:
    return torch.where(x == 0, at_zero, (x > 0).to(x.dtype))


def _signbit(x: torch.Tensor) -> torch.Tensor:
    """Of -0 too, whose reciprocal is below 0."""
    return torch.where(x == 0, 1 / x < 0, x < 0)


def _logaddexp(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Equal infinities add to themselves."""
    high, low = torch.maximum(a, b), torch.minimum(a, b)
    gap = torch.where(high == low, torch.zeros((), dtype=high.dtype), low - high)
    return high + gap.exp().log1p()


def _logaddexp2(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _logaddexp(a * math.log(2), b * math.log(2)) / math.log(2)


def _integer_power(x: torch.Tensor, exponent: int) -> torch.Tensor:
    """Products of squares, for integers, of which TVM has no power."""
    if x.is_floating_point() or not isinstance(exponent, int) or exponent < 0:
        raise NotImplementedError("a power of integers that is no whole number")
    out = torch.ones_like(x)
    while exponent:
        out = out * x if exponent % 2 else out
        x, exponent = x * x, exponent // 2
    return out


def _fake_quantize(
    x: torch.Tensor, scale: Any, zero_point: Any, low: int, high: int
) -> tuple[torch.Tensor, torch.Tensor]:
    steps = (x * (1.0 / scale)).round() + zero_point
    return (steps.clamp(low, high) - zero_point) * scale, (steps >= low) & (steps <= high)


DEFINITIONS: dict[Any, Callable[..., Any]] = {
    _aten.fake_quantize_per_tensor_affine_cachemask.default: _fake_quantize,
    _aten.fmax.default: _fmax,
    _aten.fmin.default: _fmin,
    _aten.hypot.default: _hypot,
    _aten.heaviside.default: _heaviside,
    _aten.logaddexp.default: _logaddexp,
    torch.ops.prims.signbit.default: _signbit,
    torch.ops.prims.where.default: _aten.where.self,
    _aten.logaddexp2.default: _logaddexp2,
    _aten.pow.Tensor_Scalar: _integer_power,
    _aten._neg_view.default: lambda x: -x,
    _aten.exp2.default: lambda x: (x * math.log(2)).exp(),
    _aten.erfc.default: lambda x: 1 - x.erf(),
}
