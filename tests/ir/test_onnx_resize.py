"""Resizing that TVM has not equals ONNX's reference in every mode, and torch's; what TVM has is left to it."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tests.ir.test_importers import run
from tvmhet.errors import UnsupportedOperator
from tvmhet.ir.importers import from_onnx
from tvmhet.ir.transform.define_onnx_operators import define_onnx_operators

RNG = np.random.default_rng(0)
PLACES = (
    "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize",
)  # fmt: skip
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def model(x, opset=19, dims=None, roi=None, scales=None, sizes=None, **attributes):
    """One Resize; roi, scales and sizes are initializers."""
    dtype = helper.np_dtype_to_tensor_dtype(x.dtype)
    given_ = {"roi": (roi, "float32"), "scales": (scales, "float32"), "sizes": (sizes, "int64")}
    arrays = {n: np.array(v, d) for n, (v, d) in given_.items() if v is not None}
    names = ["x", *(n if n in arrays else "" for n in given_)]
    graph = helper.make_graph(
        [helper.make_node("Resize", names, ["y"], **attributes)], "g",
        [helper.make_tensor_value_info("x", dtype, x.shape if dims is None else dims)],
        [helper.make_tensor_value_info("y", dtype, None)],
        [numpy_helper.from_array(a, n) for n, a in arrays.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def operators(proto):
    return [n.op_type for n in define_onnx_operators(proto).graph.node]


def evaluated(proto, x):
    return ReferenceEvaluator(proto).run(None, {"x": x})[0]


@st.composite
def resizes(draw):
    """Any Resize of one to three axes, of which some are named; of factors that are exact, so that ties are."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    axes = draw(st.one_of(st.none(), st.permutations(range(len(shape)))))
    named = len(shape) if axes is None else draw(st.integers(1, len(shape)))
    attributes = {} if axes is None else {"axes": list(axes)[:named]}
    attributes["mode"] = draw(st.sampled_from(("nearest", "linear", "cubic")))
    attributes["coordinate_transformation_mode"] = place = draw(st.sampled_from(PLACES))
    attributes["nearest_mode"] = draw(st.sampled_from(ROUNDINGS))
    if attributes["mode"] != "nearest":
        attributes["exclude_outside"] = draw(st.integers(0, 1)) if place != "tf_crop_and_resize" else 0
        attributes["antialias"] = draw(st.integers(0, 1)) if place == "half_pixel" else 0
        attributes["cubic_coeff_a"] = draw(st.sampled_from((-0.75, -0.5)))
    if place == "tf_crop_and_resize":
        begins = [draw(st.sampled_from((-0.25, 0.0, 0.375))) for _ in range(named)]
        attributes["roi"] = begins + [b + draw(st.sampled_from((0.25, 0.75, 1.125))) for b in begins]
        attributes["extrapolation_value"] = 7.5
    if draw(st.booleans()):
        attributes["sizes"] = [draw(st.integers(1, 9)) for _ in range(named)]
        attributes["keep_aspect_ratio_policy"] = draw(st.sampled_from(("stretch", "not_larger", "not_smaller")))
        old = shape if axes is None else [shape[a] for a in attributes["axes"]]
        factors = [n / o for n, o in zip(attributes["sizes"], old, strict=True)]
        if attributes["keep_aspect_ratio_policy"] == "not_larger" and min(factors) * min(old) < 0.5:
            attributes["keep_aspect_ratio_policy"] = "stretch"  # nothing would be left
    else:
        attributes["scales"] = [draw(st.sampled_from((1.0, 1.25, 1.5, 2.0, 2.75))) for _ in range(named)]
    return np.random.default_rng(0).standard_normal(shape).astype("float32"), attributes


@settings(max_examples=300, deadline=None)
@given(resizes())
def test_equals_the_reference(case):
    """One or two axes are never TVM's; of three some are, and are left."""
    x, attributes = case
    proto = model(x, **attributes)
    got, want = evaluated(define_onnx_operators(proto), x), evaluated(proto, x)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    if x.ndim < 3:
        assert "Resize" not in operators(proto)


@pytest.mark.parametrize(
    ("mode", "antialias", "corners"),
    [("bilinear", False, False), ("bilinear", False, True), ("bicubic", False, False), ("bilinear", True, False),
     ("bicubic", True, False)],
)  # fmt: skip
def test_equals_torch(mode, antialias, corners):
    """By a factor that no sizes give; torch's filter leaves out what lies outside, and has sharper cubics."""
    x = RNG.standard_normal((2, 3, 11, 14)).astype("float32")
    how = {"mode": mode.removeprefix("bi"), "antialias": int(antialias), "exclude_outside": int(antialias)}
    how["coordinate_transformation_mode"] = "align_corners" if corners else "half_pixel"
    how["cubic_coeff_a"] = -0.5 if antialias else -0.75
    factor = 0.6 if antialias else 1.3
    sizes = [int(n * factor) for n in x.shape[2:]]
    size = {"size": sizes} if antialias or corners else {"scale_factor": factor, "recompute_scale_factor": False}
    want = torch.nn.functional.interpolate(
        torch.from_numpy(x), mode=mode, antialias=antialias, align_corners=corners, **size
    )
    by = {"sizes": [2, 3, *sizes]} if "size" in size else {"scales": [1, 1, factor, factor]}
    got = run(from_onnx(model(x, **by, **how)), x)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("operator", "opset"), [("Upsample", 7), ("Upsample", 9), ("Resize", 10)])
@pytest.mark.parametrize(("mode", "factors"), [("nearest", (2, 3)), ("nearest", (1.5, 0.7)), ("linear", (2, 1.4))])
def test_of_old_operator_sets(operator, opset, mode, factors):
    """They divide by the factor and take the element before, or go on to the next one."""
    x = RNG.standard_normal((1, 2, 5, 6)).astype("float32")
    scales = np.array([1, 1, *factors], "float32")
    same = model(x, scales=scales, mode=mode, coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    if opset == 7:
        node = helper.make_node(operator, ["x"], ["y"], mode=mode, scales=scales.tolist())
    else:
        node = helper.make_node(operator, ["x", "scales"], ["y"], mode=mode)
    known = [] if opset == 7 else same.graph.initializer
    graph = helper.make_graph([node], "g", same.graph.input, same.graph.output, known)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    assert operator not in operators(proto)
    np.testing.assert_allclose(run(from_onnx(proto), x), evaluated(same, x), rtol=1e-5, atol=1e-6)


def test_few_places_are_gathered_and_many_multiplied():
    x = RNG.standard_normal((1, 3, 8, 8)).astype("float32")
    linear = operators(model(x, scales=[1, 1, 1.3, 1.3], mode="linear"))
    assert linear.count("Gather") == 4 and "MatMul" not in linear
    narrower = operators(model(x, scales=[1, 1, 0.3, 0.3], mode="linear", antialias=1))
    assert narrower.count("MatMul") == 2 and "Gather" not in narrower
    nearest = operators(model(x.astype("int32"), scales=[1, 1, 1.3, 1], mode="nearest"))
    assert [o for o in nearest if o != "Constant"] == ["Gather", "Identity"]


@pytest.mark.parametrize(("mode", "place"), itertools.product(("nearest", "linear", "cubic"), PLACES[2:5]))
def test_what_tvm_takes_is_left_to_it(mode, place):
    x = RNG.standard_normal((1, 2, 4, 6)).astype("float32")
    how = {"mode": mode, "coordinate_transformation_mode": place}
    for sizes in ({"scales": [1, 1, 2, 0.5]}, {"sizes": [1, 2, 7, 5]}):
        proto = model(x, **sizes, **how)
        assert operators(proto) == ["Resize"]
        np.testing.assert_allclose(run(from_onnx(proto), x), evaluated(proto, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "how"),
    [
        (RNG.standard_normal((2, 3, 4, 4)).astype("float32"), {"scales": [2, 1, 1, 1], "mode": "linear"}),
        (RNG.integers(0, 9, (4, 5)), {"sizes": [7, 3], "mode": "nearest"}),
        (RNG.standard_normal((1, 2, 5, 7)).astype("float32"),
         {"sizes": [9, 9], "axes": [3, 2], "keep_aspect_ratio_policy": "not_larger", "mode": "cubic"}),
        (RNG.standard_normal((1, 2, 5, 7)).astype("float16"),
         {"scales": [1, 1, 0.4, 0.4], "antialias": 1, "mode": "cubic"}),
    ],
)  # fmt: skip
def test_what_tvm_reads_past_comes_out(x, how):
    proto = model(x, **how)
    digits = 1e-2 if x.dtype == np.float16 else 1e-4
    np.testing.assert_allclose(run(from_onnx(proto), x), evaluated(proto, x), rtol=digits, atol=digits)


@pytest.mark.parametrize(
    ("dtype", "how"),
    [("float32", {"dims": ["n", 1, 4, 4], "mode": "linear"}), ("int32", {"mode": "linear"})],
)  # fmt: skip
def test_what_is_not_known_is_left(dtype, how):
    """Dims, and what a fraction of integers is."""
    assert operators(model(np.zeros((1, 1, 4, 4), dtype), scales=[1, 1, 1.3, 1.3], **how)) == ["Resize"]


def test_dims_that_are_not_known_are_refused():
    proto = model(np.zeros((1, 1, 4, 4), "float32"), dims=["n", 1, 4, 4], scales=[1, 1, 0.6, 0.6], mode="linear")
    with pytest.raises(UnsupportedOperator, match=r"scales=\[1.0, 1.0, 0.6, 0.6\]"):
        from_onnx(proto)
