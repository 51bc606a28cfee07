"""Functions of functions: right at any depth, in vectors, and compiled in the time of as many functions apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm.relax import op
from tvm.script import tirx as T

from tests.emit.cpu.kernels import kernel, run, scheduled, target
from tvmhet.emit.cpu.fast_math import fast_math
from tvmhet.emit.cpu.nested_calls import are_deep, values_apart

NAMES = {"tirx.exp", "tirx.erf", "tirx.tanh", "tirx.sigmoid"}
erf = np.vectorize(math.erf)


def is_costly(call):
    return getattr(call.op, "name", "") in NAMES


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gated(x):
    """A cell of an LSTM, all of whose gates read one tensor."""
    return op.multiply(op.sigmoid(x), op.tanh(op.add(op.multiply(op.sigmoid(op.negative(x)), x), op.tanh(x))))


#: What a kernel computes, by TVM and by numpy in float64.
CHAINS = {
    "two": (lambda x: op.tanh(op.erf(x)), lambda x: np.tanh(erf(x))),
    "four": (lambda x: op.tanh(op.erf(op.exp(op.sigmoid(x)))), lambda x: np.tanh(erf(np.exp(sigmoid(x))))),
    "six": (
        lambda x: op.tanh(op.tanh(op.tanh(op.tanh(op.tanh(op.tanh(x)))))),
        lambda x: np.tanh(np.tanh(np.tanh(np.tanh(np.tanh(np.tanh(x)))))),
    ),
    "activations": (
        lambda x: op.nn.silu(op.nn.gelu(op.nn.silu(x))),
        lambda x: (g := 0.5 * (s := x * sigmoid(x)) * (1 + erf(s / math.sqrt(2)))) * sigmoid(g),
    ),
    "cell": (gated, lambda x: sigmoid(x) * np.tanh(sigmoid(-x) * x + np.tanh(x))),
    "sums": (
        lambda x: op.tanh(op.sum(op.exp(op.tanh(op.sigmoid(x))), axis=-1, keepdims=True)),
        lambda x: np.tanh(np.exp(np.tanh(sigmoid(x))).sum(-1, keepdims=True)),
    ),
    "softmax": (
        lambda x: op.nn.softmax(op.tanh(op.erf(op.sigmoid(x))), axis=-1),
        lambda x: (e := np.exp(np.tanh(erf(sigmoid(x))))) / e.sum(-1, keepdims=True),
    ),
    "padded": (
        lambda x: op.nn.pad(op.tanh(op.tanh(op.tanh(op.tanh(x)))), [0, 0, 1, 2]),
        lambda x: np.pad(np.tanh(np.tanh(np.tanh(np.tanh(x)))), [(0, 0), (1, 2)]),
    ),
}


@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (5, 37)], ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_functions_of_functions_are_right(name, shape):
    make, reference = CHAINS[name]
    x = np.random.default_rng(0).uniform(-2, 2, shape).astype("float32")
    got = run(fast_math(scheduled(kernel(make, shape))[1]), [x])
    np.testing.assert_allclose(got, reference(x.astype("float64")), rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("name", [n for n in CHAINS if n != "padded"])
def test_no_function_is_left_in_another_and_none_is_computed_twice(name):
    func = scheduled(kernel(CHAINS[name][0], (3, 64)))[1]
    before, after = costly(func), costly(values_apart(func, is_costly))
    assert not any(costly_in(call) for call in after)
    assert len(after) <= len(before)
    assert not are_deep(values_apart(func, is_costly), is_costly)


def costly(func):
    found = []
    tvm_ffi.structural_walk(func.body, (tvm.ir.Call, lambda call: found.append(call) if is_costly(call) else None))
    return found


def costly_in(call):
    found = []
    tvm_ffi.structural_walk(call.args, (tvm.ir.Call, lambda c: found.append(c) if is_costly(c) else None))
    return found


@pytest.mark.parametrize("name", ["four", "activations", "cell"])
def test_each_is_a_loop_of_vectors(name):
    func = fast_math(scheduled(kernel(CHAINS[name][0], (8, 64)))[1])
    source = tvm.compile(func.with_attr("global_symbol", "main"), target=target()).mod.inspect_source("ll")
    assert "fdiv <32 x float>" in source and "fdiv float" not in source


def test_what_a_condition_guards_stays_where_it_is():
    """There it may be that only the condition keeps its load inside the tensor."""
    func = scheduled(kernel(CHAINS["padded"][0], (3, 64)))[1]
    assert values_apart(func, is_costly).same_as(func) and are_deep(func, is_costly)
    assert fast_math(func).same_as(func)


@pytest.mark.parametrize("make", [op.tanh, lambda x: op.add(op.exp(x), op.erf(x)), op.nn.relu])
def test_functions_side_by_side_are_left_alone(make):
    func = scheduled(kernel(make, (8, 64)))[1]
    assert values_apart(func, is_costly).same_as(func)


@T.prim_func(s_tir=True)
def iterated(x: T.Buffer((3,), "float32"), y: T.Buffer((1,), "float32")):
    for i in range(3):
        with T.sblock("y"):
            k = T.axis.reduce(3, i)
            T.reads(x[k], y[0])
            T.writes(y[0])
            y[0] = T.tanh(T.exp(y[0])) + x[k]


def test_a_value_of_the_stored_tensor_itself_stays_inside():
    assert values_apart(iterated, is_costly).same_as(iterated)
