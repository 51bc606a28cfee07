"""An If whose condition follows from shapes leaves the nodes of one branch, at any depth; others stay."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tests.ir.test_importers import run
from tvmhet.ir.importers import from_onnx
from tvmhet.ir.transform.fold_onnx_shapes import fold_onnx_shapes


def branch(nodes, result, *initializers):
    out = helper.make_tensor_value_info(result, TensorProto.FLOAT, None)
    return helper.make_graph(nodes, "branch", [], [out], list(initializers))


def by_size(dims):
    """y = x where the last dim is 1, else (Celu(x) + 2) * 2 by branches within the branch; all inner names are `a`."""
    two = numpy_helper.from_array(np.array(2.0, "float32"), "two")
    deep = [helper.make_node("Add", ["a", "two"], ["b"]), helper.make_node("Mul", ["b", "two"], ["c"])]
    inner = [
        helper.make_node("Celu", ["x"], ["a"]),
        helper.make_node("If", ["other"], ["d"], then_branch=branch(deep, "c"), else_branch=branch([], "a")),
    ]
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "last"], ["n"], axis=0),
        helper.make_node("Equal", ["n", "one"], ["is_one"]),
        helper.make_node("Not", ["is_one"], ["other"]),
        helper.make_node("If", ["is_one"], ["y"], then_branch=branch([], "x"), else_branch=branch(inner, "d", two)),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["a", "b"])],
        [numpy_helper.from_array(np.array(v), n) for n, v in (("last", -1), ("one", 1))],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(("dims", "operators"), [([3, 1], ["Identity"]), ([3, 2], ["Celu", "Add", "Mul", "Identity"])])
def test_one_branch_is_left(dims, operators):
    proto = by_size(dims)
    before = proto.SerializeToString()
    out = fold_onnx_shapes(proto)
    assert proto.SerializeToString() == before
    assert [n.op_type for n in out.graph.node if n.op_type != "Identity" or n.output[0] == "y"] == operators
    onnx.checker.check_model(out, full_check=True)
    x = np.random.default_rng(0).standard_normal(dims).astype("float32")
    (want,) = ReferenceEvaluator(proto).run(None, {"x": x})
    np.testing.assert_allclose(ReferenceEvaluator(out).run(None, {"x": x})[0], want)
    np.testing.assert_allclose(run(from_onnx(proto), x), want, rtol=1e-6, atol=1e-6)


def test_a_condition_that_is_data_stays():
    proto = by_size(["n", "m"])
    assert [n.op_type for n in fold_onnx_shapes(proto).graph.node][-1] == "If"
