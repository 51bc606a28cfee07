"""Bilinear resizing axis by axis gives TVM's results; a larger image is gathered from once for each of its rows."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tvm import relax
from tvm.relax import op

from tests.emit.cpu.kernels import kernel, run, scheduled
from tvmhet.ir import resizing
from tvmhet.ir.resizing import _MODES

SIZES = {"larger": (12, 21), "smaller": (5, 3), "both": (14, 4), "many times": (36, 35), "uneven": (9, 8)}


def resized(made, mode, method="linear", dtype="float32"):
    def make(x):
        shape = relax.ShapeExpr(list(made))
        return op.image.resize2d(x, shape, layout="NCHW", method=method, coordinate_transformation_mode=mode)

    return kernel(make, (2, 3, 6, 7), dtype=dtype)


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("sizes", SIZES)
def test_results_are_tvms(sizes, mode, monkeypatch):
    x = np.random.default_rng(0).normal(size=(2, 3, 6, 7)).astype("float32")
    func = resized(SIZES[sizes], mode)
    assert func.script().count('T.sblock("T_resize') == 2
    monkeypatch.setattr(resizing, "_MODES", ())
    want = run(resized(SIZES[sizes], mode), [x])
    for each in (func, scheduled(func)[1]):
        np.testing.assert_allclose(run(each, [x]), want, rtol=1e-5, atol=1e-5)


def test_a_larger_image_is_gathered_from_row_by_row():
    """Along its six rows first; the rows of the result are then made of whole ones."""
    name, fast = scheduled(resized((12, 21), "half_pixel"))
    assert name == "injective"
    assert "T_resize = T.sblock_alloc_buffer((T.int64(2), T.int64(3), T.int64(6), T.int64(21)))" in fast.script()


def test_a_smaller_image_is_made_of_whole_rows_first():
    between = "T_resize = T.sblock_alloc_buffer((T.int64(2), T.int64(3), T.int64(5), T.int64(7)))"
    assert between in resized((5, 3), "half_pixel").script()


@pytest.mark.parametrize(
    ("made", "mode", "method"),
    [
        ((12, 21), "half_pixel", "nearest_neighbor"),
        ((12, 21), "half_pixel", "cubic"),
    ],
)
def test_others_are_tvms(made, mode, method):
    assert "T_resize" not in resized(made, mode, method).script()


@pytest.mark.parametrize(("made", "wanted"), [((6, 21), 1), ((12, 7), 1), ((1, 21), 2), ((1, 1), 2)])
@pytest.mark.parametrize("align", [False, True])
def test_an_axis_may_stay_or_end_as_one_element(made, wanted, align):
    """To one element TVM's own form divides by zero where corners are aligned."""
    x = torch.randn(2, 3, 6, 7)
    func = resized(made, "align_corners" if align else "half_pixel")
    assert func.script().count('T.sblock("T_resize') == wanted
    want = F.interpolate(x, made, mode="bilinear", align_corners=align)
    np.testing.assert_allclose(run(scheduled(func)[1], [x.numpy()]), want, rtol=1e-5, atol=1e-5)


def test_short_floats_are_weighted_in_float32():
    x = np.random.default_rng(0).normal(size=(2, 3, 6, 7)).astype("float16")
    want = run(resized((12, 21), "half_pixel"), [x.astype("float32")])
    got = run(scheduled(resized((12, 21), "half_pixel", dtype="float16"))[1], [x])
    np.testing.assert_allclose(got.astype("float32"), want, rtol=1e-3, atol=1e-3)
