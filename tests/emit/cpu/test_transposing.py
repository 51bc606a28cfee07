"""Transpositions in registers: any order of axes, whole squares and rests, alone and in front of a norm."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm.relax import op

from tests.emit.cpu.kernels import LEVELS, Make, check, few, kernel, run, scheduled

level = st.sampled_from(LEVELS)
SOFTMAX: Make = lambda x: op.nn.softmax(op.permute_dims(x, (0, 2, 3, 1)), -1)  # noqa: E731
side = st.sampled_from([1, 2, 3, 4, 7, 8, 13, 16, 20, 35])


@few
@given(st.lists(side, min_size=2, max_size=4), st.randoms(use_true_random=False), level, st.sampled_from([1, 2]))
def test_any_order_of_axes(shape, dice, level, num_cores):
    order = list(range(len(shape)))
    dice.shuffle(order)
    x = np.arange(float(np.prod(shape)), dtype="float32").reshape(shape)
    func = kernel(lambda x: op.permute_dims(x, order), tuple(shape))
    np.testing.assert_array_equal(run(scheduled(func, level, num_cores)[1], [x], level), x.transpose(order))


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lambda x, b: op.permute_dims(op.reshape(op.add(x, b), (20, 3, 16)), (1, 2, 0)), [(20, 48), (48,)]),
        (
            lambda x, g, y: op.add(op.permute_dims(op.multiply(x, g), (0, 3, 1, 2)), y),
            [(2, 7, 9, 24), (24,), (2, 24, 7, 9)],
        ),
        (lambda x: op.permute_dims(op.strided_slice(x, axes=[1], begin=[8], end=[40]), (1, 0)), [(19, 48)]),
        (lambda x, y: op.multiply(op.permute_dims(x, (1, 0)), op.permute_dims(y, (1, 0))), [(16, 33), (16, 33)]),
        (lambda x: op.add(op.permute_dims(x, (1, 0)), x), [(32, 32)]),
        (lambda x: op.nn.gelu(op.exp(op.permute_dims(x, (0, 2, 1)))), [(2, 17, 21)]),
    ],
)  # fmt: skip
def test_with_what_stands_around(make, shapes, num_cores):
    check(make, *shapes, rule="injective", num_cores=num_cores)
    assert "T.Shuffle" in scheduled(kernel(make, *shapes))[1].script()


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (SOFTMAX, [(1, 24, 9, 12)]),
        (SOFTMAX, [(2, 24, 5, 19)]),
        (SOFTMAX, [(1, 7, 3, 3)]),
        (lambda x: op.nn.softmax(op.permute_dims(x, (0, 2, 1)), -1), [(3, 20, 17)]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("num_cores", [1, 2])
def test_rows_that_lie_across(make, shapes, num_cores):
    check(make, *shapes, rule="rows", num_cores=num_cores)


def test_rows_that_lie_across_are_turned_in_registers():
    func = kernel(SOFTMAX, (1, 24, 8, 19))
    assert "T.Shuffle" in scheduled(func)[1].script()


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lambda x: op.permute_dims(x, (1, 0)), [(3, 40)]),  # too few for a square
        (lambda x: op.permute_dims(x, (1, 0, 2)), [(8, 9, 32)]),  # rows stay rows
        (lambda x: op.permute_dims(op.concat((x, x), axis=0), (1, 0)), [(16, 16)]),  # a choice for each element
    ],
)  # fmt: skip
def test_what_is_no_transposition_has_no_squares(make, shapes):
    check(make, *shapes, rule="injective")
    assert "T.Shuffle" not in scheduled(kernel(make, *shapes))[1].script()
