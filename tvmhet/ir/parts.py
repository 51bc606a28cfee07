"""Which part of each operand an operator needs to make a part of its result.

    y = R.matmul(x, w)     x: 197 x 768, w: 768 x 3072      y[0:1, :]  <──  x[0:1, :] and all of w
    y = R.nn.softmax(x)    x: 197 x 197, along the last     y[:, 0:1]  <──  y[:, :]  <──  all of x
    y = R.nn.conv1d(x, w)  w: 3 wide, x padded by 1          y[:, :, 4:6]  <──  x[:, :, 3:7] and all of w

A part is a box: along each axis from where up to where. An operator that cannot make just the part that is asked for
makes a larger one, up to all of its result; one without a rule here is always computed whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from types import MappingProxyType
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvmhet.graph.families import ELEMENTWISE
from tvmhet.ir import convolutions
from tvmhet.ir.host_eval import scalar
from tvmhet.ir.rewrite import children, op_name, shape_of

#: Along each axis: from, and up to.
Box = tuple[tuple[int, int], ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A part of a result, the parts of operands that make it, and how: `make` takes those and returns a call."""

    box: Box
    operands: tuple[tuple[Any, Box], ...]
    make: Callable[[Sequence[Any]], Any]


def part_of(call: Any, wanted: Box) -> Part | None:
    """Return the smallest part of a call's result that has `wanted` in it and can be made of parts of its operands.

    None where the operator has no rule, or something about it is not fixed.
    """
    rule, made = _RULES.get(op_name(call)), shape_of(call) if isinstance(call, relax.Call) else None
    if rule is None or made is None or 0 in made:
        return None
    fixed = all(shape_of(a) is not None for arg in call.args for a in (arg, *children(arg)) if _is_tensor(a))
    return rule(call, wanted) if fixed else None


def whole(shape: Shape) -> Box:
    """Return all of a tensor.

    >>> whole((2, 3))
    ((0, 2), (0, 3))
    """
    return tuple((0, size) for size in shape)


def hull(a: Box, b: Box) -> Box:
    """Return the smallest box around two.

    >>> hull(((0, 1), (2, 3)), ((0, 1), (5, 6)))
    ((0, 1), (2, 6))
    """
    return tuple((min(i, k), max(j, m)) for (i, j), (k, m) in zip(a, b, strict=True))


def extents(box: Box) -> Shape:
    """Return the shape of a part.

    >>> extents(((0, 1), (2, 6)))
    (1, 4)
    """
    return tuple(end - begin for begin, end in box)


def around(box: Box, shape: Shape) -> tuple[int, int]:
    """Return where a part begins and ends among the elements of a tensor in row-major order.

    >>> around(((1, 2), (0, 3)), (4, 3))
    (3, 6)
    """
    steps = _steps(shape)
    first = sum(begin * step for (begin, _), step in zip(box, steps, strict=True))
    return first, sum((end - 1) * step for (_, end), step in zip(box, steps, strict=True)) + 1


def box_around(begin: int, end: int, shape: Shape) -> Box:
    """Return the smallest box with these elements in it that is a run of elements in row-major order.

    >>> box_around(64, 128, (12, 64)), box_around(64, 65, (12, 64)), box_around(60, 130, (12, 64))
    (((1, 2), (0, 64)), ((1, 2), (0, 1)), ((0, 3), (0, 64)))
    """
    box: list[tuple[int, int]] = []
    first, last = begin, end - 1
    for axis, step in enumerate(_steps(shape)):
        low, high = first // step, last // step
        box.append((low, high + 1))
        if low != high:
            return (*box, *whole(shape[axis + 1 :]))
        first, last = first - low * step, last - high * step
    return tuple(box)


def _steps(shape: Shape) -> list[int]:
    """Elements from one place to the next along each axis."""
    return list(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else []


def _is_tensor(expr: Any) -> bool:
    return isinstance(getattr(expr, "ty", None), relax.TensorType)


def _shape(expr: Any) -> Shape:
    shape = shape_of(expr)
    assert shape is not None, "part_of has looked"
    return shape


def _same(call: relax.Call) -> Callable[[Sequence[Any]], Any]:
    """Make the call again, with other tensors as its first arguments: all that it has."""
    return lambda parts: relax.Call(call.op, [*parts, *call.args[len(parts) :]], call.attrs, call.ty_args)


def _spread(shape: Shape, box: Box) -> Box:
    """The part of an operand that is broadcast to a result of which `box` is wanted."""
    own = box[len(box) - len(shape) :]
    return tuple((0, 1) if size == 1 else wanted for size, wanted in zip(shape, own, strict=True))


def _elementwise(call: relax.Call, wanted: Box) -> Part | None:
    tensors = [a for a in call.args if _is_tensor(a)]
    if not all(map(_is_tensor, call.args[: len(tensors)])):
        return None
    return Part(wanted, tuple((a, _spread(_shape(a), wanted)) for a in tensors), _same(call))


def _matmul(call: relax.Call, wanted: Box) -> Part | None:
    a, b = _shape(call.args[0]), _shape(call.args[1])
    if min(len(a), len(b)) < 2:
        return None
    batch, (rows, columns), inner = wanted[:-2], wanted[-2:], (0, a[-1])
    left, right = (*_spread(a[:-2], batch), rows, inner), (*_spread(b[:-2], batch), inner, columns)
    return Part(wanted, ((call.args[0], left), (call.args[1], right)), _same(call))


def _convolution(call: relax.Call, wanted: Box) -> Part | None:
    """All channels; of the image what the windows of the wanted places lie on, all of it where they lie beside it."""
    if not convolutions.is_convolution(call):
        return None
    attrs, image, weight = call.attrs, _shape(call.args[0]), _shape(call.args[1])
    first, made = convolutions.FIRST_PLACE, _shape(call)
    box, read = [wanted[0], (0, made[1])], [wanted[0], (0, image[1])]
    before, after = [], []
    for axis, (begin, end) in enumerate(wanted[first:]):
        extent, window, stride, step = image[first + axis], weight[first + axis], *_steps_of(attrs, axis)
        low, after_all = -int(attrs.padding[axis]), int(attrs.padding[len(image) - first + axis])
        starts = range(low + begin * stride, low + end * stride, stride)
        touched = None if (begin, end) == (0, made[first + axis]) else _touched(starts, window, step, extent)
        if touched is None:  # all, also what strides leave out
            begin, end, touched = 0, made[first + axis], (0, extent)
            padding = -low, after_all
        else:
            padding = touched[0] - starts[0], starts[-1] + (window - 1) * step + 1 - touched[1]
        box.append((begin, end))
        read.append(touched)
        before.append(padding[0])
        after.append(padding[1])
    operands = (call.args[0], tuple(read)), (call.args[1], whole(weight))
    return Part(tuple(box), operands, lambda parts: convolutions.again(call, parts[0], parts[1], [*before, *after]))


def _steps_of(attrs: Any, axis: int) -> tuple[int, int]:
    return int(attrs.strides[axis]), int(attrs.dilation[axis])


def _touched(starts: range, window: int, step: int, extent: int) -> tuple[int, int] | None:
    """The smallest run with all elements of an axis on which windows lie; None where they lie beside it.

    >>> _touched(range(-6, -4), 4, 2, 10), _touched(range(-6, -4), 3, 2, 10)
    ((0, 2), None)
    """
    reads = [range(starts.start + r * step, starts.stop + r * step, starts.step) for r in range(window)]
    inside = [r[max(0, -(r.start // r.step)) :] for r in reads]
    inside = [r[: max(0, -((r.start - extent) // r.step))] for r in inside]
    ends = [(r[0], r[-1] + 1) for r in inside if len(r)]
    return (min(low for low, _ in ends), max(high for _, high in ends)) if ends else None


def _along(call: relax.Call, wanted: Box) -> Part | None:
    """Softmax and normalisations: all of the axes they work along, all of scales and offsets."""
    shape = _shape(call)
    given = call.attrs.axis if op_name(call).endswith("softmax") else call.attrs.axes
    axes = {int(a) % len(shape) for a in (given if hasattr(given, "__iter__") else [given])}
    box = tuple((0, size) if axis in axes else wanted[axis] for axis, size in enumerate(shape))
    rest = tuple((a, whole(_shape(a))) for a in call.args[1:])
    return Part(box, ((call.args[0], box), *rest), _same(call))


def _reduction(call: relax.Call, wanted: Box) -> Part | None:
    shape, given = _shape(call.args[0]), call.attrs.axis
    axes = set(range(len(shape))) if given is None else {int(a) % len(shape) for a in given}
    left = iter(wanted)
    read = []
    for axis, size in enumerate(shape):
        if axis not in axes or call.attrs.keepdims:
            kept = next(left)
        read.append((0, size) if axis in axes else kept)
    return Part(wanted, ((call.args[0], tuple(read)),), _same(call))


def _permute_dims(call: relax.Call, wanted: Box) -> Part | None:
    rank = len(wanted)
    axes = range(rank)[::-1] if call.attrs.axes is None else [int(a) % rank for a in call.attrs.axes]
    read = dict(zip(axes, wanted, strict=True))
    return Part(wanted, ((call.args[0], tuple(read[axis] for axis in range(rank))),), _same(call))


def _reshape(call: relax.Call, wanted: Box) -> Part | None:
    """Axes that are split or joined: a run of elements. Others of which both sides have several: all of them."""
    source = call.args[0]
    read: list[tuple[int, int]] = []
    made: list[tuple[int, int]] = []
    for before, after in _groups(_shape(source), _shape(call)):
        asked = wanted[len(made) : len(made) + len(after)]
        run = (0, math.prod(after))
        if min(_num_long(before), _num_long(after)) <= 1:  # whichever is smaller makes the other's box exact
            run = around(box_around(*around(asked, after), before), before)
            run = around(box_around(*run, after), after)
        read += box_around(*run, before)
        made += box_around(*run, after)
    box = tuple(made)
    return Part(box, ((source, tuple(read)),), lambda parts: relax.op.reshape(parts[0], extents(box)))


def _num_long(shape: Shape) -> int:
    return sum(size > 1 for size in shape)


def _groups(before: Shape, after: Shape) -> list[tuple[Shape, Shape]]:
    """Cut two shapes of as many elements into the shortest pieces of as many elements each.

    >>> _groups((1, 197, 12, 64), (197, 768))
    [((1, 197), (197,)), ((12, 64), (768,))]
    """
    groups: list[tuple[Shape, Shape]] = []
    i = k = 0
    while i < len(before) or k < len(after):
        j, m = i + 1, k + 1
        while j <= len(before) and m <= len(after) and math.prod(before[i:j]) != math.prod(after[k:m]):
            j, m = (j + 1, m) if math.prod(before[i:j]) < math.prod(after[k:m]) else (j, m + 1)
        groups.append((before[i:j], after[k:m]))
        i, k = j, m
    return groups


def _broadcast_to(call: relax.Call, wanted: Box) -> Part | None:
    source = call.args[0]
    read = _spread(_shape(source), wanted)
    return Part(wanted, ((source, read),), lambda parts: relax.op.broadcast_to(parts[0], extents(wanted)))


def _concat(call: relax.Call, wanted: Box) -> Part | None:
    if not isinstance(call.args[0], relax.Tuple) or call.attrs.axis is None:
        return None
    axis, begin = int(call.attrs.axis) % len(wanted), 0
    low, high = wanted[axis]
    read: list[tuple[Any, Box]] = []
    for field in call.args[0].fields:
        end = begin + _shape(field)[axis]
        if max(low, begin) < min(high, end):
            own = max(low, begin) - begin, min(high, end) - begin
            read.append((field, (*wanted[:axis], own, *wanted[axis + 1 :])))
        begin = end

    def make(parts: Sequence[Any]) -> Any:
        return parts[0] if len(parts) == 1 else relax.op.concat(list(parts), axis=axis)

    return Part(wanted, tuple(read), make)


def _strided_slice(call: relax.Call, wanted: Box) -> Part | None:
    source, shape = call.args[0], _shape(call.args[0])
    numbers = [[scalar(v) for v in a.fields] if isinstance(a, relax.Tuple) else [None] for a in call.args[1:]]
    if any(v is None for given in numbers for v in given):
        return None
    axes, begins, _, *rest = [[int(v) for v in given if v is not None] for given in numbers]
    steps = rest[0] if rest else [1] * len(axes)
    if min(steps, default=1) < 1:
        return None
    read, made = list(wanted), [1] * len(wanted)
    for given, begin, step in zip(axes, begins, steps, strict=True):
        axis = given % len(shape)
        first = min(max(begin + shape[axis] if begin < 0 else begin, 0), shape[axis])
        low, high = wanted[axis]
        read[axis], made[axis] = (first + low * step, first + (high - 1) * step + 1), step
    box = tuple(read)

    def make(parts: Sequence[Any]) -> Any:
        if set(made) == {1}:
            return parts[0]
        rank = len(box)
        return relax.op.strided_slice(parts[0], list(range(rank)), [0] * rank, list(extents(box)), made)

    return Part(wanted, ((source, box),), make)


def _take(call: relax.Call, wanted: Box) -> Part | None:
    """Places that are known: those from the first to the last of them are read."""
    source, index = call.args[:2]
    if not isinstance(index, tvm.ir.GenericConst) or call.attrs.axis is None or len(_shape(index)) > 1:
        return None
    axis, places = int(call.attrs.axis) % len(_shape(source)), np.asarray(index.value.numpy())
    if places.min() < 0 or places.max() >= _shape(source)[axis]:
        return None
    one = places.ndim == 0
    kept = places.reshape(1) if one else places[slice(*wanted[axis])]
    first, end = int(kept.min()), int(kept.max()) + 1
    read = (*wanted[:axis], (first, end), *wanted[axis if one else axis + 1 :])

    def make(parts: Sequence[Any]) -> Any:
        if one:
            return relax.op.reshape(parts[0], extents(wanted))
        if np.array_equal(kept, np.arange(first, end)):
            return parts[0]
        return relax.op.take(parts[0], relax.const(kept - first, str(places.dtype)), axis=axis, mode=call.attrs.mode)

    return Part(wanted, ((source, read),), make)


_RULES: Mapping[str, Callable[[relax.Call, Box], Part | None]] = MappingProxyType(
    {
        **dict.fromkeys(ELEMENTWISE, _elementwise),
        **dict.fromkeys(("nn.softmax", "nn.log_softmax", "nn.layer_norm", "nn.rms_norm"), _along),
        **dict.fromkeys(("sum", "mean", "max", "min", "prod", "std", "variance"), _reduction),
        **dict.fromkeys(("reshape", "expand_dims", "squeeze", "flatten"), _reshape),
        **dict.fromkeys(convolutions.NAMES, _convolution),
        "matmul": _matmul,
        "permute_dims": _permute_dims,
        "broadcast_to": _broadcast_to,
        "concat": _concat,
        "strided_slice": _strided_slice,
        "take": _take,
    }
)
