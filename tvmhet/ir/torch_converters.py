"""Our own fx -> Relax converters, where TVM's are wrong, missing, or leave more operators than the model has.

Each takes (node, importer) like TVM's own; `importer.env` maps fx nodes to Relax expressions. Keyed by the operator's
name with overload, as fx spells it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from tvm import relax

from tvmhet.ir.fx_node import arg_of, dims_of, result_dtype
from tvmhet.ir.torch_attention import ATTENTION
from tvmhet.ir.torch_indexing import INDEXING
from tvmhet.ir.torch_norms import NORMS
from tvmhet.ir.torch_pooling import POOLING
from tvmhet.ir.torch_resize import RESIZING, RESIZING_KEPT

op = relax.op
_aten = torch.ops.aten

#: Composite operators that TVM takes whole (or one of our converters does), so that export must not take them apart.
KEPT_OPERATORS = (
    _aten.linear.default,
    _aten.matmul.default,
    _aten.scaled_dot_product_attention.default,
    _aten.layer_norm.default,
    _aten.group_norm.default,
    _aten.silu.default,
    _aten.hardswish.default,
    _aten.hardsigmoid.default,
    _aten.max_pool2d.default,
    _aten.adaptive_avg_pool2d.default,
    _aten.one_hot.default,
    _aten.embedding_bag.padding_idx,
    *RESIZING_KEPT,
)


#: What a sum and a product of booleans are; TVM's own cannot be compiled.
_OF_BOOLEANS = {op.add: op.logical_or, op.multiply: op.logical_and}


def _binary(relax_op: Callable[[Any, Any], Any]) -> Callable[[fx.Node, Any], Any]:
    """Promote both operands as torch does, then apply; `alpha` scales the second (TVM's converters do neither)."""

    def convert(node: fx.Node, importer: Any) -> relax.Expr:
        emit = importer.block_builder.emit
        values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args[:2]]
        dtype = str(torch.result_type(*values)).removeprefix("torch.")
        result = result_dtype(node)
        dtype = dtype if result == "bool" else result
        operands = [_as_dtype(importer, a, dtype) for a in node.args[:2]]
        if dtype == "bool" and relax_op in _OF_BOOLEANS:
            return emit(_OF_BOOLEANS[relax_op](*operands))
        alpha = node.kwargs.get("alpha", 1)
        if alpha != 1:
            operands[1] = emit(op.multiply(operands[1], relax.const(alpha, dtype)))
        return emit(relax_op(*operands))

    return convert


def _as_dtype(importer: Any, operand: Any, dtype: str) -> relax.Expr:
    expr = importer.env[operand] if isinstance(operand, fx.Node) else operand
    if not isinstance(expr, relax.Expr):
        return relax.const(expr, dtype)
    return expr if str(expr.ty.dtype) == dtype else importer.block_builder.emit(op.astype(expr, dtype))


def _linear(node: fx.Node, importer: Any) -> relax.Expr:
    """x @ w.T + b in the operands' own dtype (TVM's converter always gives float32)."""
    x, weight, bias = importer.env[node.args[0]], importer.env[node.args[1]], arg_of(node, 2, "bias")
    emit = importer.block_builder.emit
    product = emit(op.matmul(x, emit(op.permute_dims(weight)), out_dtype=result_dtype(node)))
    return product if bias is None else emit(op.add(product, importer.env[bias]))


def _matmul(node: fx.Node, importer: Any) -> relax.Expr:
    """A product in the operands' own dtype (TVM's converter always gives float32)."""
    a, b = importer.env[node.args[0]], importer.env[node.args[1]]
    return importer.block_builder.emit(op.matmul(a, b, out_dtype=result_dtype(node)))


def _addmm(node: fx.Node, importer: Any) -> relax.Expr:
    """beta * c + alpha * (a @ b)."""
    c, a, b = (importer.env[n] for n in node.args[:3])
    emit, dtype = importer.block_builder.emit, result_dtype(node)
    product = emit(op.matmul(a, b, out_dtype=dtype))
    for name, side in (("alpha", "product"), ("beta", "c")):
        factor = node.kwargs.get(name, 1)
        if factor != 1 and side == "product":
            product = emit(op.multiply(product, relax.const(factor, dtype)))
        elif factor != 1:
            c = emit(op.multiply(c, relax.const(factor, dtype)))
    return emit(op.add(product, c))


def _cumsum(node: fx.Node, importer: Any) -> relax.Expr:
    """Sum integers and booleans as int64, as torch does (TVM would sum booleans as booleans)."""
    x, dtype = importer.env[node.args[0]], result_dtype(node)
    emit = importer.block_builder.emit
    x = x if str(x.ty.dtype) == dtype else emit(op.astype(x, dtype))
    return emit(op.cumsum(x, int(arg_of(node, 1, "dim")), dtype))


def _elu(node: fx.Node, importer: Any) -> relax.Expr:
    """scale * x above zero, scale * alpha * (exp(x * input_scale) - 1) below (TVM's converter drops both scales)."""
    x, dtype = importer.env[node.args[0]], result_dtype(node)
    emit = importer.block_builder.emit
    alpha, scale, input_scale = (
        float(arg_of(node, i + 1, n, 1)) for i, n in enumerate(("alpha", "scale", "input_scale"))
    )
    below = emit(op.exp(emit(op.multiply(x, relax.const(input_scale, dtype)))))
    below = emit(op.multiply(emit(op.subtract(below, relax.const(1.0, dtype))), relax.const(alpha * scale, dtype)))
    above = x if scale == 1 else emit(op.multiply(x, relax.const(scale, dtype)))
    return emit(op.where(emit(op.greater(x, relax.const(0.0, dtype))), above, below))


def _div_mode(node: fx.Node, importer: Any) -> relax.Expr:
    """Division rounded towards zero or downwards, in the promoted dtype."""
    emit, dtype, mode = importer.block_builder.emit, result_dtype(node), node.kwargs.get("rounding_mode")
    a, b = (_as_dtype(importer, operand, dtype) for operand in node.args[:2])
    if mode == "floor" and not dtype.startswith(("float", "bfloat")):
        return emit(op.floor_divide(a, b))
    quotient = emit(op.divide(a, b))
    if mode is None or not dtype.startswith(("float", "bfloat")):
        return quotient
    return emit((op.floor if mode == "floor" else op.trunc)(quotient))


def _reduce(reduce_op: Callable[..., Any]) -> Callable[[fx.Node, Any], Any]:
    def convert(node: fx.Node, importer: Any) -> relax.Expr:
        dim = arg_of(node, 1, "dim") or None
        axes = [dim] if isinstance(dim, int) else dim and list(dim)
        return importer.block_builder.emit(
            reduce_op(importer.env[node.args[0]], axes, arg_of(node, 2, "keepdim", False))
        )

    return convert


def _prod_dim(node: fx.Node, importer: Any) -> relax.Expr:
    """The product along one dim; of integers as int64, as torch does."""
    x, keep = _as_dtype(importer, node.args[0], result_dtype(node)), bool(arg_of(node, 2, "keepdim", False))
    return importer.block_builder.emit(op.prod(x, int(node.args[1]), keep))


def _where(node: fx.Node, importer: Any) -> relax.Expr:
    """A choice in the promoted dtype of both values."""
    values = [_as_dtype(importer, a, result_dtype(node)) for a in node.args[1:3]]
    return importer.block_builder.emit(op.where(importer.env[node.args[0]], *values))


def _extreme_dim(node: fx.Node, importer: Any) -> relax.Expr:
    """(largest or smallest values, their positions) along one dim."""
    x, dim, keep = importer.env[node.args[0]], int(node.args[1]), bool(arg_of(node, 2, "keepdim", False))
    value, place = (op.max, op.argmax) if "max" in str(node.target) else (op.min, op.argmin)
    emit = importer.block_builder.emit
    return emit(relax.Tuple([emit(value(x, dim, keep)), emit(place(x, dim, keep))]))


def _topk(node: fx.Node, importer: Any) -> relax.Expr:
    """(k largest or smallest values, their positions) along one dim; in order also where no order is asked for."""
    options = {"axis": arg_of(node, 2, "dim", -1), "largest": arg_of(node, 3, "largest", True)}
    return importer.block_builder.emit(op.topk(importer.env[node.args[0]], node.args[1], **options, dtype="int64"))


def _var_mean(node: fx.Node, importer: Any) -> relax.Expr:
    """(variance, mean) over dims, with torch's correction."""
    x, dtype, keep = importer.env[node.args[0]], str(node.meta["val"][0].dtype)[6:], node.kwargs.get("keepdim", False)
    emit, sizes = importer.block_builder.emit, dims_of(x)
    dims = list(arg_of(node, 1, "dim") or range(len(sizes)))
    count, given = math.prod(sizes[d] for d in dims), node.kwargs.get("correction")
    correction = 1 if given is None else given
    mean = emit(op.mean(x, dims, keepdims=True))
    centred = emit(op.subtract(x, mean))
    var = emit(op.mean(emit(op.multiply(centred, centred)), dims, keepdims=keep))
    if correction:
        scale = count / (count - correction) if count > correction else math.inf  # 0 * inf is no number, as in torch
        var = emit(op.multiply(var, relax.const(scale, dtype)))
    return emit(relax.Tuple([var, mean if keep else emit(op.squeeze(mean, dims))]))


_CONV = {1: op.nn.conv1d, 2: op.nn.conv2d, 3: op.nn.conv3d}
_CONV_TRANSPOSE = {1: op.nn.conv1d_transpose, 2: op.nn.conv2d_transpose, 3: op.nn.conv3d_transpose}


def _convolution(node: fx.Node, importer: Any) -> relax.Expr:
    """Convolution in the operands' own dtype (TVM's converter takes float32 only, and no transposed one of 3 dims)."""
    x, weight, bias, stride, padding, dilation, transposed, extra, groups = node.args
    dtype, rank, emit = result_dtype(node), len(stride), importer.block_builder.emit
    if dtype == "float32" and not (transposed and rank == 3):
        return importer.create_convert_map()["convolution.default"](node)
    options = {"strides": list(stride), "padding": list(padding) * 2, "dilation": list(dilation), "groups": groups}
    if transposed:
        options["output_padding"] = list(extra)
    convolution = (_CONV_TRANSPOSE if transposed else _CONV)[rank]
    y = emit(convolution(importer.env[x], importer.env[weight], **options, out_dtype=dtype))
    if bias is None:
        return y
    return emit(op.add(y, emit(op.reshape(importer.env[bias], [1, -1, *[1] * rank]))))


def _arange(node: fx.Node, importer: Any) -> relax.Expr:
    """start + step * (0 … n - 1) for steps below 0, of which TVM's operator makes too many."""
    step = arg_of(node, 2, "step", 1)
    if not isinstance(step, int) or step >= 0:
        return importer.create_convert_map()["arange.start"](node)
    emit, dtype = importer.block_builder.emit, result_dtype(node)
    places = emit(op.arange(0, int(node.meta["val"].shape[0]), 1, dtype))
    return emit(op.add(emit(op.multiply(places, relax.const(step, dtype))), relax.const(node.args[0], dtype)))


_ARITHMETIC = {
    "add": op.add,
    "sub": op.subtract,
    "mul": op.multiply,
    "div": op.divide,
    "eq": op.equal,
    "ne": op.not_equal,
    "lt": op.less,
    "le": op.less_equal,
    "gt": op.greater,
    "ge": op.greater_equal,
}


def _sampled(node: fx.Node, importer: Any) -> relax.Expr:
    """By our definition: TVM's operator reads coordinates along the second dim. Its shape shows that but for 2 x 2."""
    raise NotImplementedError("TVM samples by grids of another layout")


CONVERTERS: dict[str, Callable[[fx.Node, Any], Any]] = {
    **{f"{name}.{kind}": _binary(f) for name, f in _ARITHMETIC.items() for kind in ("Tensor", "Scalar")},
    "linear.default": _linear,
    "mm.default": _matmul,
    "bmm.default": _matmul,
    "matmul.default": _matmul,
    "addmm.default": _addmm,
    "cumsum.default": _cumsum,
    "grid_sampler_2d.default": _sampled,
    "elu.default": _elu,
    "div.Tensor_mode": _div_mode,
    "div.Scalar_mode": _div_mode,
    "amax.default": _reduce(op.max),
    "amin.default": _reduce(op.min),
    "max.dim": _extreme_dim,
    "min.dim": _extreme_dim,
    "prod.dim_int": _prod_dim,
    "topk.default": _topk,
    "where.self": _where,
    "bitwise_left_shift.Tensor": _binary(op.left_shift),
    "bitwise_right_shift.Tensor": _binary(op.right_shift),
    "var_mean.correction": _var_mean,
    "convolution.default": _convolution,
    "arange.start_step": _arange,
    **ATTENTION,
    **INDEXING,
    **NORMS,
    **POOLING,
    **RESIZING,
}
