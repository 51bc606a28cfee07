"""ExtractGraph: what the operator graph says of each call, and which functions have none."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvmhet.graph.opgraph import OpGraph, PatternKind
from tvmhet.ir.extract import NotAGraph, _Legalised, dtype_bytes, extract
from tvmhet.ir.transform.name_operators import NameOperators


@I.ir_module
class Convs:
    @R.function
    def main(
        x: R.Tensor((2, 8, 10, 10), "float32"),
        w: R.Tensor((16, 4, 3, 3), "float32"),
        b: R.Tensor((1, 16, 1, 1), "float32"),
        m: R.Tensor((16, 5), "float16"),
    ):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            conv = R.nn.conv2d(x, w, strides=[2, 2], padding=[1, 1, 1, 1], groups=2)
            biased = R.add(conv, b)
            flat = R.reshape(biased, (2, 16, 25))
            soft = R.nn.softmax(flat, axis=-1)
            total = R.sum(soft, axis=[2])
            half = R.astype(total, "float16")
            mm = R.matmul(half, m)
            doubled = R.add(mm, mm)
            R.output(doubled, conv)
        return (doubled, conv)


@pytest.fixture(scope="module")
def graph():
    return extract(Convs)


def op(graph, name):
    return graph.operators[graph.index(name)]


def test_names_families_and_wiring(graph):
    assert [o.name for o in graph.operators] == ["conv", "biased", "flat", "soft", "total", "half", "mm", "doubled"]
    families = [o.family for o in graph.operators]
    assert families == ["nn.conv2d", "add", "reshape", "nn.softmax", "sum", "astype", "matmul", "add"]
    names = [t.name for t in graph.tensors]
    assert [names[t] for t in op(graph, "mm").inputs] == ["half", "m"]
    assert [names[t] for t in graph.inputs] == ["x"]
    assert [names[t] for t in graph.outputs] == ["doubled", "conv"]
    assert {t.name for t in graph.tensors if t.is_param} == {"w", "b", "m"}
    assert {t.name for t in graph.tensors if t.is_output} == {"doubled", "conv"}


def test_attributes_are_plain_values(graph):
    attrs = op(graph, "conv").attrs
    assert (attrs["strides"], attrs["padding"], attrs["groups"]) == ([2, 2], [1, 1, 1, 1], 2)
    assert attrs["data_layout"] == "NCHW"
    assert op(graph, "soft").attrs["axis"] == -1
    assert op(graph, "total").attrs["axis"] == [2]


def test_flop_of_products_by_hand(graph):
    outputs = 2 * 16 * 5 * 5
    assert op(graph, "conv").flop == 2 * outputs * (8 // 2) * 3 * 3  # a multiply and an add per tap
    assert op(graph, "mm").flop == 2 * (2 * 5) * 16
    assert op(graph, "biased").flop == outputs


def test_bytes_count_each_tensor_once(graph):
    conv, doubled = op(graph, "conv"), op(graph, "doubled")
    assert conv.read_bytes == 4 * (2 * 8 * 10 * 10 + 16 * 4 * 3 * 3)
    assert conv.write_bytes == 4 * 2 * 16 * 5 * 5
    assert doubled.read_bytes == doubled.write_bytes == 2 * 2 * 5  # reads mm twice, float16
    assert doubled.inputs[0] == doubled.inputs[1]


def test_patterns_are_tvms_own(graph):
    kinds = {o.name: o.pattern for o in graph.operators}
    assert kinds["conv"] is kinds["mm"] is PatternKind.OUT_EWISE_FUSABLE
    assert kinds["biased"] is PatternKind.ELEM_WISE  # TVM calls it so: one of its two operands is read in step
    assert kinds["half"] is kinds["doubled"] is PatternKind.ELEM_WISE
    assert kinds["flat"] is PatternKind.INJECTIVE
    assert kinds["total"] is PatternKind.COMM_REDUCE


def test_equal_operators_share_a_signature_and_others_do_not(graph):
    signatures = {o.name: o.signature for o in graph.operators}
    assert len(set(signatures.values())) == len(signatures)  # biased and doubled add different shapes
    again = extract(Convs)
    assert {o.name: o.signature for o in again.operators} == signatures


def test_to_networkx(graph):
    g = graph.to_networkx()
    assert list(g.nodes) == [o.name for o in graph.operators]
    assert g.nodes["conv"]["family"] == "nn.conv2d"
    assert g.nodes["conv"]["pattern"] == "OUT_EWISE_FUSABLE"
    assert g.nodes["mm"]["flop"] == 320
    assert g.edges["conv", "biased"] == {"size_bytes": 4 * 800, "tensors": ("conv",)}
    assert g.edges["mm", "doubled"] == {"size_bytes": 20, "tensors": ("mm",)}
    assert g.number_of_edges() == 7


# ---- tuples, constants, PrimFuncs


@I.ir_module
class Tuples:
    @R.function
    def main(x: R.Tensor((4, 6), "float32")):
        with R.dataflow():
            parts = R.split(x, [1, 2], axis=0)
            alias = parts[2]
            joined = R.concat((parts[0], alias))
            middle = parts[1]
            R.output(joined, middle)
        return (joined, middle)


def test_fields_of_a_tuple_are_tensors_and_unused_names_are_nothing():
    graph = extract(NameOperators()(relax.transform.Normalize()(Tuples)))
    assert [o.name for o in graph.operators] == ["split", "concat"]
    made = [graph.tensors[t] for t in graph.operators[0].outputs]
    assert [(t.name, t.shape) for t in made] == [("split.0", (1, 6)), ("split.1", (1, 6)), ("split.2", (2, 6))]
    assert [t.is_output for t in made] == [False, True, False]
    assert graph.operators[1].inputs == (graph.operators[0].outputs[0], graph.operators[0].outputs[2])
    assert graph.operators[1].attrs["axis"] == 0
    assert graph.predecessors(1) == (0,)
    edge = graph.to_networkx().edges["split", "concat"]
    assert edge == {"size_bytes": 24 + 48, "tensors": ("split.0", "split.2")}


def constant_module(value):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((3,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.add(x, relax.const(value, "float32")), name_hint="shifted")
        builder.emit_func_output(out)
    return builder.get()


def test_a_constant_is_part_of_the_signature():
    one, two = (extract(constant_module(v)).operators[0] for v in (1.0, 2.0))
    assert one.signature != two.signature
    assert one.signature == extract(constant_module(1.0)).operators[0].signature
    assert len(one.inputs) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -2.25, 65504.0, 0.1, 6.1e-5, 5.96e-8, -3e-6, np.inf, -np.inf])
def test_constants_of_16_bits_have_their_value(dtype, value):
    """Normal, subnormal, infinite."""
    exact = np.asarray(value, getattr(ml_dtypes, dtype, dtype))
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2,), dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.add(x, relax.const(exact, dtype)), name_hint="shifted")
        builder.emit_func_output(out)
    found = extract(builder.get()).operators[0].attrs["arg1"]
    assert found["dtype"] == dtype and float(found["value"]) == float(exact)


def test_equal_bytes_of_unlike_big_constants_are_told_apart():
    big = [np.zeros(3, "float32"), np.array([0, 0, 1], "float32")]
    first, second = (extract(constant_module(v)).operators[0].signature for v in big)
    assert first != second


def prim_module(factor):
    @T.prim_func(s_tir=True)
    def scale(x: T.Buffer((4, 8), "float32"), y: T.Buffer((4, 8), "float32")):
        for i, j in T.grid(4, 8):
            with T.sblock("scale"):
                vi, vj = T.axis.remap("SS", [i, j])
                y[vi, vj] = x[vi, vj] * T.float32(factor)

    builder = relax.BlockBuilder()
    gvar = builder.add_func(scale, "scale")
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            once = builder.emit(relax.call_tir(gvar, [x], relax.TensorType((4, 8), "float32")), name_hint="once")
            out = builder.emit_output(relax.call_tir(gvar, [once], x.ty), name_hint="twice")
        builder.emit_func_output(out)
    return builder.get()


def test_call_tir_is_named_by_the_prim_func_and_keyed_by_its_content():
    graph = extract(NameOperators()(prim_module(2.0)))
    assert [o.name for o in graph.operators] == ["scale", "scale_1"]
    once, twice = graph.operators
    assert once.family.startswith("call_tir")
    assert once.pattern is PatternKind.ELEM_WISE
    assert once.flop == 32
    assert once.signature == twice.signature
    other = extract(NameOperators()(prim_module(3.0))).operators[0]
    assert other.signature != once.signature


# ---- what is no graph


@I.ir_module
class Control:
    @R.function
    def main(x: R.Tensor((2,), "float32"), c: R.Tensor((), "bool")) -> R.Tensor((2,), "float32"):
        if c:  # noqa: SIM108
            y = R.exp(x)
        else:
            y = R.negative(x)
        return y


@I.ir_module
class Symbolic:
    @R.function
    def main(x: R.Tensor(("n", 2), "float32")) -> R.Tensor(("n", 2), "float32"):
        n = T.int64()
        with R.dataflow():
            y: R.Tensor((n, 2), "float32") = R.exp(x)
            R.output(y)
        return y


@I.ir_module
class Impure:
    @R.function(pure=False)
    def main(x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
        _ = R.print(x, format="x: {}")
        y = R.exp(x)
        return y


@I.ir_module
class Calls:
    @R.function
    def other(x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
        return R.exp(x)

    @R.function
    def main(x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
        cls = Calls
        y = cls.other(x)
        return y


@I.ir_module
class TupleParameter:
    @R.function
    def main(x: R.Tuple(R.Tensor((2,), "float32"), R.Tensor((2,), "float32"))) -> R.Tensor((2,), "float32"):
        with R.dataflow():
            y = R.add(x[0], x[1])
            R.output(y)
        return y


@I.ir_module
class NoMain:
    @R.function
    def other(x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
        return x


@pytest.mark.parametrize(
    ("mod", "words"),
    [
        (Control, "If"),
        (Symbolic, "value 'x' has an unbound dimension \"n\""),
        (Impure, "side effects"),
        (Calls, "binding 'y' calls a"),
        (TupleParameter, "parameter 'x' is a tuple"),
        (NoMain, "no function 'main'"),
    ],
    ids=["if", "symbolic", "impure", "call", "tuple", "no_main"],
)
def test_why_there_is_no_graph(mod, words):
    answer = extract(mod)
    assert isinstance(answer, NotAGraph)
    assert words in answer.reason


def test_dtype_bytes():
    sizes = {"bool": 1, "int4": 0.5, "uint8": 1, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int64": 8}
    assert {d: dtype_bytes(d) for d in sizes} == sizes


def test_what_is_known_of_like_operators_is_not_found_out_again(graph, monkeypatch):
    asked = []

    def legalised(mod, bindings, first):
        asked.extend(first.values())
        return {signature: _Legalised(0.0, PatternKind.OPAQUE) for signature in first}

    monkeypatch.setattr("tvmhet.ir.extract._legalise_together", legalised)
    assert extract(Convs, like=graph) == graph and not asked
    operators = tuple(replace(o, signature="?") if o.name == "soft" else o for o in graph.operators)
    other = OpGraph(operators, graph.tensors, graph.inputs, graph.outputs)
    assert op(extract(Convs, like=other), "soft").pattern is PatternKind.OPAQUE and asked == ["soft"]


def test_extraction_does_not_change_the_module():
    before = tvm.ir.save_json(Convs)
    extract(Convs)
    assert tvm.ir.save_json(Convs) == before


def test_one_call_that_tvm_cannot_legalise_does_not_spoil_the_others():
    """TVM raises on an integer power; the graph still comes, and building it names the operator."""

    @I.ir_module
    class IntegerPower:
        @R.function
        def main(x: R.Tensor((4,), "int64"), y: R.Tensor((4,), "float32")):
            with R.dataflow():
                powered = R.power(x, x)
                act = R.nn.relu(y)
                R.output(powered, act)
            return (powered, act)

    graph = extract(IntegerPower)
    kinds = {op.name: op.pattern for op in graph.operators}
    assert kinds == {"powered": PatternKind.OPAQUE, "act": PatternKind.ELEM_WISE}
