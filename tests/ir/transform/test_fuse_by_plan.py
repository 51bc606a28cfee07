"""FuseByPlan: exactly the planned kernels, nothing else changed."""

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tvmhet.errors import BadGraph
from tvmhet.graph.placement import KernelPlacement
from tvmhet.ir.transform.fuse_by_plan import FuseByPlan


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((8, 16), "float32"), w: R.Tensor((16, 4), "float32"), b: R.Tensor((4,), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            mm = R.matmul(x, w)
            biased = R.add(mm, b)
            act = R.nn.relu(biased)
            norm = R.nn.softmax(act)
            R.output(norm)
        return norm


@I.ir_module
class Expected:
    @R.function(private=True)
    def fused_matmul_add_relu(
        x: R.Tensor((8, 16), "float32"), w: R.Tensor((16, 4), "float32"), b: R.Tensor((4,), "float32")
    ) -> R.Tensor((8, 4), "float32"):
        R.func_attr({"Primitive": True, "tvmhet.kernel": "act"})
        with R.dataflow():
            mm = R.matmul(x, w)
            biased = R.add(mm, b)
            act = R.nn.relu(biased)
            R.output(act)
        return act

    @R.function
    def main(
        x: R.Tensor((8, 16), "float32"), w: R.Tensor((16, 4), "float32"), b: R.Tensor((4,), "float32")
    ) -> R.Tensor((8, 4), "float32"):
        R.func_attr({"num_input": 1})
        cls = Expected
        with R.dataflow():
            act = cls.fused_matmul_add_relu(x, w, b)
            norm = R.nn.softmax(act)
            R.output(norm)
        return norm


PLAN = (KernelPlacement("act", ("mm", "biased", "act"), "tvm"), KernelPlacement("norm", ("norm",), "tvm"))
SINGLES = tuple(KernelPlacement(op, (op,), "tvm") for op in ("mm", "biased", "act", "norm"))


def test_makes_exactly_the_planned_kernels():
    tvm.ir.assert_structural_equal(FuseByPlan(PLAN)(Before), Expected)


def test_single_operator_kernels_change_nothing():
    tvm.ir.assert_structural_equal(FuseByPlan(SINGLES)(Before), Before)


def test_input_is_unchanged():
    before = tvm.ir.save_json(Before)
    FuseByPlan(PLAN)(Before)
    assert tvm.ir.save_json(Before) == before


def test_is_idempotent_for_the_plan_of_its_output():
    once = FuseByPlan(PLAN)(Before)
    again = FuseByPlan([KernelPlacement("act", ("act",), "tvm"), KernelPlacement("norm", ("norm",), "tvm")])(once)
    tvm.ir.assert_structural_equal(again, once)


def test_works_in_a_sequential_under_instruments():
    seen = []

    @tvm.instrument.pass_instrument
    class Names:
        def run_before_pass(self, mod, info):
            seen.append(info.name)

    with tvm.transform.PassContext(instruments=[Names()]):
        out = tvm.transform.Sequential([FuseByPlan(PLAN), relax.transform.DeadCodeElimination()])(Before)
    assert "tvmhet.FuseByPlan" in seen
    tvm.ir.assert_structural_equal(out, Expected)


def test_fused_groups_become_one_prim_func_each():
    fused = tvm.transform.Sequential(
        [
            FuseByPlan(PLAN),
            relax.transform.LegalizeOps(),
            relax.transform.FuseTIR(),
            relax.transform.DeadCodeElimination(),
        ]
    )(Before)
    names = sorted(g.name_hint for g, f in fused.functions_items() if isinstance(f, tvm.tirx.PrimFunc))
    assert names == ["fused_matmul_add_relu", "softmax"]


@pytest.mark.parametrize(
    ("kernels", "text"),
    [
        (PLAN[:1], "operator 'norm' is in no kernel (1 of 4"),
        ((*PLAN, PLAN[1]), "operator 'norm' is in two kernels"),
        (PLAN[::-1], "kernel 'norm' runs before 'act'"),
        ((KernelPlacement("k", ("conv",), "tvm"),), "names operator 'conv'"),
    ],
)
def test_a_wrong_plan_is_refused(kernels, text):
    with pytest.raises(Exception, match="TVMHET-E010") as error:
        FuseByPlan(kernels)(Before)
    assert text in str(error.value)
    assert issubclass(BadGraph, ValueError)


def test_tensor_constants_are_handed_to_the_kernel():
    """FuseTIR refuses a constant with dimensions inside a Primitive function; a scalar one stays."""
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            scaled = builder.emit(relax.op.multiply(x, relax.const([2.0], "float32")), name_hint="scaled")
            shifted = builder.emit_output(relax.op.add(scaled, relax.const(1.0, "float32")), name_hint="shifted")
        builder.emit_func_output(shifted)
    fused = FuseByPlan([KernelPlacement("shifted", ("scaled", "shifted"), "tvm")])(builder.get())
    kernel = fused["fused_multiply_add"]
    assert [p.name for p in kernel.params] == ["x", "constant0"]
    lowered = tvm.transform.Sequential([relax.transform.LegalizeOps(), relax.transform.FuseTIR()])(fused)
    assert any(
        isinstance(f, tvm.tirx.PrimFunc) and g.name_hint == "fused_multiply_add" for g, f in lowered.functions_items()
    )
