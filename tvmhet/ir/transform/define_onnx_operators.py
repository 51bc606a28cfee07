"""Write out ONNX operators that TVM lacks and that the standard does not define by simpler ones.

    LpNormalization(x)           ──►  x / ReduceL2(x), 0 where the norm is 0
    IsInf(x), of one sign        ──►  x == infinity of that sign
    QLinearMatMul, QLinearConv   ──►  DequantizeLinear of both operands, MatMul or Conv, QuantizeLinear
    ConvInteger(x, w, x0, w0)    ──►  Cast(Conv(x - x0, w - w0)): sums beyond 2^24 are rounded as float32 is

What quantised models hold is computed in float32, on kernels of float32: the scales are those of the model, and sums
differ from those of integers by float32's rounding. Left as they are, and so refused later: normalisations and tests of
one sign before operator set 15, norms of another order than 1 or 2. The model that was given is left as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx

_SCALES_BY_CHANNEL = 13  # the operator set since which scales may be vectors, with an axis
_CAST_LIKE = 15
_AXES_AS_INPUT = 18  # of reductions other than sums


def define_onnx_operators(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the operators of `_DEFINITIONS` written out where they can be."""
    import onnx

    opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 1)
    if not any(n.op_type in _DEFINITIONS for n in proto.graph.node):
        return proto
    out = onnx.ModelProto()
    out.CopyFrom(proto)
    del out.graph.node[:]
    for index, node in enumerate(proto.graph.node):
        define = _DEFINITIONS.get(node.op_type)
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        made = _Nodes(f"{node.op_type}_{index}_of_tvmhet", opset)
        if define is not None and define(made, node, attributes):
            out.graph.node.extend(made.nodes)
        else:
            out.graph.node.append(node)
    return out


class _Nodes:
    """The nodes of one definition, in order; their results are named after it."""

    def __init__(self, prefix: str, opset: int) -> None:
        self.nodes: list[Any] = []
        self.opset = opset
        self._prefix = prefix

    def add(self, operator: str, *inputs: str, result: str | None = None, **attributes: Any) -> str:
        import onnx

        name = result or f"{self._prefix}_{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    def constant(self, value: Any, dtype: str) -> str:
        import onnx

        return self.add("Constant", value=onnx.numpy_helper.from_array(np.array(value, dtype)))

    def axis(self, axis: int) -> dict[str, Any]:
        """The axis of scales that may be vectors."""
        return {"axis": axis} if self.opset >= _SCALES_BY_CHANNEL else {}

    def cast(self, value: str, dtype: str) -> str:
        import onnx

        return self.add("Cast", value, to=onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def _lp_normalization(made: _Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
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


def _is_inf(made: _Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    positive, negative = attributes.get("detect_positive", 1), attributes.get("detect_negative", 1)
    if bool(positive) == bool(negative) or made.opset < _CAST_LIKE:
        return False
    infinity = made.constant(math.inf if positive else -math.inf, "float32")
    made.add("Equal", node.input[0], made.add("CastLike", infinity, node.input[0]), result=node.output[0])
    return True


def _qlinear_matmul(made: _Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    """Scales are numbers, of rows of the first operand and the result, of columns of the second."""
    del attributes
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = node.input
    left = made.add("DequantizeLinear", a, made.cast(a_scale, "float32"), a_zero, **made.axis(-2))
    right = made.add("DequantizeLinear", b, made.cast(b_scale, "float32"), b_zero, **made.axis(-1))
    product = made.add("MatMul", left, right)
    made.add("QuantizeLinear", product, made.cast(y_scale, "float32"), y_zero, result=node.output[0], **made.axis(-2))
    return True


def _qlinear_conv(made: _Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, *bias = node.input
    image = made.add("DequantizeLinear", x, x_scale, x_zero)
    weight = made.add("DequantizeLinear", w, w_scale, w_zero, **made.axis(0))
    if bias and bias[0]:
        bias = [made.add("Mul", made.cast(bias[0], "float32"), made.add("Mul", x_scale, w_scale))]
    result = made.add("Conv", image, weight, *(b for b in bias if b), **attributes)
    made.add("QuantizeLinear", result, y_scale, y_zero, result=node.output[0])
    return True


def _conv_integer(made: _Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
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


_DEFINITIONS: Mapping[str, Callable[[_Nodes, Any, Mapping[str, Any]], bool]] = {
    "LpNormalization": _lp_normalization,
    "IsInf": _is_inf,
    "QLinearMatMul": _qlinear_matmul,
    "QLinearConv": _qlinear_conv,
    "ConvInteger": _conv_integer,
}
