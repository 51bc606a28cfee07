import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tvmhet.ir.transform.bind_small_integers import bind_small_integers

WEIGHT = np.arange(128, dtype="float32").reshape(16, 8)


def before():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("ReduceSum", ["y", "axes"], ["z"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 16]),
            helper.make_tensor_value_info("axes", TensorProto.INT64, [1]),
        ],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [4])],
        [numpy_helper.from_array(WEIGHT, "w"), numpy_helper.from_array(WEIGHT, "never_read")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def test_weights_become_inputs_and_constants_initializers():
    out, weights = bind_small_integers(before(), {"axes": np.array([1])})
    assert [i.name for i in out.graph.input] == ["x", "w"]
    assert [i.name for i in out.graph.initializer] == ["axes"]
    np.testing.assert_array_equal(numpy_helper.to_array(out.graph.initializer[0]), [1])
    assert len(weights) == 1
    np.testing.assert_array_equal(weights[0], WEIGHT)
    onnx.checker.check_model(out)


def test_input_unchanged_and_idempotent():
    proto = before()
    once, _ = bind_small_integers(proto, {"axes": np.array([1])})
    assert proto.SerializeToString() == before().SerializeToString()
    twice, weights = bind_small_integers(once, {})
    assert weights == []
    assert twice.SerializeToString() == once.SerializeToString()
