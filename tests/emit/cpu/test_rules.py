"""Every CPU rule against the unscheduled kernel, on shapes that divide into vectors and on shapes that do not.

The rule of element-wise operators and moves is in test_injective.py, convolutions that slide are in test_sliding.py.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax, te, topi
from tvm.relax import op

from tests import emulated_cuda
from tests.emit.cpu.kernels import LEVELS, check, extent, few, kernel, run, scheduled
from tests.emulated_cuda import A100
from tests.emulated_cuda.kernels import check_kernels
from tvmhet.emit.cpu import contraction
from tvmhet.emit.cpu.blocks import CpuTarget, vector_length
from tvmhet.emit.cpu.contraction import choose_tile
from tvmhet.emit.cpu.fast_math import fast_math
from tvmhet.emit.cpu.nests import stages_of
from tvmhet.emit.lower import make_target
from tvmhet.emit.schedule import ScheduleReport

level = st.sampled_from(LEVELS)
HALF = relax.const(0.5, "float32")


@few
@given(extent, extent, extent, level)
def test_matmul_with_bias_and_activation(m, k, n, level):
    func = kernel(lambda x, w, b: op.nn.relu(op.add(op.matmul(x, w), b)), (m, k), (k, n), (n,))
    _, fast = scheduled(func, level)
    rng = np.random.default_rng(0)
    inputs = [rng.uniform(-1, 1, s).astype("float32") for s in ((m, k), (k, n), (n,))]
    want = np.maximum(inputs[0] @ inputs[1] + inputs[2], 0)
    np.testing.assert_allclose(run(fast, inputs, level), want, rtol=1e-5, atol=1e-5)


@few
@given(extent, extent, extent, extent)
def test_batched_matmul(b, m, k, n):
    func = kernel(lambda x, y: op.matmul(x, y), (b, m, k), (b, k, n))
    _, fast = scheduled(func)
    rng = np.random.default_rng(0)
    x, y = (rng.uniform(-1, 1, s).astype("float32") for s in ((b, m, k), (b, k, n)))
    np.testing.assert_allclose(run(fast, [x, y]), x @ y, rtol=1e-5, atol=1e-5)


@few
@given(
    st.sampled_from([1, 2]),
    st.sampled_from([3, 4, 8]),
    st.sampled_from([4, 6, 8]),
    st.sampled_from([7, 8, 11, 14]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 3]),
)
def test_convolution_with_bias(batch, channels, filters, side, stride, window):
    check(
        lambda x, w, b: op.nn.relu(op.add(op.nn.conv2d(x, w, strides=stride, padding=window // 2), b)),
        (batch, channels, side, side + 1),
        (filters, channels, window, window),
        (1, filters, 1, 1),
        rule=None,
    )


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize("side", [8, 13])
def test_windows_of_three_axes_that_move_by_two_sum_rows(side, num_cores):
    check(
        lambda x: op.nn.max_pool3d(x, (3, 3, 3), strides=2, padding=1),
        (2, 3, side, side, side + 1),
        rule="windows",
        num_cores=num_cores,
    )


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize(
    ("rule", "groups", "read", "made", "side", "strides"),
    [
        ("sliding", 2, 4, 4, 14, 1), ("sliding", 3, 5, 8, 15, 2), ("sliding", 4, 1, 6, 12, 1),
        ("sliding", 2, 3, 26, 16, 1), ("sliding", 2, 8, 17, 14, 1), ("sliding", 5, 2, 2, 15, 2),
        ("contraction", 2, 2, 320, 8, 1), ("contraction", 3, 4, 17, 8, 5),
    ],
)  # fmt: skip
def test_groups_are_a_batch_of_convolutions(rule, groups, read, made, side, strides, num_cores):
    channels = groups * made
    check(
        lambda x, w, b, y: op.nn.relu(
            op.add(op.add(op.nn.conv2d(x, w, strides=strides, padding=1, groups=groups), b), y)
        ),
        (2, groups * read, side, side + 1),
        (channels, read, 3, 3),
        (1, channels, 1, 1),
        (2, channels, (side - 1) // strides + 1, side // strides + 1),
        rule=rule,
        num_cores=num_cores,
    )


@pytest.mark.parametrize("shape", [(2, 12, 6, 8), (1, 64, 16, 16), (3, 4, 5, 7), (1, 30, 197), (1, 6, 2, 3, 5)])
@pytest.mark.parametrize("groups", [1, 2, -1])
def test_a_group_norm_and_what_follows_it(groups, shape):
    """Rows are groups of channels, the result has channels; a residual and an activation are one pass with it."""

    def make(x, g, b, y):
        norm = op.nn.group_norm(x, g, b, shape[1] if groups < 0 else groups, 1, list(range(2, len(shape))))
        return op.nn.silu(op.add(norm, y))

    check(make, shape, shape[1:2], shape[1:2], shape, rule="rows")


def test_the_mean_of_a_group_norm_costs_no_digits():
    func = kernel(lambda x, g, b: op.nn.group_norm(x, g, b, 4, 1, [2, 3]), (1, 16, 32, 32), (16,), (16,))
    x = (100 + np.random.default_rng(0).standard_normal((1, 16, 32, 32))).astype("float32")
    by_group = x.astype("float64").reshape(4, -1)
    want = (by_group - by_group.mean(1, keepdims=True)) / np.sqrt(by_group.var(1, keepdims=True) + 1e-5)
    got = run(scheduled(func)[1], [x, np.ones(16, "float32"), np.zeros(16, "float32")])
    np.testing.assert_allclose(got, want.reshape(x.shape), atol=1e-4)  # of squares less the mean's: 1e-2


def test_a_reduction_of_two_results_at_once_is_no_rules():
    """A norm's sum and sum of squares, as TVM writes it: nothing takes them, nothing stumbles over them."""
    x, g, b = (te.placeholder(s, "float32") for s in ((2, 16, 6, 8), (16,), (16,)))
    func = te.create_prim_func([x, g, b, topi.nn.group_norm(x, g, b, 4, 1, [2, 3])])
    assert scheduled(func)[0] == ""


@pytest.mark.parametrize(
    ("rule", "begin", "window", "strides"),
    [("sliding", 0, 3, 1), ("sliding", 5, 5, 1), ("contraction", 8, 1, 1), ("sliding", 3, 3, 2)],
)
def test_a_convolution_reads_channels_of_a_wider_tensor_where_they_lie(rule, begin, window, strides):
    def make(x, w, b):
        part = op.strided_slice(x, [1], [begin], [begin + 8])
        return op.nn.relu(op.add(op.nn.conv2d(part, w, strides=strides, padding=window // 2), b))

    shapes = (1, 20, 17, 16), (8, 8, window, window), (1, 8, 1, 1)
    check(make, *shapes, rule=rule)
    assert "T_strided_slice" not in scheduled(kernel(make, *shapes))[1].script()
    emulated_cuda.install()
    check_kernels({"kernel": kernel(make, *shapes)}, make_target(A100), ScheduleReport(), 1e-5)


@few
@given(st.sampled_from([4, 6]), st.sampled_from([8, 12, 14, 28, 33]), st.sampled_from([3, 5]))
def test_depthwise_convolution(channels, side, window):
    check(
        lambda x, w, b: op.add(op.nn.conv2d(x, w, padding=window // 2, groups=channels), b),
        (1, channels, side, side),
        (channels, 1, window, window),
        (1, channels, 1, 1),
        rule="windows",
    )


def by_channel(rule, channels, height, width, window, strides, *, batch=1, finish=op.nn.relu, **options):
    """Check a convolution by channel, with what follows it."""
    pad = window // 2
    check(
        lambda x, w, b: finish(op.add(op.nn.conv2d(x, w, strides=strides, padding=pad, groups=channels), b)),
        (batch, channels, height, width),
        (channels, 1, window, window),
        (1, channels, 1, 1),
        rule=rule,
        **options,
    )


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize(
    ("height", "width", "window", "strides", "batch"),
    [
        (14, 14, 3, 2, 1),
        (28, 28, 5, 2, 2),
        (13, 15, 3, 2, 1),
        (9, 12, 3, (2, 1), 1),
        (12, 9, 3, (1, 2), 3),
        (17, 21, 5, 3, 1),
    ],
)
def test_a_window_of_one_channel_that_steps_slides(height, width, window, strides, batch, num_cores):
    by_channel("sliding", 6, height, width, window, strides, batch=batch, num_cores=num_cores)


def test_rows_of_one_channel_that_are_no_vector_slide():
    """Of vectors of eight: a row of four is half of one, 67 has no divisor up to eight of them."""
    by_channel("sliding", 5, 4, 4, 3, 1)
    by_channel("sliding", 6, 90, 67, 5, 1, batch=2, num_cores=2)
    by_channel("windows", 5, 7, 7, 5, 1)


def test_the_image_of_one_channel_is_made_beside_its_sums():
    func = kernel(lambda x, w: op.nn.conv2d(x, w, strides=2, padding=1, groups=6), (1, 6, 28, 28), (6, 1, 3, 3))
    (channel,) = stages_of(scheduled(func)[1])
    assert int(channel.extent) == 6
    assert all(f'T.sblock("{name}")' in channel.script() for name in ("pad_temp", "image", "sums_update", "last"))


def test_a_convolution_of_several_results_a_channel_is_left_to_windows():
    check(lambda x, w: op.nn.conv2d(x, w, strides=1, padding=1, groups=4), (1, 4, 16, 16), (8, 1, 3, 3), rule=None)


def test_what_follows_a_window_is_computed_in_its_vectors():
    """28 results are three and a half vectors: LLVM would compute the last four sigmoids one by one."""
    func = kernel(lambda x, w: op.nn.silu(op.nn.conv2d(x, w, padding=1, groups=8)), (1, 8, 28, 28), (8, 1, 3, 3))
    name, fast = scheduled(func)
    assert name == "windows"
    last = fast.script().rsplit("T.sblock(", 1)[0].rsplit("for ", 1)[1]
    assert "T.vectorized(T.int64(28))" in last
    by_channel("windows", 4, 14, 14, 3, 1, finish=op.nn.silu)


@pytest.mark.parametrize(("height", "width", "rows"), [(14, 8, 7), (16, 8, 8), (15, 8, 5), (13, 8, 1), (12, 16, 4)])
def test_a_window_computes_several_rows_at_a_time(height, width, rows):
    """Eight vectors of sums at most, one of eight to a row of eight, in rows that divide the height."""
    func = kernel(lambda x, w: op.nn.conv2d(x, w, padding=1, groups=4), (1, 4, height, width), (4, 1, 3, 3))
    unrolled = re.findall(r"T\.unroll\(T\.int64\((\d+)\)\)", scheduled(func)[1].script())
    assert unrolled.count("3") == 2 and str(rows) in unrolled
    by_channel("windows", 4, height, width, 3, 1)
    by_channel("windows", 4, height, width, 7, 1, num_cores=2)  # 49 steps are written out too


def test_pooling_in_steps_of_one_is_vectorised_and_in_steps_of_two_left_to_llvm():
    check(lambda x: op.nn.max_pool2d(x, (3, 3), strides=1, padding=1), (1, 4, 16, 16), rule="windows")
    assert scheduled(kernel(lambda x: op.nn.max_pool2d(x, (3, 3), strides=2, padding=1), (1, 4, 16, 16)))[0] == ""


@few
@given(extent, st.sampled_from([2, 9, 16, 33, 64, 100, 197, 768]), level)
def test_softmax(rows, columns, level):
    check(lambda x: op.nn.softmax(x, -1), (2, rows, columns), rule="rows", level=level)


@few
@given(extent, st.sampled_from([8, 33, 64, 197, 768]))
def test_layer_norm(rows, columns):
    check(lambda x, g, b: op.nn.layer_norm(x, g, b, axes=-1), (rows, columns), (columns,), (columns,), rule="rows")


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize("shape", [(1, 96, 56, 56), (2, 20, 14, 14), (2, 100, 5, 13), (1, 33, 1, 40), (1, 64, 1, 1)])
def test_layer_norm_of_transposed_images(shape, num_cores):
    check(
        lambda x, g, b: op.nn.layer_norm(op.permute_dims(x, (0, 2, 3, 1)), g, b, axes=-1),
        shape, (shape[1],), (shape[1],), rule="rows" if shape[2:] == (1, 1) else "columns", num_cores=num_cores,
    )  # fmt: skip


def test_a_transposed_image_is_laid_out_part_by_part():
    func = kernel(lambda x: op.nn.softmax(op.permute_dims(x, (0, 2, 3, 1))), (2, 96, 28, 28))
    script = scheduled(func, num_cores=2)[1].script()  # 2 images of 784 pixels, 56 at a time
    assert script.index("T.parallel(T.int64(28))") < script.index('T.sblock("square")')


def test_partial_results_are_halved_down_to_a_register():
    """24 would be more in registers, but their lanes are then added up six by six."""
    script = scheduled(kernel(lambda x: op.sum(x, -1), (6, 48)), "x86-64-v3")[1].script()
    assert {int(n) for n in re.findall(r"T.vectorized\(T.int64\((\d+)\)\)", script)} == {4, 8}


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize("size", [5, 64, 197, 768])
def test_a_single_row(size, num_cores):
    check(lambda x: op.nn.softmax(x), (1, size), rule="rows", num_cores=num_cores)
    check(lambda x, g, b: op.nn.layer_norm(x, g, b, axes=-1), (1, 1, size), (size,), (size,), rule="rows")


@pytest.mark.parametrize("reduce", [op.sum, op.mean, op.max, op.min])
@pytest.mark.parametrize("shape", [(3, 64), (5, 197), (2, 7, 49), (4, 17), (3, 31)])
def test_reductions_of_the_last_axis(reduce, shape):
    check(lambda x: reduce(op.multiply(x, x), axis=-1), shape, rule="rows")


@pytest.mark.parametrize("extent", [37, 67, 197, 1009])
def test_a_reduction_that_no_vector_divides_is_cut_into_vectors_and_a_rest(extent):
    name, fast = scheduled(kernel(lambda x: op.sum(x, axis=-1), (6, extent)))
    script = fast.script()
    assert name == "rows"
    assert "T.vectorized(T.int64(8))" in script and "_rest" in script
    assert f"T.serial(T.int64({extent}))" not in script and f"range(T.int64({extent}))" not in script


def test_a_reduction_that_vectors_divide_or_that_is_short_is_not_cut():
    for columns in (13, 17, 64, 768):
        assert "_rest" not in scheduled(kernel(lambda x: op.sum(x, axis=-1), (6, columns)))[1].script()


@pytest.mark.parametrize("shape", [(65536,), (3, 67), (1, 2, 32, 32), (197, 5, 3)])
@pytest.mark.parametrize(
    ("make", "exact"),
    [
        (lambda x: op.add(op.mean(op.multiply(x, x)), HALF), lambda x: np.mean(x * x) + 0.5),
        (lambda x: op.sqrt(op.multiply(op.sum(op.multiply(x, x)), HALF)), lambda x: np.sqrt(np.sum(x * x) * 0.5)),
        (lambda x: op.divide(op.max(x), HALF), lambda x: np.max(x) / 0.5),
    ],
    ids=["loss and its weight", "norm", "maximum"],
)
def test_what_is_made_of_one_number_leaves_its_reduction_in_vectors(shape, make, exact):
    """One accumulator is off by 1e-5 of a sum of 65,536."""
    name, fast = scheduled(kernel(make, shape))
    x = np.random.default_rng(0).uniform(-1, 1, shape).astype("float32")
    assert name == "rows"
    np.testing.assert_allclose(run(fast_math(fast), [x]), exact(x.astype("float64")), rtol=1e-6)


def test_a_sum_over_the_first_axis_adds_rows():
    check(lambda x: op.sum(x, axis=0), (50, 64), rule="windows")


@few
@given(st.sampled_from([33, 40, 197, 512]), st.sampled_from([1, 7, 50, 64, 197, 1000]), st.sampled_from([1, 2]))
def test_one_row_times_a_matrix_reads_the_matrix_in_order(k, n, num_cores):
    check(
        lambda x, w, b: op.nn.relu(op.add(op.matmul(x, w), b)), (1, k), (k, n), (n,),
        rule="windows" if n > 1 else "rows", num_cores=num_cores,
    )  # fmt: skip


@few
@given(st.sampled_from([1, 2, 5, 12, 33]), st.sampled_from([24, 33, 64]), st.sampled_from([16, 20, 49, 100]))
def test_a_product_reads_a_transposed_operand_where_it_lies(m, k, n):
    func = kernel(lambda x, w, b: op.add(op.matmul(x, op.permute_dims(w)), b), (m, k), (n, k), (n,))
    _, fast = scheduled(func)
    assert "T_transpose" not in fast.script()
    rng = np.random.default_rng(0)
    x, w, b = (rng.uniform(-1, 1, s).astype("float32") for s in ((m, k), (n, k), (n,)))
    np.testing.assert_allclose(run(fast, [x, w, b]), x @ w.T + b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "padded"), [(64, False), (50, False), (67, True)])
def test_rows_that_lie_in_line_are_not_turned_to_be_padded(rows, padded):
    """A tile of six rows would be faster, but for that; 67 is a prime number."""
    func = kernel(lambda a, b: op.matmul(op.permute_dims(a), b), (40, rows), (40, 32))
    assert ("reindex_pad" in scheduled(func)[1].script()) == padded
    check(lambda a, b: op.matmul(op.permute_dims(a), b), (40, rows), (40, 32), rule="contraction")


def test_the_storage_of_a_tile_is_a_tile_also_of_rows_of_several_axes():
    func = kernel(lambda x, w, b: op.nn.gelu(op.add(op.matmul(x, w), b)), (1, 12, 12, 32), (32, 64), (64,))
    fast = scheduled(func)[1]
    written = [x for x in fast.script().splitlines() if "matmul_intermediate_reindex_local[" in x]
    assert written and not any("% T.int64(12)" in x.split("x0[")[0].split("] = ")[-1] for x in written)


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lambda x, w, b: op.nn.relu(op.add(op.matmul(x, w), b)), [(20, 96), (96, 40), (40,)]),
        (op.matmul, [(20, 96), (96, 40)]),
        (lambda x, w: op.matmul(x, op.permute_dims(w)), [(7, 50), (33, 50)]),
        (op.matmul, [(3, 17, 64), (3, 64, 16)]),
        (lambda x, w, b: op.add(op.nn.conv2d(x, w), b), [(1, 72, 9, 9), (6, 72, 1, 1), (1, 6, 1, 1)]),
    ],
)
def test_a_long_sum_is_added_up_in_parts(make, shapes, num_cores, monkeypatch):
    monkeypatch.setattr(contraction, "_MAX_OPERAND_BYTES", 0)
    monkeypatch.setattr(contraction, "_MAX_STEPS", 36)
    assert "_rf" in scheduled(kernel(make, *shapes))[1].script()
    check(make, *shapes, rule="contraction", num_cores=num_cores)


def test_a_sum_is_cut_where_the_caches_do_not_hold_its_operands():
    def parts(rows, steps, columns=64):
        axes = {n: (contraction.Axis(None, e, n == "k"),) for n, e in (("m", rows), ("n", 768), ("k", steps))}
        roles = contraction.Roles((), axes["m"], axes["n"], axes["k"], 1)
        return contraction.num_parts(roles, contraction.Tile(8, columns, 16))

    assert [parts(128, k) for k in (768, 2048, 3072, 4096)] == [1, 1, 3, 4]
    assert parts(1024, 768) == 1 and parts(1024, 2048) == 2 and parts(49, 3072) == 1
    assert parts(1024, 2999) == 1  # a prime: single steps would not pay


def test_several_cores_get_a_parallel_loop_and_one_gets_none():
    func = kernel(lambda x, w: op.matmul(x, w), (64, 64), (64, 128))
    assert "T.parallel" in scheduled(func, num_cores=2)[1].script()
    assert "T.parallel" not in scheduled(func, num_cores=1)[1].script()
    check(lambda x, w: op.matmul(x, w), (64, 64), (64, 256), rule="contraction", num_cores=2)


@pytest.mark.parametrize(
    ("make", "small", "large"),
    [
        (op.exp, ((1 << 15,),), ((1 << 16,),)),
        (lambda x: op.nn.softmax(x, -1), ((8, 64),), ((512, 64),)),
        (op.matmul, ((64, 64), (64, 64)), ((64, 64), (64, 128))),
        (lambda x: op.nn.max_pool2d(x, (3, 3)), ((1, 8, 32, 32),), ((1, 128, 32, 32),)),
    ],
    ids=["exp", "softmax", "matmul", "pooling"],
)
def test_a_kernel_of_little_work_stays_on_one_core(make, small, large):
    assert "T.parallel" not in scheduled(kernel(make, *small), num_cores=8)[1].script()
    assert "T.parallel" in scheduled(kernel(make, *large), num_cores=8)[1].script()


def test_a_softmax_divides_once_a_row_and_other_divisions_stay():
    soft = scheduled(kernel(lambda x: op.nn.softmax(x, -1), (4, 64)))[1].script()
    assert soft.count("T.float32(1.0) / ") == 1 and soft.count(" / ") == 1
    ratio = scheduled(kernel(lambda x: op.divide(x, op.sum(x, axis=-1, keepdims=True)), (4, 64)))[1].script()
    assert "T.float32(1.0) / " not in ratio


def test_a_kernel_with_symbolic_extents_has_no_rule():
    from tvm.script import tirx as T

    n = tvm.te.var("n")
    x = tvm.te.placeholder((n, 4), name="x")
    func = tvm.te.create_prim_func([x, tvm.te.compute((n, 4), lambda i, j: x[i, j] * T.float32(2))])
    assert scheduled(func) == ("", func)


def test_the_rule_does_not_change_the_kernel_it_is_given():
    func = kernel(lambda x: op.nn.softmax(x, -1), (4, 64))
    before = func.script()
    scheduled(func)
    fast_math(func)
    assert func.script() == before


@pytest.mark.parametrize(("bits", "registers", "lanes"), [(128, 16, 4), (256, 16, 8), (512, 32, 16)])
def test_a_tile_fits_the_registers(bits, registers, lanes):
    cpu = CpuTarget(bits, registers, 1)
    for rows in (1, 2, 5, 64, 197):
        for columns in (1, 10, 49, 64, 3136):
            tile = choose_tile(rows, columns, cpu, lanes)
            vectors = tile.columns // lanes
            assert tile.rows * vectors + vectors + 1 <= registers
            assert tile.columns % lanes == 0 and tile.rows <= rows


@given(st.integers(1, 5000), st.sampled_from([4, 8, 16]))
def test_a_vector_divides_its_extent(extent, lanes):
    length = vector_length(extent, lanes, 4 * lanes)
    assert extent % length == 0 and length <= 4 * lanes and (length == 1 or 2 * length > lanes)


@pytest.mark.parametrize(("stride", "window"), [(1, 3), (2, 3), (2, 5)])
def test_a_depthwise_window_without_a_padding_slides_as_well(stride, window):
    """It is the kernel's only stage then."""
    make = lambda x, w: op.nn.conv2d(x, w, strides=stride, groups=6)  # noqa: E731
    check(make, (1, 6, 17, 17), (6, 1, window, window), rule="sliding" if stride > 1 else None)
