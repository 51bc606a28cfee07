import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tvmhet.ir.transform.cast_bool_cumsum import CastBoolCumsum


@I.ir_module
class Before:
    @R.function
    def main(mask: R.Tensor((2, 4), "bool"), x: R.Tensor((2, 4), "float32")) -> R.Tensor((2, 4), "float32"):
        with R.dataflow():
            sums = R.cumsum(mask, axis=1)
            floats = R.cumsum(mask, axis=1, dtype="float32")
            plain = R.cumsum(x, axis=1)
            zero = R.equal(sums, R.const(False))
            picked = R.where(zero, floats, plain)
            R.output(picked)
        return picked


@I.ir_module
class IntBefore:
    @R.function
    def main(mask: R.Tensor((2, 4), "bool")) -> R.Tensor((2, 4), "int64"):
        with R.dataflow():
            sums = R.cumsum(mask, axis=1, dtype="int64")
            more = R.add(sums, R.const(1, "int64"))
            R.output(more)
        return more


@I.ir_module
class IntExpected:
    @R.function
    def main(mask: R.Tensor((2, 4), "bool")) -> R.Tensor((2, 4), "int64"):
        with R.dataflow():
            cast = R.astype(mask, dtype="int64")
            sums = R.cumsum(cast, axis=1, dtype="int64", exclusive=False)
            more = R.add(sums, R.const(1, "int64"))
            R.output(more)
        return more


@I.ir_module
class Plain:
    @R.function
    def main(x: R.Tensor((2, 4), "float32")) -> R.Tensor((2, 4), "float32"):
        with R.dataflow():
            sums = R.cumsum(x, axis=1)
            R.output(sums)
        return sums


def test_casts_the_operand():
    tvm.ir.assert_structural_equal(CastBoolCumsum()(IntBefore), IntExpected)


def test_sum_without_dtype_becomes_int64():
    @I.ir_module
    class Untyped:
        @R.function
        def main(mask: R.Tensor((2, 4), "bool")):
            with R.dataflow():
                sums = R.cumsum(mask, axis=1)
                R.output(sums)
            return sums

    out = CastBoolCumsum()(Untyped)
    assert str(out["main"].ret_ty.dtype) == "int64"


def test_idempotent_and_input_unchanged():
    copy = tvm.ir.load_json(tvm.ir.save_json(IntBefore))
    once = CastBoolCumsum()(IntBefore)
    tvm.ir.assert_structural_equal(CastBoolCumsum()(once), once)
    tvm.ir.assert_structural_equal(IntBefore, copy)


def test_does_nothing_where_nothing_matches():
    assert CastBoolCumsum()(Plain).same_as(Plain)
