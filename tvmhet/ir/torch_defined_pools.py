"""Pools that say where their maxima stand, written out: windows as slices of the padded input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

_aten = torch.ops.aten


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
    made = [
        _num_windows(n, k, s, p, g, ceil_mode)
        for n, k, s, p, g in zip((height, width), size, steps, pads, gaps, strict=True)
    ]
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


def _num_windows(size: int, window: int, step: int, padding: int, gap: int, ceil_mode: bool) -> int:
    """How many windows lie along a dim; with `ceil_mode` a last one that is cut, if it begins before the end."""
    room = size + 2 * padding - gap * (window - 1) - 1
    made = (-(-room // step) if ceil_mode else room // step) + 1
    return made - 1 if ceil_mode and (made - 1) * step >= size + padding else made


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


DEFINITIONS: dict[Any, Callable[..., Any]] = {
    _aten.max_pool2d_with_indices.default: _max_pool2d_with_indices,
    _aten.adaptive_max_pool2d.default: _adaptive_max_pool,
    _aten.adaptive_max_pool3d.default: _adaptive_max_pool,
}
