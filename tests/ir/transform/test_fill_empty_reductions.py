import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tvmhet.ir.transform.fill_empty_reductions import FillEmptyReductions


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((2, 0, 4), "float32"), w: R.Tensor((0, 3), "int32"), y: R.Tensor((2, 4, 0), "float32")):
        with R.dataflow():
            a = R.sum(x, axis=[1])
            b = R.max(w, axis=[0])
            c = R.matmul(y, x)
            d = R.sum(x, axis=[2])
            e = R.sum(c, axis=[1])
            gv = (a, b, c, d, e)
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def main(x: R.Tensor((2, 0, 4), "float32"), w: R.Tensor((0, 3), "int32"), y: R.Tensor((2, 4, 0), "float32")):
        with R.dataflow():
            a = R.full((2, 4), R.const(0.0, "float32"), dtype="float32")
            b = R.full((3,), R.const(-2147483648, "int32"), dtype="int32")
            c = R.full((2, 4, 4), R.const(0.0, "float32"), dtype="float32")
            d = R.sum(x, axis=[2])
            e = R.sum(c, axis=[1])
            gv = (a, b, c, d, e)
            R.output(gv)
        return gv


def test_reductions_over_nothing_are_their_neutral_value():
    before = Before.clone()
    got = FillEmptyReductions()(Before)
    tvm.ir.assert_structural_equal(got, Expected)
    tvm.ir.assert_structural_equal(Before, before)
    tvm.ir.assert_structural_equal(FillEmptyReductions()(got), Expected)
