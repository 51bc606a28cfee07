"""Attention in one kernel: any sizes, operands read where they lie, scores scaled and masked; what is none is left."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op

from tests.emit.cpu.kernels import LEVELS, Make, check, few, kernel, run, scheduled
from tvmhet.emit.cpu.fast_math import fast_math

SCALE = relax.const(0.25, "float32")
length = st.sampled_from([2, 3, 7, 16, 17, 33, 49, 64, 100])
width = st.sampled_from([4, 8, 12, 24, 32, 40])


def heads(x: relax.Expr, num: int) -> relax.Expr:
    batch, rows, channels = (int(e) for e in x.ty.shape)
    return op.permute_dims(op.reshape(x, (batch, rows, num, channels // num)), (0, 2, 1, 3))


def joined(o: relax.Expr) -> relax.Expr:
    batch, num, rows, channels = (int(e) for e in o.ty.shape)
    return op.reshape(op.permute_dims(o, (0, 2, 1, 3)), (batch, rows, num * channels))


def attend(change, axis=-1):
    """softmax(change(q @ k, mask)) @ v, of keys that lie as columns."""
    return lambda q, k, v, *mask: op.matmul(op.nn.softmax(change(op.matmul(q, k), *mask), axis), v)


def plain(q, k, v):
    return op.matmul(op.nn.softmax(op.matmul(q, op.permute_dims(k, (0, 2, 1))), -1), v)


def of_words(num: int) -> Make:
    """Attention of a transformer, from [batch, rows, channels] to the same, scaled, with a mask if there is one."""

    def make(q, k, v, *mask):
        builder = relax.BlockBuilder.current()
        q, k, v = (builder.emit(heads(builder.normalize(x), num)) for x in (q, k, v))
        scores = op.multiply(op.matmul(q, op.permute_dims(k, (0, 1, 3, 2))), SCALE)
        if mask:
            scores = op.add(scores, mask[0])
        return joined(builder.emit(op.matmul(op.nn.softmax(scores, -1), v)))

    return make


@pytest.mark.slow
@few
@given(st.integers(1, 2), st.integers(1, 3), length, length, width, st.sampled_from(LEVELS), st.sampled_from([1, 2]))
def test_any_size(batch, num, m, n, d, level, num_cores):
    shapes = [(batch, rows, num * d) for rows in (m, n, n)]
    check(of_words(num), *shapes, rule="attention", level=level, num_cores=num_cores)
    check(of_words(num), *shapes, (batch, 1, m, n), rule="attention", level=level, num_cores=num_cores)


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (plain, [(3, 17, 5), (3, 20, 5), (3, 20, 8)]),
        (attend(lambda s: s), [(2, 9, 6), (2, 6, 35), (2, 35, 4)]),
        (attend(lambda s: s), [(9, 6), (6, 35), (35, 4)]),
        (attend(lambda s, m: op.where(op.less(m, op.negative(m)), s, m)), [(2, 9, 6), (2, 6, 35), (2, 35, 4), (1, 35)]),
        (attend(lambda s, m: op.add(m, op.multiply(s, m))), [(2, 9, 6), (2, 6, 33), (2, 33, 12), (2, 9, 33)]),
    ],
)
@pytest.mark.parametrize("num_cores", [1, 2])
def test_operands_and_masks(make, shapes, num_cores):
    check(make, *shapes, rule="attention", num_cores=num_cores)


def test_of_one_tensor_cut_into_three():
    def make(x):
        parts = [op.strided_slice(x, axes=[2], begin=[i * 48], end=[i * 48 + 48]) for i in range(3)]
        return of_words(3)(*parts)

    check(make, (2, 19, 144), rule="attention")


def test_a_query_that_may_look_at_nothing_is_not_a_number_and_leaves_the_others_alone():
    make = of_words(1)
    func = kernel(make, (1, 5, 8), (1, 9, 8), (1, 9, 8), (1, 1, 5, 9))
    rng = np.random.default_rng(0)
    q, k, v = (rng.uniform(-1, 1, (1, n, 8)).astype("float32") for n in (5, 9, 9))
    mask = np.zeros((1, 1, 5, 9), "float32")
    mask[0, 0, 2] = -np.inf
    mask[0, 0, 3, 1:] = -np.inf
    got = run(fast_math(scheduled(func)[1]), [q, k, v, mask])
    assert np.isnan(got[0, 2]).all()
    np.testing.assert_allclose(got[0, 3], v[0, 0], rtol=1e-6)
    scores = q[0, 0] @ k[0].T * 0.25
    weights = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    np.testing.assert_allclose(got[0, 0], weights @ v[0], rtol=1e-5, atol=1e-6)


def chosen(s, mask, other):
    return op.where(op.greater(mask, op.negative(mask)), s, other)


def not_chosen(s, mask, other):
    return op.where(op.greater(op.negative(mask), mask), other, s)


def added(s, mask, other):
    """The same by adding: 0 where the mask is positive."""
    return op.add(s, op.where(op.greater(mask, op.negative(mask)), op.multiply(mask, SCALE), other))


MASKS = {
    "from left to right": lambda dice, m, n: np.tri(m, n),
    "from left to right, some keys behind": lambda dice, m, n: np.tri(m, n, max(0, n - m)),
    "some keys": lambda dice, m, n: dice.random((m, n)) < 0.3,
    "short": lambda dice, m, n: np.arange(n) < np.ones((m, 1)) * dice.integers(0, n + 1),
    "some queries see nothing": lambda dice, m, n: (dice.random((m, 1)) < 0.7) & (np.tri(m, n) > 0),
    "all": lambda dice, m, n: np.ones((m, n)),
}


@few
@given(
    st.sampled_from(list(MASKS)),
    st.sampled_from([chosen, not_chosen, added]),
    st.sampled_from([-np.inf, float(np.finfo("float32").min), -1e4, 0.0]),
    length,
    length,
    st.sampled_from(LEVELS),
    st.sampled_from([1, 2]),
)
def test_keys_that_no_query_of_a_block_sees_are_left_out_and_no_others(kind, change, other, m, n, level, num_cores):
    dice = np.random.default_rng(m * n)
    mask = np.where(MASKS[kind](dice, m, n), dice.uniform(0.5, 1, (m, n)), -1).astype("float32")
    q, k, v = (dice.uniform(-1, 1, shape).astype("float32") for shape in ((3, m, 6), (3, 6, n), (3, n, 12)))
    inputs = [q, k, v, mask, np.full((1, 1), other, "float32")]
    func = kernel(attend(change), *(x.shape for x in inputs))
    name, fast = scheduled(func, level, num_cores)
    scores = (q @ k).astype("float64")
    masked = np.where(mask > 0, scores + 0.25 * mask * (change is added), other + scores * (change is added))
    with np.errstate(invalid="ignore"):
        weights = np.exp(masked - masked.max(-1, keepdims=True))
        want = weights / weights.sum(-1, keepdims=True) @ v
    assert name == "attention" and "seen" in fast.script()
    np.testing.assert_allclose(run(fast_math(fast), inputs, level, num_cores), want, rtol=2e-5, atol=2e-5)


def test_a_mask_of_its_own_for_each_head_is_not_looked_through():
    shapes = [(2, 9, 6), (2, 6, 35), (2, 35, 4), (2, 9, 35), (1, 1)]
    check(attend(chosen), *shapes, rule="attention")
    assert "seen" not in scheduled(kernel(attend(chosen), *shapes))[1].script()


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (attend(op.tanh), [(2, 9, 6), (2, 6, 35), (2, 35, 4)]),  # would be computed twice
        (attend(lambda s: s), [(2, 9, 6), (2, 6, 35), (2, 35, 3)]),  # no vector divides a value
        (attend(lambda s: s, axis=1), [(2, 9, 6), (2, 6, 35), (2, 35, 4)]),
        (lambda q, k: op.nn.softmax(op.matmul(q, k), -1), [(2, 9, 6), (2, 6, 35)]),
    ],
)
def test_what_is_no_attention_is_left_to_other_rules(make, shapes):
    assert scheduled(kernel(make, *shapes))[0] != "attention"


def test_softmax_and_layout_are_functions_of_their_own_between_products():
    """Else LLVM keeps an exponential's constants in the registers of the products: half their rate, or a third."""
    text = scheduled(kernel(of_words(2), *[(1, 40, 64)] * 3))[1].script()
    assert text.count('"compute_scope", "softmax_apart"') >= 1
    assert text.count('"compute_scope", "lay_out_apart"') == 1
