import numpy as np
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.ir.test_importers import run
from tvmhet.ir.importers import from_onnx
from tvmhet.ir.prepare import prepare
from tvmhet.ir.transform.read_static_shapes import ReadStaticShapes


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((2, 3), "float32")) -> R.Tensor((2,), "int64"):
        with R.dataflow():
            s = R.shape_of(x)
            t: R.Tensor((2,), "int64") = R.shape_to_tensor(s)
            y: R.Tensor((2,), "int64") = R.add(t, t)
            R.output(y)
        return y


@I.ir_module
class Symbolic:
    @R.function
    def main(x: R.Tensor(("n", 3), "float32")) -> R.Tensor((2,), "int64"):
        with R.dataflow():
            s = R.shape_of(x)
            y: R.Tensor((2,), "int64") = R.shape_to_tensor(s)
            R.output(y)
        return y


def test_a_known_shape_is_a_constant():
    after = relax.transform.DeadCodeElimination()(ReadStaticShapes()(Before))
    (binding,) = after["main"].body.blocks[0].bindings
    assert binding.value.op == tvm.ir.Op.get("relax.add")
    assert [a.value.numpy().tolist() for a in binding.value.args] == [[2, 3], [2, 3]]


def test_idempotent_and_input_unchanged():
    before = Before.clone()
    once = ReadStaticShapes()(Before)
    tvm.ir.assert_structural_equal(Before, before)
    assert ReadStaticShapes()(once).same_as(once)


def test_an_unknown_dim_stays():
    assert ReadStaticShapes()(Symbolic).same_as(Symbolic)


def test_an_onnx_model_that_gathers_is_cut():
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], axis=0),
        helper.make_node("Gather", ["rows", "last"], ["token"], axis=1),
        helper.make_node("Relu", ["token"], ["y"]),
    ]
    table = np.random.default_rng(0).standard_normal((100, 8)).astype("float32")
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("ids", TensorProto.INT64, [2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 8])],
        [numpy_helper.from_array(table, "table"), numpy_helper.from_array(np.array(-1), "last")],
    )  # fmt: skip
    model = from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    prepared = prepare(model)
    assert prepared.graph is not None
    ids = np.array([[1, -1, 7], [0, 3, -100]])
    np.testing.assert_array_equal(run(model, ids), np.maximum(table[ids][:, -1], 0))
