from onnx import TensorProto, helper

from tvmhet.ir.transform.inline_onnx_functions import has_definition, inline_onnx_functions


def celu():
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in "xy"]
    graph = helper.make_graph([helper.make_node("Celu", ["x"], ["y"], alpha=2.0)], "g", info[:1], info[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def with_local_function():
    opsets = [helper.make_opsetid("", 18)]
    twice = helper.make_function("mine", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], opsets)
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in "xy"]
    graph = helper.make_graph([helper.make_node("Twice", ["x"], ["y"], domain="mine")], "g", info[:1], info[1:])
    return helper.make_model(graph, functions=[twice], opset_imports=[*opsets, helper.make_opsetid("mine", 1)])


def test_a_named_operator_is_replaced_by_its_definition():
    out = inline_onnx_functions(celu(), {"Celu"})
    assert "Celu" not in {n.op_type for n in out.graph.node}
    assert "Elu" in {n.op_type for n in out.graph.node}


def test_others_stay_and_the_input_is_unchanged():
    proto = celu()
    assert inline_onnx_functions(proto, {"Gelu"}) is proto
    inline_onnx_functions(proto, {"Celu"})
    assert proto.SerializeToString() == celu().SerializeToString()


def test_functions_of_the_model_are_always_inlined():
    out = inline_onnx_functions(with_local_function())
    assert [n.op_type for n in out.graph.node] == ["Add"]


def test_has_definition():
    assert has_definition("Celu", 18)
    assert not has_definition("Conv", 18)
    assert not has_definition("Frobnicate", 18)
