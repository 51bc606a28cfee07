"""Products and convolutions of one pixel by either library, in every form, against torch's own operators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tvmhet.emit import library_products
from tvmhet.emit.library_products import pointwise_into, product, product_into
from tvmhet.emit.library_steps import FOLDED, STEPS

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
CONV = {"strides": [1, 1], "padding": [0, 0, 0, 0], "dilation": [1, 1], "groups": 1}
#: Images, channels, result's channels, pixels a side: one image, few pixels in all, small images, large ones.
SHAPES = [(1, 5, 7, 6), (3, 40, 12, 3), (2, 3, 4, 7), (2, 3, 4, 13)]


@pytest.fixture(params=["mkl", pytest.param("onednn", marks=needs_onednn)])
def library(request, monkeypatch):
    """Products of any size by one of the two."""
    monkeypatch.setattr(library_products, "_mkl_is_slow", lambda: request.param == "onednn")
    monkeypatch.setattr(library_products, "_FEWEST_FLOPS", 0.0)
    return request.param


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_read_operands_where_they_lie(library, transposed, with_bias):
    torch.manual_seed(0)
    m, k, n = 9, 17, 12
    a = torch.randn(k, m).t() if transposed[0] else torch.randn(m, k)
    b = torch.randn(n, k).t() if transposed[1] else torch.randn(k, n)
    bias = torch.randn(n) if with_bias else None
    want = a.double() @ b.double() + (0.0 if bias is None else bias.double())
    out = torch.full((m, n), float("nan"))
    product_into(a, b, bias, out)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(product(a, b, bias).double(), want, rtol=1e-5, atol=1e-5)


def test_double_precision_stays_so(library):
    a, b = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    assert torch.equal(product(a, b), a @ b)


@needs_onednn
def test_small_products_and_single_rows_stay_with_mkl(monkeypatch):
    monkeypatch.setattr(library_products, "_mkl_is_slow", lambda: True)
    by_onednn = library_products._by_onednn
    assert by_onednn(torch.empty(128, 128), torch.empty(128, 256))
    assert not by_onednn(torch.empty(64, 64), torch.empty(64, 64))  # its fixed cost is more than it saves
    assert not by_onednn(torch.empty(1, 2048), torch.empty(2048, 2048))  # weights would be brought into its layout


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_convolutions_of_one_pixel(library, shape, with_bias):
    n, c, o, side = shape
    x, w, bias = torch.randn(n, c, side, side + 1), torch.randn(o, c, 1, 1), torch.randn(1, o, 1, 1)
    made = STEPS["nn.conv2d"](CONV)([x, w, bias] if with_bias else [x, w])
    torch.testing.assert_close(made, F.conv2d(x, w, bias.flatten() if with_bias else None), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [*SHAPES, (4, 5, 7, 0)])
def test_convolutions_of_one_pixel_are_written_as_products(shape):
    """As on GPUs; with images of one pixel, too."""
    n, c, o, side = shape
    x, w = torch.randn(n, c, max(side, 1), side + 1), torch.randn(o, c, 1, 1)
    out = torch.full((n, o, max(side, 1), side + 1), float("nan"))
    pointwise_into(w.flatten(1), x, out)
    torch.testing.assert_close(out, F.conv2d(x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("strides", "extra"), [([1, 1], [0, 0]), ([2, 2], [0, 1]), ([3, 2], [2, 0])])
def test_gradients_of_convolutions_of_one_pixel(library, shape, strides, extra):
    n, c, o, side = shape
    height, width = ((m - 1) * s + 1 + e for m, s, e in zip((side, side + 1), strides, extra, strict=True))
    x = torch.randn(n, c, height, width, requires_grad=True)
    w = torch.randn(o, c, 1, 1, requires_grad=True)
    gradient = torch.randn(n, o, side, side + 1)
    want_x, want_w = torch.autograd.grad(F.conv2d(x, w, None, strides), (x, w), gradient)
    with torch.no_grad():
        attrs = CONV | {"strides": strides, "output_padding": extra}
        to_x = STEPS["nn.conv2d_transpose"](attrs)([gradient, w])
        exchanged = [x.transpose(0, 1), gradient.transpose(0, 1), [2, 3], [0, 0], [1, 1]]
        to_w = FOLDED["conv2d_weight_gradient"](CONV | {"dilation": strides})(exchanged)
    torch.testing.assert_close(to_x, want_x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(to_w, want_w, rtol=1e-4, atol=1e-4)
