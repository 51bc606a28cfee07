import numpy as np
import pytest
import torch
import tvm
from torch import nn
from tvm.script import ir as I
from tvm.script import relax as R

from tvmhet.ir.importers import from_torch
from tvmhet.ir.transform.fold_batch_norm import FoldBatchNorm


def after(mod):
    """The pass, then the removal of what nothing reads any more."""
    return tvm.transform.Sequential([FoldBatchNorm(), tvm.relax.transform.DeadCodeElimination()])(mod)


@I.ir_module
class Before:
    @R.function
    def main(
        x: R.Tensor((1, 3, 8, 8), "float32"), w: R.Tensor((4, 3, 3, 3), "float32"), g: R.Tensor((4,), "float32"),
        b: R.Tensor((4,), "float32"), m: R.Tensor((4,), "float32"), v: R.Tensor((4,), "float32"),
    ):  # fmt: skip
        R.func_attr({"num_input": 1})
        with R.dataflow():
            c = R.nn.conv2d(x, w)
            n = R.nn.batch_norm(c, g, b, m, v, axis=1, epsilon=0.5, training=False)
            y = n[0]
            z = R.nn.relu(y)
            R.output(z)
        return z


@I.ir_module
class Expected:
    @R.function
    def main(
        x: R.Tensor((1, 3, 8, 8), "float32"), w: R.Tensor((4, 3, 3, 3), "float32"), g: R.Tensor((4,), "float32"),
        b: R.Tensor((4,), "float32"), m: R.Tensor((4,), "float32"), v: R.Tensor((4,), "float32"),
    ):  # fmt: skip
        R.func_attr({"num_input": 1})
        with R.dataflow():
            lv = R.add(v, R.const(0.5, "float32"))
            lv1 = R.rsqrt(lv)
            lv2 = R.multiply(g, lv1)
            lv3 = R.multiply(m, lv2)
            lv4 = R.negative(lv3)
            lv5 = R.add(b, lv4)
            lv6 = R.expand_dims(lv2, axis=[1, 2, 3])
            lv7 = R.multiply(w, lv6)
            folded = R.nn.conv2d(x, lv7)
            lv8 = R.expand_dims(lv5, axis=[0, 2, 3])
            lv9 = R.add(folded, lv8)
            z = R.nn.relu(lv9)
            R.output(z)
        return z


@I.ir_module
class Training:
    @R.function
    def main(x: R.Tensor((1, 4, 8, 8), "float32"), g: R.Tensor((4,), "float32")):
        with R.dataflow():
            n = R.nn.batch_norm(x, g, g, g, g, axis=1, training=True)
            y = n[0]
            R.output(y)
        return y


def test_the_scale_moves_into_the_convolution():
    tvm.ir.assert_structural_equal(after(Before), Expected)


def test_idempotent_and_input_unchanged():
    copy = tvm.ir.load_json(tvm.ir.save_json(Before))
    once = FoldBatchNorm()(Before)
    assert FoldBatchNorm()(once).same_as(once)
    tvm.ir.assert_structural_equal(Before, copy)


def test_training_is_left_alone():
    assert FoldBatchNorm()(Training).same_as(Training)


class Shared(nn.Module):
    """The convolution has a second reader, so its weight must not be scaled."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.conv(x)
        return self.norm(y) + y


torch.manual_seed(0)
CASES = {
    "conv with bias": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (2, 3, 8, 8), 1),
    "grouped conv": (nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8)), (2, 4, 8, 8), 1),
    "conv 1d": (nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)), (2, 3, 8), 1),
    "transposed conv": (nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(4)), (2, 3, 8, 8), 1),
    "linear": (nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), (5, 6), 1),
    "after an operator of one operand": (nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3)), (2, 3, 4, 4), 0),
    "no producer": (nn.BatchNorm2d(3), (2, 3, 4, 4), 0),
    "two norms": (nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)), (2, 3, 4, 4), 1),
    "not affine": (nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False)), (2, 3, 4, 4), 1),
    "shared": (Shared(), (2, 3, 8, 8), 1),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_same_numbers_as_torch(name):
    module, shape, num_products = CASES[name]
    torch.manual_seed(0)
    for norm in module.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
            if norm.affine:
                nn.init.normal_(norm.weight)
                nn.init.normal_(norm.bias)
    x = torch.randn(shape)
    model = from_torch(module.eval(), (x,))
    text = model.mod.script()
    assert "batch_norm" not in text
    assert text.count("R.nn.conv") + text.count("R.matmul") == num_products
    executable = tvm.compile(model.mod, target=tvm.target.Target("llvm"))
    vm = tvm.relax.VirtualMachine(executable, tvm.cpu())
    got = vm["main"](tvm.runtime.tensor(x.numpy()), *model.params.values()).numpy()
    np.testing.assert_allclose(got, module(x).detach().numpy(), rtol=1e-4, atol=1e-5)
