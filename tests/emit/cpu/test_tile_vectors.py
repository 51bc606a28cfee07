"""Both ends of a product in whole vectors: what surrounds it, columns that no tile divides, and what stays as it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm.relax import op

from tests.emit.cpu.kernels import LEVELS, Make, check, few, kernel, scheduled

size = st.sampled_from([2, 3, 8, 12, 24, 33])
side = st.sampled_from([1, 2, 3, 7, 14, 17])
ACTS = {"none": lambda x: x, "relu": op.nn.relu, "gelu": op.nn.gelu, "silu": op.nn.silu}
BEFORE = {
    "gate": lambda x, g: op.multiply(x, g),
    "norm": lambda x, g: op.nn.relu(op.add(op.multiply(x, g), g)),
    "silu": lambda x, g: op.nn.silu(op.add(x, g)),
}


def after_before(before: str, after: str) -> Make:
    return lambda x, g, w, b: ACTS[after](op.add(op.nn.conv2d(BEFORE[before](x, g), w), b))


@few
@given(
    st.sampled_from(sorted(BEFORE)), st.sampled_from(sorted(ACTS)), st.integers(1, 2), size, size, side, side,
    st.sampled_from(LEVELS), st.sampled_from([1, 2]),
)  # fmt: skip
def test_element_wise_operators_before_a_convolution(before, after, batch, c, o, h, w, level, num_cores):
    shapes = [(batch, c, h, w), (1, c, 1, 1), (o, c, 1, 1), (1, o, 1, 1)]
    check(
        after_before(before, after),
        *shapes,
        rule="contraction" if h * w > 1 else None,
        level=level,
        num_cores=num_cores,
    )


@few
@given(
    st.sampled_from(sorted(ACTS)),
    st.sampled_from([5, 16, 33]),
    st.sampled_from([7, 20, 49, 67]),
    st.sampled_from(LEVELS),
)
def test_columns_that_no_tile_divides(act, m, n, level):
    make = lambda x, w, b: ACTS[act](op.add(op.matmul(x, w), b))  # noqa: E731
    check(make, (m, 20), (20, n), (n,), rule="contraction", level=level)


def test_what_is_before_is_computed_once_while_panels_are_filled():
    func = kernel(after_before("norm", "relu"), (1, 24, 14, 14), (1, 24, 1, 1), (40, 24, 1, 1), (1, 40, 1, 1))
    name, fast = scheduled(func)
    text = fast.script()
    assert name == "contraction"
    made = [line for line in text.splitlines() if "T.max(x0[" in line]
    assert len(made) == 3  # of whole vectors of a whole panel and of the last one, and of its last columns
    assert all("_reindex_pad[" in line.split(" = ")[0] for line in made)
    assert "if_then_else" not in text and "T.where" not in text


def test_costly_ends_are_functions_of_their_own_and_others_are_not():
    shapes = [(1, 24, 14, 14), (1, 24, 1, 1), (40, 24, 1, 1), (1, 40, 1, 1)]
    costly = scheduled(kernel(after_before("silu", "gelu"), *shapes))[1].script()
    assert '"compute_scope", "before_apart"' in costly and '"compute_scope", "after_apart"' in costly
    assert "compute_scope" not in scheduled(kernel(after_before("gate", "relu"), *shapes))[1].script()


@pytest.mark.parametrize("window", [(1, 7), (3, 3), (5, 1)])
def test_a_padding_before_a_window_is_no_panel(window):
    """Its condition ends where the columns do, by chance; what is left of a row of 3 are no 9 columns."""
    high, wide = window
    make = lambda x, w: op.nn.conv2d(x, w, padding=(high // 2, wide // 2))  # noqa: E731
    check(make, (1, 8, 3, 3), (8, 8, high, wide), rule=None, level="x86-64-v2")


@few
@given(
    st.sampled_from([2, 5, 33]),
    st.sampled_from([2, 16, 35]),
    st.sampled_from([2, 24, 49, 100]),
    st.sampled_from(LEVELS),
)
def test_a_weight_that_lies_across_is_turned_in_registers(m, k, n, level):
    make = lambda x, w: op.matmul(x, op.permute_dims(w))  # noqa: E731
    check(make, (m, k), (n, k), rule="contraction", level=level)


@pytest.mark.parametrize("n", [48, 50])
def test_few_rows_pack_a_weight_that_lies_across_and_no_other(n):
    """Read where it lies it is gathered element by element: 13 times as long for 64 rows of a table of words."""
    across = kernel(lambda x, w: op.matmul(x, op.permute_dims(w)), (3, 32), (n, 32))
    assert "T.Shuffle" in scheduled(across)[1].script()
    along = scheduled(kernel(op.matmul, (3, 32), (32, n)))[1].script()
    assert "T.Shuffle" not in along
