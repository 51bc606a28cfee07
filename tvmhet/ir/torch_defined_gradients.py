"""Backward operators that autograd's formulas leave whole, written out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

_aten = torch.ops.aten


def _replication_pad_backward(gradient: torch.Tensor, x: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    """What the border repeats adds up at the edge, dim by dim; where a padding cuts, there is no gradient."""
    for i in range(len(padding) // 2):
        dim, size = x.dim() - 1 - i, x.shape[x.dim() - 1 - i]
        before, after = padding[2 * i], padding[2 * i + 1]
        width = gradient.shape[dim]
        low, high = max(before, 0), width - max(after, 0)
        inner = gradient.narrow(dim, low, high - low)
        inner = torch.constant_pad_nd(inner, [*[0, 0] * (x.dim() - 1 - dim), max(-before, 0), max(-after, 0)])
        edges = torch.zeros_like(inner)
        at = torch.arange(size).reshape(-1, *[1] * (x.dim() - 1 - dim))
        if before > 0:
            edges = edges + torch.where(at == 0, gradient.narrow(dim, 0, before).sum(dim, keepdim=True), 0.0)
        if after > 0:
            edges = edges + torch.where(at == size - 1, gradient.narrow(dim, high, after).sum(dim, keepdim=True), 0.0)
        gradient = inner + edges
    return gradient


def _slope(difference: torch.Tensor, distance: torch.Tensor, p: float) -> torch.Tensor:
    """How the p-norm of a difference over the last dim moves with it; nowhere at 0, as torch has it."""
    apart = distance.unsqueeze(-1)
    if p == 0:
        return torch.zeros_like(difference)
    if p == 1:
        return difference.sign()
    if math.isinf(p):
        return torch.where(difference.abs() == apart, difference.sign(), 0.0)
    ratio = difference.abs() / torch.where(apart == 0, 1.0, apart)
    steep = ratio if p == 2 else ratio ** (p - 1)
    if p < 1:
        steep = torch.where(difference == 0, 0.0, steep)
    return torch.where(apart == 0, 0.0, difference.sign() * steep)


def _cdist_backward(
    gradient: torch.Tensor, a: torch.Tensor, b: torch.Tensor, p: float, distance: torch.Tensor
) -> torch.Tensor:
    difference = a.unsqueeze(-2) - b.unsqueeze(-3)
    return (gradient.unsqueeze(-1) * _slope(difference, distance, p)).sum(-2)


def _pdist_backward(gradient: torch.Tensor, x: torch.Tensor, p: float, distance: torch.Tensor) -> torch.Tensor:
    i, j = torch.triu_indices(len(x), len(x), 1)
    part = gradient.unsqueeze(-1) * _slope(x[i] - x[j], distance, p)
    return torch.zeros_like(x).index_add(0, i, part).index_add(0, j, -part)


def _weight_norm_backward(
    gradient: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of w = g v / |v|, norms over all dims but one."""
    norms = norms.reshape(g.shape).to(v.dtype)
    along = (gradient * v).sum([d for d in range(v.dim()) if d != dim], keepdim=True) / norms
    return g / norms * (gradient - v * along / norms), along


def _masked_scatter_backward(gradient: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The source's elements that were taken, in turn; those after the last have no gradient."""
    count = math.prod(sizes)
    mask = mask.expand(gradient.shape).flatten()
    turn = torch.where(mask, mask.to(torch.int64).cumsum(0) - 1, count)
    return gradient.new_zeros(count + 1).scatter_add(0, turn, gradient.flatten())[:count].reshape(sizes)


def _to_maxima(rank: int, gradient: torch.Tensor, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Each gradient goes to where its window's maximum is in the plane of the last `rank` dims."""
    flat = torch.zeros_like(x).flatten(-rank)
    return flat.scatter_add(-1, indices.flatten(-rank), gradient.flatten(-rank)).reshape(x.shape)


def _resize_backward(
    forward: Callable[..., torch.Tensor],
    gradient: torch.Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> torch.Tensor:
    """Each dim is resized by a linear map, which the operator shows on the identity; this is their transposes."""
    height, width = input_size[-2:]
    rows = torch.eye(height, dtype=gradient.dtype).reshape(1, height, height, 1).expand(-1, -1, -1, 2)
    columns = torch.eye(width, dtype=gradient.dtype).reshape(1, width, 1, width).expand(-1, -1, 2, -1)
    down = forward(rows.contiguous(), [output_size[0], 2], align_corners, scales_h, None)[0, :, :, 0]
    across = forward(columns.contiguous(), [2, output_size[1]], align_corners, None, scales_w)[0, :, 0, :]
    return down @ (gradient @ across.T)


def _diagonal_scatter(
    x: torch.Tensor, source: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    """A diagonal of two dims is replaced."""
    planes = x.movedim((dim1, dim2), (-2, -1))
    row, column = torch.arange(planes.shape[-2]).unsqueeze(1), torch.arange(planes.shape[-1])
    at = (row - max(-offset, 0)).clamp(0, source.shape[-1] - 1).expand(planes.shape)
    values = source.unsqueeze(-2).expand(*planes.shape[:-1], -1).gather(-1, at)
    return torch.where(column - row == offset, values, planes).movedim((-2, -1), (dim1, dim2))


def _put(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    flat, at = x.flatten(), index.flatten() % x.numel()
    put = flat.scatter_add if accumulate else flat.scatter
    return put(0, at, source.flatten()).reshape(x.shape)


def _index_reduce(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:
    along = index.reshape(-1, *[1] * (x.dim() - 1 - dim % x.dim())).expand(source.shape)
    return x.scatter_reduce(dim, along, source, reduce, include_self=include_self)


DEFINITIONS: dict[Any, Callable[..., Any]] = {
    _aten.replication_pad1d_backward.default: _replication_pad_backward,
    _aten.replication_pad2d_backward.default: _replication_pad_backward,
    _aten.replication_pad3d_backward.default: _replication_pad_backward,
    _aten._cdist_backward.default: _cdist_backward,
    _aten._pdist_backward.default: _pdist_backward,
    _aten._weight_norm_interface_backward.default: _weight_norm_backward,
    _aten.masked_scatter_backward.default: _masked_scatter_backward,
    _aten.adaptive_max_pool2d_backward.default: partial(_to_maxima, 2),
    _aten.adaptive_max_pool3d_backward.default: partial(_to_maxima, 3),
    _aten._upsample_bilinear2d_aa_backward.default: partial(_resize_backward, _aten._upsample_bilinear2d_aa),
    _aten._upsample_bicubic2d_aa_backward.default: partial(_resize_backward, _aten._upsample_bicubic2d_aa),
    _aten.diagonal_scatter.default: _diagonal_scatter,
    _aten.put.default: _put,
    _aten.index_reduce.default: _index_reduce,
}
