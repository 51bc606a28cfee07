"""Transposed convolutions as a product and a sum of what falls on one place, so that no zeros are multiplied.

TVM:   d[c, s * y] = x[c, y], zeros between;   z[o, y] = sum of d[c, y + j] * w[c, o, k - 1 - j] over c and j
here:  t[o, j, y] = sum of x[c, y] * w[c, o, j] over c;   z[o, y] = sum of t[o, j, (y + p - j) / s] over j

The window moves by s, p of the results before the first are cut off. Of a step of two along two axes TVM's form
multiplies four times as often. Where the results are hardly more than the image (steps of one) there are few zeros,
and by channel there is no product to make: both are left to TVM.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tvm import relax, te, tirx, topi

from tvmhet.graph.library_rows import TRANSPOSED_CONVOLUTIONS
from tvmhet.graph.transposed import Along, as_product

NAMES = tuple(f"relax.{name}" for name in sorted(TRANSPOSED_CONVOLUTIONS))
_SHORT = ("float16", "bfloat16")  # whose terms are added up in float32


def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Make a kernel of a transposed convolution: as above where that costs less, else TVM's."""
    attrs = call.attrs
    axes = _axes(call)
    if axes is None:
        return call.op.get_attr("FLegalize")(builder, call)
    dilation = [1, 1, *(int(d) for d in attrs.dilation)]

    def make(x: te.Tensor, weight: te.Tensor) -> te.Tensor:
        wide = topi.nn.dilate(weight, dilation, name="kernel_dilate") if max(dilation) > 1 else weight
        return _made(x, wide, axes, int(attrs.groups), str(call.ty.dtype))

    return builder.call_te(make, *call.args, primfunc_name_hint=call.op.name.removeprefix("relax.nn."))


def _axes(call: relax.Call) -> tuple[Along, ...] | None:
    """The axes of the places, where no extent is symbolic and the form pays."""
    types = (call.args[0].ty, call.args[1].ty, call.ty)
    if not all(hasattr(e, "value") for t in types for e in t.shape):
        return None
    shapes = [[int(e) for e in t.shape] for t in types]
    names = ("data_layout", "kernel_layout", "out_layout", "strides", "padding", "dilation", "groups")
    return as_product({name: getattr(call.attrs, name) for name in names}, *shapes)


def _term(axis: Along, place: Any, which: int) -> tuple[Any, Any, Any]:
    """The element of the window, that of the image, and whether both are there, of one of the terms of a place."""
    at = place + axis.cut
    if axis.num_terms == axis.length:  # go through the image, else through what of the window falls there
        element = at - which * axis.stride
        return element, tirx.const(which, "int64"), tirx.all(element >= 0, element < axis.window)
    element, origin = at % axis.stride + which * axis.stride, at // axis.stride - which
    return element, origin, tirx.all(element < axis.window, origin >= 0, origin < axis.length)


def _made(x: te.Tensor, weight: te.Tensor, axes: Sequence[Along], groups: int, dtype: str) -> te.Tensor:
    channels, made, rank = int(x.shape[1]) // groups, int(weight.shape[1]), len(axes)
    summed = "float32" if dtype in _SHORT else dtype
    channel = te.reduce_axis((0, channels), name="c")

    def product(n: Any, g: Any, o: Any, *at: Any) -> Any:
        c = g * channels + channel
        return te.sum(x(n, c, *at[rank:]).astype(dtype) * weight(c, o, *at[:rank]).astype(dtype), axis=channel)

    shape = [x.shape[0], groups, made, *(a.window for a in axes), *(a.length for a in axes)]
    products = te.compute(shape, product, name="products")

    def term(n: Any, o: Any, places: Sequence[Any], which: Sequence[int]) -> Any:
        found = [_term(a, place, i) for a, place, i in zip(axes, places, which, strict=True)]
        window, image, there = zip(*found, strict=True)
        value = products(n, o // made, o % made, *window, *image).astype(summed)
        return tirx.if_then_else(tirx.all(*there), value, tirx.const(0, summed))

    def total(n: Any, o: Any, *places: Any) -> Any:
        terms = (term(n, o, places, which) for which in itertools.product(*(range(a.num_terms) for a in axes)))
        return sum(terms, start=next(terms)).astype(dtype)

    shape = [x.shape[0], groups * made, *(a.result for a in axes)]
    return te.compute(shape, total, name="T_conv_transpose", tag="injective")
