"""fx -> Relax converters of operators that only backward graphs have, in forms that forward kernels compute.

The gradient of a convolution is two convolutions: of the weight, the input correlated with the output's gradient; of
the input, a transposed convolution. Layouts stay NCHW and OIHW, so that the library and our CPU rules take them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from tvm import relax

from tvmhet.ir.fx_node import arg_of, dims_of, unread_result
from tvmhet.ir.torch_pooling import POOLING_BACKWARD

op = relax.op

#: Relax convolutions by number of spatial dims, and their channel-first layouts.
_CONV = {1: op.nn.conv1d, 2: op.nn.conv2d, 3: op.nn.conv3d}
_CONV_TRANSPOSE = {1: op.nn.conv1d_transpose, 2: op.nn.conv2d_transpose, 3: op.nn.conv3d_transpose}


def _convolution_backward(node: fx.Node, importer: Any) -> relax.Expr:
    """(gradient of the input, of the weight, of the bias); those that nobody asks for are empty tuples' stand-ins."""
    gradient, x, weight = (importer.env[n] for n in node.args[:3])
    stride, padding, dilation, transposed, _, groups, wanted = node.args[4:11]
    emit, window = importer.block_builder.emit, _Window(stride, padding, dilation, groups)
    results: list[relax.Expr] = []
    if wanted[0]:
        of_input = _correlation if transposed else _input_gradient
        results.append(of_input(emit, gradient, x, weight, window))
    if wanted[1]:  # a transposed convolution is the gradient of a plain one, so its operands change places
        made, read = (x, gradient) if transposed else (gradient, x)
        results.append(_weight_gradient(emit, made, read, weight, window))
    if wanted[2]:
        results.append(emit(op.sum(gradient, [0, *range(2, 2 + len(stride))])))
    made = iter(results)
    nothing = relax.const(0.0, str(gradient.ty.dtype))
    return emit(relax.Tuple([next(made) if want else nothing for want in wanted]))


@dataclass(frozen=True, slots=True)
class _Window:
    """How a convolution walks over its input."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int


def _correlation(
    emit: Callable[..., Any], gradient: relax.Expr, x: relax.Expr, weight: relax.Expr, window: _Window
) -> relax.Expr:
    """The gradient of a transposed convolution's input: the plain convolution of its output's gradient."""
    return emit(
        _CONV[len(window.stride)](
            gradient,
            weight,
            strides=list(window.stride),
            padding=list(window.padding) * 2,
            dilation=list(window.dilation),
            groups=window.groups,
            out_dtype=str(x.ty.dtype),
        )
    )


def _input_gradient(
    emit: Callable[..., Any], gradient: relax.Expr, x: relax.Expr, weight: relax.Expr, window: _Window
) -> relax.Expr:
    stride, padding, dilation = window.stride, window.padding, window.dilation
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
            groups=window.groups,
            out_dtype=str(x.ty.dtype),
        )
    )


def _weight_gradient(
    emit: Callable[..., Any], gradient: relax.Expr, x: relax.Expr, weight: relax.Expr, window: _Window
) -> relax.Expr:
    """Correlate input and output gradient over the batch: channels play the batch, the batch plays the channels.

    x as (I, N, ...), the gradient as weights (O, N, ...), stride and dilation exchanged: gives (I, O, kernel).
    For g groups, x as (I/g, g N, ...) and a grouped convolution.
    """
    rank, groups = len(window.stride), window.groups
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
            strides=list(window.dilation),
            padding=list(window.padding) * 2,
            dilation=list(window.stride),
            groups=groups,
            out_dtype=str(x.ty.dtype),
        )
    )
    if dims_of(product)[2:] != kernel:  # the stride left part of the input unread
        product = emit(op.strided_slice(product, spatial, [0] * rank, kernel))
    return emit(op.permute_dims(product, [1, 0, *spatial]))


def _embedding_bag(node: fx.Node, importer: Any) -> relax.Expr:
    """(sum or mean of the rows of each bag, and three results that the gradient does not need)."""
    weight, index = (importer.env[n] for n in node.args[:2])
    bags, emit = _bags(node, importer), importer.block_builder.emit
    mode, per_sample = arg_of(node, 4, "mode", 0), arg_of(node, 6, "per_sample_weights")
    if mode > 1 or per_sample is not None or arg_of(node, 8, "padding_idx", -1) >= 0:
        raise NotImplementedError("a maximum over bags, weighted bags, or a padding index, in training")
    rows = emit(op.take(weight, emit(op.reshape(index, bags)), axis=0, mode="clip"))
    y = emit((op.mean if mode else op.sum)(rows, axis=1))
    return relax.Tuple([y, *(unread_result(node, importer, i) for i in (1, 2, 3))])


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
    rows, mode = node.args[6], node.args[8]
    emit, dtype = importer.block_builder.emit, str(gradient.ty.dtype)
    (num_bags, length), width = _bags(node, importer), dims_of(gradient)[1]
    shared = emit(op.broadcast_to(emit(op.reshape(gradient, [num_bags, 1, width])), [num_bags, length, width]))
    if mode == 1:
        shared = emit(op.divide(shared, relax.const(float(length), dtype)))
    updates = emit(op.reshape(shared, [num_bags * length, width]))
    places = emit(op.reshape(index, [num_bags * length, 1]))
    return emit(op.scatter_nd(emit(op.zeros([rows, width], dtype)), places, updates, "add"))


BACKWARD: dict[str, Callable[[fx.Node, Any], Any]] = {
    "convolution_backward.default": _convolution_backward,
    "_embedding_bag.default": _embedding_bag,
    "_embedding_bag_backward.default": _embedding_bag_backward,
    **POOLING_BACKWARD,
}
