"""Fourier transforms as products with the matrix of their waves, on the real pairs of `torch_complex.py`.

    _fft_r2c(x, n to m)   ──►   x @ W,  W (n, 2 m): cos and -sin of 2 pi j k / n, side by side
    _fft_c2c(z)           ──►   pair(z) @ W,  W (2 n, 2 n): each wave a rotation of real and imaginary part
    _fft_c2r(z, m to n)   ──►   pair(z) @ W,  W (2 m, n): waves that have a conjugate count twice

W is made of whole numbers of n-ths of a turn, so that it is as exact as its dtype, and disappears into a parameter
(`fold_parameters`) up to 1 MiB. Lengths above `LONGEST_MATRIX` are transformed in two steps where they have two factors
(Cooley and Tukey, 1965): n = a b, waves of a, a turn of each value, waves of b. The larger matrix of a prime above it
is made at every call.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from tvmhet.ir.torch_pairs import Pairs, Rule

_ATEN = torch.ops.aten
LONGEST_MATRIX = 256  # of pairs, in float32: 1 MiB
#: A prime has no two factors; its matrix takes 268 MB in float32.
_LONGEST_PRIME = 4096


def _scale(lengths: list[int], normalization: int) -> float:
    """What the results are multiplied by: 0 of torch's numbers for nothing, 1 for 1 / sqrt(n), 2 for 1 / n."""
    total = math.prod(lengths)
    return (1.0, total**-0.5, 1.0 / total)[normalization]


class _Waves:
    """Cosine and sine of 2 pi j k / n for rows j and columns k, and what is made of them."""

    def __init__(self, pairs: Pairs, dtype: torch.dtype, device: torch.device) -> None:
        self.pairs, self._dtype, self._device = pairs, dtype, device

    def waves(self, length: int, rows: int, columns: int, sign: int, scale: float = 1.0) -> tuple[fx.Node, fx.Node]:
        """Real and imaginary part of `scale` exp(`sign` 2 pi i j k / length), (rows, columns) each."""
        p = self.pairs
        j, k = (p.call(_ATEN.arange.default, n, dtype=torch.int64, device=self._device) for n in (rows, columns))
        turns = p.call(_ATEN.mul.Tensor, p.call(_ATEN.unsqueeze.default, j, 1), p.call(_ATEN.unsqueeze.default, k, 0))
        part = p.call(_ATEN._to_copy.default, p.call(_ATEN.remainder.Scalar, turns, length), dtype=self._dtype)
        angle = p.call(_ATEN.mul.Tensor, part, 2 * math.pi / length)
        real, imaginary = p.call(_ATEN.cos.default, angle), p.call(_ATEN.sin.default, angle)
        return self.times(real, scale), self.times(imaginary, sign * scale)

    def times(self, x: fx.Node, factor: float) -> fx.Node:
        """The product with a number."""
        return x if factor == 1 else self.pairs.call(_ATEN.mul.Tensor, x, factor)

    def product(self, x: fx.Node, dim: int, matrix: fx.Node, shape: list[int]) -> fx.Node:
        """The last axes of x from `dim` on, flat, times `matrix`; `shape` is that of the result's last axes."""
        value = x.meta["val"]
        kept = list(value.shape[:dim])
        flat = self.pairs.reshape(x, [*kept, math.prod(value.shape[dim:])])
        return self.pairs.reshape(self.pairs.call(_ATEN.matmul.default, flat, matrix), [*kept, *shape])

    def moved(self, x: fx.Node, one: int, other: int) -> fx.Node:
        """Two axes in each other's place."""
        return x if one == other else self.pairs.call(_ATEN.transpose.int, x, one, other)

    def of_real(self, x: fx.Node, kept: int, sign: int, scale: float) -> fx.Node:
        """The first `kept` waves of real values along the last axis: (..., length) to (..., kept, 2)."""
        p, length = self.pairs, int(x.meta["val"].shape[-1])
        if _in_two(length):
            columns = self._columns(x, length, x.meta["val"].dim() - 1)
            full = self._second_step(self.of_real(columns, _factor(length), sign, scale), length, sign)
            return p.call(_ATEN.slice.Tensor, full, -2, 0, kept)
        matrix = p.once(
            ("real", length, kept, sign, scale, self._dtype),
            lambda: p.reshape(p.stack(*self.waves(length, length, kept, sign, scale)), [length, 2 * kept]),
        )
        return self.product(x, x.meta["val"].dim() - 1, matrix, [kept, 2])

    def to_real(self, z: fx.Node, length: int, scale: float) -> fx.Node:
        """Real values of half their waves along the last axis: (..., length // 2 + 1, 2) to (..., length)."""
        half = length // 2 + 1
        z = self.pairs.call(_ATEN.slice.Tensor, z, -2, 0, half)
        if _in_two(length):
            full = self.of_pairs(self._mirrored(z, length), length, 1, scale)
            return self.pairs.call(_ATEN.select.int, full, -1, 0)
        matrix = self.pairs.once(("half", length, scale, self._dtype), lambda: self._halves(length, scale))
        return self.product(z, z.meta["val"].dim() - 2, matrix, [length])

    def _halves(self, length: int, scale: float) -> fx.Node:
        """Real values by half their waves, (2 half, length): a wave whose conjugate is another one counts twice."""
        p, half = self.pairs, length // 2 + 1
        real, imaginary = self.waves(length, half, length, 1, scale)
        rows = p.call(_ATEN.arange.default, half, dtype=torch.int64, device=self._device)
        twice = p.call(_ATEN.ne.Scalar, p.call(_ATEN.remainder.Scalar, self.times(rows, 2), length), 0)
        count = p.call(_ATEN.add.Scalar, p.call(_ATEN._to_copy.default, twice, dtype=self._dtype), 1.0)
        parts = [
            p.call(_ATEN.mul.Tensor, part, p.call(_ATEN.unsqueeze.default, count, 1))
            for part in (real, self.times(imaginary, -1.0))
        ]
        both = p.call(_ATEN.cat.default, [p.call(_ATEN.unsqueeze.default, part, 1) for part in parts], 1)
        return p.reshape(both, [2 * half, length])

    def _mirrored(self, z: fx.Node, length: int) -> fx.Node:
        """All waves of real values, of the half that is given: the others are conjugates."""
        p = self.pairs
        real, imaginary = (p.call(_ATEN.select.int, z, -1, i) for i in (0, 1))
        inner = [p.call(_ATEN.slice.Tensor, part, -1, 1, (length + 1) // 2) for part in (real, imaginary)]
        back = [p.call(_ATEN.flip.default, part, [part.meta["val"].dim() - 1]) for part in inner]
        return p.call(_ATEN.cat.default, [z, p.stack(back[0], self.times(back[1], -1.0))], -2)

    def of_pairs(self, z: fx.Node, length: int, sign: int, scale: float) -> fx.Node:
        """The transform of pairs along their last axis but one: (..., length, 2) to (..., length, 2)."""
        if not _in_two(length):
            key = ("pairs", length, sign, scale, self._dtype)
            matrix = self.pairs.once(key, lambda: self._rotations(length, sign, scale))
            return self.product(z, z.meta["val"].dim() - 2, matrix, [length, 2])
        columns = self._columns(z, length, z.meta["val"].dim() - 2)
        return self._second_step(self.of_pairs(columns, _factor(length), sign, scale), length, sign)

    def _columns(self, x: fx.Node, length: int, dim: int) -> fx.Node:
        """Value few j1 + j2 of axis `dim` at (j2, j1): (.., length, ..) to (.., few, many, ..)."""
        *kept, _ = (shape := list(x.meta["val"].shape))[: dim + 1]
        many = _factor(length)
        apart = self.pairs.reshape(x, [*kept, many, length // many, *shape[dim + 1 :]])
        return self.moved(apart, dim, dim + 1)

    def _second_step(self, z: fx.Node, length: int, sign: int) -> fx.Node:
        """From the waves k1 of each j2, (.., few, many, 2), the waves k1 + many k2: (.., length, 2)."""
        p, (*kept, few, many, _) = self.pairs, z.meta["val"].shape
        cosine, sine = p.once(("turns", length, sign, self._dtype), lambda: self._turns(length, few, many, sign))
        real, imaginary = (p.call(_ATEN.slice.Tensor, z, -1, i, i + 1) for i in (0, 1))
        turned = [
            p.call(one, p.call(_ATEN.mul.Tensor, real, a), p.call(_ATEN.mul.Tensor, imaginary, b))
            for one, a, b in ((_ATEN.sub.Tensor, cosine, sine), (_ATEN.add.Tensor, sine, cosine))
        ]
        z = self.moved(p.call(_ATEN.cat.default, turned, -1), len(kept), len(kept) + 1)
        z = self.of_pairs(z, few, sign, 1.0)  # (many k1, few k2)
        return p.reshape(self.moved(z, len(kept), len(kept) + 1), [*kept, length, 2])

    def _turns(self, length: int, rows: int, columns: int, sign: int) -> list[fx.Node]:
        return [self.pairs.call(_ATEN.unsqueeze.default, w, -1) for w in self.waves(length, rows, columns, sign)]

    def _rotations(self, length: int, sign: int, scale: float) -> fx.Node:
        """What turns pairs into the sum of their waves: (2 length, 2 length)."""
        p = self.pairs
        real, imaginary = self.waves(length, length, length, sign, scale)
        rows = [p.stack(real, imaginary), p.stack(self.times(imaginary, -1.0), real)]
        both = p.call(_ATEN.cat.default, [p.call(_ATEN.unsqueeze.default, row, 1) for row in rows], 1)
        return p.reshape(both, [2 * length, 2 * length])


def _factor(length: int) -> int:
    """The largest divisor up to the square root."""
    return next(d for d in range(math.isqrt(length), 0, -1) if length % d == 0)


def _in_two(length: int) -> bool:
    """Whether a transform is made in two steps. Raises NotImplementedError for a prime too long for one."""
    if length <= LONGEST_MATRIX:
        return False
    if _factor(length) > 1:
        return True
    if length > _LONGEST_PRIME:
        raise NotImplementedError(f"a transform of {length} values, a prime above {_LONGEST_PRIME}; pad it")
    return False


def _along(z: fx.Node, dims: list[int], sign: int, scale: float, waves: _Waves) -> fx.Node:
    """Transform pairs along several axes; all of `scale` goes to the first."""
    last = z.meta["val"].dim() - 2
    for dim in dims:
        moved = waves.moved(z, dim, last)
        z = waves.moved(waves.of_pairs(moved, int(z.meta["val"].shape[dim]), sign, scale), dim, last)
        scale = 1.0
    return z


def _of_real(x: fx.Node, dims: list[int], half: bool, sign: int, scale: float, waves: _Waves) -> fx.Node:
    """Transform real values along several axes, the last of them first."""
    length, last = int(x.meta["val"].shape[dims[-1]]), x.meta["val"].dim() - 1
    z = waves.of_real(waves.moved(x, dims[-1], last), length // 2 + 1 if half else length, sign, scale)
    return _along(waves.moved(z, dims[-1], last), dims[:-1], sign, 1.0, waves)


def _given(p: Pairs, node: fx.Node) -> tuple[fx.Node, list[int], list[int], _Waves]:
    """What is transformed, along which axes, of which lengths."""
    x, dims = node.args[:2]
    value = x.meta["val"]
    dims = [d % value.dim() for d in dims]
    lengths = [value.shape[d] for d in dims]
    if not all(isinstance(n, int) for n in lengths):
        raise NotImplementedError("a transform along an axis whose length is not fixed; bind it")
    dtype = value.dtype.to_real() if value.is_complex() else value.dtype
    return x, dims, lengths, _Waves(p, dtype, value.device)


def _real_to_complex(p: Pairs, node: fx.Node) -> fx.Node:
    x, dims, lengths, waves = _given(p, node)
    return _of_real(x, dims, node.args[3], -1, _scale(lengths, node.args[2]), waves)


def _complex_to_complex(p: Pairs, node: fx.Node) -> fx.Node:
    x, dims, lengths, waves = _given(p, node)
    sign, scale = -1 if node.args[3] else 1, _scale(lengths, node.args[2])
    if (real := p.real_of(x)) is not None:
        return _of_real(real, dims, False, sign, scale, waves)
    return _along(p.of(x), dims, sign, scale, waves)


def _complex_to_real(p: Pairs, node: fx.Node) -> fx.Node:
    x, dims, lengths, waves = _given(p, node)
    length, last = int(node.args[3]), x.meta["val"].dim() - 1
    z = waves.moved(_along(p.of(x), dims[:-1], 1, 1.0, waves), dims[-1], last)
    return waves.moved(waves.to_real(z, length, _scale([*lengths[:-1], length], node.args[2])), dims[-1], last)


FOURIER: dict[Any, Rule] = {
    _ATEN._fft_r2c.default: _real_to_complex,
    _ATEN._fft_c2c.default: _complex_to_complex,
    _ATEN._fft_c2r.default: _complex_to_real,
}
