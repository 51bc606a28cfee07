"""Arithmetic and traffic of operators against direct counting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvmhet.cost.model import SIZES, KernelDesc, OpDesc, Predictions
from tvmhet.cost.workload import counts, kernel_of
from tvmhet.errors import BadInput, BadTime


@given(q_len=st.integers(1, 12), extra=st.integers(0, 12), window=st.integers(0, 20), causal=st.booleans())
def test_attention_counts_the_pairs_that_the_mask_leaves(q_len: int, extra: int, window: int, causal: bool) -> None:
    kv_len = q_len + extra
    if causal:
        seen = [min(extra + i + 1, window or kv_len) for i in range(q_len)]
    else:
        seen = [min(kv_len, window or kv_len)] * q_len
    op = OpDesc("attention_prefill", (2, 4, 2, q_len, kv_len, 8, window), "float16", "causal" if causal else "")
    assert counts(op)[0] == 4 * 2 * 4 * 8 * sum(seen)


def test_linear_reads_its_weight_once_and_bmm_b_times() -> None:
    assert counts(OpDesc("linear", (4, 8, 16, 32), "float32")) == (
        2 * 4 * 8 * 16 * 32,
        4 * 8 * 32 + 16 * 32,
        4 * 8 * 16,
    )
    assert counts(OpDesc("matmul", (4, 8, 16, 32), "float32")) == (2 * 4 * 8 * 16 * 32, 4 * (8 + 16) * 32, 4 * 8 * 16)


def test_depthwise_convolution() -> None:
    flop, read, write = counts(OpDesc("conv2d", (1, 32, 10, 10, 32, 3, 3, 10, 10, 32), "float32"))
    assert (flop, read, write) == (2 * 32 * 100 * 9, 32 * 100 + 32 * 9, 32 * 100)


def test_moe_reads_only_the_experts_that_tokens_reach() -> None:
    one = counts(OpDesc("moe", (1, 64, 32, 2, 8), "float16"))
    assert one == (6 * 2 * 64 * 32, pytest.approx(3 * 2 * 64 * 32 + 64), 64)
    assert counts(OpDesc("moe", (10**6, 64, 32, 2, 8), "float16"))[1] == pytest.approx(3 * 8 * 64 * 32 + 64e6)


def test_bytes_follow_the_dtype() -> None:
    wide, narrow = (kernel_of(OpDesc("softmax", (128, 64), dtype)) for dtype in ("float32", "bfloat16"))
    assert (wide.read_bytes, wide.write_bytes) == (2 * narrow.read_bytes, 2 * narrow.write_bytes) == (32768, 32768)


@pytest.mark.parametrize("family", sorted(SIZES))
def test_zero_and_negative_sizes_are_refused_by_name(family: str) -> None:
    names = SIZES[family]
    for i, name in enumerate(names):
        for bad in (-1, *(() if name in ("window", "read") else (0,))):
            sizes = tuple(bad if j == i else 4 for j in range(len(names)))
            with pytest.raises(BadInput, match=rf"{family}: {name} is {bad}"):
                OpDesc(family, sizes, "float32")


def test_unknown_words_are_refused() -> None:
    for args in (("conv9d", (1,), "float32"), ("softmax", (1,), "float32"), ("softmax", (1, 1), "float31")):
        with pytest.raises(BadInput):
            OpDesc(*args)
    op = OpDesc("softmax", (4, 4), "float32")
    with pytest.raises(BadInput, match="maker 'cublas'"):
        KernelDesc((op,), 1.0, 1.0, 1.0, "float32", "cublas")
    with pytest.raises(BadInput, match="flop is nan"):
        KernelDesc((op,), float("nan"), 1.0, 1.0, "float32")
    with pytest.raises(BadInput, match="no operator"):
        KernelDesc((), 1.0, 1.0, 1.0, "float32")


def test_root_is_the_matrix_operator_then_the_row_wise_one() -> None:
    add, softmax = OpDesc("elementwise", (10**9, 10**9), "float32", "add"), OpDesc("softmax", (2, 2), "float32")
    linear = OpDesc("linear", (1, 2, 2, 2), "float32")
    assert KernelDesc((add, softmax, linear), 1, 1, 1, "float32").root is linear
    assert KernelDesc((add, softmax), 1, 1, 1, "float32").root is softmax


def test_a_time_that_is_not_a_time_is_refused() -> None:
    import numpy as np

    one = np.ones(1)
    for seconds, low, high in ((np.nan, 1, 1), (1, 0, 1), (1, 2, 3), (1, 1, np.inf), (0, 0, 0)):
        with pytest.raises(BadTime, match="prediction 0"):
            Predictions(one * seconds, one * low, one * high, one > 0, ("roofline",))
