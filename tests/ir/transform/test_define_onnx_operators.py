"""What is written out equals ONNX's own reference, and what cannot be is left."""

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tests.ir.test_importers import run
from tvmhet.errors import UnsupportedOperator
from tvmhet.ir.importers import from_onnx
from tvmhet.ir.transform.define_onnx_operators import define_onnx_operators

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 4, 5)).astype("float32")
X[0, 1] = 0
INFINITE = np.array([1, np.inf, -np.inf, np.nan], "float32")
IMAGE, KERNEL = RNG.integers(0, 255, (2, 3, 6, 5), "uint8"), RNG.integers(-128, 127, (4, 3, 3, 2), "int8")
LEFT, RIGHT = RNG.integers(-128, 127, (2, 3, 7), "int8"), RNG.integers(-128, 127, (7, 5), "int8")


def one(value, dtype="float32"):
    return np.array(value, dtype)


def model(operator, operands, result, opset, attributes):
    """One node; its first operand is the model's input, the others are initializers."""
    names = [f"i{i}" if o is not None else "" for i, o in enumerate(operands)]
    x = helper.make_tensor_value_info("i0", helper.np_dtype_to_tensor_dtype(operands[0].dtype), operands[0].shape)
    graph = helper.make_graph(
        [helper.make_node(operator, names, ["y"], **attributes)], "g", [x],
        [helper.make_tensor_value_info("y", result, None)],
        [numpy_helper.from_array(o, n) for n, o in list(zip(names, operands, strict=True))[1:] if o is not None],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


PLANES = RNG.standard_normal((2, 3, 5, 6)).astype("float32")
SPREAD = RNG.standard_normal((3, 4, 3, 2)).astype("float32")
SCALES = RNG.uniform(0.001, 0.01, 4).astype("float32")
CONV = (IMAGE, one(0.02), one(120, "uint8"), KERNEL, SCALES, np.zeros(4, "int8"), one(0.5), one(7, "uint8"))
FLOAT, BOOL, INT32, UINT8, INT8 = (getattr(TensorProto, n) for n in ("FLOAT", "BOOL", "INT32", "UINT8", "INT8"))
PRODUCT = (LEFT, one(0.02), one(3, "int8"), RIGHT, one(0.01), one(-5, "int8"), one(0.2), one(1, "int8"))
BY_COLUMN = (*PRODUCT[:4], RNG.uniform(0.001, 0.01, 5).astype("float32"), np.zeros(5, "int8"), *PRODUCT[6:])
SQUARE = (RNG.integers(-128, 127, (7, 7), "int8"), RNG.uniform(0.001, 0.01, 7).astype("float32"), np.zeros(7, "int8"))
BY_ROW = (*SQUARE, *PRODUCT[3:6], RNG.uniform(0.02, 0.1, 7).astype("float32"), np.zeros(7, "int8"))
COLUMNS = RNG.standard_normal((2, 12, 24)).astype("float32")
SCALES_OF_TWO = RNG.uniform(0.01, 0.02, (3, 4, 3)).astype("float32")
ZEROS_OF_TWO, CODES = (RNG.integers(-9, 9, shape, "int8") for shape in ((3, 4, 3), X.shape))
#: By name: operator, operands, type of the result, operator set, attributes.
CASES = {
    "L2 norm": ("LpNormalization", (X,), FLOAT, 17, {"axis": 1}),
    "L2 norm, axes an input": ("LpNormalization", (X,), FLOAT, 22, {}),
    "L1 norm": ("LpNormalization", (np.abs(X),), FLOAT, 18, {"axis": 0, "p": 1}),
    "L2 norm of float64": ("LpNormalization", (X.astype("float64"),), TensorProto.DOUBLE, 22, {}),
    "inf": ("IsInf", (INFINITE,), BOOL, 20, {"detect_negative": 0}),
    "-inf": ("IsInf", (INFINITE,), BOOL, 20, {"detect_positive": 0}),
    "product": ("QLinearMatMul", PRODUCT, INT8, 13, {}),
    "product before axes": ("QLinearMatMul", PRODUCT, INT8, 10, {}),
    "product, scales by column": ("QLinearMatMul", BY_COLUMN, INT8, 13, {}),
    "product, scales by row": ("QLinearMatMul", BY_ROW, INT8, 13, {}),
    "convolution": ("QLinearConv", CONV, UINT8, 13, {"strides": [2, 1], "pads": [1, 0, 1, 1]}),
    "convolution with bias": ("QLinearConv", (*CONV, RNG.integers(-999, 999, 4, "int32")), UINT8, 13, {}),
    "integers": ("ConvInteger", (IMAGE, KERNEL, one(120, "uint8")), INT32, 10, {"dilations": [2, 1]}),
    "integers, zeros by channel": (
        "ConvInteger", (IMAGE, KERNEL, one(1, "uint8"), np.array([0, 3, -2, 9], "int8")), INT32, 10, {"pads": [1] * 4},
    ),
    "integers without zeros": ("ConvInteger", (IMAGE, KERNEL), INT32, 10, {}),
    "transposed, larger than it would be": ("ConvTranspose", (PLANES, SPREAD), FLOAT, 11, {
        "strides": [3, 2], "output_shape": [16, 13]}),
    "transposed, smaller, odd pads": ("ConvTranspose", (PLANES, SPREAD), FLOAT, 11, {
        "strides": [3, 2], "output_shape": [10, 8]}),
    "transposed, smaller, odd pads at the end": ("ConvTranspose", (PLANES, SPREAD), FLOAT, 11, {
        "strides": [3, 2], "output_shape": [10, 8], "auto_pad": "SAME_UPPER"}),
    "transposed, dilated": ("ConvTranspose", (PLANES, SPREAD), FLOAT, 11, {
        "strides": [3, 2], "dilations": [2, 1], "output_padding": [1, 0], "output_shape": [16, 11]}),
    "power, integer exponent": ("Pow", (X, np.array([2, 3, 0, 1, 4])), FLOAT, 13, {}),
    "power of integers": ("Pow", (np.arange(-7, 8, dtype="int32"), one(5, "int32")), INT32, 13, {}),
    "power of integers, exponent in halves": ("Pow", (np.arange(9), one(1.5)), TensorProto.INT64, 13, {}),
    "running product": ("CumProd", (X, np.array(1)), FLOAT, 26, {}),
    "running product of those before": ("CumProd", (X, np.array(-1)), FLOAT, 26, {"exclusive": 1}),
    "running product from the end": ("CumProd", (X, np.array(0)), FLOAT, 26, {"reverse": 1}),
    "running product of integers after": (
        "CumProd", (np.arange(1, 11, dtype="int32"), np.array(0)), INT32, 26, {"exclusive": 1, "reverse": 1},
    ),
    "blocks to an image": ("Col2Im", (COLUMNS[..., :21], np.array([6, 7]), np.array([2, 3])), FLOAT, 18, {
        "strides": [2, 1], "pads": [1, 0, 1, 2], "dilations": [2, 1]}),
    "blocks side by side": ("Col2Im", (COLUMNS[..., :6], np.array([4, 9]), np.array([2, 3])), FLOAT, 18, {
        "strides": [2, 3]}),
    "blocks to a volume": ("Col2Im", (COLUMNS[..., :12], np.array([3, 3, 4]), np.array([1, 2, 3])), FLOAT, 18, {}),
    "ones along a diagonal": ("EyeLike", (X[0],), INT32, 9, {"dtype": INT32, "k": -1}),
    "ones along the diagonal": ("EyeLike", (X[0],), FLOAT, 22, {}),
    "quantised by blocks": ("QuantizeLinear", (X, SCALES_OF_TWO, ZEROS_OF_TWO), INT8, 21, {"axis": 2, "block_size": 2}),
    "quantised by blocks around zero": ("QuantizeLinear", (X, SCALES_OF_TWO), INT8, 21, {
        "axis": 2, "block_size": 2, "output_dtype": INT8}),
    "from blocks": ("DequantizeLinear", (CODES, SCALES_OF_TWO, ZEROS_OF_TWO), FLOAT, 21, {"axis": -1, "block_size": 2}),
    "in reverse, time first": ("ReverseSequence", (X, np.array([3, 1, 2, 0])), FLOAT, 10, {}),
    "in reverse, samples first": (
        "ReverseSequence", (X, np.array([4, 1, 2])), FLOAT, 10, {"batch_axis": 0, "time_axis": 1},
    ),
}  # fmt: skip
LEFT_ALONE = {
    "norm of order 3": ("LpNormalization", (X,), FLOAT, 22, {"p": 3}),
    "norm of an old set": ("LpNormalization", (X,), FLOAT, 13, {}),
    "infinity of an old set": ("IsInf", (INFINITE,), BOOL, 10, {"detect_negative": 0}),
}


def cut(x, w, output_shape, strides, dilations=(1, 1), output_padding=(0, 0), auto_pad="NOTSET"):
    """torch's transposed convolution, zeros after it or cut to the shape: the larger half of the cut at one end."""
    operands = (torch.from_numpy(o) for o in (x, w))
    y = torch.nn.functional.conv_transpose2d(*operands, stride=strides, dilation=dilations).numpy()
    y = np.pad(y, ((0, 0), (0, 0), *((0, p) for p in output_padding)))
    for axis, wanted in enumerate(output_shape, 2):
        more = y.shape[axis] - wanted
        begin = max(0, more // 2 if auto_pad == "SAME_UPPER" else more - more // 2)
        y = np.pad(y, [(0, max(0, -more) if a == axis else 0) for a in range(4)])
        y = y.take(range(begin, begin + wanted), axis=axis)
    return y


def reference(name):
    """ONNX's evaluator; where it takes no vectors, or forgets the second zero, the sums themselves."""
    operator, operands, *_ = CASES[name]
    if operator == "QLinearMatMul":
        a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = (o.astype("float64") for o in operands)
        a_scale, a_zero, y_scale, y_zero = (s[:, None] if s.ndim else s for s in (a_scale, a_zero, y_scale, y_zero))
        return np.clip(np.round((a - a_zero) @ (b - b_zero) * (a_scale * b_scale / y_scale)) + y_zero, -128, 127)
    if operator == "ConvTranspose":
        return cut(*operands, **CASES[name][4])
    if name == "integers, zeros by channel":
        wide = [IMAGE.astype("float32") - 1, KERNEL - operands[3][:, None, None, None].astype("float32")]
        conv = model("Conv", wide, FLOAT, 13, CASES[name][4])
        return ReferenceEvaluator(conv).run(None, {"i0": wide[0]})[0]
    return ReferenceEvaluator(model(*CASES[name])).run(None, {"i0": operands[0]})[0]


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name):
    """Quantised results may be one step apart where the exact one lies between two steps."""
    proto = model(*CASES[name])
    kept = proto.SerializeToString()
    assert proto.graph.node[0] not in define_onnx_operators(proto).graph.node
    assert proto.SerializeToString() == kept
    got, want = run(from_onnx(proto), CASES[name][1][0]), reference(name)
    assert got.shape == want.shape
    if CASES[name][0].startswith("QLinear"):
        off = np.abs(got.astype(int) - want.astype(int))
        assert off.max() <= 1 and off.mean() < 0.01
        assert len(np.unique(got)) > 10
    else:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_others_are_left_and_refused(name):
    proto = model(*LEFT_ALONE[name])
    assert [n.op_type for n in define_onnx_operators(proto).graph.node] == [LEFT_ALONE[name][0]]
    with pytest.raises(UnsupportedOperator):
        from_onnx(proto)


def test_what_drops_is_left():
    """Where the mask is asked for and training is on, or an input."""
    for training in ([numpy_helper.from_array(np.array(True), "training")], []):
        graph = helper.make_graph(
            [helper.make_node("Dropout", ["x", "", "training"], ["y", "mask"])], "g",
            [helper.make_tensor_value_info("x", FLOAT, [4]),
             *([] if training else [helper.make_tensor_value_info("training", BOOL, [])])],
            [helper.make_tensor_value_info("y", FLOAT, [4])], training,
        )  # fmt: skip
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        assert define_onnx_operators(proto) is proto


def test_nothing_is_dropped():
    x, y = (helper.make_tensor_value_info(n, FLOAT, X.shape) for n in "xy")
    mask = helper.make_tensor_value_info("mask", BOOL, X.shape)
    graph = helper.make_graph([helper.make_node("Dropout", ["x"], ["y", "mask"])], "g", [x], [y, mask])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    kept, all_of_them = run(from_onnx(proto), X)
    assert (kept == X).all() and all_of_them.dtype == bool and all_of_them.all() and all_of_them.shape == X.shape


def test_a_model_without_them_is_returned_as_it_is():
    proto = model("Relu", (X,), FLOAT, 17, {})
    assert define_onnx_operators(proto) is proto


def test_shapes_are_computed_only_where_they_are_asked_for(monkeypatch):
    """Powers are in most models, and shapes of a large one take seconds."""
    monkeypatch.setattr("tvmhet.ir.onnx_nodes.fold_onnx_shapes", pytest.fail)
    for exponent in (one(2), np.array(2)):
        proto = model("Pow", (X, exponent), FLOAT, 13, {})
        assert len(define_onnx_operators(proto).graph.node) == 1 + (exponent.dtype != X.dtype)
