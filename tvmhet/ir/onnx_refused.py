"""ONNX attributes that TVM's front end reads past in silence: the result would be wrong, so the node is refused.

Found by running ONNX's own node cases through TVM 0.27 and comparing numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx

#: operator -> (test of its attributes with defaults filled in, what TVM ignores)
_Rule = tuple[Callable[[Mapping[str, Any]], bool], str]
_NOTHING: _Rule = (lambda _: False, "")
_IGNORED: dict[str, _Rule] = {
    "BatchNormalization": (lambda a: a.get("training_mode", 0) == 1, "training_mode=1"),
    "IsInf": (
        lambda a: not (a.get("detect_positive", 1) and a.get("detect_negative", 1)),
        "detect_positive/negative=0",
    ),
    "Resize": (
        lambda a: (
            any(a.get(name) for name in ("antialias", "exclude_outside", "axes"))
            or a.get("keep_aspect_ratio_policy", b"stretch") != b"stretch"
            or a.get("coordinate_transformation_mode") == b"half_pixel_symmetric"
        ),
        "antialias, exclude_outside, axes, keep_aspect_ratio_policy or half_pixel_symmetric",
    ),
    "RoiAlign": (lambda a: a.get("mode", b"avg") == b"max", "mode=max"),
    "SpaceToDepth": (lambda a: a.get("mode", b"DCR") == b"CRD", "mode=CRD"),
}


def refusal(node: onnx.NodeProto, initializers: Mapping[str, onnx.TensorProto], inputs: Collection[str]) -> str | None:
    """Say what of the node TVM would ignore, or None when nothing is known to be wrong.

    Constants must be initializers, as `fold_onnx_shapes` makes them.
    """
    import onnx

    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    test, what = _IGNORED.get(node.op_type, _NOTHING)
    if test(attributes):
        return what
    if node.op_type == "Expand" and node.input[1] in inputs:
        return f"sizes of the data where its shape, the input {node.input[1]!r}, has 1 (constants= fixes an input)"
    if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
        training = initializers.get(node.input[2])
        if training is None or onnx.numpy_helper.to_array(training).any():
            return "training_mode" + (", an input of the model" if training is None else "=true")
    if node.op_type == "Resize" and len(node.input) > 2 and node.input[2] in initializers:
        scales = onnx.numpy_helper.to_array(initializers[node.input[2]])
        shown = f"scales={[round(float(s), 4) for s in scales]}"
        if not _is_exact(scales):
            return f"{shown}: it uses the rounded sizes' ratio instead"
        if (scales[:2] != 1).any():
            return f"{shown} of images and channels"
    return None


def _is_exact(scales: np.ndarray) -> bool:
    """True when each scale is a whole number or one over a whole number."""
    factors = np.maximum(scales, 1 / np.maximum(scales, 1e-6))
    return bool(np.allclose(factors, np.round(factors), atol=1e-4))
