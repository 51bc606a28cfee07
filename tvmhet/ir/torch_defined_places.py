"""Masks, windows and strides written out: what moves elements from place to place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

_aten = torch.ops.aten


def _masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The masked elements take those of the source in turn."""
    mask = mask.expand(x.shape)
    turn = (mask.flatten().to(torch.int64).cumsum(0) - 1).clamp(0, source.numel() - 1)
    return torch.where(mask, source.flatten()[turn].reshape(x.shape), x)


def _index_put(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """x[mask] = v: one mask over the first dims, and values alike for all that it picks.

    With places for indices it stays the operator that it is, which is converted (torch_indexing).
    """
    if all(index is None or index.dtype is not torch.bool for index in indices):
        return NotImplemented
    (mask,) = indices if len(indices) == 1 else (None,)
    if mask is None or mask.dtype is not torch.bool or (values.dim() > x.dim() - mask.dim()):
        raise NotImplementedError("several masks, or one value for each element that a mask picks")
    mask = mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))
    return torch.where(mask, x + values if accumulate else values, x)


def _unfold(x: torch.Tensor, dimension: int, size: int, step: int) -> torch.Tensor:
    """Windows along one dim; what is within a window comes last."""
    dimension %= x.dim()
    num_windows = (x.shape[dimension] - size) // step + 1
    places = torch.arange(num_windows).unsqueeze(1) * step + torch.arange(size)
    return x.movedim(dimension, -1)[..., places].movedim(-2, dimension)


def _as_strided(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """Places in memory; of a tensor whose dims were permuted these are those of the dims in their old order."""
    stored = x.permute(sorted(range(x.dim()), key=lambda d: -x.stride(d)))
    if not stored.is_contiguous():
        raise NotImplementedError("strides of a tensor with gaps in its memory")
    begin = 0 if storage_offset is None else storage_offset - x.storage_offset()
    reach = begin + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if begin < 0 or reach >= x.numel():
        raise NotImplementedError("strides that leave the tensor for what it is a part of")
    places = torch.zeros((), dtype=torch.int64)
    for n, s in zip(size, stride, strict=True):
        places = places.unsqueeze(-1) + torch.arange(n) * s
    return stored.flatten()[places + begin]


def _scatter_reduce(
    x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:
    """Means by sums and counts; where the element itself does not count, it is first replaced by the neutral one.

    What is left, a reduction with the element itself over all of the source, stays the operator that it is.
    """
    if include_self and reduce not in ("sum", "mean") and src.shape == index.shape:
        return NotImplemented  # torch then keeps the operator, which is converted (torch_indexing)
    src = src[tuple(slice(n) for n in index.shape)]
    if not include_self:
        lowest, highest = -math.inf, math.inf
        if not x.is_floating_point():
            lowest, highest = torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max
        neutral = {"amax": lowest, "amin": highest, "prod": 1}.get(reduce, 0)
        x = x.scatter(dim, index, neutral)
    if reduce == "sum":
        return x.scatter_add(dim, index, src)
    if reduce != "mean":
        return x.scatter_reduce(dim, index, src, reduce)
    counts = torch.ones_like(x) if include_self else torch.ones_like(x).scatter(dim, index, 0)
    counts = counts.scatter_add(dim, index, torch.ones_like(src))
    total = x.scatter_add(dim, index, src)
    return total / counts if x.is_floating_point() else torch.div(total, counts, rounding_mode="floor")


DEFINITIONS: dict[Any, Callable[..., Any]] = {
    _aten.masked_scatter.default: _masked_scatter,
    _aten.index_put.default: _index_put,
    _aten.unfold.default: _unfold,
    _aten.as_strided.default: _as_strided,
    _aten.scatter_reduce.two: _scatter_reduce,
}
