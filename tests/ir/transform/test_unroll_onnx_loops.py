"""Loops of known length equal ONNX's reference step by step; those that only data can end are left and refused."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tests.ir.test_importers import run
from tvmhet.errors import UnsupportedOperator
from tvmhet.ir.importers import from_onnx
from tvmhet.ir.transform import unroll_onnx_loops as loops
from tvmhet.ir.transform.unroll_onnx_loops import unroll_onnx_loops

X = np.random.default_rng(0).standard_normal((4, 3)).astype("float32")
NODE = helper.make_node


def info(name, dims=None, dtype=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, dtype, dims)


def constant(name, value, dtype=None):
    return numpy_helper.from_array(np.array(value, dtype), name)


def whole(nodes, outputs, *initializers, opset=17):
    """`outputs` are names and ranks."""
    results = [info(name, [f"{name}_{i}" for i in range(rank)]) for name, rank in outputs.items()]
    graph = helper.make_graph(nodes, "g", [info("x", X.shape)], results, list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def loop_body(condition):
    """h = tanh(h + i) - x, y = h * 2, as long as `condition` says; `two` is the body's own, `x` the graph's."""
    nodes = [
        NODE("Cast", ["i"], ["j"], to=TensorProto.FLOAT), NODE("Add", ["h", "j"], ["a"]), NODE("Tanh", ["a"], ["b"]),
        NODE("Sub", ["b", "x"], ["next"]), NODE("Mul", ["next", "two"], ["y"]), *condition,
    ]  # fmt: skip
    inputs = [info("i", [], TensorProto.INT64), info("c", [], TensorProto.BOOL), info("h", X.shape)]
    outputs = [info("go", [], TensorProto.BOOL), info("next"), info("y")]
    return helper.make_graph(nodes, "body", inputs, outputs, [constant("two", 2, "float32"), constant("three", 3)])


ALWAYS = [NODE("Identity", ["c"], ["go"])]
UP_TO_THREE = [NODE("Less", ["i", "three"], ["go"])]
BY_CHANCE = [
    NODE("RandomUniform", [], ["r"], shape=[1], seed=1.0), NODE("ReduceMax", ["r"], ["m"], keepdims=0),
    NODE("Less", ["m", "two"], ["go"]),
]  # fmt: skip
OF_DATA = [NODE("ReduceMax", ["next"], ["m"], keepdims=0), NODE("Less", ["m", "two"], ["go"])]


def looped(condition, count="count", first="yes", body=None, ys_rank=3, opset=17):
    node = NODE("Loop", [count, first, "x"], ["h_n", "ys"], body=body or loop_body(condition))
    return whole(
        [node],
        {"h_n": 2, "ys": ys_rank},
        constant("count", 5),
        constant("yes", True),
        constant("no", False),
        opset=opset,
    )


def in_numpy(steps, h=X):
    """What `loop_body` makes: ONNX's reference does not stack what a Loop collects."""
    collected = []
    for i in range(steps):
        h = np.tanh(h + np.float32(i)) - X
        collected.append(h * 2)
    return h, np.stack(collected)


def is_right(proto, *wanted):
    kept = proto.SerializeToString()
    written = unroll_onnx_loops(proto)
    assert not {"Loop", "Scan"} & {n.op_type for n in written.graph.node}
    assert proto.SerializeToString() == kept
    onnx.checker.check_model(written, full_check=True)
    by_steps = ReferenceEvaluator(written).run(None, {"x": X})
    for got, want, same in zip(run(from_onnx(proto), X), wanted, by_steps, strict=True):
        np.testing.assert_allclose(same, want, rtol=1e-5)
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("condition", "count", "first", "steps"),
    [
        (ALWAYS, "count", "yes", 5), (ALWAYS, "count", "", 5), (UP_TO_THREE, "count", "yes", 4),
        (UP_TO_THREE, "", "yes", 4), (UP_TO_THREE, "", "", 4),
    ],
)  # fmt: skip
def test_loops(condition, count, first, steps):
    is_right(looped(condition, count, first), *in_numpy(steps))


def test_results_that_nobody_reads_may_be_left_out():
    for kept in (0, 1):
        names = [name if i == kept else "" for i, name in enumerate(("h_n", "ys"))]
        node = NODE("Loop", ["count", "yes", "x"], names[: kept + 1], body=loop_body(ALWAYS))
        nodes = [node, NODE("Neg", ["x"], ["z"])]
        is_right(
            whole(nodes, {names[kept]: 2 + kept, "z": 2}, constant("count", 5), constant("yes", True)),
            in_numpy(5)[kept],
            -X,
        )


@pytest.mark.parametrize("opset", [9, 11, 12, 13])
def test_loops_of_older_operator_sets(opset):
    is_right(looped(UP_TO_THREE, opset=opset), *in_numpy(4))


def test_a_while_loop_that_counts_in_a_state():
    """As exporters of scripted models write it: the counter is a state, the condition is made of it."""
    nodes = [
        NODE("Add", ["k", "two"], ["k_next"]), NODE("Less", ["k_next", "limit"], ["go"]), NODE("Mul", ["h", "h"], ["n"])
    ]  # fmt: skip
    inputs = [info("i", [], TensorProto.INT64), info("c", [], TensorProto.BOOL), info("k", [], TensorProto.INT64)]
    outputs = [info("go", [], TensorProto.BOOL), info("k_next", [], TensorProto.INT64), info("n")]
    body = helper.make_graph(nodes, "body", [*inputs, info("h", X.shape)], outputs, [constant("two", 2)])
    proto = whole(
        [NODE("Loop", ["", "yes", "zero", "x"], ["k_n", "h_n"], body=body), NODE("Abs", ["h_n"], ["y"]),
         NODE("Neg", ["y"], ["z"])],
        {"y": 2, "z": 2}, constant("yes", True), constant("zero", 0), constant("limit", 7),
    )  # fmt: skip
    is_right(proto, X**16, -(X**16))


def test_a_loop_in_a_loop():
    inner = loop_body(UP_TO_THREE)
    steps = NODE("Loop", ["", "c", "h"], ["h_3", "ys_3"], body=inner)
    inputs = [info("i", [], TensorProto.INT64), info("c", [], TensorProto.BOOL), info("h", X.shape)]
    nodes = [steps, NODE("ReduceSum", ["ys_3"], ["all"], keepdims=0), NODE("Identity", ["c"], ["go"])]
    outputs = [info("go", [], TensorProto.BOOL), info("h_3"), info("all", [])]
    proto = looped((), body=helper.make_graph(nodes, "outer", inputs, outputs), ys_rank=1)
    h, sums = X, []
    for _ in range(5):
        h, collected = in_numpy(4, h)
        sums.append(collected.sum())
    for got, want in zip(run(from_onnx(proto), X), (h, np.array(sums)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("in_axis", "back"), [(0, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize(("out_axis", "out_back"), [(0, 0), (1, 0), (-1, 1)])
def test_scans(in_axis, back, out_axis, out_back):
    """Running sums of x's rows or columns, and their squares."""
    nodes = [NODE("Add", ["s", "row"], ["next"]), NODE("Mul", ["next", "next"], ["square"])]
    size = X.shape[1 - in_axis]
    body = helper.make_graph(
        nodes, "body", [info("s", [size]), info("row", [size])], [info("next", [size]), info("square", [size])]
    )
    node = NODE(
        "Scan", ["zero", "x"], ["total", "squares"], body=body, num_scan_inputs=1, scan_input_axes=[in_axis],
        scan_input_directions=[back], scan_output_axes=[out_axis], scan_output_directions=[out_back],
    )  # fmt: skip
    proto = whole([node], {"total": 1, "squares": 2}, constant("zero", np.zeros(size), "float32"))
    rows = np.moveaxis(X, in_axis, 0)[:: -1 if back else 1]
    sums = np.cumsum(rows, axis=0)
    squares = np.stack(list(sums**2)[:: -1 if out_back else 1], axis=out_axis)
    is_right(proto, sums[-1], squares)


def test_a_loop_of_no_step_gives_its_states():
    body = helper.make_graph(
        [NODE("Neg", ["h"], ["n"]), NODE("Identity", ["c"], ["go"])], "body",
        [info("i", [], TensorProto.INT64), info("c", [], TensorProto.BOOL), info("h")],
        [info("go", [], TensorProto.BOOL), info("n")],
    )  # fmt: skip
    for count, first in (("none", "yes"), ("", "no")):
        proto = whole(
            [NODE("Loop", [count, first, "x"], ["h_n"], body=body), NODE("Abs", ["h_n"], ["y"]),
             NODE("Neg", ["x"], ["z"])],
            {"y": 2, "z": 2}, constant("none", 0), constant("yes", True), constant("no", False),
        )  # fmt: skip
        is_right(proto, np.abs(X), -X)


@pytest.mark.parametrize(
    "proto",
    [looped(OF_DATA), looped(BY_CHANCE), looped(ALWAYS, count=""), looped(ALWAYS, first="no")],
    ids=["until data says so", "until chance says so", "without an end", "results of no step"],
)
def test_others_are_left_and_refused(proto):
    assert unroll_onnx_loops(proto) is proto
    with pytest.raises(UnsupportedOperator, match=r"(?s)Loop.*number of steps"):
        from_onnx(proto)


def test_a_loop_that_stays_is_whole_beside_one_that_does_not():
    """What was written of it before its condition was data is dropped."""
    proto = looped(OF_DATA)
    proto.graph.node.append(NODE("Loop", ["count", "yes", "x"], ["z"], body=loop_body(ALWAYS)))
    kept = [n for n in unroll_onnx_loops(proto).graph.node if n.output[0] in ("h_n", "ys", "z") or "h_n" in n.output[0]]
    assert kept[0] == proto.graph.node[0] and [n.op_type for n in kept] == ["Loop", "Identity"]


def test_a_scan_of_unlike_lengths_is_left():
    body = helper.make_graph(
        [NODE("Identity", ["s"], ["next"])], "body", [info("s"), info("row"), info("column")], [info("next")]
    )
    node = NODE("Scan", ["x", "x", "x"], ["y"], body=body, num_scan_inputs=2, scan_input_axes=[0, 1])
    proto = whole([node], {"y": 2})
    assert unroll_onnx_loops(proto) is proto


def test_what_would_be_too_long_is_left(monkeypatch):
    monkeypatch.setattr(loops, "MAX_NODES", 20)
    proto = looped(ALWAYS)
    assert unroll_onnx_loops(proto) is proto


def test_a_model_without_loops_is_returned_as_it_is():
    proto = whole([NODE("Relu", ["x"], ["y"])], {"y": 2})
    assert unroll_onnx_loops(proto) is proto
