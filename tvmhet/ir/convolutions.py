"""Convolutions whose image and weight have two axes before the places, and how to make one again.

R.nn.conv2d(x, w, padding=[1, 1, 1, 1])  with  x': fewer rows  ──►  R.nn.conv2d(x', w, padding=[1, 1, 0, 1])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from tvmhet.ir.rewrite import op_name

FIRST_PLACE = 2  # axis of the places
_MAKE = {
    ("nn.conv1d", "NCW", "OIW"): relax.op.nn.conv1d,
    ("nn.conv2d", "NCHW", "OIHW"): relax.op.nn.conv2d,
    ("nn.conv3d", "NCDHW", "OIDHW"): relax.op.nn.conv3d,
}
NAMES = frozenset(name for name, *_ in _MAKE)


def is_convolution(call: Any) -> bool:
    """Whether a call is one of those that `again` makes."""
    name, attrs = op_name(call), getattr(call, "attrs", None)
    return name in NAMES and attrs is not None and (name, attrs.data_layout, attrs.kernel_layout) in _MAKE


def again(call: relax.Call, image: Any, weight: Any, padding: Sequence[int]) -> Any:
    """Return the convolution of another image, by another weight, with other padding: before each axis, then after."""
    attrs = call.attrs
    return _MAKE[op_name(call), attrs.data_layout, attrs.kernel_layout](
        image, weight, strides=[int(s) for s in attrs.strides], padding=list(padding),
        dilation=[int(d) for d in attrs.dilation], groups=int(attrs.groups), data_layout=attrs.data_layout,
        kernel_layout=attrs.kernel_layout, out_layout=attrs.out_layout, out_dtype=attrs.out_dtype or None,
    )  # fmt: skip
