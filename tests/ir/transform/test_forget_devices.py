"""TVM's own device annotations are taken out."""

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.ir.test_importers import run
from tvmhet.ir.importers import from_relax
from tvmhet.ir.transform.forget_devices import ForgetDevices


@I.ir_module
class Before:
    I.module_global_infos({"vdevice": [I.vdevice("llvm", 0, "global"), I.vdevice("llvm", 1, "global")]})

    @R.function
    def main(x: R.Tensor((4,), "float32", "llvm:0"), y: R.Tensor((4,), "float32")):
        with R.dataflow():
            a = R.add(x, x)
            b = R.to_vdevice(a, "llvm:1")
            c = R.hint_on_device(y, tvm.cpu())
            d = R.exp(b)
            e = R.nn.relu(c)
            R.output(d, e)
        return (d, e)


@I.ir_module
class Expected:
    @R.function
    def main(x: R.Tensor((4,), "float32"), y: R.Tensor((4,), "float32")):
        with R.dataflow():
            a = R.add(x, x)
            d = R.exp(a)
            e = R.nn.relu(y)
            R.output(d, e)
        return (d, e)


def test_types_and_moves_lose_their_device():
    before = Before.clone()
    after = ForgetDevices()(Before)
    tvm.ir.assert_structural_equal(after["main"], Expected["main"])
    tvm.ir.assert_structural_equal(Before, before)
    assert ForgetDevices()(after).same_as(after)
    assert ForgetDevices()(Expected).same_as(Expected)


def test_such_a_model_is_cut_and_computes_the_same():
    model = from_relax(Before)
    assert model.whole_reason is None
    x, y = np.ones(4, "float32"), -np.ones(4, "float32")
    got = run(model, x, y)
    np.testing.assert_allclose(got[0], np.exp(x + x), rtol=1e-6)
    np.testing.assert_array_equal(got[1], np.zeros(4))


def test_a_shape_that_is_not_known_stays_unknown():
    x = relax.Var("x", relax.TensorType(dtype="float32", ndim=2, vdevice=Before.global_infos["vdevice"][0]))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.exp(x))
        builder.emit_func_output(y)
    (param,) = ForgetDevices()(builder.get())["main"].params
    assert param.ty.vdevice is None and param.ty.ndim == 2 and param.ty.shape is None
