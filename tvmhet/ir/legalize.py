"""TVM's LegalizeOps, with some mends: other kernels are the same.

Its legalisation of `take` warns on standard error, for each, that indices out of bounds are read as they are; that of
`full` raises a TypeError where the value is infinite or no number, as in the masks of attention. A tensor compared with
itself becomes a constant, as TVM's arithmetic takes any x for equal to itself; NaN is not. For bfloat16 TVM has no
tests for NaN and infinities: those of float32 say the same. The place of the largest of values that are all the lowest
number, or -inf, is -1 with TVM, which is no place. It has no extremes of bools, and no RMS norm along all axes. Where
it writes a slice into a tensor it reads beyond the slice what it then does not use, from lists of indices and masks.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import relax, te, tirx, topi

from tvmhet.ir import resizing, transposed_convolutions


def legalize_ops() -> tvm.transform.Pass:
    """Return the pass that makes PrimFuncs of operators."""
    kinds = dict.fromkeys(("relax.isnan", "relax.isinf", "relax.isfinite"), _is_of_kind)
    equal = dict.fromkeys(("relax.equal", "relax.not_equal"), _equal)
    places = dict.fromkeys(("relax.argmax", "relax.argmin"), _place)
    norms = dict.fromkeys(("relax.nn.group_norm", "relax.nn.instance_norm"), _norm_of_groups)
    bools = dict.fromkeys(("relax.max", "relax.min"), _extreme)
    transposed = dict.fromkeys(transposed_convolutions.NAMES, transposed_convolutions.legalize)
    single = {
        "relax.take": _take, "relax.full": _full, "relax.nn.rms_norm": _rms_norm, "relax.slice_scatter": _slice_scatter,
    }  # fmt: skip
    resized = {resizing.NAME: resizing.legalize}
    return relax.transform.LegalizeOps(
        {**single, **equal, **kinds, **norms, **places, **bools, **transposed, **resized}
    )


def _extreme(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if str(call.args[0].ty.dtype) != "bool":
        return call.op.get_attr("FLegalize")(builder, call)
    reduce = topi.any if call.op.name == "relax.max" else topi.all
    axes, keep = call.attrs.axis, call.attrs.keepdims
    return builder.call_te(reduce, call.args[0], None if axes is None else list(axes), keep, primfunc_name_hint="any")


def _rms_norm(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    rank, axes = int(call.args[0].ty.ndim), call.attrs.axes
    if len(axes) < rank:
        return call.op.get_attr("FLegalize")(builder, call)

    def row(x: te.Tensor, weight: te.Tensor) -> te.Tensor:
        wide = topi.nn.rms_norm(topi.expand_dims(x, 0), weight, list(range(1, rank + 1)), call.attrs.epsilon)
        return topi.squeeze(wide, [0])

    return builder.call_te(row, *call.args, primfunc_name_hint="rms_norm")


def _norm_of_groups(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    x, gamma, beta = call.args
    attrs, shape = call.attrs, [getattr(extent, "value", None) for extent in x.ty.shape or ()]
    rank = max(len(shape), 1)
    axes = {int(a) % rank for a in attrs.axes} - ({0} if shape[:1] == [1] else set())
    if None in shape or int(attrs.channel_axis) % rank != 1 or axes != set(range(2, rank)):
        return call.op.get_attr("FLegalize")(builder, call)
    name = call.op.name.removeprefix("relax.nn.")
    groups = int(attrs.num_groups) if name == "group_norm" else shape[1]
    return builder.call_te(_normalised, x, gamma, beta, groups, float(attrs.epsilon), primfunc_name_hint=name)


def _normalised(x: te.Tensor, gamma: te.Tensor, beta: te.Tensor, groups: int, epsilon: float) -> te.Tensor:
    """Group norm of [n, c, ...] as TVM writes layer norm: squares are of what is less its mean."""
    dtype = "float32" if str(x.dtype) == "float16" else str(x.dtype)
    channels, rest = int(x.shape[1]) // groups, x.shape[2:]
    size = tirx.const(math.prod(map(int, rest)) * channels, dtype)
    inner = [te.reduce_axis((0, extent)) for extent in (channels, *rest)]
    again = [te.reduce_axis((0, extent)) for extent in (channels, *rest)]

    def read(n: Any, g: Any, c: Any, *at: Any) -> Any:
        return x(n, g * channels + c, *at).astype(dtype)

    def centred(n: Any, g: Any, *at: Any) -> Any:
        return read(n, g, *at) - mean(n, g)

    def element(n: Any, g: Any, c: Any, *at: Any) -> Any:
        scale = tirx.rsqrt(squares(n, g) / size + tirx.const(epsilon, dtype)) * gamma(g * channels + c).astype(dtype)
        return (centred(n, g, c, *at) * scale + beta(g * channels + c).astype(dtype)).astype(str(x.dtype))

    by_group = (x.shape[0], groups)
    total = te.compute(by_group, lambda n, g: te.sum(read(n, g, *inner), axis=inner), name="T_sum")
    mean = te.compute(by_group, lambda n, g: total(n, g) / size, name="T_mean")
    squares = te.compute(by_group, lambda n, g: te.sum(centred(n, g, *again) * centred(n, g, *again), axis=again))
    norm = te.compute((*by_group, channels, *rest), element, name="T_norm")
    return te.compute(x.shape, lambda n, c, *at: norm(n, c // channels, c % channels, *at), name="T_channels")


def _equal(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    a, b = call.args
    if not a.same_as(b) or "float" not in str(a.ty.dtype):
        return call.op.get_attr("FLegalize")(builder, call)
    return _tested(builder, call)


def _place(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    name = call.op.name.removeprefix("relax.")

    def found(x: te.Tensor) -> te.Tensor:
        numbers = topi.cast(x, "int8") if str(x.dtype) == "bool" else x  # TVM knows no least value of bool
        place = getattr(topi, name)(numbers, call.attrs.axis, call.attrs.keepdims)
        return te.compute(place.shape, lambda *at: tirx.max(place(*at), tirx.const(0, str(place.dtype))), name=name)

    return builder.call_te(found, call.args[0], primfunc_name_hint=name)


def _is_of_kind(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if str(call.args[0].ty.dtype) != "bfloat16":
        return call.op.get_attr("FLegalize")(builder, call)
    return _tested(builder, call)


_TESTS = {
    "equal": lambda x: tirx.Not(tirx.isnan(x)),
    "not_equal": tirx.isnan,
    "isnan": tirx.isnan,
    "isinf": tirx.isinf,
    "isfinite": tirx.isfinite,
}


def _tested(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    name = call.op.name.removeprefix("relax.")
    return builder.call_te(_test, call.args[0], name, primfunc_name_hint=name)


def _test(x: te.Tensor, name: str) -> te.Tensor:
    test, is_bfloat16 = _TESTS[name], str(x.dtype) == "bfloat16"

    def element(*at: Any) -> Any:
        return test(x(*at).astype("float32") if is_bfloat16 else x(*at))

    return te.compute(x.shape, element, name=f"T_{name}", tag="injective")


def _full(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    shape, filling = call.args
    value = float(filling.value.numpy()) if isinstance(filling, tvm.ir.GenericConst) else 0.0
    if math.isfinite(value) or not isinstance(shape, relax.ShapeExpr):
        return tvm.ir.Op.get("relax.full").get_attr("FLegalize")(builder, call)
    return builder.call_te(topi.full, shape.values, str(call.ty.dtype), value, primfunc_name_hint="full")


def _take(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if call.attrs.axis is None or call.attrs.mode != "fast":
        return tvm.ir.Op.get("relax.take").get_attr("FLegalize")(builder, call)
    return builder.call_te(_rows, call.args[0], call.args[1], int(call.attrs.axis), primfunc_name_hint="take")


def _rows(data: te.Tensor, indices: te.Tensor, axis: int) -> te.Tensor:
    axis, rank = axis % len(data.shape), len(indices.shape)
    shape = [*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]]

    def element(*at: Any) -> Any:
        return data(*at[:axis], indices(*at[axis : axis + rank]), *at[axis + rank :])

    return te.compute(shape, element, name="T_take", tag="injective")


def _slice_scatter(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    x, part, *bounds = call.args
    begin, end, step = (getattr(bound, "value", None) for bound in bounds)
    if None in (begin, end, step) or getattr(x.ty.shape, "values", None) is None:
        return call.op.get_attr("FLegalize")(builder, call)
    return builder.call_te(
        _written, x, part, begin, end, step, int(call.attrs.axis), primfunc_name_hint="slice_scatter"
    )


def _written(x: te.Tensor, part: te.Tensor, begin: int, end: int, step: int, axis: int) -> te.Tensor:
    """Return `x` with `part` from `begin` to `end` of an axis, in steps."""
    axis %= len(x.shape)
    is_cut = not isinstance(x.shape[axis], tirx.IntImm) or end < int(x.shape[axis])

    def element(*at: Any) -> Any:
        place = at[axis]
        needed = [(begin > 0, place >= begin), (is_cut, place < end)]
        needed += [(step > 1, tirx.floormod(place - begin, step) == 0)]
        inside = [condition for is_needed, condition in needed if is_needed]
        written = part(*at[:axis], tirx.floordiv(place - begin, step), *at[axis + 1 :])
        return tirx.if_then_else(tirx.all(*inside), written, x(*at)) if inside else written

    return te.compute(x.shape, element, name="T_slice_scatter", tag="injective")
