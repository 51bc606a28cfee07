"""Axes that move as one become one, in every block or in none; results stay what they were."""

from __future__ import annotations

import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm.relax import op
from tvm.script import tirx as T

from tests.emit.cpu.kernels import LEVELS, check, few, kernel, scheduled, target
from tvmhet.emit.cpu.blocks import CpuTarget
from tvmhet.emit.cpu.merged_axes import merged_axes
from tvmhet.emit.cpu.rows import _rows_at_a_time

side = st.sampled_from([1, 2, 3, 7, 8, 14, 28])


def merged(make, *shapes, places):
    made = merged_axes(tvm.s_tir.Schedule(kernel(make, *shapes)), places)
    return None if made is None else made.func


def test_rows_and_columns_of_an_image_become_pixels():
    @T.prim_func(private=True, s_tir=True)
    def expected(x: T.Buffer((T.int64(3), T.int64(20)), "float32"), y: T.Buffer((T.int64(20),), "float32")):
        T.func_attr({"tirx.noalias": True})
        moved = T.sblock_alloc_buffer((T.int64(20), T.int64(3)))
        for p, c in T.grid(T.int64(20), T.int64(3)):
            with T.sblock("T_transpose"):
                vp, vc = T.axis.remap("SS", [p, c])
                moved[vp, vc] = x[vc, vp]
        for p, c in T.grid(T.int64(20), T.int64(3)):
            with T.sblock("lv_red"):
                vp, vc = T.axis.remap("SR", [p, c])
                with T.init():
                    y[vp] = T.float32(0.0)
                y[vp] = y[vp] + moved[vp, vc]

    make = lambda x: op.sum(op.permute_dims(x, (1, 2, 0)), -1)  # noqa: E731
    tvm.ir.assert_structural_equal(merged(make, (3, 4, 5), places=range(2)), expected)


@pytest.mark.parametrize(
    ("make", "shapes", "num_leading"),
    [
        (lambda x: op.sum(op.permute_dims(x, (2, 1, 0)), -1), [(3, 4, 5)], 2),  # columns before rows
        (lambda x: op.sum(op.permute_dims(x, (1, 2, 0)), -1), [(3, 4, 5)], 1),  # the axes are reduced
        (lambda x, y: op.sum(op.add(op.permute_dims(x, (1, 2, 0)), y), -1), [(3, 4, 5), (5, 1)], 2),  # one by column
        (lambda x: op.sum(op.permute_dims(x, (0, 2, 1)), -1), [(3, 4, 5)], 2),  # the channels are between
    ],
)
def test_axes_that_do_not_move_as_one_stay(make, shapes, num_leading):
    assert merged(make, *shapes, places=range(num_leading)) is None


def test_three_axes_become_one_and_what_holds_none_of_them_keeps_its_shape():
    make = lambda x, g: op.sum(op.multiply(op.permute_dims(x, (1, 2, 3, 0)), g), -1)  # noqa: E731
    func = merged(make, (6, 2, 3, 4), (6,), places=range(3))
    assert [[int(e) for e in p.shape] for p in func.params] == [[6, 24], [6], [24]]


@few
@given(
    st.tuples(st.sampled_from([1, 2]), st.sampled_from([4, 17, 24]), side, side),
    st.sampled_from(LEVELS),
    st.sampled_from([1, 2, 3]),
)
def test_norms_of_pixels_between_other_operators_are_right(shape, level, num_cores):
    channels = (shape[1],)

    def make(x, g, b, y):
        moved = op.permute_dims(op.nn.relu(x), (0, 2, 3, 1))
        return op.add(op.nn.layer_norm(moved, g, b, axes=-1), y)

    shapes = (shape, channels, channels, (shape[0], *shape[2:], shape[1]))
    check(make, *shapes, rule=None, level=level, num_cores=num_cores)


def test_squares_end_where_the_image_does():
    make = lambda x: op.nn.softmax(op.permute_dims(x, (0, 2, 3, 1)), -1)  # noqa: E731
    _, func = scheduled(kernel(make, (1, 16, 12, 12)))
    assert "T.view(" not in func.script() and ".view(T.int64(1), T.int64(16), T.int64(144)" in func.script()


@pytest.mark.parametrize(
    ("shape", "num_cores", "rows"),
    [
        ((784, 192), 1, 16),
        ((3136, 96), 1, 64),
        ((196, 384), 1, 49),
        ((49, 768), 1, 49),
        ((49, 768), 4, 7),
        ((2, 28, 96), 1, 28),
        ((13, 96), 1, 13),
        ((1009, 768), 1, 1009),  # a prime number
        ((22, 65536), 1, 22),  # too large for the cache: rather turned than kept there
    ],
)
def test_so_many_rows_are_laid_out_at_a_time(shape, num_cores, rows):
    cpu = CpuTarget.of(target("x86-64-v4", num_cores))
    assert _rows_at_a_time([shape], len(shape) - 1, cpu) == rows


def test_the_axes_of_a_sum_become_a_row_of_it():
    @T.prim_func(private=True, s_tir=True)
    def expected(x: T.Buffer((T.int64(3), T.int64(20)), "float32"), y: T.Buffer((T.int64(3),), "float32")):
        T.func_attr({"tirx.noalias": True})
        total = T.sblock_alloc_buffer((T.int64(3),))
        for c, p in T.grid(T.int64(3), T.int64(20)):
            with T.sblock("lv_red"):
                vc, vp = T.axis.remap("SR", [c, p])
                with T.init():
                    total[vc] = T.float32(0.0)
                total[vc] = total[vc] + x[vc, vp]
        for c in range(T.int64(3)):
            with T.sblock("compute"):
                vc = T.axis.spatial(T.int64(3), c)
                y[vc] = T.max(total[vc], T.float32(0.0))

    make = lambda x: op.nn.relu(op.sum(x, [1, 2]))  # noqa: E731
    tvm.ir.assert_structural_equal(merged(make, (3, 4, 5), places=range(1, 3)), expected)


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lambda x, y: op.sum(op.multiply(x, y), [1, 2]), [(3, 4, 5), (1, 4, 1)]),  # one factor by row
        (lambda x: op.sum(op.permute_dims(x, (0, 2, 1)), [1, 2]), [(3, 4, 5)]),  # columns before rows
    ],
)
def test_rows_of_a_sum_that_do_not_follow_one_another_stay(make, shapes):
    assert merged(make, *shapes, places=range(1, 3)) is None


IMAGES = {
    "mean": lambda x: op.mean(x, [2, 3]),
    "greatest, then computed": lambda x: op.exp(op.max(x, [2, 3], keepdims=True)),
    "spread again": lambda x: op.multiply(x, op.mean(x, [2, 3], keepdims=True)),
    "variance": lambda x: op.variance(x, [2, 3]),
    "all": lambda x: op.sum(op.multiply(x, x)),
    "turned": lambda x: op.mean(op.permute_dims(x, (0, 2, 3, 1)), [1, 2]),
}


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize("shape", [(2, 6, 7, 7), (1, 5, 14, 14), (3, 4, 1, 9), (1, 40, 28, 29)])
@pytest.mark.parametrize("name", IMAGES)
def test_reductions_of_images_are_right(name, shape, num_cores):
    check(IMAGES[name], shape, rule=None, num_cores=num_cores)


def test_the_vectors_of_a_mean_do_not_end_with_the_rows_of_the_image():
    text = scheduled(kernel(IMAGES["mean"], (1, 5, 14, 14)))[1].script()
    assert "T.vectorized(T.int64(28))" in text  # of 196 elements seven, where 14 rows had one each


def test_groups_of_a_norm_are_rows_of_pixels():
    func = kernel(lambda x, g, b: op.nn.group_norm(x, g, b, 2, 1, [2, 3]), (1, 6, 14, 14), (6,), (6,))
    assert "T.int64(196)" in scheduled(func)[1].script()
