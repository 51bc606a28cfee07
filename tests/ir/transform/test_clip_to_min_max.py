import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tvmhet.ir.transform.clip_to_min_max import ClipToMinMax


def clip_module(dtype, low, high):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4,), dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.clip(x, relax.prim_value(low), relax.prim_value(high)))
        builder.emit_func_output(y)
    return builder.get()


@I.ir_module
class Expected:
    @R.function
    def main(x: R.Tensor((4,), "int64")) -> R.Tensor((4,), "int64"):
        with R.dataflow():
            y = R.maximum(x, R.const(1, "int64"))
            R.output(y)
        return y


@I.ir_module
class ExpectedBoth:
    @R.function
    def main(x: R.Tensor((4,), "int64")) -> R.Tensor((4,), "int64"):
        with R.dataflow():
            lv = R.maximum(x, R.const(1, "int64"))
            y = R.minimum(lv, R.const(3, "int64"))
            R.output(y)
        return y


def test_open_integer_clip():
    before = clip_module("int64", 1, float("inf"))
    tvm.ir.assert_structural_equal(ClipToMinMax()(before), Expected)


def test_integer_clip_with_both_bounds():
    tvm.ir.assert_structural_equal(ClipToMinMax()(clip_module("int64", 1, 3)), ExpectedBoth)


def test_idempotent_and_input_unchanged():
    before = clip_module("int64", 1, 3)
    once = ClipToMinMax()(before)
    tvm.ir.assert_structural_equal(ClipToMinMax()(once), once)
    tvm.ir.assert_structural_equal(before, clip_module("int64", 1, 3))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_closed_float_clip_stays(dtype):
    before = clip_module(dtype, 0.0, 6.0)
    assert ClipToMinMax()(before).same_as(before)


def test_clip_open_on_both_sides_is_its_operand():
    out = ClipToMinMax()(clip_module("float32", float("-inf"), float("inf")))
    assert "clip" not in out.script()
    assert "imum" not in out.script()
