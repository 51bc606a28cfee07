"""Bilinear resizing one axis after the other: of a larger image first along rows, then across them.

TVM:   z[y, x] = four elements of d, weighted, at rows and columns that are computed for each result
here:  t[y, x] = d[y, p(x)] * (1 - f(x)) + d[y, p(x) + 1] * f(x)
       z[y, x] = t[q(y), x] * (1 - g(y)) + t[q(y) + 1, x] * g(y)

Only the few rows of d are gathered from; those of z are made of whole rows, in vectors. A smaller image is first made
of whole rows, so that fewer are gathered from. On GPUs both are one kernel, as TVM's is.
"""

from __future__ import annotations

from typing import Any

from tvm import relax, te, tirx
from tvm.topi.image.resize import get_inx

NAME = "relax.image.resize2d"
_ROWS, _COLUMNS = 2, 3  # axes of NCHW
_MODES = ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel")  # with which no axis moves that stays


def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Make a kernel of a resizing: as above where it is bilinear, else TVM's."""
    attrs, types = call.attrs, (call.args[0].ty, call.ty)
    mode = str(attrs.coordinate_transformation_mode)
    known = all(hasattr(e, "value") for t in types for e in t.shape)
    sizes, made = ([int(e) for e in t.shape] if known else [] for t in types)
    plain = attrs.layout == "NCHW" and attrs.method == "linear" and mode in _MODES
    if not plain or sizes == made:
        return call.op.get_attr("FLegalize")(builder, call)
    order = (_COLUMNS, _ROWS) if made[_ROWS] > sizes[_ROWS] else (_ROWS, _COLUMNS)
    changed = [axis for axis in order if made[axis] != sizes[axis]]

    def resized(x: te.Tensor) -> te.Tensor:
        dtype = str(x.dtype)
        for axis in changed[:-1]:
            x = _along(x, axis, made[axis], mode, "float64" if dtype == "float64" else "float32")
        return _along(x, changed[-1], made[changed[-1]], mode, dtype)

    return builder.call_te(resized, call.args[0], primfunc_name_hint="resize2d")


def _along(x: te.Tensor, axis: int, made: int, mode: str, dtype: str) -> te.Tensor:
    """Resize one axis to `made` elements, of `dtype`."""
    last = int(x.shape[axis]) - 1
    spread = made > 1 or mode != "align_corners"  # one element is the first, as in ONNX and torch
    summed = "float64" if dtype == "float64" else "float32"

    def element(*at: Any) -> Any:
        place = get_inx(at[axis], x.shape[axis], tirx.const(made, "int64"), mode) if spread else tirx.const(0.0)
        start = tirx.floor(place).astype("int32")
        weight = (place - start.astype("float32")).astype(summed)

        def read(index: Any) -> Any:
            clipped = tirx.max(tirx.min(index, tirx.const(last, "int32")), tirx.const(0, "int32"))
            return x(*at[:axis], clipped, *at[axis + 1 :]).astype(summed)

        return (read(start) * (1 - weight) + read(start + 1) * weight).astype(dtype)

    shape = [*x.shape[:axis], made, *x.shape[axis + 1 :]]
    return te.compute(shape, element, name="T_resize", tag="injective")
