"""The polynomials against float64, over every magnitude, and at the values where they could go wrong."""

from __future__ import annotations

import math

import ml_dtypes  # noqa: F401 (numpy knows bfloat16 once it is loaded)
import numpy as np
import pytest
import tvm
from tvm import te, tirx
from tvm.relax import op

from tests.emit.cpu.kernels import kernel, run, scheduled, target
from tvmhet.emit.cpu.fast_math import fast_math

BOUND = {
    "exp": 2e-7, "erf": 6e-7, "tanh": 6e-7, "sigmoid": 3e-7, "log": 2e-7, "sin": 2e-7, "cos": 2e-7, "tan": 4e-7,
    "asin": 3e-7, "acos": 3e-7, "atan": 3e-7, "sinh": 4e-7, "cosh": 4e-7,
}  # fmt: skip
REFERENCE = {
    "exp": np.exp,
    "erf": np.vectorize(math.erf),
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "log": np.log,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
}

DOMAIN = {"log": (1e-37, 88.7), "asin": (-1.0, 1.0), "acos": (-1.0, 1.0)}


def _function(name: str, size: int, dtype: str = "float32") -> tvm.tirx.PrimFunc:
    x = te.placeholder((size,), dtype, name="x")
    return te.create_prim_func([x, te.compute((size,), lambda i: getattr(tirx, name)(x[i]), name="y")])


@pytest.mark.parametrize("name", list(BOUND))
def test_relative_error_over_every_magnitude(name):
    small = np.logspace(-30, 2, 60_000)
    x = np.concatenate([small, -small, np.linspace(-20, 20, 40_000), [0.0]]).astype("float32")
    low, high = DOMAIN.get(name, (-87.0, 88.7))
    x = x[(x <= high) & (x >= low)]
    got = run(fast_math(_function(name, x.size)), [x]).astype("float64")
    want = REFERENCE[name](x.astype("float64"))
    large = np.abs(want) > 2e-38
    np.testing.assert_array_less(np.abs(got[large] / want[large] - 1), BOUND[name])
    assert np.all(np.abs(got[~large]) <= 2e-38)


@pytest.mark.parametrize("name", list(BOUND))
def test_special_values_are_those_of_the_function(name):
    x = np.array([np.nan, np.inf, -np.inf, 0.0, 89.0, -104.0, 3e38, -3e38], "float32")
    got = run(fast_math(_function(name, x.size)), [x])
    if name in ("sin", "cos", "tan"):
        x, got = x[:6], got[:6]
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        want = REFERENCE[name](x.astype("float64")).astype("float32")
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=2e-38)


@pytest.mark.parametrize("level", ["x86-64-v2", "x86-64-v3"])
@pytest.mark.parametrize("name", ["erf", "tanh"])
def test_they_reach_one_and_stay_there(name, level):
    """GELU of -1e6 is 0: -1e6 * (1 + erf)."""
    x = np.concatenate([np.linspace(2.5, 12, 200_000), np.logspace(1.1, 38, 2_000)]).astype("float32")
    got = run(fast_math(_function(name, 2 * x.size)), [np.concatenate([x, -x])], level)
    assert np.abs(got).max() == 1.0
    assert np.all(got[: x.size][x >= 9.1] == 1.0) and np.all(got[x.size :][x >= 9.1] == -1.0)


@pytest.mark.parametrize("level", ["x86-64-v2", "x86-64-v3"])
@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_angles_of_many_turns(name, level):
    rng = np.random.default_rng(0)
    turns = np.round(10 ** rng.uniform(0, 9.2, 20_000)) * (np.pi / 2)
    x = np.concatenate([10 ** rng.uniform(0, 9.47, 40_000), turns]).astype("float32")
    got = run(fast_math(_function(name, x.size)), [x], level)
    np.testing.assert_allclose(got, REFERENCE[name](x.astype("float64")), rtol=BOUND[name])


@pytest.mark.parametrize("level", ["x86-64-v2", "x86-64-v3"])
def test_angles_of_points(level):
    """In every direction, near and far, on the axes with either zero, and where a coordinate is no finite number."""
    rng = np.random.default_rng(0)
    special = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan])
    y = np.concatenate([rng.normal(size=40_000) * 10.0 ** rng.integers(-9, 9, 40_000), np.repeat(special, 7)])
    x = np.concatenate([rng.normal(size=40_000) * 10.0 ** rng.integers(-9, 9, 40_000), np.tile(special, 7)])
    y, x = y.astype("float32"), x.astype("float32")
    given = [te.placeholder((x.size,), "float32", name=name) for name in "yx"]
    made = te.compute((x.size,), lambda i: tirx.atan2(given[0][i], given[1][i]), name="angle")
    got = run(fast_math(te.create_prim_func([*given, made])), [y, x], level)
    want = np.arctan2(y.astype("float64"), x.astype("float64"))
    np.testing.assert_allclose(got, want, rtol=3e-7, atol=1e-38)
    np.testing.assert_array_equal(np.signbit(got[:-49]), np.signbit(want[:-49]))


def test_hyperbolic_functions_overflow_where_their_values_do():
    x = np.array([88.8, 89.3, 89.5, -89.3, -89.5], "float32")
    with np.errstate(over="ignore"):
        for name in ("sinh", "cosh"):
            want = REFERENCE[name](x.astype("float64")).astype("float32")
            np.testing.assert_allclose(run(fast_math(_function(name, x.size)), [x]), want, rtol=4e-7)


def test_angles_that_float32_does_not_know_are_no_numbers():
    assert np.all(np.isnan(run(fast_math(_function("sin", 3)), [np.array([3.1e9, -1e20, np.inf], "float32")])))


def test_logarithms_of_tiny_numbers():
    x = np.array([1e-45, 1e-40, 1.17e-38, 1.18e-38, 0.0, -0.0, -1e-40], "float32")
    got = run(fast_math(_function("log", x.size)), [x])
    with np.errstate(invalid="ignore", divide="ignore"):
        np.testing.assert_allclose(got, np.log(x.astype("float64")), rtol=2e-7)


def test_the_logarithm_of_a_sum_with_one_keeps_the_digits():
    small = np.logspace(-30, 1, 20_000)
    x = np.concatenate([small, -small[small < 0.999], [0.0, np.inf, np.nan, 1e30, -1.0]]).astype("float32")
    given = te.placeholder((x.size,), "float32", name="x")
    made = te.compute((x.size,), lambda i: tirx.log(tirx.const(1.0, "float32") + given[i]), name="y")
    got = run(fast_math(te.create_prim_func([given, made])), [x])
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(got, np.log1p(x.astype("float64")), rtol=3e-7)


@pytest.mark.parametrize("name", list(BOUND))
def test_loops_over_them_become_vectors(name):
    """An operation without a vector form (`isnan`, once) would leave TVM a scalar loop, and LLVM half the register."""
    func = fast_math(scheduled(kernel(getattr(op, name), (8, 64)))[1])
    source = tvm.compile(func.with_attr("global_symbol", "main"), target=target()).mod.inspect_source("ll")
    assert "fmul <32 x float>" in source or "fdiv <32 x float>" in source


@pytest.mark.parametrize("exponent", [2.0, 3.0, 4.0])
def test_small_powers_are_products_in_vectors(exponent):
    x = np.array([*np.linspace(-30, 30, 4001), np.nan, np.inf, -np.inf, 0.0], "float32")
    given = te.placeholder((x.size,), "float32", name="x")
    made = te.compute((x.size,), lambda i: tirx.pow(given[i], tirx.const(exponent, "float32")), name="y")
    fast = fast_math(te.create_prim_func([given, made]))
    assert "pow" not in fast.script()
    np.testing.assert_allclose(run(fast, [x]), x.astype("float64") ** exponent, rtol=3e-7)


def test_other_powers_keep_their_calls():
    given = te.placeholder((8,), "float32", name="x")
    made = te.compute((8,), lambda i: tirx.pow(given[i], tirx.const(2.5, "float32")), name="y")
    func = te.create_prim_func([given, made])
    assert fast_math(func).script() == func.script()


def test_other_dtypes_and_functions_keep_their_calls():
    assert "T.exp" in fast_math(_function("exp", 4, "float64")).script()
    assert "T.asinh" in fast_math(_function("asinh", 4)).script()
    assert "T.exp" not in fast_math(_function("exp", 4)).script()


@pytest.mark.parametrize("name", [n for n in BOUND if n not in ("sinh", "cosh")])  # TVM has none of those
@pytest.mark.parametrize("outside", ["operand", "result"])
def test_a_kernel_with_bfloat16_values_computes_them_as_before(name, outside):
    """TVM's conversions between bfloat16 and float32 are wrong around a T.Let in a vector."""
    dtype = "bfloat16" if outside == "operand" else "float32"

    def make(x):
        value = getattr(op, name)(op.astype(x, "float32"))
        return op.astype(value, "bfloat16") if outside == "result" else value

    func = kernel(make, (8, 64), dtype=dtype)
    rule, fast = scheduled(func)
    assert rule == "injective" and f"T.{name}" in fast_math(fast).script()
    x = np.random.default_rng(0).uniform(-3, 3, (8, 64)).astype(dtype)
    got = run(fast_math(fast), [x]).astype("float64")
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(got, REFERENCE[name](x.astype("float64")), rtol=1e-2)
