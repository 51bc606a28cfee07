"""The logarithm of the gamma function and its slope, written out: what likelihoods of counts and of Student's t need.

Both are computed in float64, as near 1 and 2, where the logarithm is 0, float32 would leave few digits. Stirling's
series, after the argument has been moved to 8 or more by the recurrences (Abramowitz and Stegun, 1964, 6.1.41, 6.3.18).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

_LEAST = 8  # of the argument of the series
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730)  # B2, B4, ...


def _moved(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of x above 0: x + 8, the logarithm of x (x + 1) ... (x + 7), and the sum of their reciprocals."""
    product, reciprocals = torch.ones_like(x), torch.zeros_like(x)
    for k in range(_LEAST):
        product, reciprocals = product * (x + k), reciprocals + 1 / (x + k)
    small = x < _LEAST
    nothing = torch.zeros_like(x)
    moved = torch.where(small, x + _LEAST, x)
    return moved, torch.where(small, product.log(), nothing), torch.where(small, reciprocals, nothing)


def _log_gamma_above_0(x: torch.Tensor) -> torch.Tensor:
    z, logarithm, _ = _moved(x)
    series = (z - 0.5) * z.log() - z + 0.5 * math.log(2 * math.pi)
    for k, b in enumerate(_BERNOULLI, 1):
        series = series + b / (2 * k * (2 * k - 1)) * z ** (1 - 2 * k)
    return series - logarithm


def _digamma_above_0(x: torch.Tensor) -> torch.Tensor:
    z, _, reciprocals = _moved(x)
    series = z.log() - 0.5 / z
    for k, b in enumerate(_BERNOULLI, 1):
        series = series - b / (2 * k) * z ** (-2 * k)
    return series - reciprocals


def _lgamma(x: torch.Tensor) -> torch.Tensor:
    """Below 1/2 by reflection: gamma(x) gamma(1 - x) = pi / sin(pi x)."""
    z = x.to(torch.float64)
    is_low = z < 0.5
    above = _log_gamma_above_0(torch.where(is_low, 1 - z, z))
    turn = (math.pi * (z - z.floor())).sin().abs()
    found = torch.where(is_low, math.log(math.pi) - turn.log() - above, above)
    return torch.where(z.isinf(), torch.full_like(z, math.inf), found).to(x.dtype)


def _digamma(x: torch.Tensor) -> torch.Tensor:
    z = x.to(torch.float64)
    is_low = z < 0.5
    above = _digamma_above_0(torch.where(is_low, 1 - z, z))
    angle = math.pi * (z - z.floor())
    reflected = above - math.pi * angle.cos() / angle.sin()
    at_pole = (z <= 0) & (z == z.floor())
    poles = torch.where(z == 0, -1 / z, torch.full_like(z, math.nan))
    return torch.where(at_pole, poles, torch.where(is_low, reflected, above)).to(x.dtype)


DEFINITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.prims.lgamma.default: _lgamma,
    torch.ops.prims.digamma.default: _digamma,
    torch.ops.aten.lgamma.default: _lgamma,
    torch.ops.aten.digamma.default: _digamma,
}
