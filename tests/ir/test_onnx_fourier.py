"""Transforms of ONNX models equal torch's, along any axis, cut, padded, halved or back; what has no size is refused."""

import itertools

import numpy as np
import pytest
import torch
from onnx import helper, numpy_helper

from tests.ir.test_importers import run
from tvmhet.errors import UnsupportedOperator
from tvmhet.ir.importers import from_onnx

RNG = np.random.default_rng(0)


def model(operator, x, opset, others=(), dims=None, **attributes):
    """One node whose first operand is the model's input; the others are constants, or absent."""
    names = [f"i{i}" if o is not None else "" for i, o in enumerate((x, *others))]
    dtype = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [helper.make_node(operator, names, ["y"], **attributes)], "g",
        [helper.make_tensor_value_info("i0", dtype, x.shape if dims is None else dims)],
        [helper.make_tensor_value_info("y", dtype, None)],
        [numpy_helper.from_array(np.asarray(o), n) for n, o in zip(names[1:], others, strict=True) if o is not None],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def pairs(values):
    return torch.view_as_real(values.resolve_conj()).numpy()


def signal(*dims):
    return RNG.standard_normal(dims).astype("float32")


@pytest.mark.parametrize(("is_complex", "axis", "length"), itertools.product([False, True], [1, 2], [None, 5, 6, 11]))
def test_there_and_back_along_an_axis(is_complex, axis, length):
    """Seven values, or eight: cut to 5 or 6, or with zeros after them."""
    x = signal(2, 7, 8, 2 if is_complex else 1)
    numbers = torch.view_as_complex(torch.from_numpy(x)) if is_complex else torch.from_numpy(x[..., 0])
    size = None if length is None else np.int64(length)
    for opset, more in ((17, {"axis": axis}), (20, {})):
        others = (size,) if opset == 17 else (size, np.int64(axis))
        there = run(from_onnx(model("DFT", x, opset, others, **more)), x)
        np.testing.assert_allclose(there, pairs(torch.fft.fft(numbers, n=length, dim=axis)), atol=2e-5)
        back = run(from_onnx(model("DFT", x, opset, others, inverse=1, **more)), x)
        np.testing.assert_allclose(back, pairs(torch.fft.ifft(numbers, n=length, dim=axis)), atol=1e-5)
        if not is_complex:
            half = run(from_onnx(model("DFT", x, opset, others, onesided=1, **more)), x)
            np.testing.assert_allclose(half, pairs(torch.fft.rfft(numbers, n=length, dim=axis)), atol=2e-5)


@pytest.mark.parametrize("length", [None, 9, 12, 13])
def test_from_a_half_to_real_numbers(length):
    x = signal(3, 7, 2)
    x[:, [0, -1], 1] = 0
    numbers = torch.view_as_complex(torch.from_numpy(x))
    if length is not None and length % 2 == 0:
        numbers[:, length // 2] = numbers[:, length // 2].real
    want = torch.fft.irfft(numbers, n=length, dim=1)[..., None]
    x = pairs(numbers)
    size = None if length is None else np.int64(length)
    got = run(from_onnx(model("DFT", x, 20, (size, np.int64(1)), inverse=1, onesided=1)), x)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_the_axis_before_the_pairs_is_meant_where_none_is_given():
    x = signal(2, 3, 8, 1)
    for opset, axis in ((17, 1), (20, 2)):
        want = pairs(torch.fft.fft(torch.from_numpy(x[..., 0]), dim=axis))
        np.testing.assert_allclose(run(from_onnx(model("DFT", x, opset)), x), want, atol=1e-5)


@pytest.mark.parametrize(("is_complex", "onesided"), [(False, 1), (False, 0), (True, 0)])
@pytest.mark.parametrize("windowed", [False, True])
def test_frames_of_a_signal(is_complex, onesided, windowed):
    x = signal(2, 50, 2 if is_complex else 1)
    numbers = torch.view_as_complex(torch.from_numpy(x)) if is_complex else torch.from_numpy(x[..., 0])
    window = np.hanning(12).astype("float32") if windowed else None
    want = torch.stft(
        numbers, 12, 5, window=torch.ones(12) if window is None else torch.from_numpy(window), center=False,
        onesided=bool(onesided), return_complex=True,
    )  # fmt: skip
    for length in (np.int64(12), *([None] if windowed else [])):  # a window has a length of its own
        got = run(from_onnx(model("STFT", x, 17, (np.int64(5), window, length), onesided=onesided)), x)
        np.testing.assert_allclose(got, pairs(want.transpose(1, 2)), atol=2e-5)


def test_in_float64():
    x = RNG.standard_normal((1, 9, 1))
    want = pairs(torch.fft.fft(torch.from_numpy(x[..., 0]), dim=1))
    got = run(from_onnx(model("DFT", x, 17)), x)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, atol=1e-13)


@pytest.mark.parametrize(("operator", "others", "dims"), [("DFT", (), [2, "n", 1]), ("STFT", (None,), [2, 50, 1])])
def test_unknown_sizes_are_refused(operator, others, dims):
    with pytest.raises(UnsupportedOperator, match=operator):
        from_onnx(model(operator, signal(2, 50, 1), 17, others, dims))
