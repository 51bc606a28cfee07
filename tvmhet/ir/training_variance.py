"""Variances and deviations of a training step as the variance with its mean, which has a conversion.

    var(x)  ──►  var_mean(x)[0]        std(x)  ──►  sqrt(var_mean(x)[0])

Torch's own way of taking them apart ends in `prims.var`, which has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_aten = torch.ops.aten


def _var(x: torch.Tensor, dim: Sequence[int] | None = None, **how: Any) -> torch.Tensor:
    return torch.var_mean(x, dim, **how)[0]


def _std(x: torch.Tensor, dim: Sequence[int] | None = None, **how: Any) -> torch.Tensor:
    return torch.sqrt(_var(x, dim, **how))


def _std_mean(x: torch.Tensor, dim: Sequence[int] | None = None, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    variance, mean = torch.var_mean(x, dim, **how)
    return torch.sqrt(variance), mean


VARIANCES: dict[Any, Callable[..., Any]] = {
    _aten.var.correction: _var,
    _aten.std.correction: _std,
    _aten.std_mean.correction: _std_mean,
}
