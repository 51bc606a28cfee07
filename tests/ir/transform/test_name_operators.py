"""NameOperators: names that a person finds in the model, unique and stable."""

import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tvmhet.ir.bindings import Bindings
from tvmhet.ir.transform.name_operators import NameOperators


@I.ir_module
class Before:
    @R.function
    def main(
        x: R.Tensor((4, 6), "float32"),
        p_layer1_fc_weight: R.Tensor((6, 6), "float32"),
        p_layer1_fc_bias: R.Tensor((6,), "float32"),
        relu: R.Tensor((6,), "float32"),
    ):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            lv = R.matmul(x, p_layer1_fc_weight)
            lv1 = R.add(lv, p_layer1_fc_bias)
            lv2 = R.nn.relu(lv1)
            lv3 = R.nn.relu(lv2)
            lv4 = R.add(lv3, relu)
            lv5 = lv4
            pair = (lv5, lv3)
            lv6 = R.split(pair[0], 2, axis=1)
            lv7 = R.concat((lv6[1], lv6[0]), axis=1)
            gv = lv7
            R.output(gv)
        return gv


def names(mod):
    return list(Bindings(mod["main"]).calls)


def test_names_come_from_parameters_then_operators():
    assert names(NameOperators()(relax.transform.Normalize()(Before))) == [
        "layer1_fc",
        "layer1_fc_add",
        "relu_1",  # `relu` is a parameter
        "relu_2",
        "add",
        "split",
        "concat",
    ]


def test_only_names_aliases_and_tuples_change():
    after = NameOperators()(relax.transform.Normalize()(Before))
    tvm.ir.assert_structural_equal(after, Expected, map_free_vars=True)


@I.ir_module
class Expected:
    @R.function
    def main(
        x: R.Tensor((4, 6), "float32"),
        w: R.Tensor((6, 6), "float32"),
        b: R.Tensor((6,), "float32"),
        c: R.Tensor((6,), "float32"),
    ):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            layer1_fc = R.matmul(x, w)
            layer1_fc_add = R.add(layer1_fc, b)
            relu_1 = R.nn.relu(layer1_fc_add)
            relu_2 = R.nn.relu(relu_1)
            add = R.add(relu_2, c)
            split = R.split(add, 2, axis=1)
            left = split[0]
            right = split[1]
            concat = R.concat((right, left), axis=1)
            R.output(concat)
        return concat


def test_is_idempotent():
    once = NameOperators()(relax.transform.Normalize()(Before))
    twice = NameOperators()(once)
    tvm.ir.assert_structural_equal(once, twice)
    assert names(once) == names(twice)


def test_input_is_unchanged():
    before = tvm.ir.save_json(Before)
    NameOperators()(Before)
    assert tvm.ir.save_json(Before) == before


def test_works_in_a_sequential_under_instruments():
    seen = []

    @tvm.instrument.pass_instrument
    class Names:
        def run_before_pass(self, mod, info):
            seen.append(info.name)

    with tvm.transform.PassContext(instruments=[Names()]):
        out = tvm.transform.Sequential([relax.transform.Normalize(), NameOperators()])(Before)
    assert "tvmhet.NameOperators" in seen
    assert names(out)[0] == "layer1_fc"


def test_front_ends_reuse_of_names_is_mended():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            first, second = relax.Var("lv", x.ty), relax.Var("lv", x.ty)
            builder.emit_normalized(relax.VarBinding(first, builder.normalize(relax.op.exp(x))))
            builder.emit_normalized(relax.VarBinding(second, builder.normalize(relax.op.exp(first))))
            out = builder.emit_output(relax.op.exp(second))
        builder.emit_func_output(out)
    assert names(NameOperators()(builder.get())) == ["exp", "exp_1", "exp_2"]
