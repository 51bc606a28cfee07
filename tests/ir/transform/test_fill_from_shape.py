import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tvmhet.ir.transform.fill_from_shape import FillFromShape


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            a = R.zeros_like(x)
            b = R.ones_like(x, dtype="int32")
            c = R.full_like(x, R.const(2.0, "float32"))
            gv = (a, b, c)
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def main(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            a = R.zeros((2, 3), dtype="float32")
            b = R.ones((2, 3), dtype="int32")
            c = R.full((2, 3), R.const(2.0, "float32"), dtype="float32")
            gv = (a, b, c)
            R.output(gv)
        return gv


@I.ir_module
class Symbolic:
    @R.function
    def main(x: R.Tensor(("n", 3), "float32")):
        with R.dataflow():
            a = R.zeros_like(x)
            R.output(a)
        return a


def test_makes_fills_of_the_shape():
    tvm.ir.assert_structural_equal(FillFromShape()(Before), Expected)


def test_idempotent_and_input_unchanged():
    copy = tvm.ir.load_json(tvm.ir.save_json(Before))
    once = FillFromShape()(Before)
    assert FillFromShape()(once).same_as(once)
    tvm.ir.assert_structural_equal(Before, copy)


def test_symbolic_shape_stays():
    assert FillFromShape()(Symbolic).same_as(Symbolic)
