"""Convolutions by channel, channels side by side: any window, step, padding and end; others are left to other rules."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op

from tests.emit.cpu.kernels import LEVELS, check, few, kernel, scheduled

SIX = relax.const(6.0, "float32")
side = st.sampled_from([1, 3, 5, 7, 8, 12, 14, 19, 28])


def conv(channels, strides=1, padding=1, dilation=1, before=None, end="bias"):
    """A convolution by channel between other operators."""

    def make(x, w, *rest):
        image = x if before is None else before(x)
        sums = op.nn.conv2d(image, w, strides=strides, padding=padding, groups=channels, dilation=dilation)
        if end == "nothing":
            return sums
        made = op.add(sums, rest[0])
        if end == "residual":
            return op.nn.relu(op.add(made, rest[1]))
        return op.divide(op.multiply(made, op.clip(made, 0, 6)), SIX) if end == "hard swish" else op.nn.relu(made)

    return make


def result_side(extent, window, stride, before, after, dilation):
    return (extent + before + after - dilation * (window - 1) - 1) // stride + 1


@few
@given(
    st.data(),
    st.sampled_from([1, 2]),
    st.sampled_from([4, 8, 17, 24]),
    st.tuples(side, side),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.sampled_from(["nothing", "bias", "residual", "hard swish"]),
    st.sampled_from([None, op.nn.relu]),
    st.sampled_from(LEVELS),
    st.sampled_from([1, 2]),
)
def test_any_size(data, batch, channels, image, window, end, before, level, num_cores):
    strides, dilation = (data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3))) for _ in range(2))
    padding = data.draw(st.tuples(*[st.integers(0, 3)] * 4))  # top, left, bottom, right
    made = [
        result_side(e, w, s, b, a, d)
        for e, w, s, b, a, d in zip(image, window, strides, padding[:2], padding[2:], dilation, strict=True)
    ]
    assume(min(made) > 0)
    shapes = [(batch, channels, *image), (channels, 1, *window)]
    shapes += [(1, channels, 1, 1)] * (end != "nothing") + [(batch, channels, *made)] * (end == "residual")
    make = conv(channels, list(strides), list(padding), list(dilation), before, end)
    assume(scheduled(kernel(make, *shapes), level, num_cores)[0])  # a row of results may have no rule
    check(make, *shapes, rule=None, level=level, num_cores=num_cores)


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (conv(24, padding=2), [(1, 24, 7, 7), (24, 1, 5, 5), (1, 24, 1, 1)]),
        (conv(20, 2, 2, end="hard swish"), [(2, 20, 14, 14), (20, 1, 5, 5), (1, 20, 1, 1)]),
        (conv(16, 1, 3, end="nothing"), [(1, 16, 28, 28), (16, 1, 7, 7)]),
        (conv(9, 2, 0, end="residual"), [(1, 9, 17, 17), (9, 1, 5, 5), (1, 9, 1, 1), (1, 9, 7, 7)]),
        (conv(16, 1, 2, 2, op.nn.relu), [(1, 16, 14, 14), (16, 1, 3, 3), (1, 16, 1, 1)]),
        (conv(16, 1, [4, 0, 4, 0]), [(1, 16, 14, 10), (16, 1, 9, 1), (1, 16, 1, 1)]),
    ],
)
def test_channels_lie_side_by_side(make, shapes, num_cores):
    check(make, *shapes, rule="depthwise", num_cores=num_cores)


@pytest.mark.parametrize(
    ("make", "shapes", "rule"),
    [
        (conv(24), [(1, 24, 56, 56), (24, 1, 3, 3), (1, 24, 1, 1)], "windows"),  # long rows, a small window
        (conv(4), [(1, 4, 7, 7), (4, 1, 3, 3), (1, 4, 1, 1)], None),  # fewer channels than lanes
        (conv(1), [(1, 24, 7, 7), (24, 24, 3, 3), (1, 24, 1, 1)], "sliding"),
        (conv(24), [(1, 24, 14, 14), (48, 1, 3, 3), (1, 48, 1, 1)], None),  # two results of each channel
    ],
)
def test_others_are_not_taken(make, shapes, rule):
    name = scheduled(kernel(make, *shapes))[0]
    assert name not in ("", "depthwise") and (rule is None or name == rule)


def test_what_is_beside_the_image_is_left_out_and_not_multiplied_by_zero():
    script = scheduled(kernel(conv(8, padding=2), (1, 8, 7, 7), (8, 1, 5, 5), (1, 8, 1, 1)))[1].script()
    assert "pad_temp" not in script
    assert script.count("* weight[") == 29  # of 35 pairs of a pixel and a tap in a row
