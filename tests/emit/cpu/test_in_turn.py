"""Products whose result is moved in the same kernel, products of an image's mean, and what is left alone."""

from __future__ import annotations

import pytest
from tvm import relax
from tvm.relax import op

from tests.emit.cpu.kernels import LEVELS, check, kernel, scheduled


def pooled(x):
    return op.nn.adaptive_avg_pool2d(x, (1, 1))


def product(x, w, b):
    return op.nn.relu(op.add(op.matmul(x, w), b))


def window(x, w, b):
    return op.clip(op.add(op.nn.conv2d(x, w, padding=int(w.ty.shape[2]) // 2), b), 0, 6)


MOVES = {
    "padded": (
        lambda *a: op.nn.pad(window(*a), (0, 0, 0, 0, 0, 1, 0, 1)),
        [(1, 8, 9, 14), (12, 8, 1, 1), (1, 12, 1, 1)],
    ),
    "window, padded": (
        lambda *a: op.nn.pad(window(*a), (0, 0, 0, 0, 1, 1, 2, 0)),
        [(2, 8, 9, 14), (12, 8, 3, 3), (1, 12, 1, 1)],
    ),
    "reshaped": (lambda *a: op.reshape(product(*a), (1, 19, 4, 12)), [(1, 19, 33), (33, 48), (48,)]),
    "heads": (
        lambda *a: op.permute_dims(op.reshape(product(*a), (1, 19, 4, 12)), (0, 2, 1, 3)),
        [(1, 19, 33), (33, 48), (48,)],
    ),
    "sliced": (lambda *a: op.strided_slice(product(*a), axes=[1], begin=[3], end=[13]), [(1, 19, 33), (33, 48), (48,)]),
    "mean, product": (
        lambda x, *a: product(op.reshape(pooled(x), (1, 33)), *a),
        [(1, 33, 5, 7), (33, 48), (48,)],
    ),
    "mean, window": (lambda x, *a: window(pooled(x), *a), [(1, 24, 6, 6), (12, 24, 1, 1), (1, 12, 1, 1)]),
    "moved, then computed": (
        lambda x, w, b, y: op.multiply(op.reshape(product(x, w, b), (19, 4, 12)), y),
        [(1, 19, 33), (33, 48), (48,), (4, 12)],
    ),
    "transposed window": (
        lambda x, w, b: op.nn.relu(op.add(op.nn.conv2d_transpose(x, w, strides=[2, 2], padding=[1, 1]), b)),
        [(2, 8, 5, 7), (8, 12, 4, 4), (1, 12, 1, 1)],
    ),
    "transposed windows of groups": (
        lambda x, w: op.nn.conv1d_transpose(op.exp(x), w, strides=3, padding=1, groups=2),
        [(1, 8, 11), (8, 12, 5)],
    ),
    "enlarged": (
        lambda x, w: op.image.resize2d(op.nn.conv2d(x, w), relax.ShapeExpr([18, 28]), layout="NCHW"),
        [(1, 8, 9, 14), (12, 8, 1, 1)],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("level", "num_cores"), [*((level, 1) for level in LEVELS), (LEVELS[-1], 2)])
@pytest.mark.parametrize("name", MOVES)
def test_both_parts_have_a_schedule(name, level, num_cores):
    make, shapes = MOVES[name]
    check(make, *shapes, rule="in turn", level=level, num_cores=num_cores)


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lambda x: op.nn.pad(op.nn.relu(x), (0, 1)), [(33,)]),
        (lambda x, w, b: op.nn.softmax(product(x, w, b), -1), [(19, 33), (33, 48), (48,)]),
        (lambda x, w: op.matmul(x, w), [(19, 33), (33, 48)]),
    ],
)
def test_others_are_not_taken(make, shapes):
    assert scheduled(kernel(make, *shapes))[0] != "in turn"


def gated(x, w, b, y):
    """y and what a product of x's mean says of each of its channels."""
    scale = op.sigmoid(op.add(op.nn.conv2d(pooled(x), w), b))
    return op.multiply(op.nn.relu(y), scale)


@pytest.mark.parametrize("channels", [12, 24])
def test_a_mean_is_made_once_however_many_channels_the_product_has(channels):
    """Of as many channels as the mean has, rows of both would be taken for the same, and the mean made for each."""
    shapes = [(1, 24, 6, 6), (channels, 24, 1, 1), (1, channels, 1, 1)]
    make = lambda x, w, b: op.sigmoid(op.add(op.nn.conv2d(pooled(x), w), b))  # noqa: E731
    check(make, *shapes, rule="in turn")
    check(gated, *shapes, (1, channels, 5, 7), rule="in turn")
