"""Linear algebra of small matrices: factorisations step by step, each step a few operators on whole batches.

    inverse, solve, determinants   ──►   L U = P A with partial pivoting, then triangular solves
    Cholesky, Householder's QR     ──►   column by column
    exponential                    ──►   a Taylor polynomial of A / 2^s, squared s times

Results are LAPACK's: the same pivots, signs and packed factors. A matrix of more than `MOST` rows is refused: there are
a few operators for each of its columns. What one step makes of the other is a product of a column and a row, which no
fusion computes again: arithmetic alone would be inlined into the next step, several times, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._library.simple_registry import singleton

_aten = torch.ops.aten

#: Rows of a matrix that is written out.
MOST = 32
#: Squarings of an exponential: matrices of a norm up to 2^19. Terms of its polynomial: below float64's rounding at 1/2.
_SQUARINGS, _TERMS = 20, 16


def _check(a: torch.Tensor) -> None:
    rows = max(a.shape[-2:])
    if rows > MOST:
        raise NotImplementedError(f"a matrix of {rows} rows or columns, more than {MOST}")
    if a.is_complex():
        raise NotImplementedError("complex matrices")


def _places(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of each row, as a column, and of each column, as a row."""
    rows, columns = a.shape[-2:]
    return torch.arange(rows, device=a.device).unsqueeze(-1), torch.arange(columns, device=a.device)


def _row(a: torch.Tensor, k: int) -> torch.Tensor:
    return a.narrow(-2, k, 1)


def _column(a: torch.Tensor, k: int) -> torch.Tensor:
    return a.narrow(-1, k, 1)


def _swapped(a: torch.Tensor, k: int, place: torch.Tensor) -> torch.Tensor:
    """Return `a` with row k and the row at `place`, of the shape of the batch, in each other's place."""
    rows, _ = _places(a)
    place = place.unsqueeze(-1).unsqueeze(-1)
    other = a.gather(-2, place.expand(*a.shape[:-2], 1, a.shape[-1]))
    return torch.where(rows == k, other, torch.where(rows == place, _row(a, k), a))


def _swap(a: torch.Tensor, k: int, place: torch.Tensor) -> torch.Tensor:
    """Return the matrix that gives row k of `a` and the row at `place` each other's place."""
    rows, columns = torch.arange(a.shape[-2], device=a.device).unsqueeze(-1), torch.arange(a.shape[-2], device=a.device)
    place = place.unsqueeze(-1).unsqueeze(-1)
    source = torch.where(rows == k, place, torch.where(rows == place, k, rows))
    return (columns == source).to(a.dtype)


def _factored(a: torch.Tensor, num_columns: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return L (below the diagonal, with ones on it) and U in one matrix, and the pivots, counted from 1.

    Columns after the first `num_columns` are right sides of equations: of b it leaves the solution of L y = P b.
    """
    num_columns = a.shape[-1] if num_columns is None else num_columns
    _check(a.narrow(-1, 0, num_columns))
    rows, columns = _places(a)
    pivots = []
    for k in range(min(a.shape[-2], num_columns)):
        sizes = torch.where(rows >= k, _column(a, k).abs(), -1.0).squeeze(-1)
        place = sizes.argmax(-1)
        pivots.append(place)
        a = _swapped(a, k, place)
        pivot = _column(_row(a, k), k)  # the largest: where it is 0 so is what is below it
        factors = torch.where(rows > k, _column(a, k) / torch.where(pivot == 0, 1.0, pivot), 0.0)
        rest = a - factors @ torch.where(columns > k, _row(a, k), 0.0)
        a = torch.where((rows > k) & (columns == k), factors, rest)
    return a, torch.stack(pivots, -1).to(torch.int32) + 1


def _solved(
    a: torch.Tensor, b: torch.Tensor, *, upper: bool, transposed: bool = False, ones: bool = False
) -> torch.Tensor:
    """Return x of T x = b, T the upper or lower triangle of `a` (transposed), with `ones` on its diagonal."""
    _check(a)
    if transposed:
        a, upper = a.mT, not upper
    b = b.expand(*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *b.shape[-2:])
    rows, _ = _places(a)
    size = a.shape[-1]
    for k in reversed(range(size)) if upper else range(size):
        x = _row(b, k) if ones else _row(b, k) / _column(_row(a, k), k)
        factors = torch.where(rows < k if upper else rows > k, _column(a, k), 0.0)
        b = torch.where(rows == k, x, b - factors @ x)
    return b


def _lu_solve(
    factors: torch.Tensor, pivots: torch.Tensor, b: torch.Tensor, left: bool = True, adjoint: bool = False
) -> torch.Tensor:
    if not left:
        return _lu_solve(factors, pivots, b.mT, True, not adjoint).mT
    batch = torch.broadcast_shapes(factors.shape[:-2], b.shape[:-2])
    b = b.expand(*batch, *b.shape[-2:])
    places = (pivots.to(torch.int64) - 1).expand(*batch, -1)
    order = range(places.shape[-1])
    if adjoint:
        b = _solved(factors, b, upper=True, transposed=True)
        b = _solved(factors, b, upper=False, transposed=True, ones=True)
        for k in reversed(order):
            b = _swap(b, k, places.select(-1, k)) @ b
        return b
    for k in order:
        b = _swap(b, k, places.select(-1, k)) @ b
    return _solved(factors, _solved(factors, b, upper=False, ones=True), upper=True)


def _no_error(a: torch.Tensor) -> torch.Tensor:
    return torch.zeros(a.shape[:-2], dtype=torch.int32, device=a.device)


def _lu_factor_ex(a: torch.Tensor, *, pivot: bool = True, check_errors: bool = False) -> tuple[torch.Tensor, ...]:
    if not pivot:
        raise NotImplementedError("factors without pivots")
    return *_factored(a), _no_error(a)


def _lu(a: torch.Tensor, *, pivot: bool = True) -> tuple[torch.Tensor, ...]:
    factors, pivots, _ = _lu_factor_ex(a, pivot=pivot)
    return _lu_unpack(factors, pivots)


def _lu_unpack(
    factors: torch.Tensor, pivots: torch.Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[torch.Tensor, ...]:
    _check(factors)
    rows, columns = factors.shape[-2:]
    least, none = min(rows, columns), factors.new_empty(0)
    order = torch.eye(rows, dtype=factors.dtype, device=factors.device).expand(*factors.shape[:-2], rows, rows)
    for k in range(least if unpack_pivots else 0):
        order = _swap(factors, k, pivots.select(-1, k).to(torch.int64) - 1) @ order
    ones = torch.eye(rows, least, dtype=factors.dtype, device=factors.device)
    lower, upper = factors.narrow(-1, 0, least).tril(-1) + ones, factors.narrow(-2, 0, least).triu()
    return order.mT if unpack_pivots else none, *((lower, upper) if unpack_data else (none, none))


def _is_vector(a: torch.Tensor, b: torch.Tensor) -> bool:
    """As torch tells a batch of vectors from one of matrices."""
    return b.dim() == 1 or (a.dim() - 1 == b.dim() and tuple(b.shape) == tuple(a.shape[:-1]))


def _solved_at_once(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the solution of A x = b and the factors of A; the right sides are eliminated with it."""
    size, batch = a.shape[-1], torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if batch != a.shape[:-2]:  # the factors of one matrix serve several right sides
        factors, pivots = _factored(a)
        return _lu_solve(factors, pivots, b), factors, pivots
    both, pivots = _factored(torch.cat([a, b.expand(*batch, *b.shape[-2:])], -1), size)
    factors, half = both.narrow(-1, 0, size), both.narrow(-1, size, b.shape[-1])
    return _solved(factors, half, upper=True), factors, pivots


def _solve_ex(
    a: torch.Tensor, b: torch.Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[torch.Tensor, ...]:
    vector = _is_vector(a, b)
    b = b.unsqueeze(-1) if vector else b
    if left:
        x, factors, pivots = _solved_at_once(a, b)
    else:
        factors, pivots = _factored(a)
        x = _lu_solve(factors, pivots, b, False)
    return x.squeeze(-1) if vector else x, factors, pivots, _no_error(a)


def _inv_ex(a: torch.Tensor, *, check_errors: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return _solved_at_once(a, identity)[0], _no_error(a)


def _swaps_sign(pivots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 1 or -1 for an even or odd number of rows that changed places."""
    own = torch.arange(1, pivots.shape[-1] + 1, device=pivots.device)
    return 1 - 2 * ((pivots != own).to(dtype).sum(-1) % 2)


def _of_determinant(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors that torch's gradient reads: those of the transpose where the rows lie in order."""
    return _factored(a.mT if a.is_contiguous() else a)


def _det(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
    factors, pivots = _of_determinant(a)
    return factors.diagonal(0, -2, -1).prod(-1) * _swaps_sign(pivots, a.dtype), factors, pivots


def _slogdet(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
    factors, pivots = _of_determinant(a)
    diagonal = factors.diagonal(0, -2, -1)
    sign = diagonal.sign().prod(-1) * _swaps_sign(pivots, a.dtype)
    return sign, diagonal.abs().log().sum(-1), factors, pivots


def _cholesky_ex(
    a: torch.Tensor, *, upper: bool = False, check_errors: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Column by column: of a matrix that is not positive definite NaN, where torch raises an error."""
    _check(a)
    rows, _ = _places(a)
    left, made = a.mT if upper else a, []
    for k in range(a.shape[-1]):
        column = torch.where(rows >= k, _column(left, k) / _column(_row(left, k), k).sqrt(), 0.0)
        made.append(column)
        left = left - column @ column.mT
    found = torch.cat(made, -1)
    return found.mT if upper else found, _no_error(a)


def _solve_triangular(
    a: torch.Tensor, b: torch.Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> torch.Tensor:
    if left:
        return _solved(a, b, upper=upper, ones=unitriangular)
    return _solved(a, b.mT, upper=upper, transposed=True, ones=unitriangular).mT


def _triangular_solve(
    b: torch.Tensor, a: torch.Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    return _solved(a, b, upper=upper, transposed=transpose, ones=unitriangular), a


def _cholesky_solve(b: torch.Tensor, factor: torch.Tensor, upper: bool = False) -> torch.Tensor:
    half = _solved(factor, b, upper=upper, transposed=upper)
    return _solved(factor, half, upper=upper, transposed=not upper)


def _cholesky_inverse(factor: torch.Tensor, upper: bool = False) -> torch.Tensor:
    identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    return _cholesky_solve(identity.expand_as(factor), factor, upper)


def _qr(a: torch.Tensor, mode: str = "reduced") -> tuple[torch.Tensor, torch.Tensor]:
    """Householder's reflections, with LAPACK's signs: none where a column is zero below its diagonal."""
    _check(a)
    count, high = min(a.shape[-2:]), a.shape[-2]
    rows, _ = _places(a)
    q = torch.eye(high, dtype=a.dtype, device=a.device).expand(*a.shape[:-2], high, high)
    for k in range(min(count, high - 1)):
        column = torch.where(rows >= k, _column(a, k), 0.0)
        first = _column(_row(a, k), k)
        below = torch.where(rows > k, column, 0.0).square().sum(-2, keepdim=True)
        length = (first.square() + below).sqrt()
        beta = torch.where(first >= 0, -length, length)
        mirror = torch.where(rows == k, column - beta, column)
        scale = torch.where(below == 0, 0.0, 2 / torch.where(below == 0, 1.0, mirror.square().sum(-2, keepdim=True)))
        a = a - mirror @ (scale * (mirror.mT @ a))
        q = q - (scale * (q @ mirror)) @ mirror.mT
    kept = high if mode == "complete" else count
    upper = a.narrow(-2, 0, kept).triu()
    return (a.new_empty(0) if mode == "r" else q.narrow(-1, 0, kept)), upper


def _matrix_exp(a: torch.Tensor) -> torch.Tensor:
    """NaN where the matrix is too large to be scaled."""
    _check(a)
    norm = a.abs().sum(-2, keepdim=True).amax(-1, keepdim=True)
    halvings = (norm * 2).clamp(min=1.0).log2().ceil()
    scaled = a * torch.exp2(-halvings)
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    found = identity + scaled / _TERMS
    for term in range(_TERMS - 1, 0, -1):
        found = identity + scaled @ found / term
    for k in range(_SQUARINGS):
        found = torch.where(halvings > k, found @ found, found)
    return torch.where(halvings > _SQUARINGS, math.nan, found)


@contextmanager
def without_checks() -> Iterator[None]:
    """Let torch trace `CHECKS` as operators without an effect, which it would order by tokens among the tensors."""
    holder = getattr(singleton.find("aten::_linalg_check_errors"), "effect", None)
    if holder is None:  # older releases of torch order no operators
        yield
        return
    before = holder.effect
    holder.register(None)
    try:
        yield
    finally:
        holder.register(before)


#: They raise torch's errors, which no graph of tensors does: a singular matrix gives infinities and NaN.
CHECKS: dict[Any, Callable[..., Any]] = {_aten._linalg_check_errors.default: lambda info, name, *, is_matrix: None}

DEFINITIONS: dict[Any, Callable[..., Any]] = {
    _aten.linalg_inv_ex.default: _inv_ex,
    _aten._linalg_solve_ex.default: _solve_ex,
    _aten._linalg_det.default: _det,
    _aten._linalg_slogdet.default: _slogdet,
    _aten.linalg_lu.default: _lu,
    _aten.linalg_lu_factor_ex.default: _lu_factor_ex,
    _aten.lu_unpack.default: _lu_unpack,
    _aten.linalg_lu_solve.default: lambda lu, pivots, b, *, left=True, adjoint=False: _lu_solve(
        lu, pivots, b, left, adjoint
    ),
    _aten.linalg_cholesky_ex.default: _cholesky_ex,
    _aten.linalg_solve_triangular.default: _solve_triangular,
    _aten.triangular_solve.default: _triangular_solve,
    _aten.cholesky_solve.default: _cholesky_solve,
    _aten.cholesky_inverse.default: _cholesky_inverse,
    _aten.linalg_qr.default: _qr,
    _aten.linalg_matrix_exp.default: _matrix_exp,
}
