"""Products compute what is read of them; everything else stays, and results are what they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm
from torch import nn
from tvm.script import ir as I
from tvm.script import relax as R

import tvmhet
from tvmhet.ir.importers import from_torch
from tvmhet.ir.rewrite import bindings_of, op_name, shape_of
from tvmhet.ir.transform.slice_early import SliceEarly
from tvmhet.zoo import get


def after(mod):
    """The pass, then the removal of what nothing reads any more."""
    return tvm.transform.Sequential([SliceEarly(), tvm.relax.transform.DeadCodeElimination()])(mod)


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((1, 8, 4), "float32"), w: R.Tensor((4, 6), "float32"), b: R.Tensor((6,), "float32")):
        with R.dataflow():
            t = R.tanh(x)
            y = R.matmul(t, w)
            z = R.add(y, b)
            c = R.take(z, R.const(2, "int64"), axis=1)
            R.output(c)
        return c


@I.ir_module
class Expected:
    @R.function
    def main(x: R.Tensor((1, 8, 4), "float32"), w: R.Tensor((4, 6), "float32"), b: R.Tensor((6,), "float32")):
        with R.dataflow():
            t = R.tanh(x)
            p = R.strided_slice(t, axes=[1], begin=[2], end=[3])
            y = R.matmul(p, w)
            z = R.add(y, b)
            c = R.reshape(z, (1, 6))
            R.output(c)
        return c


@I.ir_module
class TwoReaders:
    @R.function
    def main(x: R.Tensor((8, 4), "float32"), w: R.Tensor((4, 6), "float32")):
        with R.dataflow():
            y = R.matmul(x, w)
            a = R.strided_slice(y, axes=[0], begin=[1], end=[2])
            b = R.strided_slice(y, axes=[0], begin=[3], end=[5])
            s = R.sum(b, axis=[0], keepdims=True)
            z = R.add(a, s)
            R.output(z)
        return z


@I.ir_module
class TwoReadersExpected:
    @R.function
    def main(x: R.Tensor((8, 4), "float32"), w: R.Tensor((4, 6), "float32")):
        with R.dataflow():
            p = R.strided_slice(x, axes=[0], begin=[1], end=[5])
            y = R.matmul(p, w)
            a = R.strided_slice(y, axes=[0], begin=[0], end=[1])
            b = R.strided_slice(y, axes=[0], begin=[2], end=[4])
            s = R.sum(b, axis=[0], keepdims=True)
            z = R.add(a, s)
            R.output(z)
        return z


@I.ir_module
class Unread:
    """Nothing here is worth a slice: no product, one whose result is returned, one of which most is read."""

    @R.function
    def main(x: R.Tensor((8, 4), "float32"), w: R.Tensor((4, 8), "float32")):
        with R.dataflow():
            t = R.tanh(x)
            a = R.strided_slice(t, axes=[0], begin=[0], end=[1])
            y = R.matmul(x, w)
            b = R.strided_slice(y, axes=[0], begin=[0], end=[1])
            z = R.matmul(y, x)
            c = R.strided_slice(z, axes=[0], begin=[0], end=[7])
            R.output(y, a, b, c)
        return (y, a, b, c)


@I.ir_module
class Causal:
    """A causal convolution, padded on both sides and cut behind, after one of which the last two places are read."""

    @R.function
    def main(x: R.Tensor((1, 4, 64), "float32"), w: R.Tensor((4, 4, 3), "float32"), b: R.Tensor((1, 4, 1), "float32")):
        with R.dataflow():
            t = R.nn.conv1d(x, w, padding=[4, 4], dilation=[2])
            u = R.strided_slice(t, axes=[2], begin=[0], end=[-4])
            v = R.nn.relu(R.add(u, b))
            y = R.nn.conv1d(v, w, padding=[2, 2])
            z = R.strided_slice(y, axes=[2], begin=[0], end=[-2])
            c = R.strided_slice(z, axes=[2], begin=[-2], end=[64])
            R.output(z, c)
        return (z, c)


@I.ir_module
class CausalExpected:
    @R.function
    def main(x: R.Tensor((1, 4, 64), "float32"), w: R.Tensor((4, 4, 3), "float32"), b: R.Tensor((1, 4, 1), "float32")):
        with R.dataflow():
            u = R.nn.conv1d(x, w, padding=[4, 0], dilation=[2])
            v = R.nn.relu(R.add(u, b))
            y = R.nn.conv1d(v, w, padding=[2, 0])
            z = y
            c = R.strided_slice(z, axes=[2], begin=[-2], end=[64])
            R.output(z, c)
        return (z, c)


@pytest.mark.parametrize(
    ("before", "expected"), [(Before, Expected), (TwoReaders, TwoReadersExpected), (Causal, CausalExpected)]
)
def test_slices_move_before_products(before, expected):
    out = after(before)
    tvm.ir.assert_structural_equal(out, expected)
    assert SliceEarly()(out).same_as(out)


def test_what_is_not_worth_a_slice_stays():
    assert SliceEarly()(Unread).same_as(Unread)


class Block(nn.Module):
    """Attention with a residual and what follows it, of which one token is read, as in a classifier."""

    def __init__(self, read):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down, self.read = nn.Linear(16, 64), nn.Linear(64, 16), read

    def forward(self, x):
        tokens = x.shape[1]
        q, k, v = self.qkv(self.norm(x)).reshape(-1, tokens, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(-1, tokens, 16))
        return self.read(x + self.down(nn.functional.gelu(self.up(x))))


READS = {
    "first": lambda y: y[:, 0],
    "last": lambda y: y[:, -1:],
    "two": lambda y: y[:, 2] * y[:, 4],
    "channels": lambda y: y[..., 3:5],
    "every third": lambda y: y[:, 1:5:3],
    "mean of the first": lambda y: y[:, :3].mean(1),
}


@pytest.mark.parametrize("makers", [("tvm",), ("tvm", "library")])
@pytest.mark.parametrize("read", READS)
def test_a_block_gives_the_same_with_less_to_do(read, makers):
    torch.manual_seed(0)
    module, x = Block(READS[read]).eval(), torch.randn(2, 12, 16)
    model = from_torch(module, (x,))
    widths = [shape_of(b.var) for b in bindings_of(model.main) if op_name(b.value) == "matmul"]
    whole = [(2, 12, 48), (2, 4, 12, 12), (2, 4, 12, 4), (2, 12, 16), (2, 12, 64), (2, 12, 16)]
    assert widths != whole and all(np.prod(a) <= np.prod(b) for a, b in zip(widths, whole, strict=True))
    built = tvmhet.build(model, cluster=tvmhet.ClusterSpec.of({"cpu-x86-64-v2": 1}), makers=makers, inline=True)
    np.testing.assert_allclose(built(x.numpy()), module(x).detach().numpy(), rtol=1e-5, atol=1e-5)


class Causals(nn.Module):
    """Causal convolutions with growing holes over few places, as in temporal networks; one place or all are read."""

    def __init__(self, last):
        super().__init__()
        holes = (1, 2, 16, 128)
        self.layers = nn.ModuleList(nn.Conv1d(6, 6, 7, padding=6 * d, dilation=d) for d in holes)
        self.last = last

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)[..., : x.shape[-1]].contiguous() + x)
        return x[..., -1] if self.last else x


@pytest.mark.parametrize("makers", [("tvm",), ("tvm", "library")])
@pytest.mark.parametrize("last", [True, False])
def test_causal_convolutions_compute_what_is_kept(last, makers):
    torch.manual_seed(0)
    module, x = Causals(last).eval(), torch.randn(2, 6, 40)
    model = from_torch(module, (x,))
    calls = [b for b in bindings_of(model.main) if "conv" in op_name(b.value)]
    # the last place reads itself alone, in the layer before places 7, 23 and 39: so 33 of the one before
    assert [shape_of(b.var)[-1] for b in calls] == ([40, 33, 1, 1] if last else [40] * 4)
    assert [shape_of(b.value.args[1])[-1] for b in calls] == [7, 7, 3, 1]
    built = tvmhet.build(model, cluster=tvmhet.ClusterSpec.of({"cpu-x86-64-v2": 1}), makers=makers, inline=True)
    np.testing.assert_allclose(built(x.numpy()), module(x).detach().numpy(), rtol=1e-5, atol=1e-5)


def test_of_its_last_block_a_vision_transformer_computes_one_token():
    net, inputs = get("vit_b16", image=32, layers=2, dim=64, heads=4)
    model = from_torch(net, inputs)
    rows = [shape_of(b.var)[-2] for b in bindings_of(model.main) if op_name(b.value) == "matmul"]
    # patches are a convolution: query, key, value, scores, mix, out, up, down of two blocks, and the head
    assert rows == [5] * 8 + [1, 5, 5, 1, 1, 1, 1, 1, 1]


def test_what_is_cut_of_a_parameter_is_cut_once():
    class Columns(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.table = nn.Linear(8, 64), nn.Parameter(torch.randn(100, 16))

        def forward(self, x):
            return self.wide(x)[:, 16:32] + self.table[4:5]

    module, x = Columns().eval(), torch.randn(3, 8)
    model = from_torch(module, (x,))
    assert sorted(tuple(v.shape) for v in model.params.values()) == [(1, 16), (8, 16), (16,)]
    built = tvmhet.build(model, cluster=tvmhet.ClusterSpec.of({"cpu-x86-64-v2": 1}), makers=("tvm",), inline=True)
    np.testing.assert_allclose(built(x.numpy()), module(x).detach().numpy(), rtol=1e-5, atol=1e-5)
