import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tvmhet.ir.transform.fold_onnx_shapes import fold_onnx_shapes


def flatten_by_hand(dims):
    """Reshape to (first dim, -1), written as exporters write it."""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Shape", ["r"], ["s"]),
        helper.make_node("Constant", [], ["zero"], value_int=0),
        helper.make_node("Gather", ["s", "zero"], ["n"], axis=0),
        helper.make_node("Constant", [], ["axes"], value_ints=[0]),
        helper.make_node("Unsqueeze", ["n", "axes"], ["n1"]),
        helper.make_node("Concat", ["n1", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["r", "target"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["a", "b"])],
        [numpy_helper.from_array(np.array([-1]), "rest")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def test_shape_arithmetic_becomes_one_constant():
    out = fold_onnx_shapes(flatten_by_hand([4, 2, 8]))
    assert [n.op_type for n in out.graph.node] == ["Relu", "Reshape"]
    (target,) = out.graph.initializer
    assert target.name == "target"
    np.testing.assert_array_equal(numpy_helper.to_array(target), [4, -1])
    onnx.checker.check_model(out)


def test_idempotent_and_input_unchanged():
    proto = flatten_by_hand([4, 2, 8])
    once = fold_onnx_shapes(proto)
    assert fold_onnx_shapes(once).SerializeToString() == once.SerializeToString()
    assert proto.SerializeToString() == flatten_by_hand([4, 2, 8]).SerializeToString()


def test_an_unknown_dim_stays_computed():
    out = fold_onnx_shapes(flatten_by_hand(["n", 2, 8]))
    assert [n.op_type for n in out.graph.node] == ["Relu", "Shape", "Gather", "Unsqueeze", "Concat", "Reshape"]


def test_large_values_and_results_stay():
    proto = flatten_by_hand([4, 2, 8])
    assert len(fold_onnx_shapes(proto, max_elements=0).graph.node) == len(proto.graph.node)
    proto.graph.output.append(helper.make_tensor_value_info("target", TensorProto.INT64, [2]))
    assert [n.op_type for n in fold_onnx_shapes(proto).graph.node] == ["Relu", "Concat", "Reshape"]


def test_random_values_stay():
    node = helper.make_node("RandomNormal", [], ["r"], shape=[2])
    add = helper.make_node("Add", ["x", "r"], ["y"])
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy"]
    proto = helper.make_model(helper.make_graph([node, add], "g", info[:1], info[1:]))
    assert len(fold_onnx_shapes(proto).graph.node) == 2
