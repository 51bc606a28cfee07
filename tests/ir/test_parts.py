"""A part that is made of parts of operands is that part of the result: each kind of rule, random shapes and boxes."""

from __future__ import annotations

import math

import pytest
import torch
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from tvmhet.ir.host_eval import evaluate, scalar
from tvmhet.ir.model import to_torch
from tvmhet.ir.parts import around, box_around, extents, hull, part_of, whole
from tvmhet.ir.rewrite import op_name, shape_of


def var(shape, name="x"):
    return relax.Var(name, relax.TensorType(shape, "float32"))


def dims(least=1, most=4):
    return st.lists(st.integers(1, 5), min_size=least, max_size=most).map(tuple)


@st.composite
def boxes(draw, shape):
    ends = [sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True))) for size in shape]
    return tuple((low, high) for low, high in ends)


@st.composite
def elementwise(draw):
    shape = draw(dims())
    other = tuple(draw(st.sampled_from((1, size))) for size in shape)[draw(st.integers(0, len(shape))) :]
    x, y = var(shape), var(other, "y")
    return draw(st.sampled_from((relax.op.add(x, y), relax.op.maximum(y, x), relax.op.clip(x, 0.0, 1.0))))


@st.composite
def matmuls(draw):
    batch, m, k, n = draw(dims(0, 2)), *(draw(st.integers(1, 5)) for _ in range(3))
    other = tuple(draw(st.sampled_from((1, size))) for size in batch)[draw(st.integers(0, len(batch))) :]
    a, b = (*batch, m, k), (*other, k, n)
    return relax.op.matmul(var(a), var(b, "w"))


@st.composite
def reductions(draw):
    shape = draw(dims())
    axes = draw(st.none() | st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True))
    make = draw(st.sampled_from((relax.op.sum, relax.op.mean, relax.op.max, relax.op.min)))
    return make(var(shape), axes, draw(st.booleans()))


@st.composite
def softmaxes(draw):
    shape = draw(dims())
    return relax.op.nn.softmax(var(shape), draw(st.integers(-len(shape), len(shape) - 1)))


@st.composite
def norms(draw):
    shape, first = draw(dims(1, 3)), draw(st.booleans())
    axes = [0] if first else [len(shape) - 1]
    own = (shape[axes[0]],)
    if draw(st.booleans()):
        return relax.op.nn.rms_norm(var(shape), var(own, "s"), axes, 1e-5)
    return relax.op.nn.layer_norm(var(shape), var(own, "s"), var(own, "b"), axes)


@st.composite
def moves(draw):
    shape = draw(dims())
    order = draw(st.permutations(range(len(shape))))
    spread = tuple(draw(st.sampled_from((size, 1))) for size in shape)
    x = var(shape)
    makers = (
        lambda: relax.op.permute_dims(x, list(order)),
        lambda: relax.op.permute_dims(x),
        lambda: relax.op.broadcast_to(var(spread), (2, *shape)),
        lambda: relax.op.concat([x, var(shape, "y"), var(shape, "z")], order[0]),
    )
    return draw(st.sampled_from(makers))()


@st.composite
def reshapes(draw):
    """Factors in one order, joined as it comes on each side, ones in between."""
    factors = draw(st.lists(st.sampled_from((1, 2, 3, 5)), min_size=1, max_size=5))

    def joined():
        out = []
        for factor in factors:
            if out and draw(st.booleans()):
                out[-1] *= factor
            else:
                out += [1] * draw(st.integers(0, 1)) + [factor]
        return tuple(out + [1] * draw(st.integers(0, 1)))

    return relax.op.reshape(var(joined()), joined())


@st.composite
def slices(draw):
    shape = draw(dims())
    axes = draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True))
    box, x = draw(boxes(shape)), var(shape)
    begin, end = ([box[a][k] for a in axes] for k in (0, 1))
    begin = [b - shape[a] if draw(st.booleans()) else b for a, b in zip(axes, begin, strict=True)]
    end = [e if e < shape[a] else draw(st.sampled_from((e, e + 7))) for a, e in zip(axes, end, strict=True)]
    return relax.op.strided_slice(x, axes, begin, end, [draw(st.integers(1, 3)) for _ in axes])


@st.composite
def takes(draw):
    shape = draw(dims())
    axis = draw(st.integers(0, len(shape) - 1))
    place = st.integers(0, shape[axis] - 1)
    places = draw(place | st.lists(place, min_size=1, max_size=4))
    return relax.op.take(var(shape), relax.const(places, "int64"), axis=axis, mode="fast")


@st.composite
def convolutions(draw):
    """One to three axes of places; paddings wider than windows, too."""
    axes, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    window, steps, strides, pads = (
        [draw(st.integers(low, 3)) for _ in range(n)] for low, n in ((1, axes), (1, axes), (1, axes), (0, 2 * axes))
    )
    least = [max(1, (k - 1) * d + 1 - a - b) for k, d, a, b in zip(window, steps, pads, pads[axes:], strict=False)]
    image = [draw(st.integers(low, low + 4)) for low in least]
    make = (relax.op.nn.conv1d, relax.op.nn.conv2d, relax.op.nn.conv3d)[axes - 1]
    x, w = var((2, 2 * groups, *image)), var((3 * groups, 2, *window), "w")
    return make(x, w, strides=strides, padding=pads, dilation=steps, groups=groups)


KINDS = {
    "convolution": convolutions(),
    "elementwise": elementwise(),
    "matmul": matmuls(),
    "reduction": reductions(),
    "softmax": softmaxes(),
    "normalisation": norms(),
    "move": moves(),
    "reshape": reshapes(),
    "slice": slices(),
    "take": takes(),
}


def value_of(expr, values):
    if expr in values:
        return values[expr]
    if isinstance(expr, relax.Tuple):
        return [value_of(f, values) for f in expr.fields]
    if isinstance(expr, relax.ShapeExpr):
        return [int(d) for d in expr.values]
    if isinstance(expr, tvm.ir.GenericConst):
        return to_torch(expr.value)
    if not isinstance(expr, relax.Call):
        return scalar(expr)
    expr = relax.BlockBuilder().normalize(expr)
    if op_name(expr).startswith("nn.conv"):
        return convolved(expr, *(value_of(a, values) for a in expr.args))
    if op_name(expr) in ("nn.layer_norm", "nn.rms_norm"):
        return normalised(expr, *(value_of(a, values) for a in expr.args))
    return evaluate(expr, [value_of(a, values) for a in expr.args])


def convolved(call, x, weight):
    attrs, axes = call.attrs, x.dim() - 2
    pads = [p for pair in zip(attrs.padding[:axes], attrs.padding[axes:], strict=True) for p in pair]
    reversed_pads = [int(p) for i in range(axes)[::-1] for p in pads[2 * i : 2 * i + 2]]
    make = (torch.conv1d, torch.conv2d, torch.conv3d)[axes - 1]
    options = {"stride": [int(s) for s in attrs.strides], "dilation": [int(d) for d in attrs.dilation]}
    return make(torch.nn.functional.pad(x, reversed_pads), weight, None, groups=int(attrs.groups), **options)


def normalised(call, x, scale, shift=0.0):
    """Along one axis, which may be the first."""
    axis, centred = int(call.attrs.axes[0]), op_name(call) == "nn.layer_norm"
    x = x.movedim(axis, -1)
    x = x - x.mean(-1, keepdim=True) if centred else x
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + call.attrs.epsilon)
    return (x * scale + shift).movedim(-1, axis)


def cut(tensor, box):
    return tensor[tuple(slice(low, high) for low, high in box)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_part_of_parts_is_the_part_of_the_whole(kind, data):
    call = relax.BlockBuilder().normalize(data.draw(KINDS[kind]))
    wanted = data.draw(boxes(shape_of(call)))
    part = part_of(call, wanted)
    assert hull(part.box, wanted) == part.box
    tensors = {}
    for arg in call.args:
        for field in arg.fields if isinstance(arg, relax.Tuple) else [arg]:
            if isinstance(field, relax.Var):
                tensors[field] = torch.randn(shape_of(field), generator=torch.Generator().manual_seed(len(tensors)))
    pieces, values = [], {}
    for i, (operand, box) in enumerate(part.operands):
        piece = var(extents(box), f"piece{i}")
        values[piece] = cut(tensors[operand], box)
        pieces.append(piece)
    got, want = value_of(part.make(pieces), values), cut(value_of(call, tensors), part.box)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_smallest_run_of_elements_around_a_part(data):
    shape = data.draw(dims())
    box = data.draw(boxes(shape))
    inside = set(cut(torch.arange(math.prod(shape)).reshape(shape), box).reshape(-1).tolist())
    first, end = around(box, shape)
    assert (first, end) == (min(inside), max(inside) + 1)
    run = box_around(first, end, shape)
    elements = cut(torch.arange(math.prod(shape)).reshape(shape), run).reshape(-1)
    assert elements.tolist() == list(range(elements[0], elements[-1] + 1)) and inside <= set(elements.tolist())


def test_parts_that_are_asked_for_in_vain():
    x, axes = var((4, 6)), [1]
    y = relax.BlockBuilder().normalize(relax.op.nn.layer_norm(x, var((6,), "s"), var((6,), "b"), axes))
    part = part_of(y, ((1, 2), (0, 1)))
    assert part.box == ((1, 2), (0, 6))  # a row is made whole
    assert [box for _, box in part.operands] == [part.box, ((0, 6),), ((0, 6),)]
    both = relax.BlockBuilder().normalize(relax.op.reshape(var((4, 6)), (6, 4)))
    assert part_of(both, ((0, 1), (0, 1))).box == whole((6, 4))  # rows of other lengths


def test_rows_that_strides_leave_out_are_read_all_the_same():
    """56 rows are not made 55 for what reads every second."""
    call = relax.BlockBuilder().normalize(relax.op.nn.conv2d(var((1, 3, 8, 8)), var((4, 3, 1, 1), "w"), strides=[2, 2]))
    assert part_of(call, whole((1, 4, 4, 4))).operands[0][1] == whole((1, 3, 8, 8))
    assert part_of(call, ((0, 1), (0, 4), (0, 4), (0, 2))).operands[0][1] == ((0, 1), (0, 3), (0, 8), (0, 3))


@pytest.mark.parametrize(
    "call",
    [
        relax.op.cumsum(var((4, 6)), 1),
        relax.op.nn.conv1d(var((1, 6, 4)), var((3, 4, 2), "w"), data_layout="NWC"),
        relax.op.matmul(var((4,)), var((4, 6), "w")),
        relax.op.strided_slice(var((4, 6)), [0], [3], [0], [-1]),
        relax.op.take(var((4, 6)), relax.const([0, -1], "int64"), axis=0),
        relax.op.take(var((4, 6)), relax.const([0, 7], "int64"), axis=0),
        relax.op.take(var((4, 6)), relax.Var("i", relax.TensorType((2,), "int64")), axis=0),
    ],
    ids=lambda call: str(call)[:40],
)
def test_what_has_no_rule(call):
    call = relax.BlockBuilder().normalize(call)
    assert part_of(call, whole(shape_of(call))) is None
