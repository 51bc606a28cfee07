"""Operators that TVM lacks, written out in operators that it has: torch's own definitions, and ours where it has none.

    aten.logcumsumexp(x, d)   ──►   m = cummax(x, d);  log(cumsum(exp(x - m), d)) + m

`definition_of` is what an import asks for an operator without a conversion, or whose conversion failed. Ours are plain
torch, so that tests compare them with the operators they stand for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

Definition = Callable[..., Any]
_aten = torch.ops.aten


def definition_of(operator: Any) -> Definition | None:
    """Return a function of the operator's arguments that computes it from simpler operators, or None."""
    if str(operator) in _BY_NAME:
        return _BY_NAME[str(operator)]
    if operator in _OWN:
        return _OWN[operator]
    composite = torch.export.default_decompositions()
    found: Definition | None = composite[operator] if operator in composite else _torch_definitions().get(operator)
    return found


@cache
def _torch_definitions() -> Any:
    from torch._decomp import decomposition_table

    return decomposition_table


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


def _running(x: torch.Tensor, dim: int, *, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The extreme of each prefix and where it stands: the last of equals, as torch's."""
    n = x.shape[dim]
    wide = x.movedim(dim, -1).unsqueeze(-2)
    reached = torch.ones(n, n, dtype=torch.bool).tril()
    far = -math.inf if largest else math.inf
    if not x.is_floating_point():
        far = torch.iinfo(x.dtype).min if largest else torch.iinfo(x.dtype).max
    wide = torch.where(reached, wide, torch.full((), far, dtype=x.dtype))
    best = wide.amax(-1) if largest else wide.amin(-1)
    places = torch.where((wide == best.unsqueeze(-1)) & reached, torch.arange(n), -1).amax(-1)
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


def _masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The masked elements take those of the source in turn."""
    mask = mask.expand(x.shape)
    turn = (mask.flatten().to(torch.int64).cumsum(0) - 1).clamp(0, source.numel() - 1)
    return torch.where(mask, source.flatten()[turn].reshape(x.shape), x)


def _index_put(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """x[mask] = v: one mask over the first dims, and values alike for all that it picks."""
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
    if not x.is_contiguous():
        raise NotImplementedError("strides of a tensor that is not contiguous")
    places = torch.zeros((), dtype=torch.int64)
    for n, s in zip(size, stride, strict=True):
        places = places.unsqueeze(-1) + torch.arange(n) * s
    return x.flatten()[places + (storage_offset or 0)]


def _scatter_reduce(
    x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:
    """Means by sums and counts; where the element itself does not count, it is first replaced by the neutral one."""
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
        if include_self:
            raise NotImplementedError(reduce)
        return x.scatter_reduce(dim, index, src, reduce)
    counts = torch.ones_like(x) if include_self else torch.ones_like(x).scatter(dim, index, 0)
    counts = counts.scatter_add(dim, index, torch.ones_like(src))
    total = x.scatter_add(dim, index, src)
    return total / counts if x.is_floating_point() else torch.div(total, counts, rounding_mode="floor")


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


def _max_pool2d_with_indices(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(maxima, their positions in the plane): each position of the window is a strided slice of the padded input."""
    size = _pair(kernel_size)
    steps, pads, gaps = _pair(stride or size), _pair(padding), _pair(dilation)
    height, width = x.shape[-2:]
    made = _aten.max_pool2d(x, size, steps, pads, gaps, ceil_mode).shape[-2:]
    spans = [(m - 1) * s + g * (k - 1) + 1 for m, s, g, k in zip(made, steps, gaps, size, strict=True)]
    after = [max(0, span - n - p) for span, n, p in zip(spans, (height, width), pads, strict=True)]
    lowest = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    wide = F.pad(x, (pads[1], after[1], pads[0], after[0]), value=lowest)
    places = (torch.arange(height).unsqueeze(1) * width + torch.arange(width)).to(torch.int64)
    places = F.pad(places, (pads[1], after[1], pads[0], after[0]))
    best: torch.Tensor | None = None
    at = x.new_zeros((), dtype=torch.int64)
    for i in range(size[0]):
        for j in range(size[1]):
            rows = slice(i * gaps[0], i * gaps[0] + (made[0] - 1) * steps[0] + 1, steps[0])
            columns = slice(j * gaps[1], j * gaps[1] + (made[1] - 1) * steps[1] + 1, steps[1])
            part, where = wide[..., rows, columns], places[rows, columns]
            if best is None:
                best, at = part, where.expand(part.shape)
                continue
            better = part > best
            best, at = torch.where(better, part, best), torch.where(better, where, at)
    assert best is not None
    return best, at


def _pair(values: int | Sequence[int]) -> list[int]:
    given = [values] if isinstance(values, int) else list(values)
    return given * 2 if len(given) == 1 else given


def _adaptive_windows(x: torch.Tensor, made: Sequence[int], dim: int) -> torch.Tensor:
    """Positions of each window along one dim, shape (made, longest); short ones repeat their last."""
    n, m = x.shape[dim], made[dim]
    longest = max(-(-(i + 1) * n // m) - i * n // m for i in range(m))
    i = torch.arange(m)
    first, last = i * n // m, ((i + 1) * n + m - 1) // m - 1
    return torch.minimum(first.unsqueeze(1) + torch.arange(longest), last.unsqueeze(1))


def _adaptive_max_pool(x: torch.Tensor, output_size: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(maxima, their positions) of windows that differ in size, dim by dim from the last."""
    rank = len(output_size)
    best, at = x, torch.arange(math.prod(x.shape[-rank:])).reshape(x.shape[-rank:]).expand(x.shape)
    for dim in range(-1, -rank - 1, -1):
        windows = _adaptive_windows(x, output_size, dim)
        parts = best.movedim(dim, -1)[..., windows]
        where = at.movedim(dim, -1)[..., windows]
        top = parts.amax(-1)
        first = torch.where(parts == top.unsqueeze(-1), where, math.prod(x.shape[-rank:])).amin(-1)
        best, at = top.movedim(-1, dim), first.movedim(-1, dim)
    return best, at


def _grouped_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, *_: Any) -> torch.Tensor:
    """Rows sorted by expert, times each expert's weight (experts, in, out): every product, and a choice of one a row.

    A mixture of experts so costs what all its experts cost; which rows an expert has is not known before.
    """
    rows = torch.arange(x.shape[0], dtype=ends.dtype)
    first = torch.cat([ends.new_zeros(1), ends[:-1]])
    mine = (rows >= first.unsqueeze(1)) & (rows < ends.unsqueeze(1))
    products = torch.matmul(x.unsqueeze(0), weight)
    return torch.where(mine.unsqueeze(2), products, torch.zeros((), dtype=products.dtype)).sum(0)


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


def _fmax(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(b.isnan() | (a > b), a, b)


def _fmin(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(b.isnan() | (a < b), a, b)


def _hypot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    big, small = torch.maximum(a.abs(), b.abs()), torch.minimum(a.abs(), b.abs())
    ratio = small / torch.where(big > 0, big, torch.ones((), dtype=big.dtype))
    return big * (1 + ratio * ratio).sqrt()


def _heaviside(x: torch.Tensor, at_zero: torch.Tensor) -> torch.Tensor:
    return torch.where(x == 0, at_zero, (x > 0).to(x.dtype))


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


_OWN: dict[Any, Definition] = {
    _aten.layer_norm.default: _layer_norm,
    _aten.group_norm.default: _group_norm,
    _aten._trilinear.default: _trilinear,
    _aten._cdist_forward.default: _cdist,
    _aten._pdist_forward.default: _pdist,
    _aten.cummax.default: _cummax,
    _aten.cummin.default: _cummin,
    _aten.logcumsumexp.default: _logcumsumexp,
    _aten.kthvalue.default: _kthvalue,
    _aten.median.dim: _median_dim,
    _aten.median.default: _median,
    _aten.masked_scatter.default: _masked_scatter,
    _aten.index_put.default: _index_put,
    _aten.unfold.default: _unfold,
    _aten.as_strided.default: _as_strided,
    _aten.scatter_reduce.two: _scatter_reduce,
    _aten.embedding_bag.padding_idx: _embedding_bag,
    _aten.max_pool2d_with_indices.default: _max_pool2d_with_indices,
    _aten.adaptive_max_pool2d.default: _adaptive_max_pool,
    _aten.adaptive_max_pool3d.default: _adaptive_max_pool,
    _aten.searchsorted.Tensor: _searchsorted,
    _aten.bucketize.Tensor: _bucketize,
    _aten.histc.default: _histc,
    _aten.fake_quantize_per_tensor_affine_cachemask.default: _fake_quantize,
    _aten.fmax.default: _fmax,
    _aten.fmin.default: _fmin,
    _aten.hypot.default: _hypot,
    _aten.heaviside.default: _heaviside,
    _aten.logaddexp.default: _logaddexp,
    _aten.logaddexp2.default: _logaddexp2,
    _aten.pow.Tensor_Scalar: _integer_power,
    _aten.exp2.default: lambda x: (x * math.log(2)).exp(),
    _aten.erfc.default: lambda x: 1 - x.erf(),
    _aten.addbmm.default: lambda c, a, b, beta=1, alpha=1: c * beta + torch.bmm(a, b).sum(0) * alpha,
    _aten.addmv.default: lambda c, a, b, beta=1, alpha=1: c * beta + (a @ b) * alpha,
    _aten.dist.default: lambda a, b, p=2: _distance((a - b).flatten(), p),
}

#: Operators of other packages, which may not be there.
_BY_NAME: dict[str, Definition] = {
    "transformers.grouped_mm_fallback.default": _grouped_product,
    "aten._grouped_mm.default": _grouped_product,
}
