"""The CPU rule of element-wise operators and moves: broadcasts, transposes, heads, concatenations, images."""

from __future__ import annotations

import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm.relax import op

from tests.emit.cpu.kernels import check, extent, few, kernel, scheduled


@few
@given(extent, extent, extent)
def test_elementwise_chains_with_broadcasts(a, b, c):
    check(lambda x, y, z: op.tanh(op.multiply(op.add(x, y), z)), (a, b, c), (b, 1), (c,), rule="injective")


@few
@given(extent, extent, extent, st.permutations([0, 1, 2]))
def test_transposition(a, b, c, axes):
    check(lambda x: op.permute_dims(x, axes), (a, b, c), rule="injective")


def normalised(side):
    """A batch norm's way back: images, and values of each channel that are computed from others."""

    def make(g, x, m, r):
        scale = op.reshape(op.multiply(m, op.multiply(r, r)), (1, 6, 1, 1))
        return op.multiply(op.subtract(g, op.multiply(x, scale)), op.reshape(r, (1, 6, 1, 1)))

    return make, ((2, 6, side, side), (2, 6, side, side), (6,), (6,))


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize("side", [7, 12, 14, 24, 28, 37, 67, 75])
def test_images_of_any_size_are_walked_in_vectors(side, num_cores):
    """Rows that no vector ends with, 24 of vectors of 64, as well: a vector of two rows is 48."""
    make, shapes = normalised(side)
    script = scheduled(kernel(make, *shapes))[1].script()
    alone = side * side // 8 * 8 != side * side and side not in (7, 14, 75)
    assert ("T.vectorized" in script) != alone
    assert (
        f"range(T.int64({2 * 6 * side * side}))" not in script
    )  # LLVM makes no vectors of that: channels change in it
    check(make, *shapes, rule="injective", num_cores=num_cores)


def test_a_padding_that_many_windows_read_is_made_once():
    def corners(x):
        wide = op.nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1])
        views = [op.strided_slice(wide, [2, 3], [i, j], [i + 17, j + 17], [2, 2]) for i in (0, 1) for j in (0, 1)]
        best = views[0]
        for view in views[1:]:
            best = op.maximum(best, view)
        return op.reshape(best, (2 * 3, 81))

    script = scheduled(kernel(corners, (2, 3, 16, 16)))[1].script()
    assert script.count("T.if_then_else") == 1
    check(corners, (2, 3, 16, 16), rule="injective")
    check(corners, (2, 3, 16, 16), rule="injective", num_cores=2)


def heads(axes):
    """Rows of 4 heads of 32 with a bias, the heads brought to another place, as attention reads them."""
    return lambda x, b: op.permute_dims(op.reshape(op.add(x, b), (1, 48, 4, 32)), axes)


@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (0, 2, 3, 1), (2, 0, 3, 1), (3, 2, 1, 0)])
@pytest.mark.parametrize("num_cores", [1, 2])
def test_heads_are_moved_as_tensors_of_their_own_are(axes, num_cores):
    check(heads(axes), (1, 48, 128), (128,), rule="injective", num_cores=num_cores)


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize(("rows", "heads", "width"), [(128, 12, 64), (197, 3, 16), (5, 2, 12), (64, 64, 8), (7, 3, 10)])
def test_heads_put_together_again_are_read_in_vectors(rows, heads, width, num_cores):
    """x[v // width, row, v % width]: a flat loop would divide for every element."""

    def merged(x, b):
        return op.add(op.reshape(op.permute_dims(x, (0, 2, 1, 3)), (1, rows, heads * width)), b)

    shapes = ((1, heads, rows, width), (heads * width,))
    assert "T.vectorized" in scheduled(kernel(merged, *shapes))[1].script()
    check(merged, *shapes, rule="injective", num_cores=num_cores)


def test_elements_that_lie_apart_in_their_head_are_no_vectors():
    func = kernel(lambda x: op.reshape(op.permute_dims(x, (0, 2, 3, 1)), (1, 16, 256)), (1, 16, 16, 16))
    assert "T.vectorized" not in scheduled(func)[1].script()
    check(lambda x: op.reshape(op.permute_dims(x, (0, 2, 3, 1)), (1, 16, 256)), (1, 16, 16, 16), rule="injective")


def test_elements_of_a_head_are_vectors_and_transposed_heads_are_turned():
    kept = scheduled(kernel(heads((0, 2, 1, 3)), (1, 48, 128), (128,)))[1].script()
    assert "T.vectorized(T.int64(32))" in kept
    moved = scheduled(kernel(heads((0, 2, 3, 1)), (1, 48, 128), (128,)))[1].script()
    assert "T.Shuffle" in moved and "T.Shuffle" not in kept


def conditions_left(func):
    """The conditions in a kernel once its blocks are gone: those whose outcome TVM cannot tell."""
    passes = tvm.s_tir.transform
    lower = [passes.ConvertBlocksToOpaque(), passes.LowerOpaqueBlock(), passes.StmtSimplify()]
    return tvm.transform.Sequential(lower)(tvm.IRModule({"main": func})).script().count("if_then_else")


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("num_cores", [1, 2])
def test_a_concatenation_is_copies(axis, num_cores):
    shapes = [(32, 32, 48), (32, 32, 48), (32, 32, 48)]
    shapes[1] = tuple(2 * e if i == axis else e for i, e in enumerate(shapes[1]))
    check(lambda *x: op.concat(list(x), axis), *shapes, rule="injective", num_cores=num_cores)
    fast = scheduled(kernel(lambda *x: op.concat(list(x), axis), *shapes))[1]
    assert conditions_left(fast) == 0


@pytest.mark.parametrize("num_cores", [1, 2])
def test_parts_of_a_concatenation_that_are_computed_are_one_long_row_each(num_cores):
    """LLVM's vectors are longer than a row of 35 pixels."""
    shapes = [(1, 8, 35, 35), (1, 16, 35, 35)]
    check(lambda x, y: op.concat([op.nn.relu(x), op.nn.relu(y)], 1), *shapes, rule="injective", num_cores=num_cores)
    fast = scheduled(kernel(lambda x, y: op.concat([op.nn.relu(x), op.nn.relu(y)], 1), *shapes))[1]
    assert conditions_left(fast) == 0 and fast.script().count("1225") >= 2


def rolled(x):
    """Rows twice over, all one place on: element v of a row is element (v - 1) // 2 of x."""
    twice = op.repeat(x, 2, 2)
    return op.concat([op.strided_slice(twice, [2], [15], [16]), op.strided_slice(twice, [2], [0], [15])], 2)


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (rolled, "injective"),
        (lambda x: op.strided_slice(op.nn.pad(op.repeat(x, 2, 2), [0, 0, 0, 0, 1, 1]), [2], [0], [16]), "injective"),
        (lambda x: op.nn.softmax(rolled(x)), "rows"),
        (lambda x: op.sum(rolled(x), [1, 2]), "rows"),
    ],
    ids=["rolled", "padded", "softmax", "sum"],
)
def test_halves_of_shifted_indices_are_not_fused(make, rule, num_cores):
    """TVM gets (v - 1) // 2 wrong once v is a part of a fused loop."""
    check(make, (4, 4, 8), rule=rule, num_cores=num_cores)


@pytest.mark.parametrize("side", [7, 14, 28, 56, 64])
def test_vectors_over_an_image_never_gather(side):
    func = kernel(lambda x, y: op.add(x, y), (1, 32, side, side), (1, 32, side, side))
    script = scheduled(func, level="x86-64-v4")[1].script()
    length = int(script.partition("T.vectorized(T.int64(")[2].partition(")")[0] or 1)
    assert side % length == 0 or length % side == 0
    check(lambda x, y: op.add(x, y), (1, 32, side, side), (1, 32, side, side), rule="injective")


def test_a_concatenation_of_short_parts_stays_a_choice():
    check(lambda x, y: op.concat([x, y], 1), (4, 1, 8), (4, 196, 8), rule="injective")
    assert conditions_left(scheduled(kernel(lambda x, y: op.concat([x, y], 1), (4, 1, 8), (4, 196, 8)))[1]) == 1


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize(
    "make", [lambda x: op.reshape(x, (4, 9, 16)), op.nn.relu, lambda x: x], ids=["rows", "relu", "alone"]
)
def test_a_concatenation_of_uneven_parts_that_its_reader_reshapes_is_copies(make, num_cores):
    shapes = [(4, 16), (4, 96), (4, 32)]
    check(lambda *x: make(op.concat(list(x), 1)), *shapes, rule="injective", num_cores=num_cores)
    assert conditions_left(scheduled(kernel(lambda *x: make(op.concat(list(x), 1)), *shapes))[1]) == 0


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize(("count", "num_blocks"), [(4, 1), (6, 2), (27, 2)])
def test_a_concatenation_of_many_is_made_before_it_is_transposed(count, num_blocks, num_cores):
    """Else each element would be looked for among all parts; few parts, and a transposition of one, are one block."""

    def turned(*parts):
        joined = op.reshape(op.concat(list(parts), 1), (3, count, 16))
        return op.permute_dims(joined, (0, 2, 1))

    script = scheduled(kernel(turned, *[(3, 16)] * count), num_cores=num_cores)[1].script()
    assert script.count("alloc_buffer") == num_blocks - 1
    check(turned, *[(3, 16)] * count, rule="injective", num_cores=num_cores)
    check(lambda *parts: op.reshape(op.concat(list(parts), 1), (3, count, 16)), *[(3, 16)] * count, rule="injective")


def larger(x, size):
    return op.image.resize2d(
        x, (size, size), layout="NCHW", method="linear", coordinate_transformation_mode="half_pixel"
    )


def test_what_is_made_larger_is_computed_once():
    """Each element is read for four others, so that of two resizings in each other the inner one would be made anew."""
    check(lambda x, y: larger(op.add(larger(x, 8), y), 16), (1, 5, 4, 4), (1, 5, 8, 8), rule="injective")
    text = scheduled(kernel(lambda x, b: larger(op.exp(op.add(x, b)), 16), (1, 5, 8, 8), (1, 5, 1, 1)))[1].script()
    assert text.count("T.exp(") == 1
    moved = scheduled(kernel(lambda x: larger(op.reshape(x, (1, 5, 8, 8)), 16), (5, 64)))[1].script()
    assert moved.count("sblock_alloc_buffer") == 1  # of what is resized along one axis
