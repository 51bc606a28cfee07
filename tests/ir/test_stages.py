"""stage_modules: self-contained modules, equal where stages compute the same."""

import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tvmhet._tvm import structural_equal, structural_hash
from tvmhet.graph.placement import KernelPlacement
from tvmhet.ir.stages import stage_modules
from tvmhet.ir.transform.fuse_by_plan import FuseByPlan
from tvmhet.ir.transform.split_by_stage import SplitByStage


@I.ir_module
class Twins:
    """Two equal layers of a matmul and a relu, then an exp."""

    @R.function
    def main(x: R.Tensor((8, 8), "float32"), w1: R.Tensor((8, 8), "float32"), w2: R.Tensor((8, 8), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            mm1 = R.matmul(x, w1)
            relu1 = R.nn.relu(mm1)
            mm2 = R.matmul(relu1, w2)
            relu2 = R.nn.relu(mm2)
            out = R.exp(relu2)
            R.output(out)
        return out


KERNELS = (
    KernelPlacement("relu1", ("mm1", "relu1"), "tvm"),
    KernelPlacement("relu2", ("mm2", "relu2"), "tvm"),
    KernelPlacement("out", ("out",), "tvm"),
)


def split(stages):
    return stage_modules(tvm.transform.Sequential([FuseByPlan(KERNELS), SplitByStage(stages)])(Twins))


def test_one_well_formed_module_per_stage():
    stages = split([["relu1"], ["relu2", "out"]])
    assert len(stages) == 2
    for stage in stages:
        relax.analysis.well_formed(stage)
        assert str(stage["main"].attrs["global_symbol"]) == "main"
        assert isinstance(stage["main"].ret_ty, relax.TupleType)


def test_equal_stages_are_equal_modules_wherever_they_stood():
    first, second, last = split([["relu1"], ["relu2"], ["out"]])
    assert structural_equal(first, second)
    assert structural_hash(first) == structural_hash(second)
    assert not structural_equal(first, last)


def test_callees_are_named_by_operator_and_order_of_use():
    (whole,) = split([["relu1", "relu2", "out"]])
    names = sorted(g.name_hint for g in whole.get_global_vars())
    assert names == ["fused_matmul_relu", "fused_matmul_relu_1", "main"]
    single = split([["relu1"], ["relu2", "out"]])[0]
    assert sorted(g.name_hint for g in single.get_global_vars()) == ["fused_matmul_relu", "main"]


def test_no_trace_of_the_plan_is_left():
    for stage in split([["relu1"], ["relu2", "out"]]):
        keys = {k for f in stage.functions.values() for k in f.attrs.keys()}  # noqa: SIM118 (attributes iterate by position)
        assert keys <= {"global_symbol", "num_input", "Primitive"}


@I.ir_module
class Expected:
    @R.function(private=True)
    def fused_matmul_relu(x: R.Tensor((8, 8), "float32"), w: R.Tensor((8, 8), "float32")) -> R.Tensor(
        (8, 8), "float32"
    ):
        R.func_attr({"Primitive": True})
        with R.dataflow():
            mm = R.matmul(x, w)
            relu = R.nn.relu(mm)
            R.output(relu)
        return relu

    @R.function
    def main(h: R.Tensor((8, 8), "float32"), w: R.Tensor((8, 8), "float32")) -> R.Tuple(R.Tensor((8, 8), "float32")):
        R.func_attr({"num_input": 1})
        cls = Expected
        with R.dataflow():
            y = cls.fused_matmul_relu(h, w)
            R.output(y)
        return (y,)


def test_a_stage_reads_like_a_module_written_by_hand():
    tvm.ir.assert_structural_equal(split([["relu1"], ["relu2"], ["out"]])[1], Expected)


def prim_module(name):
    """A module whose main calls a PrimFunc called `name` twice, each time a stage of its own."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    gvar = builder.add_func(double_prim().with_attr("global_symbol", name), name)
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.call_tir(gvar, [x], x.ty), name_hint="a")
            out = builder.emit_output(relax.call_tir(gvar, [y], x.ty), name_hint="b")
        builder.emit_func_output(out)
    return builder.get()


def double_prim():
    x = tvm.te.placeholder((4,), "float32", name="x")
    return tvm.te.create_prim_func([x, tvm.te.compute((4,), lambda i: x[i] * 2.0, name="double")])


def test_prim_funcs_come_along_without_their_number_and_their_symbol():
    first, second = stage_modules(SplitByStage([["a"], ["b"]])(prim_module("double_7")))
    assert sorted(g.name_hint for g in first.get_global_vars()) == ["double", "main"]
    assert "global_symbol" not in (first["double"].attrs or {})
    assert structural_equal(first, second)
    assert structural_equal(first, stage_modules(SplitByStage([["a"], ["b"]])(prim_module("double_9")))[0])
