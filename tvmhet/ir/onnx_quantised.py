"""Quantised operators of ONNX models in simpler ones.

    QLinearMatMul, QLinearConv   ──►  DequantizeLinear of both operands, MatMul or Conv, QuantizeLinear
    ConvInteger(x, w, x0, w0)    ──►  Cast(Conv(x - x0, w - w0)): sums beyond 2^24 are rounded as float32 is
    QuantizeLinear and DequantizeLinear by blocks  ──►  the same arithmetic, the scale of each element gathered

What quantised models hold is computed in float32, on kernels of float32: the scales are those of the model, and sums
differ from those of integers by float32's rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tvmhet.ir.onnx_nodes import Nodes


def define_qlinear_matmul(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    """Write out a product of quantised matrices.

    Scales are numbers, of rows of the first operand and the result, of columns of the second.
    """
    del attributes
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = node.input
    left = made.add("DequantizeLinear", a, made.cast(a_scale, "float32"), a_zero, **made.axis(-2))
    right = made.add("DequantizeLinear", b, made.cast(b_scale, "float32"), b_zero, **made.axis(-1))
    product = made.add("MatMul", left, right)
    made.add("QuantizeLinear", product, made.cast(y_scale, "float32"), y_zero, result=node.output[0], **made.axis(-2))
    return True


def define_qlinear_conv(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    """Write out a convolution of quantised images."""
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, *bias = node.input
    image = made.add("DequantizeLinear", x, x_scale, x_zero)
    weight = made.add("DequantizeLinear", w, w_scale, w_zero, **made.axis(0))
    if bias and bias[0]:
        bias = [made.add("Mul", made.cast(bias[0], "float32"), made.add("Mul", x_scale, w_scale))]
    result = made.add("Conv", image, weight, *(b for b in bias if b), **attributes)
    made.add("QuantizeLinear", result, y_scale, y_zero, result=node.output[0])
    return True


def define_conv_integer(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    """Write out a convolution of integers."""
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


def _by_blocks(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> tuple[str, str, np.dtype[Any]] | None:
    """Return scale and zero point (as such a float) of each element, and that dtype; None if there are no blocks."""
    shape, dtype = made.known.shape(node.input[0]), made.known.dtype(node.input[1])
    size = int(attributes.get("block_size", 0))
    if not size or shape is None or dtype is None:
        return None
    axis = int(attributes.get("axis", 1)) % len(shape)
    blocks = made.constant(np.arange(shape[axis]) // size, "int64")
    scale = made.add("Gather", node.input[1], blocks, axis=axis)
    zero = (*node.input, "")[2]
    if not zero:
        return scale, made.constant(0, dtype), dtype
    return scale, made.cast(made.add("Gather", zero, blocks, axis=axis), dtype), dtype


def define_dequantize_linear(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    """Write out a DequantizeLinear by blocks; return False for others."""
    found = _by_blocks(made, node, attributes)
    if found is None:
        return False
    scale, zero, dtype = found
    made.add("Mul", made.add("Sub", made.cast(node.input[0], dtype), zero), scale, result=node.output[0])
    return True


def define_quantize_linear(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    """Write out a QuantizeLinear by blocks; return False for others."""
    import onnx

    if len(node.input) > 2 and node.input[2]:
        wanted = made.known.dtype(node.input[2])
    else:
        wanted = onnx.helper.tensor_dtype_to_np_dtype(attributes.get("output_dtype") or onnx.TensorProto.UINT8)
    found = _by_blocks(made, node, attributes)
    if found is None or wanted is None or wanted.kind not in "iu":
        return False
    scale, zero, dtype = found
    limits = (made.constant(getattr(np.iinfo(wanted), end), dtype) for end in ("min", "max"))
    steps = made.add("Add", made.add("Round", made.add("Div", node.input[0], scale)), zero)
    made.cast(made.add("Clip", steps, *limits), wanted, result=node.output[0])
    return True
