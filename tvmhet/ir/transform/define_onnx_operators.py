"""Write out ONNX operators that TVM lacks and that the standard does not define by simpler ones.

    LpNormalization(x)           ──►  x / ReduceL2(x), 0 where the norm is 0
    IsInf(x), of one sign        ──►  x == infinity of that sign
    quantised operators          ──►  the same in float32 (`onnx_quantised.py`)
    ConvTranspose, output_shape  ──►  the same with the pads that give this shape
    Pow(x, n), of unlike dtypes  ──►  Pow(x, Cast(n)); of integers in float64
    ReverseSequence(x, lengths)  ──►  GatherElements(x, the place of each element before)
    CumProd(x)                   ──►  x times itself moved on by 1, 2, 4, ..
    Col2Im(x)                    ──►  ConvTranspose(x, each place of a block alone)
    EyeLike(x), Dropout's mask   ──►  constants
    DFT, STFT                    ──►  products with cosines and sines (`onnx_fourier.py`)
    Resize where TVM lacks it, Upsample  ──►  gathered or multiplied along each axis (`onnx_resize.py`)

Left as they are, and so refused later: normalisations and tests of
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
from tvmhet.ir.onnx_quantised import (
    define_conv_integer,
    define_dequantize_linear,
    define_qlinear_conv,
    define_qlinear_matmul,
    define_quantize_linear,
)
from tvmhet.ir.onnx_resize import define_resize

if TYPE_CHECKING:
    import onnx

_CAST_LIKE = 15
_MASK_OF_BOOLS = 10
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


def _cum_prod(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    shape, axis_of = made.known.shape(node.input[0]), made.known.values.get(node.input[1])
    if shape is None or axis_of is None:
        return False
    axis = int(axis_of) % len(shape)
    size = shape[axis]
    one = made.add("CastLike", made.constant(1, "float32"), node.input[0])

    def moved(value: str, by: int) -> str:
        ones = made.add("Expand", one, made.constant([*shape[:axis], by, *shape[axis + 1 :]], "int64"))
        rest = made.add("Gather", value, made.constant(np.arange(size - by), "int64"), axis=axis)
        return made.add("Concat", ones, rest, axis=axis)

    def turned(value: str, result: str | None = None) -> str:
        places = np.arange(size)[:: -1 if attributes.get("reverse", 0) else 1]
        return made.add("Gather", value, made.constant(places, "int64"), axis=axis, result=result)

    value = turned(node.input[0])
    if attributes.get("exclusive", 0):
        value = moved(value, 1)
    for k in range((size - 1).bit_length()):
        value = made.add("Mul", value, moved(value, 2**k))
    turned(value, result=node.output[0])
    return True


def _col2im(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    shape, dtype = made.known.shape(node.input[0]), made.known.dtype(node.input[0])
    image, block = (made.known.values.get(name) for name in node.input[1:])
    if shape is None or dtype is None or dtype.kind != "f" or image is None or block is None:
        return False
    sizes, spans = image.tolist(), block.tolist()
    strides, dilations = (list(attributes.get(a) or [1] * len(spans)) for a in ("strides", "dilations"))
    pads = list(attributes.get("pads") or [0] * (2 * len(spans)))
    steps, beyond = [], []
    for i, size in enumerate(sizes):
        room = size + pads[i] + pads[i + len(spans)] - (spans[i] - 1) * dilations[i] - 1
        steps.append(room // strides[i] + 1)
        beyond.append(room % strides[i])
    num_values = math.prod(spans)
    columns = made.add("Reshape", node.input[0], made.constant([-1, num_values, *steps], "int64"))
    places = made.constant(np.eye(num_values).reshape(num_values, 1, *spans), dtype)
    how: dict[str, Any] = {"strides": strides, "dilations": dilations, "pads": pads, "output_padding": beyond}
    total = made.add("ConvTranspose", columns, places, kernel_shape=spans, **how)
    made.add("Reshape", total, made.constant([shape[0], -1, *sizes], "int64"), result=node.output[0])
    return True


def _eye_like(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    import onnx

    shape, dtype = made.known.shape(node.input[0]), made.known.dtype(node.input[0])
    if "dtype" in attributes:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(attributes["dtype"])
    if shape is None or dtype is None:
        return False
    eye = np.eye(shape[0], shape[1], int(attributes.get("k", 0))).astype(dtype)
    made.add("Constant", value=onnx.numpy_helper.from_array(eye), result=node.output[0])
    return True


def _dropout(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    """Of inference, where the mask is asked for: nothing is dropped."""
    del attributes
    shape, training = made.known.shape(node.input[0]), (*node.input, "", "")[2]
    if len(node.output) < 2 or not node.output[1] or shape is None or made.opset < _MASK_OF_BOOLS:
        return False
    if training and (made.known.values.get(training) is None or made.known.values[training].any()):
        return False
    made.add("Identity", node.input[0], result=node.output[0])
    made.add("Expand", made.constant(True, "bool"), made.constant(shape, "int64"), result=node.output[1])
    return True


_DEFINITIONS: Mapping[str, Write] = {
    "LpNormalization": _lp_normalization,
    "IsInf": _is_inf,
    "QLinearMatMul": define_qlinear_matmul,
    "QLinearConv": define_qlinear_conv,
    "ConvInteger": define_conv_integer,
    "ConvTranspose": _conv_transpose,
    "Pow": _pow,
    "ReverseSequence": _reverse_sequence,
    "CumProd": _cum_prod,
    "Col2Im": _col2im,
    "EyeLike": _eye_like,
    "Dropout": _dropout,
    "QuantizeLinear": define_quantize_linear,
    "DequantizeLinear": define_dequantize_linear,
    "DFT": define_dft,
    "STFT": define_stft,
    "Resize": define_resize,
    "Upsample": define_resize,
}
