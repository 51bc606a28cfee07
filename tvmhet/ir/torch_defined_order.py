"""Running extremes, medians and counts written out: what depends on the order of values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten


def _running(x: torch.Tensor, dim: int, *, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The extreme of each prefix and where it stands: the last of equals, or of those that are NaN, as torch's."""
    n = x.shape[dim]
    wide = x.movedim(dim, -1).unsqueeze(-2)
    reached = torch.ones(n, n, dtype=torch.bool).tril()
    far = -math.inf if largest else math.inf
    if not x.is_floating_point():
        far = torch.iinfo(x.dtype).min if largest else torch.iinfo(x.dtype).max
    wide = torch.where(reached, wide, torch.full((), far, dtype=x.dtype))
    best = wide.amax(-1) if largest else wide.amin(-1)
    equal = wide == best.unsqueeze(-1)
    if x.is_floating_point():
        equal = equal | wide.isnan()
    places = torch.where(equal & reached, torch.arange(n), -1).amax(-1)
    return best.movedim(-1, dim), places.movedim(-1, dim)


def _cummax(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _running(x, dim, largest=True)


def _cummin(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _running(x, dim, largest=False)


def _logcumsumexp(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Every prefix has its own maximum, so that none overflows or vanishes."""
    n = x.shape[dim]
    wide = x.movedim(dim, -1).unsqueeze(-2)
    reached = torch.ones(n, n, dtype=torch.bool).tril()
    wide = torch.where(reached, wide, torch.full((), -math.inf, dtype=x.dtype))
    best = wide.amax(-1, keepdim=True)
    best = torch.where(best.isinf(), 0.0, best)
    return ((wide - best).exp().sum(-1).log() + best.squeeze(-1)).movedim(-1, dim)


def _kthvalue(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    values, places = x.sort(dim)
    index = (k - 1) % x.shape[dim]
    found = values.select(dim, index), places.select(dim, index)
    return (found[0].unsqueeze(dim), found[1].unsqueeze(dim)) if keepdim else found


def _median_dim(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return _kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)


def _median(x: torch.Tensor) -> torch.Tensor:
    return _median_dim(x.flatten(), 0)[0]


def _searchsorted(
    edges: torch.Tensor,
    x: torch.Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> torch.Tensor:
    """How many edges come before each value."""
    edges = edges if sorter is None else edges.gather(-1, sorter)
    edges = edges.unsqueeze(-2) if edges.dim() > 1 else edges
    before = edges <= x.unsqueeze(-1) if right or side == "right" else edges < x.unsqueeze(-1)
    return before.sum(-1).to(torch.int32 if out_int32 else torch.int64)


def _bucketize(x: torch.Tensor, edges: torch.Tensor, *, out_int32: bool = False, right: bool = False) -> torch.Tensor:
    return _searchsorted(edges, x, out_int32=out_int32, right=right)


def _histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """How many values lie in each of equal bins between two numbers; the last bin has its upper edge."""
    if min == max:
        raise NotImplementedError("bins between the least and the largest value")
    x = x.flatten()
    bin_of = ((x - min) * (bins / (max - min))).floor().clamp(max=bins - 1)
    hits = (bin_of.unsqueeze(1) == torch.arange(bins, dtype=x.dtype)) & ((x >= min) & (x <= max)).unsqueeze(1)
    return hits.to(x.dtype).sum(0)


DEFINITIONS: dict[Any, Callable[..., Any]] = {
    _aten.cummax.default: _cummax,
    _aten.cummin.default: _cummin,
    _aten.logcumsumexp.default: _logcumsumexp,
    _aten.kthvalue.default: _kthvalue,
    _aten.median.dim: _median_dim,
    _aten.median.default: _median,
    _aten.searchsorted.Tensor: _searchsorted,
    _aten.bucketize.Tensor: _bucketize,
    _aten.histc.default: _histc,
}
