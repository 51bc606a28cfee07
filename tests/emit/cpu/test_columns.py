"""Norms of rows that lie across: summed side by side and turned when written; others are left to other rules."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op

from tests.emit.cpu.kernels import LEVELS, check, few, kernel, scheduled

SMALL = relax.const(1e-3, "float32")
side = st.sampled_from([1, 4, 7, 8, 14, 28, 56])


def norm(x, g, b):
    return op.nn.layer_norm(op.permute_dims(x, (0, 2, 3, 1)), g, b, axes=-1)


def norm_between(x, g, b, y):
    """With an activation before it and a residual after it."""
    return op.add(norm(op.nn.relu(x), g, b), y)


def root_mean_square(x, g, b):
    rows = op.permute_dims(x, (0, 2, 3, 1))
    square = op.mean(op.multiply(rows, rows), axis=-1, keepdims=True)
    return op.add(op.multiply(op.multiply(rows, op.rsqrt(op.add(square, SMALL))), g), b)


@few
@given(
    st.sampled_from([norm, norm_between, root_mean_square]),
    st.tuples(st.sampled_from([1, 2]), st.sampled_from([2, 4, 17, 24, 50]), side, side),
    st.sampled_from(LEVELS),
    st.sampled_from([1, 2, 3]),
)
def test_any_size(make, shape, level, num_cores):
    n, c, h, w = shape
    shapes = [shape, (c,), (c,), (n, h, w, c)][: 4 if make is norm_between else 3]
    check(make, *shapes, rule=None, level=level, num_cores=num_cores)


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (norm, [(1, 24, 14, 14), (24,), (24,)]),
        (norm_between, [(2, 24, 7, 7), (24,), (24,), (2, 7, 7, 24)]),
        (root_mean_square, [(1, 24, 28, 28), (24,), (24,)]),
        (lambda x, g, b: op.nn.layer_norm(op.permute_dims(x, (0, 2, 1)), g, b, axes=-1), [(3, 20, 16), (20,), (20,)]),
    ],
)
def test_norms_of_turned_rows(make, shapes, num_cores):
    check(make, *shapes, rule="columns", num_cores=num_cores)


def test_no_lane_meets_another_one_and_what_a_row_has_once_is_computed_once():
    script = scheduled(kernel(norm, (1, 24, 14, 14), (24,), (24,)), "x86-64-v3")[1].script()
    assert "_rf" not in script and "T.Shuffle" in script
    assert script.count("T.rsqrt(") == 7  # one for each vector of 49 rows
    assert "kept1" in script and "kept2" not in script  # the mean, and 1 / the deviation


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lambda x, g, b: op.nn.layer_norm(x, g, b, axes=-1), [(2, 12, 24), (24,), (24,)]),  # rows that lie along
        (lambda x: op.nn.softmax(op.permute_dims(x, (0, 2, 1)), -1), [(3, 20, 16)]),  # exponentials would be made twice
        (lambda x: op.sum(op.permute_dims(x, (0, 2, 1)), -1), [(3, 20, 16)]),  # nothing is turned
        (norm, [(1, 24, 1, 127), (24,), (24,)]),  # a prime number of rows
        (lambda x: op.subtract(op.exp(x), op.mean(op.exp(x), axis=-1, keepdims=True)), [(12, 24)]),
    ],
)
def test_others_are_not_taken(make, shapes):
    assert scheduled(kernel(make, *shapes))[0] not in ("", "columns")


def test_an_image_is_shared_among_the_cores():
    script = scheduled(kernel(norm, (1, 64, 56, 56), (64,), (64,)), num_cores=4)[1].script()
    (steps,) = re.findall(r"T.parallel\(T.int64\((\d+)\)\)", script)
    assert int(steps) >= 4
