"""Estimates of kernels with element-wise ends against those of their parts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvmhet.cost.epilogues import epilogues, with_epilogues
from tvmhet.cost.model import KernelDesc, OpDesc
from tvmhet.cost.table import Entry

CALL_S = 1e-6
SIZE = 1000.0  # bytes of every tensor between operators

CONV = OpDesc("conv2d", (1, 8, 8, 8, 8, 3, 3, 8, 8, 1), "float32")
RELU = OpDesc("elementwise", (250, 250), "float32", "relu")
RESIDUAL = OpDesc("elementwise", (500, 250), "float32", "add")
GELU = OpDesc("elementwise", (250, 250), "float32", "gelu")
LINEAR = OpDesc("linear", (1, 10, 25, 25), "float32")
POOL = OpDesc("pooling", (1, 8, 8, 8, 2, 2, 4, 4), "float32", "max_pool2d")


def kernel(name, ops, descs, read=1, maker="tvm"):
    return name, ops, KernelDesc(tuple(descs), 100.0, read * SIZE, SIZE, "float32", maker)


def sized(name, ops, descs, read_bytes, write_bytes):
    return name, ops, KernelDesc(tuple(descs), 100.0, read_bytes, write_bytes, "float32", "tvm")


def entry(seconds, source="learned"):
    note = "" if math.isfinite(seconds) else "too large"
    return Entry(seconds, seconds / 2 if note == "" else seconds, seconds * 2, source, note)


def priced(kernels, seconds, sources=None):
    entries = {
        name: entry(s, (sources or {}).get(name, "learned")) for (name, *_), s in zip(kernels, seconds, strict=True)
    }
    return entries, with_epilogues(entries, epilogues(kernels), CALL_S)


def fused(epilogue, read_apart=1):
    """A convolution (2 tensors read), an operator after it, and both in one kernel."""
    whole = kernel("whole", (0, 1), (CONV, epilogue), 1 + read_apart)
    return [kernel("conv", (0,), (CONV,), 2), kernel("end", (1,), (epilogue,), read_apart), whole]


def test_a_relu_in_registers_adds_nothing():
    _, found = priced(fused(RELU), (100e-6, 11e-6, 150e-6))
    assert found["whole"].seconds == pytest.approx(100e-6)
    assert (found["whole"].low, found["whole"].high) == pytest.approx((50e-6, 200e-6))
    assert "no more than its parts" in found["whole"].note


def test_a_residual_is_still_read():
    # apart: two tensors read, one written; what is between the two, once written and once read, is saved
    _, found = priced(fused(RESIDUAL, read_apart=2), (100e-6, 31e-6, 150e-6))
    assert found["whole"].seconds == pytest.approx(100e-6 + 30e-6 / 3)


def test_arithmetic_is_not_saved_by_fusing():
    _, found = priced(fused(GELU), (100e-6, 31e-6, 150e-6))
    assert found["whole"].seconds == pytest.approx(130e-6)


def test_what_is_estimated_lower_is_left_as_it_is():
    entries, found = priced(fused(RELU), (100e-6, 11e-6, 90e-6))
    assert found == entries


@pytest.mark.parametrize("source", ["measured", "tuned"])
def test_a_measurement_stands(source):
    entries, found = priced(fused(RELU), (100e-6, 11e-6, 150e-6), {"whole": source})
    assert found == entries


@given(st.lists(st.floats(2e-6, 1e-3), min_size=3, max_size=3))
def test_an_interval_without_width_stays_sound(seconds):
    kernels = fused(RELU)
    entries = {name: Entry(s, s, s, "learned") for (name, *_), s in zip(kernels, seconds, strict=True)}
    found = with_epilogues(entries, epilogues(kernels), CALL_S)["whole"]
    assert found.low == pytest.approx(found.high)


def test_measured_parts_bound_an_estimate():
    _, found = priced(fused(RELU), (80e-6, 11e-6, 150e-6), {"conv": "measured", "end": "measured"})
    assert found["whole"].seconds == pytest.approx(80e-6)
    assert found["whole"].source == "learned"


@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_cannot_run_bounds_nothing_and_stays(at):
    seconds = [100e-6, 11e-6, 150e-6]
    seconds[at] = math.inf
    entries, found = priced(fused(RELU), seconds, {("conv", "end", "whole")[at]: "cannot run"})
    assert found == entries


def test_only_element_wise_ends_are_cut_off():
    kernels = [
        kernel("relu", (0,), (RELU,)), kernel("pool", (1,), (POOL,)), kernel("whole", (0, 1), (RELU, POOL)),
    ]  # fmt: skip
    assert epilogues(kernels) == ()


BIAS = OpDesc("elementwise", (258, 250), "float32", "add")
LINEAR = OpDesc("linear", (1, 10, 25, 8), "float32")


def made_by(maker, *ops):
    """Every run of operators as a kernel of a maker."""
    runs = [tuple(range(a, b)) for a in range(len(ops)) for b in range(a + 1, len(ops) + 1)]
    return [kernel(f"{maker} {run}", run, [ops[i] for i in run], 1, maker) for run in runs]


def ways(whole, *kernels):
    return {(e.root, e.apart, e.kept) for e in epilogues([k for made in kernels for k in made]) if e.whole == whole}


@pytest.mark.parametrize("root", [CONV, LINEAR])
def test_the_library_adds_a_bias_in_the_call_of_its_product(root):
    found = ways("library (0, 1)", made_by("library", root, BIAS)[:2], made_by("tvm", root, BIAS))
    assert {(r, a) for r, a, _ in found} == {("library (0,)", "tvm (1,)")}
    assert all(kept < 1 for *_, kept in found)


def test_the_library_adds_a_residual_to_a_convolution_and_to_no_other_product():
    found = ways("library (0, 1)", made_by("library", CONV, RESIDUAL))
    assert all(kept < 1 for *_, kept in found) and found
    assert ways("library (0, 1)", made_by("library", LINEAR, RESIDUAL)) == {("library (0,)", "library (1,)", 1.0)}


def test_what_follows_in_a_library_kernel_is_another_call_of_the_library():
    found = ways("library (0, 1)", made_by("library", CONV, RELU), made_by("tvm", CONV, RELU))
    assert found == {("library (0,)", "library (1,)", 1.0)}


def test_a_diamond_is_cut_off_whole():
    """x * relu(x) after a convolution: no kernel ends between the two, as both read the convolution."""
    times = OpDesc("elementwise", (500, 250), "float32", "multiply")
    kernels = [
        kernel("conv", (0,), (CONV,), 2),
        kernel("both", (1, 2), (RELU, times), 1),
        kernel("whole", (0, 1, 2), (CONV, RELU, times), 2),
    ]
    _, found = priced(kernels, (100e-6, 11e-6, 200e-6))
    assert found["whole"].seconds == pytest.approx(100e-6)


@given(st.lists(st.floats(2e-6, 1e-3), min_size=10, max_size=10))
def test_no_chain_is_dearer_than_any_way_to_cut_it(seconds):
    """A convolution and three relus, every run of them a kernel: against all ways to cut, tried one by one."""
    ops = (CONV, RELU, RELU, RELU)
    runs = [tuple(range(a, b)) for a in range(4) for b in range(a + 1, 5)]
    kernels = [kernel(str(run), run, [ops[i] for i in run], 1 + (run[0] == 0)) for run in runs]
    _, found = priced(kernels, seconds)
    for run in runs:
        for cut in range(1, len(run)):
            apart = found[str(run[:cut])].seconds + found[str(run[cut:])].seconds - CALL_S
            assert found[str(run)].seconds <= apart * (1 + 1e-9)


NORM = OpDesc("layer_norm", (10, 25), "float32", "layer_norm")
PERMUTE = OpDesc("movement", (250, 250), "float32", "permute_dims")


@pytest.mark.parametrize(
    ("first", "read", "left"),
    [(RESIDUAL, 2, 30e-6 / 3), (RELU, 1, 30e-6 / 4), (GELU, 1, 30e-6), (PERMUTE, 1, 30e-6)],
    ids=["residual", "relu", "gelu", "permutation"],
)
def test_what_comes_before_a_kernel_along_rows_is_read_from_the_cache(first, read, left):
    kernels = [
        kernel("first", (0,), (first,), read),
        kernel("norm", (1,), (NORM,)),
        kernel("whole", (0, 1), (first, NORM), read),
    ]
    _, found = priced(kernels, (31e-6, 100e-6, 150e-6))
    assert found["whole"].seconds == pytest.approx(100e-6 + left)


def test_nothing_is_known_of_what_comes_before_another_kernel_or_of_the_library():
    kernels = [kernel("first", (0,), (RELU,)), kernel("pool", (1,), (POOL,)), kernel("whole", (0, 1), (RELU, POOL))]
    assert priced(kernels, (31e-6, 100e-6, 150e-6))[1]["whole"].seconds == 150e-6
    kernels = [
        kernel("first", (0,), (RELU,), maker="library"),
        kernel("norm", (1,), (NORM,), maker="library"),
        kernel("both", (0, 1), (RELU, NORM), maker="library"),
    ]
    assert priced(kernels, (31e-6, 100e-6, 150e-6))[1]["both"].seconds == 150e-6


MEAN = OpDesc("pooling", (1, 25, 10, 10, 10, 10, 1, 1), "float32", "adaptive_avg_pool2d")


def mean_and_product():
    return [
        kernel("mean", (0,), (MEAN,)),
        kernel("product", (1,), (LINEAR,)),
        kernel("whole", (0, 1), (MEAN, LINEAR)),
    ]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (MEAN, LINEAR),
        (OpDesc("embedding", (40, 100, 25), "float32", "take"), OpDesc("reduction", (10, 25), "float32", "sum")),
    ],
    ids=["mean, product", "bag"],
)
def test_a_mean_or_a_look_up_before_a_kernel_takes_what_it_takes_alone(first, then):
    kernels = [kernel("first", (0,), (first,)), kernel("then", (1,), (then,)), kernel("whole", (0, 1), (first, then))]
    _, found = priced(kernels, (31e-6, 100e-6, 150e-6))
    assert found["whole"].seconds == pytest.approx(130e-6)


def test_a_mean_and_the_product_that_reads_it_take_no_less_either():
    """They are two kernels in one call, of which the learned model knows no example."""
    kernels = mean_and_product()
    _, found = priced(kernels, (31e-6, 100e-6, 50e-6))
    assert found["whole"].seconds == pytest.approx(130e-6) and "one after the other" in found["whole"].note
    assert found["whole"].low <= found["whole"].seconds <= found["whole"].high


@pytest.mark.parametrize(("product", "kept"), [(CONV, 1.0), (LINEAR, 1.0), (NORM, 1 / 3)])
def test_a_residual_before_a_product_is_added_up_in_memory_and_before_a_norm_in_the_cache(product, kept):
    kernels = [
        kernel("sum", (0,), (RESIDUAL,), 2),
        kernel("root", (1,), (product,)),
        kernel("whole", (0, 1), (RESIDUAL, product), 2),
    ]
    (found,) = epilogues(kernels)
    assert found.kept == pytest.approx(kept) and found.in_turn == (product is not NORM)


def test_a_gate_that_ends_its_product_takes_what_the_image_takes_alone():
    """So a plan gives it to the convolution that reads it, before which it costs next to nothing."""
    few = OpDesc("conv2d", (1, 50, 25, 1, 1, 1, 1, 1, 1, 1), "float32")
    image = OpDesc("elementwise", (525, 500), "float32", "multiply")
    kernels = [
        sized("product", (0,), (few,), 1000, 100),
        sized("relu", (1,), (OpDesc("elementwise", (25, 25), "float32", "relu"),), 100, 100),
        sized("both", (0, 1), (few, RELU), 1000, 100),
        sized("gate", (2,), (image,), 2100, 2000),
        sized("end", (1, 2), (RELU, image), 2100, 2000),
        sized("whole", (0, 1, 2), (few, RELU, image), 3000, 2000),
    ]
    entries = {name: entry(s) for (name, *_), s in zip(kernels, (20e-6, 2e-6, 20e-6, 11e-6, 3e-6, 21e-6), strict=True)}
    assert with_epilogues(entries, epilogues(kernels), 1e-6)["whole"].seconds == pytest.approx(30e-6)


def test_on_a_gpu_no_kernel_is_taken_for_two():
    kernels = mean_and_product()
    entries = {name: entry(s) for (name, *_), s in zip(kernels, (31e-6, 100e-6, 50e-6), strict=True)}
    assert with_epilogues(entries, epilogues(kernels, in_turn=False), CALL_S) == entries


@pytest.mark.parametrize("missing", ["mean", "product"])
def test_two_in_one_call_of_which_one_cannot_run_alone_keep_their_estimate(missing):
    kernels = mean_and_product()
    entries = {name: entry(math.inf if name == missing else 50e-6) for name, *_ in kernels}
    assert with_epilogues(entries, epilogues(kernels), CALL_S) == entries


def test_an_operator_that_gives_a_gate_another_axis_is_no_reason_to_keep_the_product_apart():
    wide = OpDesc("matmul", (8, 128, 512, 64), "float32", "")
    turn = OpDesc("movement", (1024, 1024), "float32", "expand_dims")
    gate = OpDesc("elementwise", (525312, 524288), "float32", "multiply")
    kernels = [
        sized("product", (0,), (wide,), 4e6, 2e6),
        sized("gate", (1, 2), (turn, gate), 2e6, 2e6),
        sized("whole", (0, 1, 2), (wide, turn, gate), 4e6, 2e6),
    ]
    _, found = priced(kernels, (100e-6, 31e-6, 150e-6))
    assert found["whole"].seconds == pytest.approx(100e-6)
