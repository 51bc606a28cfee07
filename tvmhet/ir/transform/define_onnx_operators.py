"""Write out ONNX operators that TVM lacks and that the standard does not define by simpler ones.

    LpNormalization(x)           ──►  x / ReduceL2(x), 0 where the norm is 0
    IsInf(x), of one sign        ──►  x == infinity of that sign
    QLinearMatMul, QLinearConv   ──►  DequantizeLinear of both operands, MatMul or Conv, QuantizeLinear
    ConvInteger(x, w, x0, w0)    ──►  Cast(Conv(x - x0, w - w0)): sums beyond 2^24 are rounded as float32 is
    ConvTranspose, output_shape  ──►  the same with the pads that give this shape
    Pow(x, n), of unlike dtypes  ──►  Pow(x, Cast(n)); of integers in float64
    ReverseSequence(x, lengths)  ──►  GatherElements(x, the place of each element before)
    DFT, STFT                    ──►  products with cosines and sines (`onnx_fourier.py`)

What quantised models hold is computed in float32, on kernels of float32: the scales are those of the model, and sums
differ from those of integers by float32's rounding. Left as they are, and so refused later: normalisations and tests of
one sign before operator set 15, norms of another order than 1 or 2, and what needs dims or lengths that are not known.
The model that was given is left as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmhet.ir.onnx_fourier import define_dft, define_stft
from tvmhet.ir.onnx_nodes import Nodes, Write, write_out

if TYPE_CHECKING:
    import onnx

_CAST_LIKE = 15
_AXES_AS_INPUT = 18  # of reductions other than sums


def define_onnx_operators(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the operators of `_DEFINITIONS` written out where they can be."""
    return write_out(proto, _DEFINITIONS)


def _lp_normalization(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    operator = {1: "ReduceL1", 2: "ReduceL2"}.get(int(attributes.get("p", 2)))
    if operator is None or made.opset < _CAST_LIKE:
        return False
    x, axes = node.input[0], [int(attributes.get("axis", -1))]
    if made.opset < _AXES_AS_INPUT:
        norm = made.add(operator, x, axes=axes, keepdims=1)
    else:
        norm = made.add(operator, x, made.constant(axes, "int64"), keepdims=1)
    zero = made.add("CastLike", made.constant(0, "float32"), x)
    one = made.add("CastLike", made.constant(1, "float32"), x)
    empty = made.add("Equal", norm, zero)
    made.add("Div", x, made.add("Where", empty, one, norm), result=node.output[0])
    return True


def _is_inf(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    positive, negative = attributes.get("detect_positive", 1), attributes.get("detect_negative", 1)
    if bool(positive) == bool(negative) or made.opset < _CAST_LIKE:
        return False
    infinity = made.constant(math.inf if positive else -math.inf, "float32")
    made.add("Equal", node.input[0], made.add("CastLike", infinity, node.input[0]), result=node.output[0])
    return True


def _qlinear_matmul(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    """Scales are numbers, of rows of the first operand and the result, of columns of the second."""
    del attributes
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = node.input
    left = made.add("DequantizeLinear", a, made.cast(a_scale, "float32"), a_zero, **made.axis(-2))
    right = made.add("DequantizeLinear", b, made.cast(b_scale, "float32"), b_zero, **made.axis(-1))
    product = made.add("MatMul", left, right)
    made.add("QuantizeLinear", product, made.cast(y_scale, "float32"), y_zero, result=node.output[0], **made.axis(-2))
    return True


def _qlinear_conv(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, *bias = node.input
    image = made.add("DequantizeLinear", x, x_scale, x_zero)
    weight = made.add("DequantizeLinear", w, w_scale, w_zero, **made.axis(0))
    if bias and bias[0]:
        bias = [made.add("Mul", made.cast(bias[0], "float32"), made.add("Mul", x_scale, w_scale))]
    result = made.add("Conv", image, weight, *(b for b in bias if b), **attributes)
    made.add("QuantizeLinear", result, y_scale, y_zero, result=node.output[0])
    return True


def _conv_integer(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    import onnx

    x, w, x_zero, w_zero = (*node.input, "", "")[:4]
    image, weight = made.cast(x, "float32"), made.cast(w, "float32")
    if x_zero:
        image = made.add("Sub", image, made.cast(x_zero, "float32"))
    if w_zero:  # a number, or one for each channel: channels are the last axis of the kernel, flattened and turned
        flat = made.add("Transpose", made.add("Flatten", weight, axis=1), perm=[1, 0])
        less = made.add("Transpose", made.add("Sub", flat, made.cast(w_zero, "float32")), perm=[1, 0])
        weight = made.add("Reshape", less, made.add("Shape", weight))
    total = made.add("Conv", image, weight, **attributes)
    made.add("Cast", total, result=node.output[0], to=onnx.TensorProto.INT32)
    return True


def _conv_transpose(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    wanted = attributes.get("output_shape")
    image, kernel = made.known.shape(node.input[0]), made.known.shape(node.input[1])
    if not wanted or image is None or kernel is None:
        return False
    num_dims = len(image) - 2
    strides, dilations = (list(attributes.get(a) or [1] * num_dims) for a in ("strides", "dilations"))
    extra = list(attributes.get("output_padding") or [0] * num_dims)
    before, after = [], []
    for i, size in enumerate(image[2:]):
        span = strides[i] * (size - 1) + extra[i] + (kernel[i + 2] - 1) * dilations[i] + 1
        pads = span - wanted[-num_dims:][i]
        extra[i] += max(0, -pads)
        less, more = max(0, pads) // 2, max(0, pads) - max(0, pads) // 2
        at_end = attributes.get("auto_pad", b"NOTSET") == b"SAME_UPPER"
        before.append(less if at_end else more)
        after.append(more if at_end else less)
    kept = {k: v for k, v in attributes.items() if k not in ("output_shape", "auto_pad", "pads", "output_padding")}
    made.add(
        "ConvTranspose", *node.input, result=node.output[0], pads=before + after, output_padding=extra, **kept
    )  # fmt: skip
    return True


def _pow(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    del attributes
    base, exponent = (made.known.dtype(name) for name in node.input)
    if base is None or exponent is None or (base == exponent and base.kind == "f"):
        return False
    if base.kind == "f":
        made.add("Pow", node.input[0], made.cast(node.input[1], base), result=node.output[0])
    else:
        made.cast(made.add("Pow", *(made.cast(name, "float64") for name in node.input)), base, result=node.output[0])
    return True


def _reverse_sequence(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    shape = made.known.shape(node.input[0])
    if shape is None:
        return False
    batch, time = int(attributes.get("batch_axis", 1)), int(attributes.get("time_axis", 0))
    steps = made.constant(np.arange(shape[time]).reshape([-1 if a == time else 1 for a in range(len(shape))]), "int64")
    lengths = made.on_axes("Unsqueeze", made.cast(node.input[1], "int64"), [a for a in range(len(shape)) if a != batch])
    turned = made.add("Sub", made.add("Sub", lengths, made.constant(1, "int64")), steps)
    places = made.add("Where", made.add("Less", steps, lengths), turned, steps)
    places = made.add("Expand", places, made.constant(shape, "int64"))
    made.add("GatherElements", node.input[0], places, result=node.output[0], axis=time)
    return True


_DEFINITIONS: Mapping[str, Write] = {
    "LpNormalization": _lp_normalization,
    "IsInf": _is_inf,
    "QLinearMatMul": _qlinear_matmul,
    "QLinearConv": _qlinear_conv,
    "ConvInteger": _conv_integer,
    "ConvTranspose": _conv_transpose,
    "Pow": _pow,
    "ReverseSequence": _reverse_sequence,
    "DFT": define_dft,
    "STFT": define_stft,
}
