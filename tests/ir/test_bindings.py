"""Bindings: names of calls and tensors, what a call reads, and calls rebuilt elsewhere."""

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tvmhet.errors import NotSupported
from tvmhet.ir.bindings import (
    _TAKES_SCALARS,
    Bindings,
    flatten,
    live_ins,
    live_outs,
    outline,
    readers_of,
    rebuild_main,
)


@I.ir_module
class Tuples:
    @R.function
    def main(x: R.Tensor((4, 6), "float32"), w: R.Tensor((6, 3), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            halves = R.split(x, 2, axis=0)
            top = halves[0]
            mm = R.matmul(top, w)
            alias = mm
            both = R.concat((alias, R.matmul(halves[1], w)), axis=0)
            pair = (both, alias)
            out = R.add(pair[1], pair[1])
            R.output(both, out)
        return (both, (out, x))


@pytest.fixture(scope="module")
def bindings():
    return Bindings(relax.transform.Normalize()(Tuples)["main"])


def test_calls_are_named_by_their_variables(bindings):
    assert list(bindings.calls)[:2] == ["halves", "mm"]
    assert list(bindings.calls)[3:] == ["both", "out"]  # alias and pair compute nothing
    assert bindings.param_names == ("x", "w")
    assert bindings.num_input == 1


def test_a_tuples_fields_are_tensors_of_their_own(bindings):
    assert bindings.results["halves"] == ("halves.0", "halves.1")
    assert bindings.producer["halves.1"] == "halves"
    assert [int(d) for d in bindings.types["halves.1"].shape.values] == [2, 6]
    assert "x" not in bindings.producer


def test_reads_sees_through_aliases_and_tuples(bindings):
    second = list(bindings.calls)[2]
    assert bindings.reads("halves") == ("x",)
    assert bindings.reads("mm") == ("halves.0", "w")
    assert bindings.reads(second) == ("halves.1", "w")
    assert bindings.reads("both") == ("mm", second)
    assert bindings.reads("out") == ("mm",)  # read twice, named once


def test_output_keeps_its_nesting(bindings):
    assert bindings.output == ("both", ("out", "x"))
    assert list(flatten(bindings.output)) == ["both", "out", "x"]


def test_readers_live_ins_and_live_outs(bindings):
    second = list(bindings.calls)[2]
    readers = readers_of(bindings)
    assert readers["w"] == {"mm", second}
    assert readers["mm"] == {"both", "out"}
    assert live_ins(bindings, ["mm", second]) == ("halves.0", "w", "halves.1")
    assert live_outs(bindings, ["halves", "mm"], readers) == ("halves.1", "mm")  # halves.0 is read inside only
    assert live_outs(bindings, ["both", "out"], readers) == ("both", "out")  # returned
    assert live_ins(bindings, list(bindings.calls)) == ("x", "w")


def test_num_input_without_the_attribute_is_all_parameters():
    assert Bindings(Tuples["main"].without_attr("num_input")).num_input == 2


def test_a_repeated_variable_name_is_told_apart():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            first = relax.Var("lv", x.ty)
            second = relax.Var("lv", x.ty)
            third = relax.Var("x", x.ty)
            for var, value in ((first, relax.op.exp(x)), (second, relax.op.exp(first)), (third, relax.op.exp(second))):
                builder.emit_normalized(relax.VarBinding(var, builder.normalize(value)))
            out = builder.emit_output(third)
        builder.emit_func_output(out)
    bindings = Bindings(builder.get()["main"])
    assert list(bindings.calls) == ["lv", "lv~1", "x~1"]
    assert [bindings.reads(name) for name in bindings.calls] == [("x",), ("lv",), ("lv~1",)]


def test_outline_is_a_private_function_of_the_live_ins(bindings):
    func = outline(bindings, ["halves", "mm"], ("x", "w"), ("halves.1", "mm"))

    @R.function(private=True)
    def expected(x: R.Tensor((4, 6), "float32"), w: R.Tensor((6, 3), "float32")):
        with R.dataflow():
            halves = R.split(x, 2, axis=0)
            first = halves[0]
            second = halves[1]
            mm = R.matmul(first, w)
            R.output(second, mm)
        return (second, mm)

    tvm.ir.assert_structural_equal(func, expected)


def test_outline_of_one_result_is_a_tensor_unless_asked(bindings):
    single = outline(bindings, ["halves", "mm"], ("x", "w"), ("mm",))
    assert isinstance(single.ret_ty, relax.TensorType)
    always = outline(bindings, ["halves", "mm"], ("x", "w"), ("mm",), always_tuple=True)
    assert isinstance(always.ret_ty, relax.TupleType) and len(always.ret_ty.fields) == 1


def test_rebuild_main_keeps_attributes_names_and_other_functions(bindings):
    before = relax.transform.Normalize()(Tuples)

    def emit(emitter, env):
        for name in bindings.calls:
            env |= emitter.emit(bindings.rebuild(name, env), bindings.results[name], name)

    after = rebuild_main(before, bindings, emit)
    assert [p.name for p in after["main"].params] == ["x", "w"]
    assert int(after["main"].attrs["num_input"]) == 1
    assert str(after["main"].attrs["global_symbol"]) == "main"
    assert relax.analysis.check_well_formed(after)
    again = Bindings(after["main"])
    assert list(again.calls) == list(bindings.calls)
    assert again.output == bindings.output


def test_constants_that_no_legalisation_writes_into_the_code_are_tensors():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    two, low, row = (relax.const(v, "float32") for v in (2.0, -1e4, [1.0, 2.0]))
    with builder.function("main", [x]):
        with builder.dataflow():
            doubled = builder.emit(relax.op.multiply(x, two), name_hint="doubled")
            masked = builder.emit(relax.op.where(relax.op.less(doubled, two), low, doubled), name_hint="masked")
            shifted = builder.emit(relax.op.add(masked, row), name_hint="shifted")
            out = builder.emit_output(relax.op.concat([shifted, row]), name_hint="joined")
        builder.emit_func_output(out)
    bindings = Bindings(builder.get()["main"])
    assert bindings.tensor_constants(["doubled"]) == ()
    assert list(map(low.same_as, bindings.tensor_constants(["masked"]))) == [True]
    assert list(map(row.same_as, bindings.tensor_constants(["shifted", "joined"]))) == [True]  # once


def test_the_operators_that_take_numbers_are_tvms():
    """_TAKES_SCALARS is what this TVM does: a scalar constant leaves the PrimFunc's parameters for these only."""
    x = relax.Var("x", relax.TensorType((2,), "float32"))

    def takes_number(call):
        builder = relax.BlockBuilder()
        with builder.function("main", [x]):
            with builder.dataflow():
                out = builder.emit_output(call)
            builder.emit_func_output(out)
        mod = relax.transform.LegalizeOps()(builder.get())
        (prim,) = (f for f in mod.functions.values() if not isinstance(f, relax.Function))
        return len(prim.params) == 2  # x and the result

    number = relax.const(2.0, "float32")
    for name in ("add", "divide", "power", "maximum", "less_equal", "subtract"):
        assert f"relax.{name}" in _TAKES_SCALARS
        assert takes_number(getattr(relax.op, name)(x, number)), name
    condition = relax.Var("c", relax.TensorType((2,), "bool"))
    builder = relax.BlockBuilder()
    with builder.function("main", [condition, x]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.where(condition, number, x))
        builder.emit_func_output(out)
    mod = relax.transform.LegalizeOps()(builder.get())
    (prim,) = (f for f in mod.functions.values() if not isinstance(f, relax.Function))
    assert len(prim.params) == 4 and "relax.where" not in _TAKES_SCALARS


@I.ir_module
class Splits:
    @R.function
    def main(x: R.Tensor((4, 4), "float32")):
        with R.dataflow():
            split = R.split(x, 2, axis=0)
            a = split[0]
            b = split[1]
            split_1 = R.split(a, 2, axis=1)
            c = split_1[0]
            d = split_1[1]
            split_2 = R.split(b, 2, axis=1)
            e = split_2[0]
            out = R.add(c, e)
            R.output(out, d)
        return (out, d)


def test_fields_of_tuples_take_no_calls_name():
    """TVM's builder would call the second field of `split` split_1, and the call split_1 something else."""
    before = Bindings(Splits["main"])

    def emit(emitter, env):
        for name in before.calls:
            env |= emitter.emit(before.rebuild(name, env), before.results[name], name)

    mod = rebuild_main(Splits, before, emit)
    after = Bindings(mod["main"])
    assert list(after.calls) == ["split", "split_1", "split_2", "out"]
    assert (after.reads("out"), after.output) == (("split_1.0", "split_2.0"), ("out", "split_1.1"))
    relax.analysis.well_formed(mod)


@I.ir_module
class Cast:
    @R.function
    def main(x: R.Tensor(("n",), "float32")) -> R.Tensor((4,), "float32"):
        y = R.match_cast(x, R.Tensor((4,), "float32"))
        return y


def test_a_binding_that_is_no_call_is_refused():
    with pytest.raises(NotSupported, match=r"TVMHET-E015.*'y' is a MatchCast"):
        Bindings(Cast["main"])


def test_a_constant_outside_an_operator_is_refused():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.const(1.0, "float32"))
        builder.emit_func_output(out)
    with pytest.raises(NotSupported, match="stands outside an operator"):
        Bindings(builder.get()["main"])
