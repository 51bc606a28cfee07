"""Windows keep what lies on the image at some place; results stay what they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from tvm.script import ir as I
from tvm.script import relax as R

import tvmhet
from tvmhet.ir.importers import from_torch
from tvmhet.ir.transform.crop_windows import CropWindows, _on_image


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((1, 8, 14, 20), "float32"), w: R.Tensor((4, 8, 3, 3), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            y = R.nn.conv2d(x, w, strides=[1, 1], padding=[14, 14, 14, 14], dilation=[14, 14])
            R.output(y)
        return y


@I.ir_module
class Expected:
    @R.function
    def main(x: R.Tensor((1, 8, 14, 20), "float32"), w: R.Tensor((4, 8, 3, 3), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            t = R.take(w, R.const([1], "int64"), axis=2)
            y = R.nn.conv2d(x, t, strides=[1, 1], padding=[0, 14, 0, 14], dilation=[14, 14])
            R.output(y)
        return y


def test_rows_of_a_window_that_lie_beside_the_image_are_left_out():
    out = CropWindows()(Before)
    tvm.ir.assert_structural_equal(out, Expected)
    assert CropWindows()(out).same_as(out)


def test_the_weight_of_an_input_stays():
    mod = tvm.IRModule({"main": Before["main"].with_attr("num_input", 2)})
    assert CropWindows()(mod).same_as(mod)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.integers(0, 20), st.integers(0, 20)
)
def test_the_window_of_one_axis_against_all_its_elements(extent, window, stride, step, before, after):
    made = (extent + before + after - step * (window - 1) - 1) // stride + 1
    assume(made > 0)
    lies = {r for r in range(window) for y in range(made) if 0 <= y * stride + r * step - before < extent}
    kept = _on_image(extent, window, made, stride, step, before, after)
    assert (kept is None) == (not lies)
    if kept is not None:
        first, behind = kept
        assert lies <= set(range(first, behind)) and first * step <= before and (window - behind) * step <= after
        left = before - first * step, after - (window - behind) * step
        assert (extent + sum(left) - step * (behind - first - 1) - 1) // stride + 1 == made
        if first > 0:
            assert first in lies


class Pyramid(nn.Module):
    """Two windows with holes of one image, as in DeepLab, one of which reaches over it, and one in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(8, 4, 3, padding=12, dilation=12)
        self.near = nn.Conv2d(8, 4, 3, padding=2, dilation=2)
        self.norm = nn.BatchNorm2d(4)
        self.long = nn.Conv1d(4, 4, 5, padding=40, dilation=20)

    def forward(self, x):
        made = self.norm(self.wide(x)) + self.near(x)
        return self.long(made.flatten(2)[:, :, ::6])


@pytest.mark.parametrize("makers", [("tvm",), ("tvm", "library")])
def test_a_model_gives_the_same_with_less_to_do(makers):
    torch.manual_seed(0)
    module, x = Pyramid().eval(), torch.randn(1, 8, 9, 10)
    model = from_torch(module, (x,))
    shapes = {tuple(v.shape) for v in model.params.values()}
    assert (4, 8, 1, 1) in shapes and (4, 8, 3, 3) in shapes and (4, 4, 1) in shapes
    built = tvmhet.build(model, cluster=tvmhet.ClusterSpec.of({"cpu-x86-64-v2": 1}), makers=makers, inline=True)
    got, want = built(x.numpy()), module(x).detach().numpy()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
