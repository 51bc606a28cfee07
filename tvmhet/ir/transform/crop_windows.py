"""Leave out what of a convolution's window never lies on the image.

Before:  y = R.nn.conv2d(x, w, dilation=[36, 36],     x: 14 x 14    After:  t = R.take(w, [1], axis=2), axis 3 alike
                        padding=[36, 36, 36, 36])     w: 3 x 3              y = R.nn.conv2d(x, t, padding=[0, 0, 0, 0])

A window with wide holes over a small image (DeepLab's at 224 pixels, and its widest at 513) multiplies the padding: of
nine elements one is left here. Only weights that depend on parameters alone are cut, which `fold_parameters` does once.
A window of which nothing lies on the image stays. Idempotent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvmhet.ir.convolutions import FIRST_PLACE, again, is_convolution
from tvmhet.ir.parameters import parameter_values
from tvmhet.ir.rewrite import Rebuild, Step, bindings_of, rewrite_straight_lines, shape_of


@tvm.transform.module_pass(opt_level=0, name="tvmhet.CropWindows")
class CropWindows:
    """Crop every such window; see the picture above."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return rewrite_straight_lines(mod, _make_step)


def _make_step(func: relax.Function) -> Step | None:
    fixed = parameter_values(func)
    cropped = {
        b.var: kept
        for b in bindings_of(func)
        if (kept := _kept(b.value)) is not None and (b.value.args[1] in fixed or _is_const(b.value.args[1]))
    }
    if not cropped:
        return None

    def step(state: Rebuild, var: relax.Var, value: Any) -> Any:
        return _cropped(state, value, cropped[var]) if var in cropped else value

    return step


def _is_const(expr: Any) -> bool:
    return isinstance(expr, tvm.ir.GenericConst)


def _kept(call: Any) -> list[tuple[int, int]] | None:
    """What is left of a convolution's window along each axis: from, and up to; None where that is all, or nothing."""
    if not is_convolution(call):
        return None
    attrs = call.attrs
    image, weight, made = (shape_of(x) for x in (*call.args[:2], call))
    if image is None or weight is None or made is None:
        return None
    num_axes = len(image) - FIRST_PLACE
    padding = [int(p) for p in attrs.padding]
    axes = zip(
        image[FIRST_PLACE:], weight[FIRST_PLACE:], made[FIRST_PLACE:], attrs.strides, attrs.dilation,
        padding[:num_axes], padding[num_axes:], strict=True,
    )  # fmt: skip
    kept = [_on_image(*(int(v) for v in axis)) for axis in axes]
    if None in kept or all(found == (0, size) for found, size in zip(kept, weight[FIRST_PLACE:], strict=True)):
        return None
    return [found for found in kept if found is not None]


def _on_image(
    extent: int, window: int, made: int, stride: int, step: int, before: int, after: int
) -> tuple[int, int] | None:
    """The elements of a window that lie on the image at some place; None where that is none, or would need a slice.

    >>> _on_image(14, 3, 14, 1, 36, 36, 36), _on_image(14, 3, 14, 1, 12, 12, 12)
    ((1, 2), (0, 3))
    """
    lies = [any(0 <= y * stride + r * step - before < extent for y in range(made)) for r in range(window)]
    if not any(lies):
        return None
    first, behind = lies.index(True), window - lies[::-1].index(True)
    fits = first * step <= before and (window - behind) * step <= after
    return (first, behind) if fits else (0, window)


def _cropped(state: Rebuild, call: relax.Call, kept: Sequence[tuple[int, int]]) -> Any:
    image, weight = call.args
    attrs, num_axes = call.attrs, len(kept)
    padding = [int(p) for p in attrs.padding]
    for axis, ((first, behind), step) in enumerate(zip(kept, attrs.dilation, strict=True)):
        window = int(weight.ty.shape.values[FIRST_PLACE + axis])
        if (first, behind) == (0, window):
            continue
        padding[axis] -= first * int(step)
        padding[num_axes + axis] -= (window - behind) * int(step)
        places = relax.const(np.arange(first, behind), "int64")
        weight = state.emit(relax.op.take(weight, places, axis=FIRST_PLACE + axis))
    return again(call, image, weight, padding)
