import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tvmhet.ir.model import Model
from tvmhet.ir.transform.lift_constants import lift_constants

WEIGHT = np.arange(64, dtype="float32").reshape(8, 8)


def before():
    builder = relax.BlockBuilder()
    x, weight = relax.Var("x", relax.TensorType((2, 8), "float32")), relax.const(WEIGHT)
    with builder.function("main", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            y = builder.emit(relax.op.matmul(x, weight))
            z = builder.emit(relax.op.concat([weight, y], axis=0))
            out = builder.emit_output(relax.op.add(z, relax.const(1.0, "float32")))
        builder.emit_func_output(out)
    return builder.get()


@I.ir_module
class Expected:
    @R.function
    def main(x: R.Tensor((2, 8), "float32"), const: R.Tensor((8, 8), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            y = R.matmul(x, const)
            z = R.concat((const, y), axis=0)
            out = R.add(z, R.const(1.0, "float32"))
            R.output(out)
        return out


def test_a_constant_becomes_one_parameter():
    out = lift_constants(Model(before()))
    tvm.ir.assert_structural_equal(out.mod, Expected)
    np.testing.assert_array_equal(out.params["const"].numpy(), WEIGHT)


def test_idempotent_and_input_unchanged():
    mod = before()
    out = lift_constants(Model(mod))
    assert lift_constants(out) is out
    tvm.ir.assert_structural_equal(mod, before())


def test_small_constants_stay():
    model = Model(before())
    assert lift_constants(model, min_bytes=257) is model


def test_constants_without_elements_are_lifted():
    builder = relax.BlockBuilder()
    x, nothing = relax.Var("x", relax.TensorType((2, 3), "float32")), relax.const(np.zeros((2, 0), "float32"))
    with builder.function("main", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            out = builder.emit_output(relax.op.concat([nothing, x], axis=1))
        builder.emit_func_output(out)
    assert [v.shape for v in lift_constants(Model(builder.get())).params.values()] == [(2, 0)]
