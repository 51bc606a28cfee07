"""fx -> Relax converters of operators that only backward graphs have, in forms that forward kernels compute.

The gradient of a convolution is two convolutions: of the weight, the input correlated with the output's gradient; of
the input, a transposed convolution. Layouts stay NCHW and OIHW, so that the library and our CPU rules take them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from tvm import relax

from tvmhet.ir.fx_node import arg_of, dims_of

op = relax.op

#: Relax convolutions by number of spatial dims, and their channel-first layouts.
_CONV = {1: op.nn.conv1d, 2: op.nn.conv2d, 3: op.nn.conv3d}
_CONV_TRANSPOSE = {1: op.nn.conv1d_transpose, 2: op.nn.conv2d_transpose, 3: op.nn.conv3d_transpose}


def _convolution_backward(node: fx.Node, importer: Any) -> relax.Expr:
    """(gradient of the input, of the weight, of the bias); those that nobody asks for are empty tuples' stand-ins."""
    gradient, x, weight = (importer.env[n] for n in node.args[:3])
    stride, padding, dilation, transposed, _, groups, wanted = node.args[4:11]
    if transposed:
        raise NotImplementedError("the gradient of a transposed convolution")
    emit = importer.block_builder.emit
    results: list[relax.Expr] = []
    if wanted[0]:
        results.append(_input_gradient(emit, gradient, x, weight, stride, padding, dilation, groups))
    if wanted[1]:
        results.append(_weight_gradient(emit, gradient, x, weight, stride, padding, dilation, groups))
    if wanted[2]:
        results.append(emit(op.sum(gradient, [0, *range(2, 2 + len(stride))])))
    made = iter(results)
    nothing = relax.const(0.0, str(gradient.ty.dtype))
    return emit(relax.Tuple([next(made) if want else nothing for want in wanted]))


def _input_gradient(
    emit: Callable[..., Any],
    gradient: relax.Expr,
    x: relax.Expr,
    weight: relax.Expr,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> relax.Expr:
    rank = len(stride)
    sizes, made, kernel = dims_of(x)[2:], dims_of(gradient)[2:], dims_of(weight)[2:]
    left_over = [
        sizes[d] - ((made[d] - 1) * stride[d] - 2 * padding[d] + dilation[d] * (kernel[d] - 1) + 1) for d in range(rank)
    ]
    return emit(
        _CONV_TRANSPOSE[rank](
            gradient,
            weight,
            strides=list(stride),
            padding=list(padding) * 2,
            output_padding=left_over,
            dilation=list(dilation),
            groups=groups,
            out_dtype=str(x.ty.dtype),
        )
    )


def _weight_gradient(
    emit: Callable[..., Any],
    gradient: relax.Expr,
    x: relax.Expr,
    weight: relax.Expr,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> relax.Expr:
    """Correlate input and output gradient over the batch: channels play the batch, the batch plays the channels.

    x as (I, N, ...), the gradient as weights (O, N, ...), stride and dilation exchanged: gives (I, O, kernel).
    For g groups, x as (I/g, g N, ...) and a grouped convolution.
    """
    rank = len(stride)
    batch, channels, *sizes = dims_of(x)
    kernel = dims_of(weight)[2:]
    spatial = list(range(2, 2 + rank))
    if groups == 1:
        source = emit(op.permute_dims(x, [1, 0, *spatial]))
    else:
        source = emit(op.reshape(x, [batch, groups, channels // groups, *sizes]))
        source = emit(op.permute_dims(source, [2, 1, 0, *(d + 1 for d in spatial)]))
        source = emit(op.reshape(source, [channels // groups, groups * batch, *sizes]))
    filters = emit(op.permute_dims(gradient, [1, 0, *spatial]))
    product = emit(
        _CONV[rank](
            source,
            filters,
            strides=list(dilation),
            padding=list(padding) * 2,
            dilation=list(stride),
            groups=groups,
            out_dtype=str(x.ty.dtype),
        )
    )
    if dims_of(product)[2:] != kernel:  # the stride left part of the input unread
        product = emit(op.strided_slice(product, spatial, [0] * rank, kernel))
    return emit(op.permute_dims(product, [1, 0, *spatial]))


def _max_pool2d_with_indices(node: fx.Node, importer: Any) -> relax.Expr:
    """(maxima, zeros): the gradient finds the positions again from the input."""
    x, size = importer.env[node.args[0]], list(node.args[1])
    stride, padding, dilation, ceil_mode = _pool_options(node, 2, size)
    y = importer.block_builder.emit(op.nn.max_pool2d(x, size, stride, padding * 2, dilation, ceil_mode, layout="NCHW"))
    return relax.Tuple([y, _unread(node, importer, 1)])


def _unread(node: fx.Node, importer: Any, index: int) -> relax.Expr:
    """Stand for a result that only converters of this file take, which do not read it."""
    like = node.meta["val"][index]
    return importer.block_builder.emit(op.zeros(list(like.shape), str(like.dtype).removeprefix("torch.")))


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
    padding, ceil_mode, count_pad = list(node.args[4]), bool(node.args[5]), bool(node.args[6])
    divisor = node.args[7] if len(node.args) > 7 else None
    emit, dtype = importer.block_builder.emit, str(x.ty.dtype)
    if ceil_mode:
        raise NotImplementedError("the gradient of an average pool with ceil_mode")
    batch, channels, height, width = dims_of(x)
    rows, columns = dims_of(gradient)[2:]
    counts = _window_counts((height, width), (rows, columns), size, stride, padding, count_pad, divisor)
    shared = emit(op.multiply(gradient, relax.const((1.0 / counts).to(getattr(torch, dtype)).numpy(), dtype)))
    planes = emit(op.reshape(shared, [batch * channels, 1, rows, columns]))
    ones = relax.const(torch.ones(1, 1, *size, dtype=getattr(torch, dtype)).numpy(), dtype)
    left_over = [
        n - ((m - 1) * s - 2 * p + k)
        for n, m, s, p, k in zip((height, width), (rows, columns), stride, padding, size, strict=True)
    ]
    spread = emit(
        op.nn.conv2d_transpose(
            planes, ones, strides=stride, padding=padding * 2, output_padding=left_over, out_dtype=dtype
        )
    )
    return emit(op.reshape(spread, [batch, channels, height, width]))


def _window_counts(
    sizes: tuple[int, int],
    made: tuple[int, int],
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    count_pad: bool,
    divisor: int | None,
) -> torch.Tensor:
    """How many elements torch divides each window's sum by, shape (rows, columns)."""
    if divisor or count_pad:
        return torch.full(made, float(divisor or math.prod(size)), dtype=torch.float64)
    inside = [
        torch.tensor([min(r * st - p + k, n) - max(r * st - p, 0) for r in range(m)], dtype=torch.float64)
        for n, m, k, st, p in zip(sizes, made, size, stride, padding, strict=True)
    ]
    return inside[0][:, None] * inside[1][None, :]


def _embedding_bag(node: fx.Node, importer: Any) -> relax.Expr:
    """(sum or mean of the rows of each bag, and three results that the gradient does not need)."""
    weight, index = (importer.env[n] for n in node.args[:2])
    bags, emit = _bags(node, importer), importer.block_builder.emit
    mode, per_sample = arg_of(node, 4, "mode", 0), arg_of(node, 6, "per_sample_weights")
    if mode > 1 or per_sample is not None or arg_of(node, 8, "padding_idx", -1) >= 0:
        raise NotImplementedError("a maximum over bags, weighted bags, or a padding index, in training")
    rows = emit(op.take(weight, emit(op.reshape(index, bags)), axis=0, mode="clip"))
    y = emit((op.mean if mode else op.sum)(rows, axis=1))
    return relax.Tuple([y, *(_unread(node, importer, i) for i in (1, 2, 3))])


def _bags(node: fx.Node, importer: Any, first: int = 1) -> list[int]:
    """Return (bags, length) where all bags have one known length; arguments from `first` are indices and offsets."""
    (count,) = dims_of(importer.env[node.args[first]])
    offsets = node.args[first + 1]
    (num_bags,) = offsets.meta["val"].shape
    if "arange" not in str(offsets.target) or offsets.args != (0, count, count // num_bags):
        raise NotImplementedError("bags of data-dependent length")
    return [num_bags, count // num_bags]


def _embedding_bag_backward(node: fx.Node, importer: Any) -> relax.Expr:
    """Each row gets the gradients of the bags that it is in, divided by the bag's length for a mean."""
    gradient, index = (importer.env[n] for n in node.args[:2])
    rows, mode, emit, dtype = (
        node.args[6],
        node.args[8],
        importer.block_builder.emit,
        str(importer.env[node.args[0]].ty.dtype),
    )
    (num_bags, length), width = _bags(node, importer), dims_of(gradient)[1]
    shared = emit(op.broadcast_to(emit(op.reshape(gradient, [num_bags, 1, width])), [num_bags, length, width]))
    if mode == 1:
        shared = emit(op.divide(shared, relax.const(float(length), dtype)))
    updates = emit(op.reshape(shared, [num_bags * length, width]))
    places = emit(op.reshape(index, [num_bags * length, 1]))
    return emit(op.scatter_nd(emit(op.zeros([rows, width], dtype)), places, updates, "add"))


BACKWARD: dict[str, Callable[[fx.Node, Any], Any]] = {
    "convolution_backward.default": _convolution_backward,
    "max_pool2d_with_indices.default": _max_pool2d_with_indices,
    "max_pool2d_with_indices_backward.default": _max_pool2d_backward,
    "avg_pool2d_backward.default": _avg_pool2d_backward,
    "_embedding_bag.default": _embedding_bag,
    "_embedding_bag_backward.default": _embedding_bag_backward,
}
