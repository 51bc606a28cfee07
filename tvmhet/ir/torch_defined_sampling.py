"""Sampling an image at given places, and its gradients, written out for any number of dims.

place u of a sample along a dim, t = u - floor(u)         y = sum over corners c of  w[c] x[floor(u) + c]
w[c] = product over dims of (t where c is 1, else 1 - t), 0 outside the image

dx: each sample's gradient times w[c] is added at floor(u) + c
du: sum over corners and channels of  dy x[floor(u) + c] dw[c]/du,  times du/dgrid of the padding mode
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_aten = torch.ops.aten
_BILINEAR, _NEAREST, _CUBIC = 0, 1, 2
_ZEROS, _BORDER = 0, 1


@dataclass(frozen=True, slots=True)
class _Corner:
    """One of the elements that each sample reads: its place in the flattened image, its weights by dim, and whether it
    is in the image (1 or 0). All have the shape (batch, samples)."""

    offsets: tuple[int, ...]
    place: torch.Tensor
    weights: tuple[torch.Tensor, ...]
    inside: torch.Tensor

    def weight(self, but: int = -1) -> torch.Tensor:
        """The product of the weights, without that of the dim `but`."""
        kept = [w for d, w in enumerate(self.weights) if d != but]
        return math.prod(kept, start=self.inside)


def _places(
    grid: torch.Tensor, sizes: Sequence[int], padding_mode: int, align_corners: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """By dim: where the samples lie, in elements, and how far that moves with the grid. Shape (batch, samples)."""
    found = []
    for dim, size in enumerate(sizes):
        at = grid[..., len(sizes) - 1 - dim].flatten(1)  # the grid names the last dim first
        scale = (size - 1) / 2 if align_corners else size / 2
        at, slope = at * scale + (size - 1) / 2, torch.full_like(at, scale)
        if padding_mode != _ZEROS:
            if padding_mode != _BORDER:
                at, slope = _reflected(at, slope, size, align_corners)
            slope = torch.where((at > 0) & (at < size - 1), slope, torch.zeros_like(slope))
            at = at.clamp(0, size - 1)
        found.append((at, slope))
    return found


def _reflected(
    at: torch.Tensor, slope: torch.Tensor, size: int, align_corners: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fold the places at the first and the last element, or at the edges of the image."""
    low, span = (0.0, float(size - 1)) if align_corners else (-0.5, float(size))
    if span == 0:
        return torch.zeros_like(at), torch.zeros_like(slope)
    away = at - low
    folds = (away.abs() / span).floor()
    rest = away.abs() - folds * span
    is_odd = (folds - 2 * (folds / 2).floor()) > 0
    sign = torch.where(away < 0, -slope, slope)
    return torch.where(is_odd, span - rest, rest) + low, torch.where(is_odd, -sign, sign)


def _corners(places: Sequence[torch.Tensor], sizes: Sequence[int], mode: int) -> Iterator[_Corner]:
    steps = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
    nearest = mode == _NEAREST
    firsts = [at.round() if nearest else at.floor() for at in places]
    for offsets in itertools.product((0,) if nearest else (0, 1), repeat=len(sizes)):
        index, weights, inside = [], [], torch.ones_like(places[0], dtype=torch.bool)
        for at, first, offset, size in zip(places, firsts, offsets, sizes, strict=True):
            there = first + offset
            within = (there >= 0) & (there <= size - 1)
            inside = inside & within
            index.append(torch.where(within, there, torch.zeros_like(there)).to(torch.int64))  # NaN is not within
            part = at - first
            weights.append(torch.ones_like(at) if nearest else part if offset else 1 - part)
        place = sum(i * step for i, step in zip(index, steps, strict=True))
        assert isinstance(place, torch.Tensor)
        yield _Corner(offsets, place, tuple(weights), inside.to(places[0].dtype))


def _check(mode: int) -> None:
    if mode not in (_BILINEAR, _NEAREST):
        raise NotImplementedError("samples by cubic interpolation")


def _grid_sampler(
    x: torch.Tensor, grid: torch.Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> torch.Tensor:
    _check(interpolation_mode)
    sizes, flat = x.shape[2:], x.flatten(2)
    places = [at for at, _ in _places(grid, sizes, padding_mode, align_corners)]
    total: torch.Tensor | None = None
    for corner in _corners(places, sizes, interpolation_mode):
        part = _read(flat, corner) * corner.weight().unsqueeze(1)
        total = part if total is None else total + part
    assert total is not None
    return total.reshape(*x.shape[:2], *grid.shape[1:-1])


def _grid_sampler_2d(
    x: torch.Tensor, grid: torch.Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> torch.Tensor:
    """Cubic samples by torch's own definition; of the others it computes every weight once a channel."""
    if interpolation_mode == _CUBIC:
        from torch._decomp.decompositions import grid_sampler_2d

        found: torch.Tensor = grid_sampler_2d(x, grid, interpolation_mode, padding_mode, align_corners)
        return found
    return _grid_sampler(x, grid, interpolation_mode, padding_mode, align_corners)


def _read(flat: torch.Tensor, corner: _Corner) -> torch.Tensor:
    return flat.gather(2, corner.place.unsqueeze(1).expand(-1, flat.shape[1], -1))


def _grid_sampler_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    grid: torch.Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor]:
    _check(interpolation_mode)
    sizes, flat, dy = x.shape[2:], x.flatten(2), gradient.flatten(2)
    places = _places(grid, sizes, padding_mode, align_corners)
    dx = torch.zeros_like(flat)
    along = [torch.zeros_like(at) for at, _ in places]
    for corner in _corners([at for at, _ in places], sizes, interpolation_mode):
        if output_mask[0]:
            where = corner.place.unsqueeze(1).expand_as(dy)
            dx = dx.scatter_add(2, where, dy * corner.weight().unsqueeze(1))
        if output_mask[1] and interpolation_mode != _NEAREST:
            share = (dy * _read(flat, corner)).sum(1)
            for dim, offset in enumerate(corner.offsets):
                part = share * corner.weight(but=dim)
                along[dim] = along[dim] + part if offset else along[dim] - part
    moved = [a * slope for a, (_, slope) in zip(along, places, strict=True)]
    dgrid = torch.stack(moved[::-1], -1).reshape(grid.shape)
    return dx.reshape(x.shape) if output_mask[0] else None, dgrid


DEFINITIONS: dict[Any, Callable[..., Any]] = {
    _aten.grid_sampler_2d.default: _grid_sampler_2d,
    _aten.grid_sampler_3d.default: _grid_sampler,
    _aten.grid_sampler_2d_backward.default: _grid_sampler_backward,
    _aten.grid_sampler_3d_backward.default: _grid_sampler_backward,
}
