"""Transposed convolutions give torch's results, and multiply no zeros where that pays."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tvm_ffi
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tvm.relax import op

import tvmhet
from tests.emit.cpu.kernels import few, kernel, run, scheduled
from tvmhet._tvm import SBlock
from tvmhet.profiling import local_types

RELAX = {1: op.nn.conv1d_transpose, 2: op.nn.conv2d_transpose, 3: op.nn.conv3d_transpose}
HERE = [d.target["mcpu"] for d in local_types([tvmhet.device_type(f"cpu-x86-64-v{level}") for level in (3, 4)])]
REDUCED = 2  # the kind of a block's variable
TORCH = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def made(rank, image, weight, strides, cut, extra, groups=1, dilation=None, dtype="float32"):
    def make(x, w):
        options = {"strides": strides, "padding": cut * 2, "output_padding": extra, "groups": groups}
        return RELAX[rank](x, w, dilation=dilation or [1] * rank, out_dtype=dtype, **options)

    return kernel(make, image, weight, dtype=dtype)


def num_products(func):
    """How many products a kernel's reduction adds up."""
    found = []

    def visit(block):
        if any(int(v.iter_type) == REDUCED for v in block.iter_vars):
            found.append(math.prod(int(v.dom.extent) for v in block.iter_vars))

    tvm_ffi.structural_walk(func.body, (SBlock, visit))
    return sum(found)


@st.composite
def windows(draw):
    rank = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    channels, results = groups * draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    lengths, sizes, strides, dilation, cut, extra = [], [], [], [], [], []
    for _ in range(rank):
        lengths.append(draw(st.sampled_from([1, 2, 5, 7, 16])))
        sizes.append(draw(st.integers(1, 5)))
        strides.append(draw(st.integers(1, 3)))
        dilation.append(draw(st.sampled_from([1, 1, 2])))
        cut.append(draw(st.integers(0, dilation[-1] * (sizes[-1] - 1) // 2)))
        extra.append(draw(st.integers(0, strides[-1] - 1)))
    sizes_of_results = zip(lengths, sizes, strides, dilation, cut, extra, strict=True)
    assume(all((n - 1) * s - 2 * p + d * (k - 1) + e + 1 > 0 for n, k, s, d, p, e in sizes_of_results))
    return rank, (2, channels, *lengths), (channels, results, *sizes), strides, cut, extra, groups, dilation


@given(windows())
@settings(few, max_examples=40)
def test_any_window_gives_torchs_result(window):
    rank, image, weight, strides, cut, extra, groups, dilation = window
    func = made(*window)
    x, w = torch.randn(image), torch.randn(weight)
    want = TORCH[rank](x, w, None, strides, cut, extra, groups, dilation).numpy()
    np.testing.assert_allclose(run(func, [x.numpy(), w.numpy()]), want, rtol=1e-4, atol=1e-4)
    for level in HERE:
        got = run(scheduled(func, level)[1], [x.numpy(), w.numpy()], level)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rank", "image", "weight", "strides", "cut", "extra"),
    [
        (2, (1, 8, 6, 7), (8, 4, 4, 4), [2, 2], [1, 1], [0, 0]),
        (2, (1, 8, 6, 7), (8, 4, 3, 3), [2, 2], [1, 1], [1, 1]),
        (1, (1, 8, 20), (8, 4, 16), [8], [4], [0]),
        (3, (1, 8, 3, 4, 5), (8, 4, 2, 2, 2), [2, 2, 2], [0, 0, 0], [0, 0, 0]),
        (2, (1, 8, 1, 1), (8, 4, 4, 4), [1, 1], [0, 0], [0, 0]),  # a code becomes an image
    ],
)
def test_as_many_products_as_the_image_and_the_window_have(rank, image, weight, strides, cut, extra):
    func = made(rank, image, weight, strides, cut, extra)
    assert num_products(func) == math.prod(image) * math.prod(weight[1:])


@pytest.mark.parametrize(
    ("image", "weight", "strides", "cut", "groups"),
    [
        ((1, 8, 6, 7), (8, 4, 3, 3), 1, 1, 1),  # hardly more results than elements
        ((1, 8, 6, 7), (8, 1, 16, 16), 8, 4, 8),  # by channel
        ((1, 2, 9, 9), (2, 4, 19, 19), 2, 9, 1),  # a hundred elements of the window fall on one place
    ],
)
def test_others_are_tvms(image, weight, strides, cut, groups):
    assert "T_conv_transpose" not in made(2, image, weight, [strides] * 2, [cut] * 2, [0, 0], groups).script()


@pytest.mark.parametrize(("dtype", "rtol"), [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_what_falls_on_one_place_is_added_up_in_float32(dtype, rtol):
    func = made(2, (1, 2, 5, 5), (2, 3, 4, 4), [2, 2], [1, 1], [0, 0], dtype=dtype)
    assert func.script().count('.astype("float32")') + func.script().count('T.Cast("float32"') >= 4
    x, w = torch.randn(1, 2, 5, 5).to(getattr(torch, dtype)), torch.randn(2, 3, 4, 4).to(getattr(torch, dtype))
    want = F.conv_transpose2d(x.float(), w.float(), stride=2, padding=1).numpy()
    name = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
    got = run(scheduled(func)[1], [t.float().numpy().astype(name) for t in (x, w)]).astype("float32")
    np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol * np.abs(want).max())
