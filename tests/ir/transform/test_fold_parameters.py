import numpy as np
import pytest
import torch
import tvm
from torch import nn
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tvmhet.ir.host_eval import evaluate
from tvmhet.ir.importers import from_torch
from tvmhet.ir.model import Model
from tvmhet.ir.prepare import prepare
from tvmhet.ir.transform.fold_parameters import fold_parameters


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((2, 3), "float32"), w: R.Tensor((4, 3), "float32"), unused: R.Tensor((9,), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            t = R.permute_dims(w, [1, 0])
            y = R.matmul(x, t)
            a = R.arange(R.prim_value(0), R.prim_value(4), R.prim_value(1), "float32")
            z = R.add(y, a)
            R.output(z)
        return z


@I.ir_module
class Expected:
    @R.function
    def main(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 4), "float32"), const: R.Tensor((4,), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            y = R.matmul(x, w)
            z = R.add(y, const)
            R.output(z)
        return z


@I.ir_module
class Tied:
    @R.function
    def main(i: R.Tensor((2,), "int64"), w: R.Tensor((1024, 512), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            e = R.take(w, i, axis=0)
            t = R.permute_dims(w, [1, 0])
            y = R.matmul(e, t)
            R.output(y)
        return y


def values(**shapes):
    rng = np.random.default_rng(0)
    return {n: tvm.runtime.tensor(rng.standard_normal(s).astype("float32")) for n, s in shapes.items()}


def test_transposed_weight_is_transposed_once():
    model = Model(Before, values(w=(4, 3), unused=(9,)))
    out = fold_parameters(model)
    tvm.ir.assert_structural_equal(out.mod, Expected)
    assert list(out.params) == ["w", "const"]
    np.testing.assert_array_equal(out.params["w"].numpy(), model.params["w"].numpy().T)
    np.testing.assert_array_equal(out.params["const"].numpy(), [0, 1, 2, 3])


def test_idempotent_and_input_unchanged():
    model = Model(Before, values(w=(4, 3), unused=(9,)))
    copy = tvm.ir.load_json(tvm.ir.save_json(Before))
    out = fold_parameters(model)
    assert fold_parameters(out) is out
    tvm.ir.assert_structural_equal(Before, copy)
    assert list(model.params) == ["w", "unused"]


def test_a_tied_weight_is_not_stored_twice():
    model = Model(Tied, values(w=(1024, 512)))
    assert fold_parameters(model) is model
    assert fold_parameters(model, slack_bytes=1 << 22).param_bytes == 2 * model.param_bytes


def test_what_shares_a_parameter_is_folded_together():
    @I.ir_module
    class Two:
        @R.function
        def main(x: R.Tensor((2, 512), "float32"), w: R.Tensor((512, 512), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                t = R.permute_dims(w, [1, 0])
                y = R.matmul(x, t)
                s = R.multiply(w, R.const(2.0, "float32"))
                z = R.matmul(y, s)
                R.output(z)
            return z

    model = Model(Two, values(w=(512, 512)))
    folded = fold_parameters(model)  # 1 MiB grows to 2 MiB: as much as is allowed
    assert list(folded.params) == ["w", "w_folded"]
    assert fold_parameters(model, slack_bytes=(1 << 20) - 1) is model


def test_constants_are_folded_each_for_itself():
    @I.ir_module
    class Constants:
        @R.function
        def main(x: R.Tensor((512, 512), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                a = R.cos(R.full(R.shape([512, 512]), R.const(1.0, "float32"), "float32"))
                y = R.multiply(x, a)
                b = R.sin(R.full(R.shape([512, 512]), R.const(2.0, "float32"), "float32"))
                z = R.add(y, b)
                c = R.cos(R.full(R.shape([1024, 512]), R.const(3.0, "float32"), "float32"))
                out = R.matmul(c, z)
                R.output(out)
            return out

    folded = fold_parameters(Model(Constants, {}))  # 1, 1 and 2 MiB: only the last is too large
    assert [tuple(p.shape) for p in folded.params.values()] == [(512, 512), (512, 512)]


class Masked(nn.Module):
    """The mask of a Swin transformer: numbers of windows are written into an image, and all pairs of one compared."""

    def forward(self, x):
        numbers = torch.zeros(224, 224)
        numbers[7:14] = 1.0
        numbers[:, ::2] = 2.0
        windows = numbers.reshape(32, 7, 32, 7).permute(0, 2, 1, 3).reshape(1024, 49)
        different = windows[:, None] != windows[:, :, None]  # 2.3 MiB
        return x.masked_fill(different, -100.0), different[:3, 5].float(), numbers.flatten()[::3]


def test_of_what_is_too_large_that_is_folded_which_it_comes_from():
    module, x = Masked(), torch.rand(1024, 49, 49)
    model = prepare(from_torch(module, (x,))).model
    assert {tuple(p.shape) for p in model.params.values()} == {(1024, 1, 49), (1024, 49, 1), (3, 49), (16726,)}
    assert [op.family for op in prepare(model).operator_graph.operators] == ["not_equal", "where"]
    vm = relax.VirtualMachine(tvm.compile(model.mod, target="llvm"), tvm.cpu())
    got = vm["main"](tvm.runtime.tensor(x.numpy()), *model.params.values())
    for ours, torchs in zip(got, module(x), strict=True):
        assert torch.equal(torch.from_numpy(ours.numpy()), torchs)


class Standardised(nn.Module):
    """A convolution whose weight is brought to mean 0 and variance 1 at every call, as in NFNets and BiT."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.gain = nn.Parameter(torch.rand(6, 4, 3, 3)), nn.Parameter(torch.rand(6))

    def forward(self, x):
        flat = self.weight.reshape(1, 6, -1)
        weight = nn.functional.batch_norm(flat, None, None, weight=self.gain, training=True, momentum=0.0, eps=1e-6)
        return nn.functional.conv2d(
            x, weight.reshape(6, 4, 3, 3) * torch.softmax(torch.relu(self.gain), 0)[:, None, None, None]
        )


class Adapted(nn.Module):
    """A weight with a product of two narrow ones added, of which every other row is read."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Parameter(torch.rand(12, 6))
        self.down, self.up = nn.Parameter(torch.rand(2, 6)), nn.Parameter(torch.rand(12, 2))

    def forward(self, x):
        return x @ (self.base + self.up @ self.down)[1:11:2].T


def test_slices_and_products_of_parameters_are_made_once():
    module, x = Adapted(), torch.rand(3, 6)
    model = prepare(from_torch(module, (x,))).model
    assert [op.family for op in prepare(model).operator_graph.operators] == ["matmul"]
    (weight,) = (torch.from_numpy(p.numpy()) for p in model.params.values())
    with torch.no_grad():
        torch.testing.assert_close(x @ weight, module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("begin", "end", "step"), [(1, 6, 2), (-3, 2**63 - 1, 1), (4, 0, -2), (-1, -7, -1)])
def test_a_slice_is_evaluated_as_tvm_computes_it(begin, end, step):
    x = torch.arange(12.0).reshape(6, 2)
    var = relax.Var("x", relax.TensorType((6, 2), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [var]):
        call = builder.normalize(relax.op.strided_slice(var, [0], [begin], [end], [step]))
        builder.emit_func_output(builder.emit(call))
    vm = relax.VirtualMachine(tvm.compile(builder.get(), target="llvm"), tvm.cpu())
    want = torch.from_numpy(vm["main"](tvm.runtime.tensor(x.numpy())).numpy())
    assert torch.equal(evaluate(call, [x, [0], [begin], [end], [step]]), want)


def test_standardised_weights_are_made_once():
    module, x = Standardised(), torch.rand(1, 4, 5, 5)
    model = prepare(from_torch(module, (x,))).model
    assert [op.family for op in prepare(model).operator_graph.operators] == ["nn.conv2d"]
    (weight,) = (p.numpy() for p in model.params.values())
    with torch.no_grad():
        got = nn.functional.conv2d(x, torch.from_numpy(weight))
        torch.testing.assert_close(got, module(x), rtol=1e-5, atol=1e-5)
