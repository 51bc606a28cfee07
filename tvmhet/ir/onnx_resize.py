"""Resizing in ONNX models that TVM's front end has not, or reads past: along one axis after the other.

    Resize(x)  ──►  along each axis whose size or place changes
                    nearest                     Gather(x, places)
                    up to four places a value   Gather(x, places_0) * weights_0 + Gather(x, places_1) * weights_1 + ..
                    more (a filter that shrinks an image)   MatMul(x, weights), this axis last

Left to TVM is what it takes as the standard says: images whose batch and channels stay, with half pixels, corners or
none to align, sizes, or scales that make them exactly. Upsample, and Resize of operator set 10, are always written out.
Sizes or scales, and the dims of what is resized, have to be known; else the operator is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmhet.ir.onnx_nodes import Nodes

_MAX_GATHERED = 4  # places that cubic interpolation takes
_TVM_MODES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
_TVM_NUM_DIMS = (3, 4, 5)
_HAS_ROI = 11
_OLD = {"coordinate_transformation_mode": b"asymmetric", "nearest_mode": b"floor"}  # before operator set 11
_Weights = NDArray[np.float64]
_ROUNDINGS: Mapping[str, Callable[[_Weights], _Weights]] = {
    "round_prefer_floor": lambda at: np.ceil(at - 0.5),
    "round_prefer_ceil": lambda at: np.floor(at + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


@dataclass(frozen=True, slots=True)
class _Axis:
    """One axis that is resized. `crop` is where the part of it that is taken begins and ends, as shares of it."""

    index: int
    size: int
    new_size: int
    scale: float
    crop: tuple[float, float]

    def coordinates(self, mode: str) -> _Weights:
        """Return where each new element lies among the old ones; ValueError for a mode that is not known."""
        new = np.arange(self.new_size, dtype=np.float64)
        length = self.scale * self.size  # may be no whole number
        if mode == "asymmetric":
            return new / self.scale
        if mode == "align_corners":
            return new * (self.size - 1) / (length - 1) if length != 1 else new * 0
        if mode == "tf_crop_and_resize":
            begin, end = (at * (self.size - 1) for at in self.crop)
            return begin + new * (end - begin) / (length - 1) if length != 1 else np.full(1, (begin + end) / 2)
        if mode == "half_pixel_symmetric":
            return self.size / 2 * (1 - self.new_size / length) + (new + 0.5) / self.scale - 0.5
        centres = (new + 0.5) / self.scale - 0.5
        if mode == "pytorch_half_pixel":
            return centres if length != 1 else np.full(1, -0.5)
        if mode == "half_pixel":
            return centres
        raise ValueError(mode)


def define_resize(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    """Write out an Upsample, or a Resize that TVM does not take as it is; return False where that cannot be."""
    shape, dtype = made.known.shape(node.input[0]), made.known.dtype(node.input[0])
    if shape is None or dtype is None:
        return False
    is_old = node.op_type == "Upsample" or made.opset < _HAS_ROI
    names = ("", *node.input[1:], "", "") if is_old else (*node.input[1:], "", "", "")
    roi, scales, sizes = (made.known.values.get(name) for name in names[:3])
    if is_old:
        scales = np.asarray(attributes["scales"]) if "scales" in attributes else scales
        attributes = {**_OLD, "mode": attributes.get("mode", b"nearest")}
    axes = _axes(attributes, shape, roi, scales, sizes)
    texts = {k: v.decode() for k, v in attributes.items() if isinstance(v, bytes)}
    mode, place = texts.get("mode", "nearest"), texts.get("coordinate_transformation_mode", "half_pixel")
    rounding = texts.get("nearest_mode", "round_prefer_floor")
    if axes is None or (mode != "nearest" and dtype.kind != "f") or rounding not in _ROUNDINGS:
        return False
    if not is_old and _is_taken_by_tvm(axes, place, attributes, len(shape)):
        return False
    value, cropped = node.input[0], place == "tf_crop_and_resize"
    for axis in axes:
        if axis.scale == 1 and not cropped:
            continue
        try:
            at = axis.coordinates(place)
        except ValueError:
            return False
        if mode == "nearest":
            places = _inside(_ROUNDINGS[rounding](at), axis.size)
            value = made.add("Gather", value, made.constant(places, "int64"), axis=axis.index)
        else:
            value = _interpolated(made, value, _weights(axis, at, mode, attributes), axis.index, len(shape), dtype)
        if cropped and (outside := (at < 0) | (at > axis.size - 1)).any():
            mask = made.constant(outside.reshape(_along(axis.index, len(shape))), "bool")
            value = made.add("Where", mask, made.constant(attributes.get("extrapolation_value", 0.0), dtype), value)
    made.add("Identity", value, result=node.output[0])
    return True


def _axes(
    attributes: Mapping[str, Any],
    shape: tuple[int, ...],
    roi: NDArray[Any] | None,
    scales: NDArray[Any] | None,
    sizes: NDArray[Any] | None,
) -> list[_Axis] | None:
    """Return the axes that are named, all by default; None where their sizes are not known."""
    indices = [int(a) % len(shape) for a in attributes.get("axes") or range(len(shape))]
    old = [shape[a] for a in indices]
    if sizes is not None and sizes.size == len(old):
        new = [int(n) for n in sizes]
        policy = attributes.get("keep_aspect_ratio_policy", b"stretch").decode()
        factors = [n / o for n, o in zip(new, old, strict=True)]
        if policy != "stretch":
            factors = [min(factors) if policy == "not_larger" else max(factors)] * len(old)
            new = [math.floor(factors[0] * o + 0.5) for o in old]
    elif scales is not None and scales.size == len(old):
        factors = [float(f) for f in scales]
        new = [math.floor(f * o) for f, o in zip(factors, old, strict=True)]
    else:
        return None
    crops = [(0.0, 1.0)] * len(old)
    if roi is not None and roi.size == 2 * len(old):
        crops = [(float(a), float(b)) for a, b in roi.reshape(2, -1).T]
    elif attributes.get("coordinate_transformation_mode") == b"tf_crop_and_resize":
        return None
    return [_Axis(*each) for each in zip(indices, old, new, factors, crops, strict=True)]


def _is_taken_by_tvm(axes: list[_Axis], place: str, attributes: Mapping[str, Any], num_dims: int) -> bool:
    """TVM resizes all axes but the first two, to sizes, and knows neither other axes nor filters."""
    ignored = ("antialias", "exclude_outside", "axes", "keep_aspect_ratio_policy")
    exact = all(math.isclose(a.scale * a.size, a.new_size, rel_tol=1e-6) for a in axes)
    images = num_dims in _TVM_NUM_DIMS and all(a.size == a.new_size for a in axes if a.index < 2)
    known = place in _TVM_MODES and not (
        place == "pytorch_half_pixel" and any(a.new_size == 1 for a in axes if a.index > 1)
    )
    return known and exact and images and not any(attributes.get(name) for name in ignored)


def _weights(axis: _Axis, at: _Weights, mode: str, attributes: Mapping[str, Any]) -> _Weights:
    """Return what each old element (rows) adds to each new one (columns); elements at an edge go on beyond it."""
    sharpness = float(attributes.get("cubic_coeff_a", -0.75))
    falls: Callable[[_Weights], _Weights] = (lambda t: _cubic(t, sharpness)) if mode == "cubic" else _linear
    filters = bool(attributes.get("antialias", 0))
    narrow = min(axis.scale, 1.0) if filters else 1.0
    reach = math.ceil((2 if mode == "cubic" else 1) / narrow)
    near = np.floor(at)[:, None] + np.arange(1 - reach, reach + 1)
    found = falls((near - at[:, None]) * narrow)
    if attributes.get("exclude_outside", 0):
        found = np.where((near < 0) | (near > axis.size - 1), 0.0, found)
    if filters or attributes.get("exclude_outside", 0):
        found /= found.sum(axis=1, keepdims=True)
    out = np.zeros((axis.size, axis.new_size))
    np.add.at(out, (_inside(near, axis.size), np.arange(axis.new_size)[:, None]), found)
    return out


def _linear(t: _Weights) -> _Weights:
    return np.maximum(0.0, 1.0 - np.abs(t))


def _cubic(t: _Weights, a: float) -> _Weights:
    """The piecewise cubic of Keys (1981), "Cubic convolution interpolation for digital image processing"."""
    t = np.abs(t)
    middle = ((a + 2) * t - (a + 3)) * t**2 + 1
    tail = a * (((t - 5) * t + 8) * t - 4)
    return np.where(t <= 1, middle, np.where(t < 2, tail, 0.0))


def _interpolated(made: Nodes, value: str, weights: _Weights, axis: int, num_dims: int, dtype: np.dtype[Any]) -> str:
    """Append what multiplies an axis with a matrix, and return the name of the result."""
    num_places = int((weights != 0).sum(axis=0).max())
    if num_places > _MAX_GATHERED:
        order = [a for a in range(num_dims) if a != axis] + [axis]
        product = made.add("MatMul", made.add("Transpose", value, perm=order), made.constant(weights, dtype))
        return made.add("Transpose", product, perm=[order.index(a) for a in range(num_dims)])
    terms = []
    places = np.argsort(weights == 0, axis=0, kind="stable")[:num_places]  # those with weight first, in order
    for rows in places:
        factors = np.take_along_axis(weights, rows[None], axis=0).reshape(_along(axis, num_dims))
        near = made.add("Gather", value, made.constant(rows, "int64"), axis=axis)
        terms.append(made.add("Mul", near, made.constant(factors, dtype)))
    total = terms[0]
    for term in terms[1:]:
        total = made.add("Add", total, term)
    return total


def _inside(places: NDArray[Any], size: int) -> NDArray[np.int64]:
    out: NDArray[np.int64] = np.clip(places, 0, size - 1).astype(np.int64)
    return out


def _along(axis: int, num_dims: int) -> list[int]:
    """The shape that lays a vector along an axis."""
    return [-1 if a == axis else 1 for a in range(num_dims)]
