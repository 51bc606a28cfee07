"""fx -> Relax converters of pools: the options that TVM's converters drop, and the backward operators.

Gradients are arithmetic, products and convolutions that forward kernels compute; those of maxima end in a scatter.
Any number of spatial dims.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from tvm import relax

from tvmhet.ir.fx_node import arg_of, dims_of, unread_result

op = relax.op
Emit = Callable[..., Any]

_MAX_POOL = {2: op.nn.max_pool2d, 3: op.nn.max_pool3d}
_TRANSPOSED = {2: op.nn.conv2d_transpose, 3: op.nn.conv3d_transpose}


@dataclass(frozen=True, slots=True)
class _Windows:
    """How a pool's windows lie on its input, one entry per spatial dim."""

    size: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    ceil_mode: bool

    @classmethod
    def of(cls, node: fx.Node, first: int, rank: int, *, dilated: bool) -> _Windows:
        """Read size, stride, padding, (dilation,) ceil_mode, which begin at argument `first`."""
        size = _per_dim(node.args[first], rank)
        stride = _per_dim(arg_of(node, first + 1, "stride", []) or size, rank)
        padding = _per_dim(arg_of(node, first + 2, "padding", 0), rank)
        dilation = _per_dim(arg_of(node, first + 3, "dilation", 1), rank) if dilated else [1] * rank
        return cls(size, stride, padding, dilation, bool(arg_of(node, first + 3 + dilated, "ceil_mode", False)))


def _per_dim(value: Any, rank: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values


def _const(values: torch.Tensor, dtype: str) -> relax.Expr:
    return relax.const(values.numpy(), dtype)


def _avg_pool2d(node: fx.Node, importer: Any) -> relax.Expr:
    """The mean of each window; `divisor_override` replaces the count (TVM's converter drops it)."""
    y = importer.create_convert_map()["avg_pool2d.default"](node)
    divisor = arg_of(node, 6, "divisor_override")
    if divisor is None:
        return y
    count_pad, dtype = arg_of(node, 5, "count_include_pad", True), str(y.ty.dtype)
    windows = _Windows.of(node, 1, 2, dilated=False)
    counts = _window_counts(dims_of(importer.env[node.args[0]])[2:], dims_of(y)[2:], windows, count_pad, None)
    return importer.block_builder.emit(op.multiply(y, _const(counts / divisor, dtype)))


def _max_pool_with_indices(node: fx.Node, importer: Any) -> relax.Expr:
    """(maxima, zeros): the gradient finds the positions again from the input."""
    x = importer.env[node.args[0]]
    rank = len(dims_of(x)) - 2
    w = _Windows.of(node, 1, rank, dilated=True)
    y = _MAX_POOL[rank](x, w.size, w.stride, w.padding * 2, w.dilation, w.ceil_mode)
    return relax.Tuple([importer.block_builder.emit(y), unread_result(node, importer, 1)])


def _max_pool_backward(node: fx.Node, importer: Any) -> relax.Expr:
    gradient, x = importer.env[node.args[0]], importer.env[node.args[1]]
    windows = _Windows.of(node, 2, len(dims_of(x)) - 2, dilated=True)
    return _scatter_windows(importer.block_builder.emit, gradient, x, windows)


def _even_windows(x: relax.Expr, made: Sequence[int]) -> _Windows:
    """The windows of an adaptive pool. Raises NotImplementedError where they are not alike."""
    sizes = dims_of(x)[-len(made) :]
    if any(n % m for n, m in zip(sizes, made, strict=True)):
        raise NotImplementedError(f"an adaptive maximum of {sizes} to {list(made)}, whose windows differ in size")
    size = [n // m for n, m in zip(sizes, made, strict=True)]
    return _Windows(size, size, [0] * len(made), [1] * len(made), ceil_mode=False)


def _adaptive_max_pool(node: fx.Node, importer: Any) -> relax.Expr:
    x = importer.env[node.args[0]]
    w = _even_windows(x, _per_dim(node.args[1], len(dims_of(x)) - 2))
    y = importer.block_builder.emit(_MAX_POOL[len(w.size)](x, w.size, w.stride))
    return relax.Tuple([y, unread_result(node, importer, 1)])


def _adaptive_max_pool_backward(node: fx.Node, importer: Any) -> relax.Expr:
    gradient, x = importer.env[node.args[0]], importer.env[node.args[1]]
    return _scatter_windows(importer.block_builder.emit, gradient, x, _even_windows(x, dims_of(gradient)[2:]))


def _scatter_windows(emit: Emit, gradient: relax.Expr, x: relax.Expr, w: _Windows) -> relax.Expr:
    """Each output's gradient goes to the first maximum of its window, as torch's does.

    Where that lies is arithmetic that fuses, once per output; a scatter then adds the gradients up. Arithmetic alone
    finds the maxima again for each input and window: 1.7 ms where this takes 0.6 (4 x 16 x 48 x 48, one AMD core).
    """
    dtype, (batch, channels, *sizes) = str(x.ty.dtype), dims_of(x)
    plane = math.prod(sizes)
    at = emit(op.reshape(_first_maxima(emit, x, dims_of(gradient)[2:], w), [batch * channels, -1]))
    nothing = emit(op.zeros((batch * channels, plane), dtype))
    flat = emit(op.reshape(gradient, [batch * channels, -1]))
    total = emit(op.scatter_elements(nothing, at, flat, axis=1, reduction="add"))
    return emit(op.reshape(total, [batch, channels, *sizes]))


def _first_maxima(emit: Emit, x: relax.Expr, made: Sequence[int], w: _Windows) -> relax.Expr:
    """The place of each window's first maximum in its plane, row by row: int32 of the outputs' shape."""
    dtype, sizes = str(x.ty.dtype), dims_of(x)[2:]
    axes = list(range(2, 2 + len(sizes)))
    steps = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
    spans = [(m - 1) * s + 1 for m, s in zip(made, w.stride, strict=True)]
    reach = [span + d * (k - 1) for span, d, k in zip(spans, w.dilation, w.size, strict=True)]
    after = [max(r, n + p) - n - p for r, n, p in zip(reach, sizes, w.padding, strict=True)]
    lowest = torch.finfo(getattr(torch, dtype)).min
    wide = emit(op.nn.pad(x, _paddings(w.padding, after), pad_value=lowest))
    best: relax.Expr | None = None
    for offset in itertools.product(*([i * d for i in range(k)] for k, d in zip(w.size, w.dilation, strict=True))):
        end = [a + span for a, span in zip(offset, spans, strict=True)]
        view = emit(op.strided_slice(wide, axes, list(offset), end, w.stride))
        here = relax.const(sum(map(operator.mul, offset, steps)), "int32")
        if best is None:
            best, place = view, here
        else:
            place = emit(op.where(emit(op.greater(view, best)), here, place))
            best = emit(op.maximum(view, best))
    starts = [torch.arange(m) * s - p for m, s, p in zip(made, w.stride, w.padding, strict=True)]
    corner = sum(g * step for g, step in zip(torch.meshgrid(*starts, indexing="ij"), steps, strict=True))
    place = emit(op.add(place, _const(torch.as_tensor(corner), "int32")))
    return emit(op.clip(place, 0, math.prod(sizes) - 1))  # a window of NaN alone may name its padding


def _paddings(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Paddings of a tensor whose first two dims get none, as Relax's pad takes them."""
    return [0, 0, 0, 0, *(p for pair in zip(before, after, strict=True) for p in pair)]


def _avg_pool_backward(node: fx.Node, importer: Any) -> relax.Expr:
    """Each output's gradient is shared evenly by its window: a transposed depth-wise convolution with ones."""
    gradient, x = importer.env[node.args[0]], importer.env[node.args[1]]
    emit, dtype = importer.block_builder.emit, str(x.ty.dtype)
    batch, channels, *sizes = dims_of(x)
    made, rank = dims_of(gradient)[2:], len(sizes)
    w = _Windows.of(node, 2, rank, dilated=False)
    counts = _window_counts(sizes, made, w, bool(node.args[6]), arg_of(node, 7, "divisor_override"))
    shared = emit(op.multiply(gradient, _const(1.0 / counts, dtype)))
    planes = emit(op.reshape(shared, [batch * channels, 1, *made]))
    ones = _const(torch.ones(1, 1, *w.size), dtype)
    spread = emit(_TRANSPOSED[rank](planes, ones, strides=w.stride, out_dtype=dtype))
    unread = [max(0, p + n - r) for n, p, r in zip(sizes, w.padding, dims_of(spread)[2:], strict=True)]
    if any(unread):
        spread = emit(op.nn.pad(spread, _paddings([0] * rank, unread), pad_value=0.0))
    end = [p + n for p, n in zip(w.padding, sizes, strict=True)]
    if any(w.padding) or dims_of(spread)[2:] != end:  # windows reach beyond the input
        spread = emit(op.strided_slice(spread, list(range(2, 2 + rank)), w.padding, end))
    return emit(op.reshape(spread, [batch, channels, *sizes]))


def _window_counts(
    sizes: Sequence[int], made: Sequence[int], w: _Windows, count_pad: bool, divisor: int | None
) -> torch.Tensor:
    """How many elements torch divides each window's sum by, shape `made`, float64."""
    if divisor:
        return torch.full(tuple(made), float(divisor), dtype=torch.float64)
    counts = torch.ones((), dtype=torch.float64)
    for n, m, k, step, p in zip(sizes, made, w.size, w.stride, w.padding, strict=True):
        first, last = (-p, n + p) if count_pad else (0, n)
        reach = [min(r * step - p + k, last) - max(r * step - p, first) for r in range(m)]
        counts = counts[..., None] * torch.tensor(reach, dtype=torch.float64)
    return counts


def _adaptive_avg_pool_backward(node: fx.Node, importer: Any) -> relax.Expr:
    """Each dim apart: the product with the (outputs, inputs) matrix of the shares that outputs take of inputs."""
    gradient, x = importer.env[node.args[0]], importer.env[node.args[1]]
    emit, dtype = importer.block_builder.emit, str(x.ty.dtype)
    dims = dims_of(x)
    for axis in range(2, len(dims)):
        made, size = dims_of(gradient)[axis], dims[axis]
        if made == 1:
            continue  # broadcast below
        shares = torch.zeros(made, size, dtype=torch.float64)
        for i in range(made):
            first, last = i * size // made, -(-(i + 1) * size // made)
            shares[i, first:last] = 1.0 / (last - first)
        swapped = list(range(len(dims)))
        swapped[axis], swapped[-1] = swapped[-1], swapped[axis]
        turned = gradient if axis == len(dims) - 1 else emit(op.permute_dims(gradient, swapped))
        product = emit(op.matmul(turned, _const(shares, dtype), out_dtype=dtype))
        gradient = product if axis == len(dims) - 1 else emit(op.permute_dims(product, swapped))
    once = math.prod(n for n, m in zip(dims[2:], dims_of(gradient)[2:], strict=True) if m != n)
    if once != 1:
        gradient = emit(op.broadcast_to(emit(op.multiply(gradient, relax.const(1.0 / once, dtype))), dims))
    return gradient


POOLING: dict[str, Callable[[fx.Node, Any], Any]] = {"avg_pool2d.default": _avg_pool2d}

POOLING_BACKWARD: dict[str, Callable[[fx.Node, Any], Any]] = {
    "max_pool2d_with_indices.default": _max_pool_with_indices,
    "max_pool3d_with_indices.default": _max_pool_with_indices,
    "max_pool2d_with_indices_backward.default": _max_pool_backward,
    "max_pool3d_with_indices_backward.default": _max_pool_backward,
    "adaptive_max_pool2d.default": _adaptive_max_pool,
    "adaptive_max_pool3d.default": _adaptive_max_pool,
    "adaptive_max_pool2d_backward.default": _adaptive_max_pool_backward,
    "adaptive_max_pool3d_backward.default": _adaptive_max_pool_backward,
    "avg_pool2d_backward.default": _avg_pool_backward,
    "avg_pool3d_backward.default": _avg_pool_backward,
    "_adaptive_avg_pool2d_backward.default": _adaptive_avg_pool_backward,
    "_adaptive_avg_pool3d_backward.default": _adaptive_avg_pool_backward,
}
