"""fx -> Relax converters of pools: the options that TVM's converters drop, and the backward operators.

A gradient is laid out again with the windows' stride. It is arithmetic and convolutions that forward kernels compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from tvm import relax

from tvmhet.ir.fx_node import arg_of, dims_of, unread_result

op = relax.op


def _avg_pool2d(node: fx.Node, importer: Any) -> relax.Expr:
    """The mean of each window; `divisor_override` replaces the count (TVM's converter drops it)."""
    y = importer.create_convert_map()["avg_pool2d.default"](node)
    divisor = arg_of(node, 6, "divisor_override")
    if divisor is None:
        return y
    size, count_pad = list(node.args[1]), arg_of(node, 5, "count_include_pad", True)
    stride, padding = list(arg_of(node, 2, "stride", [])) or size, list(arg_of(node, 3, "padding", [0, 0]))
    x, dtype = importer.env[node.args[0]], str(y.ty.dtype)
    counts = _window_counts(dims_of(x)[2:], dims_of(y)[2:], size, stride, padding, count_pad, None)
    factor = relax.const((counts / divisor).to(getattr(torch, dtype)).numpy(), dtype)
    return importer.block_builder.emit(op.multiply(y, factor))


def _max_pool2d_with_indices(node: fx.Node, importer: Any) -> relax.Expr:
    """(maxima, zeros): the gradient finds the positions again from the input."""
    x, size = importer.env[node.args[0]], list(node.args[1])
    stride, padding, dilation, ceil_mode = _pool_options(node, 2, size)
    y = importer.block_builder.emit(op.nn.max_pool2d(x, size, stride, padding * 2, dilation, ceil_mode, layout="NCHW"))
    return relax.Tuple([y, unread_result(node, importer, 1)])


def _pool_options(node: fx.Node, first: int, size: Sequence[int]) -> tuple[list[int], list[int], list[int], bool]:
    stride = list(arg_of(node, first, "stride", [])) or list(size)
    padding = list(arg_of(node, first + 1, "padding", [0, 0]))
    dilation = list(arg_of(node, first + 2, "dilation", [1, 1]))
    return stride, padding, dilation, bool(arg_of(node, first + 3, "ceil_mode", False))


def _max_pool2d_backward(node: fx.Node, importer: Any) -> relax.Expr:
    """Each output's gradient goes to the first maximum of its window, as torch's does.

    Window by window position: the first position whose value equals the maximum takes the gradient; the
    positions' gradients are laid out `stride` apart and added. All of it is arithmetic that fuses.
    """
    gradient, x, size = importer.env[node.args[0]], importer.env[node.args[1]], list(node.args[2])
    stride, padding, dilation, _ = _pool_options(node, 3, size)
    return _scatter_windows(importer, gradient, x, size, stride, padding, dilation)


def _scatter_windows(
    importer: Any,
    gradient: relax.Expr,
    x: relax.Expr,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> relax.Expr:
    emit, dtype = importer.block_builder.emit, str(x.ty.dtype)
    (height, width), (rows, columns) = dims_of(x)[2:], dims_of(gradient)[2:]
    reach = [
        (rows - 1) * stride[0] + dilation[0] * (size[0] - 1) + 1,
        (columns - 1) * stride[1] + dilation[1] * (size[1] - 1) + 1,
    ]
    full = [max(reach[0], height + padding[0]), max(reach[1], width + padding[1])]
    lowest = torch.finfo(getattr(torch, dtype)).min
    after = [full[0] - height - padding[0], full[1] - width - padding[1]]
    wide = emit(op.nn.pad(x, [0, 0, 0, 0, padding[0], after[0], padding[1], after[1]], pad_value=lowest))
    offsets = [(i * dilation[0], j * dilation[1]) for i in range(size[0]) for j in range(size[1])]
    ends = ((rows - 1) * stride[0] + 1, (columns - 1) * stride[1] + 1)
    views = [
        emit(op.strided_slice(wide, [2, 3], [i, j], [i + ends[0], j + ends[1]], [stride[0], stride[1]]))
        for i, j in offsets
    ]
    best = views[0]
    for view in views[1:]:
        best = emit(op.maximum(best, view))
    zero = relax.const(0.0, dtype)
    left = gradient
    total = None
    for (i, j), view in zip(offsets, views, strict=True):
        hit = emit(op.equal(view, best))
        part = emit(op.where(hit, left, zero))
        left = emit(op.where(hit, zero, left))
        spread = _lay_out(emit, part, (i, j), stride, full, dtype)
        total = spread if total is None else emit(op.add(total, spread))
    begin, end = list(padding), [padding[0] + height, padding[1] + width]
    return emit(op.strided_slice(total, [2, 3], begin, end))


def _lay_out(
    emit: Callable[..., Any],
    part: relax.Expr,
    offset: tuple[int, int],
    stride: Sequence[int],
    full: Sequence[int],
    dtype: str,
) -> relax.Expr:
    """Put part[r, c] at (offset + stride * (r, c)) of a plane of `full` zeros."""
    batch, channels, rows, columns = dims_of(part)
    if tuple(stride) != (1, 1):
        wide = emit(op.reshape(part, [batch, channels, rows, 1, columns, 1]))
        wide = emit(op.nn.pad(wide, [0, 0, 0, 0, 0, 0, 0, stride[0] - 1, 0, 0, 0, stride[1] - 1], pad_value=0.0))
        part = emit(op.reshape(wide, [batch, channels, rows * stride[0], columns * stride[1]]))
        keep = [min(rows * stride[0], full[0] - offset[0]), min(columns * stride[1], full[1] - offset[1])]
        part = emit(op.strided_slice(part, [2, 3], [0, 0], keep))
        rows, columns = keep
    after = [full[0] - offset[0] - rows, full[1] - offset[1] - columns]
    return emit(op.nn.pad(part, [0, 0, 0, 0, offset[0], after[0], offset[1], after[1]], pad_value=0.0))


def _avg_pool2d_backward(node: fx.Node, importer: Any) -> relax.Expr:
    """Each output's gradient is shared evenly by its window: a transposed depth-wise convolution with ones."""
    gradient, x, size = importer.env[node.args[0]], importer.env[node.args[1]], list(node.args[2])
    stride = list(node.args[3]) or size
    padding, count_pad = list(node.args[4]), bool(node.args[6])
    divisor = node.args[7] if len(node.args) > 7 else None
    emit, dtype = importer.block_builder.emit, str(x.ty.dtype)
    batch, channels, height, width = dims_of(x)
    rows, columns = dims_of(gradient)[2:]
    counts = _window_counts((height, width), (rows, columns), size, stride, padding, count_pad, divisor)
    shared = emit(op.multiply(gradient, relax.const((1.0 / counts).to(getattr(torch, dtype)).numpy(), dtype)))
    planes = emit(op.reshape(shared, [batch * channels, 1, rows, columns]))
    ones = relax.const(torch.ones(1, 1, *size, dtype=getattr(torch, dtype)).numpy(), dtype)
    spread = emit(op.nn.conv2d_transpose(planes, ones, strides=stride, out_dtype=dtype))
    unread = [max(0, p + n - reach) for n, p, reach in zip((height, width), padding, dims_of(spread)[2:], strict=True)]
    if any(unread):
        spread = emit(op.nn.pad(spread, [0, 0, 0, 0, 0, unread[0], 0, unread[1]], pad_value=0.0))
    end = [padding[0] + height, padding[1] + width]
    if padding != [0, 0] or dims_of(spread)[2:] != end:  # windows reach beyond the input
        spread = emit(op.strided_slice(spread, [2, 3], padding, end))
    return emit(op.reshape(spread, [batch, channels, height, width]))


def _window_counts(
    sizes: Sequence[int],
    made: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    count_pad: bool,
    divisor: int | None,
) -> torch.Tensor:
    """How many elements torch divides each window's sum by, shape (rows, columns)."""
    if divisor:
        return torch.full(made, float(divisor), dtype=torch.float64)
    inside = []
    for n, m, k, step, p in zip(sizes, made, size, stride, padding, strict=True):
        first, last = (-p, n + p) if count_pad else (0, n)
        reach = [min(r * step - p + k, last) - max(r * step - p, first) for r in range(m)]
        inside.append(torch.tensor(reach, dtype=torch.float64))
    return inside[0][:, None] * inside[1][None, :]


POOLING: dict[str, Callable[[fx.Node, Any], Any]] = {"avg_pool2d.default": _avg_pool2d}

POOLING_BACKWARD: dict[str, Callable[[fx.Node, Any], Any]] = {
    "max_pool2d_with_indices.default": _max_pool2d_with_indices,
    "max_pool2d_with_indices_backward.default": _max_pool2d_backward,
    "avg_pool2d_backward.default": _avg_pool2d_backward,
}
