import numpy as np
import torch
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.ir.test_importers import run
from tvmhet.ir.importers import from_relax, from_torch
from tvmhet.ir.model import Model
from tvmhet.ir.prepare import prepare
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


def test_constants_of_the_result_become_parameters_whatever_their_size():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 8), "float32"))
    two = relax.const(2.0, "float32")
    with builder.function("main", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            y = builder.emit_output(relax.op.multiply(x, two))
        builder.emit_func_output(relax.Tuple([y, two, x]))
    model = from_relax(builder.get())
    assert [v.numpy().tolist() for v in model.params.values()] == [2.0]
    assert prepare(model).whole_reason == ""
    y, two, x = run(model, np.ones((2, 8), "float32"))
    assert (y == 2).all() and two == 2 and (x == 1).all()


def small(make):
    """A model of one operator on x and a constant of 8 bytes."""
    builder = relax.BlockBuilder()
    x, two = relax.Var("x", relax.TensorType((2, 3), "float32")), relax.const(np.ones((2, 1), "float32"))
    with builder.function("main", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            out = builder.emit_output(make(x, two))
        builder.emit_func_output(out)
    return Model(builder.get())


def test_small_constants_stay():
    model = small(relax.op.add)
    assert lift_constants(model) is model


def test_small_constants_among_tensors_are_lifted():
    out = lift_constants(small(lambda x, two: relax.op.concat([two, x, two], axis=1)))
    assert [v.shape for v in out.params.values()] == [(2, 1)]
    assert lift_constants(out) is out


def test_a_model_that_appends_a_small_constant_is_cut():
    class Appends(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("end", torch.tensor([[7.0]]))

        def forward(self, x):
            return torch.cat([x.relu(), self.end], 1)

    x = torch.tensor([[-1.0, 2.0]])
    model = from_torch(Appends(), (x,))
    assert prepare(model).graph is not None
    np.testing.assert_array_equal(run(model, x.numpy()), [[0.0, 2.0, 7.0]])


def test_constants_without_elements_are_lifted():
    builder = relax.BlockBuilder()
    x, nothing = relax.Var("x", relax.TensorType((2, 3), "float32")), relax.const(np.zeros((2, 0), "float32"))
    with builder.function("main", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            out = builder.emit_output(relax.op.concat([nothing, x], axis=1))
        builder.emit_func_output(out)
    assert [v.shape for v in lift_constants(Model(builder.get())).params.values()] == [(2, 0)]
