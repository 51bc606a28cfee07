"""Norms, distances and products written out: what comes down to sums along dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

_aten = torch.ops.aten
_TIMES_READ = 3  # how often a weight that is gathered crosses memory: read, written and read again


def _layer_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    del cudnn_enable
    y = _standardised(x, list(range(-len(normalized_shape), 0)), eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    del cudnn_enabled
    y = _standardised(x.reshape(x.shape[0], num_groups, -1), [-1], eps).reshape(x.shape)
    along = [-1] + [1] * (x.dim() - 2)
    y = y if weight is None else y * weight.reshape(along)
    return y if bias is None else y + bias.reshape(along)


def _standardised(x: torch.Tensor, dims: list[int], eps: float) -> torch.Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


def _trilinear(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> torch.Tensor:
    del unroll_dim
    for d in expand1:
        a = a.unsqueeze(d)
    for d in expand2:
        b = b.unsqueeze(d)
    for d in expand3:
        c = c.unsqueeze(d)
    return (a * b * c).sum(list(sumdim))


def _distance(difference: torch.Tensor, p: float) -> torch.Tensor:
    """The p-norm over the last dim."""
    if p == 2:
        return difference.square().sum(-1).sqrt()
    return torch.linalg.vector_norm(difference, p, dim=-1)


def _cdist(a: torch.Tensor, b: torch.Tensor, p: float, compute_mode: int | None) -> torch.Tensor:
    del compute_mode  # by products or not: the same distances
    return _distance(a.unsqueeze(-2) - b.unsqueeze(-3), p)


def _pdist(x: torch.Tensor, p: float = 2) -> torch.Tensor:
    i, j = torch.triu_indices(len(x), len(x), 1)
    return _distance(x[i] - x[j], p)


def _embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bags that begin at offsets: which rows are in which bag is a matrix of 0 and 1."""
    del scale_grad_by_freq, sparse
    rows = weight[indices]
    first = offsets[:-1] if include_last_offset else offsets
    end = torch.cat([first[1:], first.new_full((1,), len(indices))])
    place = torch.arange(len(indices), dtype=offsets.dtype)
    inside = (place >= first.unsqueeze(1)) & (place < end.unsqueeze(1))
    if padding_idx is not None:
        inside = inside & (indices != padding_idx % weight.shape[0])
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    counts = inside.to(weight.dtype).sum(1, keepdim=True)
    if mode == 2:
        best = torch.where(inside.unsqueeze(2), rows, torch.full((), -math.inf, dtype=rows.dtype)).amax(1)
        out = torch.where(counts > 0, best, torch.zeros((), dtype=rows.dtype))
    else:
        out = inside.to(weight.dtype) @ rows
        out = out / counts.clamp(min=1) if mode == 1 else out
    unread = torch.zeros(len(first), dtype=torch.int64)
    return out, torch.zeros(len(indices), dtype=torch.int64), unread, unread


def _grouped_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, *_: Any) -> torch.Tensor:
    """Rows sorted by expert, times each expert's weight (experts, in, out): every product, and a choice of one a row.

    A mixture of experts so costs what all its experts cost; which rows an expert has is not known before. Of few rows,
    as when a text is continued, each reads its expert's weight instead. Of a `weight` (rows, out) and x (in, rows), the
    products of each expert's own: the gradient of the experts' weights.
    """
    if weight.dim() == 2:
        mine = _rows_of_experts(ends, x.shape[1]).unsqueeze(1)
        return torch.matmul(torch.where(mine, x.unsqueeze(0), torch.zeros((), dtype=x.dtype)), weight.unsqueeze(0))
    mine = _rows_of_experts(ends, x.shape[0])
    if len(x) * _TIMES_READ <= len(weight):
        own = torch.bmm(x.unsqueeze(1), weight[mine.to(torch.int64).argmax(0)]).squeeze(1)
        return torch.where(mine.any(0).unsqueeze(1), own, torch.zeros((), dtype=own.dtype))
    products = torch.matmul(x.unsqueeze(0), weight)
    mine = mine.unsqueeze(2)
    return torch.where(mine, products, torch.zeros((), dtype=products.dtype)).sum(0)


def _grouped_product_backward(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _grouped_product(gradient, weight.transpose(1, 2), ends), _grouped_product(x.t(), gradient, ends)


def _rows_of_experts(ends: torch.Tensor, count: int) -> torch.Tensor:
    """Which of `count` rows are each expert's: (experts, count) of bool."""
    rows = torch.arange(count, dtype=ends.dtype)
    first = torch.cat([ends.new_zeros(1), ends[:-1]])
    return (rows >= first.unsqueeze(1)) & (rows < ends.unsqueeze(1))


DEFINITIONS: dict[Any, Callable[..., Any]] = {
    _aten.layer_norm.default: _layer_norm,
    _aten.group_norm.default: _group_norm,
    _aten._trilinear.default: _trilinear,
    _aten._cdist_forward.default: _cdist,
    _aten._pdist_forward.default: _pdist,
    _aten.embedding_bag.padding_idx: _embedding_bag,
    _aten.addbmm.default: lambda c, a, b, beta=1, alpha=1: c * beta + torch.bmm(a, b).sum(0) * alpha,
    _aten.addmv.default: lambda c, a, b, beta=1, alpha=1: c * beta + (a @ b) * alpha,
    _aten.dist.default: lambda a, b, p=2: _distance((a - b).flatten(), p),
}

#: Operators of other packages, which may not be there.
BY_NAME: dict[str, Callable[..., Any]] = {
    "transformers.grouped_mm_fallback.default": _grouped_product,
    "transformers.grouped_mm_fallback_backward.default": _grouped_product_backward,
    "aten._grouped_mm.default": _grouped_product,
}
