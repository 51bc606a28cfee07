"""SplitByStage: one function per stage, main only hands live-outs on."""

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tvmhet.errors import BadGraph
from tvmhet.ir.bindings import Bindings
from tvmhet.ir.transform.split_by_stage import SplitByStage, StageInterface, stage_interfaces


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((4, 6), "float32"), w: R.Tensor((6, 6), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            a = R.nn.relu(x)
            b = R.matmul(a, w)
            c = R.add(a, b)
            R.output(c, a)
        return (c, a)


@I.ir_module
class Expected:
    @R.function(private=True)
    def stage0(x: R.Tensor((4, 6), "float32")) -> R.Tuple(R.Tensor((4, 6), "float32")):
        R.func_attr({"tvmhet.stage": 0, "num_input": 1})
        with R.dataflow():
            a = R.nn.relu(x)
            R.output(a)
        return (a,)

    @R.function(private=True)
    def stage1(a: R.Tensor((4, 6), "float32"), w: R.Tensor((6, 6), "float32")) -> R.Tuple(R.Tensor((4, 6), "float32")):
        R.func_attr({"tvmhet.stage": 1, "num_input": 1})
        with R.dataflow():
            b = R.matmul(a, w)
            c = R.add(a, b)
            R.output(c)
        return (c,)

    @R.function
    def main(x: R.Tensor((4, 6), "float32"), w: R.Tensor((6, 6), "float32")) -> R.Tuple(
        R.Tensor((4, 6), "float32"), R.Tensor((4, 6), "float32")
    ):
        R.func_attr({"num_input": 1})
        cls = Expected
        with R.dataflow():
            s0 = cls.stage0(x)
            a = s0[0]
            s1 = cls.stage1(a, w)
            c = s1[0]
            R.output(c, a)
        return (c, a)


STAGES = (("a",), ("b", "c"))


def test_outlines_exactly_the_given_stages():
    tvm.ir.assert_structural_equal(SplitByStage(STAGES)(Before), Expected)


def test_input_is_unchanged():
    before = tvm.ir.save_json(Before)
    SplitByStage(STAGES)(Before)
    assert tvm.ir.save_json(Before) == before


def test_works_in_a_sequential_under_instruments():
    seen = []

    @tvm.instrument.pass_instrument
    class Names:
        def run_before_pass(self, mod, info):
            seen.append(info.name)

    with tvm.transform.PassContext(opt_level=3, instruments=[Names()]):
        out = tvm.transform.Sequential([SplitByStage(STAGES), relax.transform.Normalize()])(Before)
    assert seen.count("tvmhet.SplitByStage") == 1
    tvm.ir.assert_structural_equal(out, Expected)


def test_interfaces_tell_inputs_weights_and_outputs():
    assert stage_interfaces(Bindings(Before["main"]), STAGES) == (
        StageInterface(("x",), (), ("a",)),
        StageInterface(("a",), ("w",), ("c",)),
    )


def test_every_stage_returns_a_tuple_and_the_whole_is_well_formed():
    for stages in ([["a", "b", "c"]], [["a"], ["b"], ["c"]], STAGES):
        mod = SplitByStage(stages)(Before)
        relax.analysis.well_formed(mod)
        functions = [f for g, f in mod.functions_items() if g.name_hint != "main"]
        assert len(functions) == len(stages)
        assert all(isinstance(f.ret_ty, relax.TupleType) for f in functions)


@I.ir_module
class Fields:
    @R.function
    def main(x: R.Tensor((4, 6), "float32")) -> R.Tensor((2, 6), "float32"):
        with R.dataflow():
            halves = R.split(x, 2, axis=0)
            top = halves[0]
            bottom = halves[1]
            e = R.exp(top)
            y = R.add(e, bottom)
            R.output(y)
        return y


def test_fields_of_a_tuple_cross_a_cut_one_by_one():
    interfaces = stage_interfaces(Bindings(Fields["main"]), [["halves", "e"], ["y"]])
    assert interfaces[0].outputs == ("halves.1", "e")
    assert interfaces[1].inputs == ("e", "halves.1")
    relax.analysis.well_formed(SplitByStage([["halves", "e"], ["y"]])(Fields))


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ((("a",), ("b",)), "call 'c' is in no stage (1 of 3 are not)"),
        ((("b", "c"), ("a",)), "stage 0 reads 'a', which a later stage makes"),
        ((("a", "b"), ("b", "c")), "call 'b' is in two stages, 0 and 1"),
        ((("a", "nope"), ("b", "c")), "stage 0 names call 'nope', which main does not have"),
        ((("a",), ("c", "b")), "stage 1: 'c' runs before 'b', which it reads"),
        ((("a", "b", "c"), ()), "stage 1 is empty"),
    ],
)
def test_a_wrong_split_is_refused(stages, text):
    with pytest.raises(BadGraph) as error:
        SplitByStage(stages).transform_module(Before, None)
    assert text in str(error.value)
    assert error.value.code == "TVMHET-E010"
