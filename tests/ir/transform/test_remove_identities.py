import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tvmhet.ir.transform.remove_identities import RemoveIdentities


def after(mod):
    """The pass, then the removal of what nothing reads any more."""
    return tvm.transform.Sequential([RemoveIdentities(), tvm.relax.transform.DeadCodeElimination()])(mod)


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((4, 4), "float32")):
        with R.dataflow():
            a = R.reshape(x, (2, 8))
            b = R.reshape(a, (16,))
            c = R.astype(b, "float32")
            d = R.nn.dropout(c)
            e = d[0]
            f = R.broadcast_to(e, (16,))
            g = R.reshape(f, (2, 2, 4))
            h = R.permute_dims(g, [2, 0, 1])
            i = R.permute_dims(h, [0, 2, 1])
            y = R.nn.relu(i)
            R.output(y)
        return y


@I.ir_module
class Expected:
    @R.function
    def main(x: R.Tensor((4, 4), "float32")):
        with R.dataflow():
            g = R.reshape(x, (2, 2, 4))
            i = R.permute_dims(g, [2, 1, 0])
            y = R.nn.relu(i)
            R.output(y)
        return y


@I.ir_module
class RoundTrip:
    @R.function
    def main(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            a = R.permute_dims(x, [1, 0])
            b = R.permute_dims(a, [1, 0])
            c = R.reshape(b, (6,))
            d = R.reshape(c, (2, 3))
            e = R.strided_slice(d, axes=[0, 1], begin=[0, 0], end=[2, 3], strides=[1, 1])
            y = R.nn.relu(e)
            R.output(y)
        return y


@I.ir_module
class RoundTripExpected:
    @R.function
    def main(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            y = R.nn.relu(x)
            R.output(y)
        return y


@I.ir_module
class Nothing:
    @R.function
    def main(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            a = R.strided_slice(x, axes=[0], begin=[1], end=[-3], strides=[-1])
            b = R.reshape(a, (6,))
            y = R.astype(b, "float16")
            R.output(y)
        return y


@I.ir_module
class Empty:
    @R.function
    def main(x: R.Tensor((2, 8), "float32"), y: R.Tensor((2, 3), "float32"), z: R.Tensor((2, 0), "float32")):
        with R.dataflow():
            a = R.strided_slice(x, axes=[1], begin=[8], end=[8])
            b = R.negative(a)
            c = R.concat((x, b), axis=1)
            d = R.concat((a, c, y, z), axis=-1)
            t = (z, x)
            e = R.concat(t, axis=1)
            f = R.concat((z, b), axis=1)
            gv = (d, e, f)
            R.output(gv)
        return gv


@I.ir_module
class EmptyExpected:
    @R.function
    def main(x: R.Tensor((2, 8), "float32"), y: R.Tensor((2, 3), "float32"), z: R.Tensor((2, 0), "float32")):
        with R.dataflow():
            a = R.strided_slice(x, axes=[1], begin=[8], end=[8])
            b = R.negative(a)
            d = R.concat((x, y), axis=-1)
            f = R.concat((z, b), axis=1)
            gv = (d, x, f)
            R.output(gv)
        return gv


def test_empty_operands_of_a_concatenation_are_dropped():
    tvm.ir.assert_structural_equal(after(Empty), EmptyExpected)
    tvm.ir.assert_structural_equal(after(after(Empty)), EmptyExpected)


def test_joins_and_drops():
    tvm.ir.assert_structural_equal(after(Before), Expected)


def test_there_and_back_is_nothing():
    tvm.ir.assert_structural_equal(after(RoundTrip), RoundTripExpected)


def test_idempotent_and_input_unchanged():
    copy = tvm.ir.load_json(tvm.ir.save_json(Before))
    once = RemoveIdentities()(Before)
    tvm.ir.assert_structural_equal(after(RemoveIdentities()(once)), Expected)
    tvm.ir.assert_structural_equal(Before, copy)


def test_leaves_a_reversal_and_a_cast_alone():
    assert RemoveIdentities()(Nothing).same_as(Nothing)
