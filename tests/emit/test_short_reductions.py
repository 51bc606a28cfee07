"""CUDA kernels of short reductions: as serial loops, their threads give what the unscheduled kernel does."""

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op
from tvm.script import tirx as T

from tests.emit.cpu.kernels import few, kernel, run
from tests.emit.test_apart import CUDA, scheduled, serial
from tvmhet._tvm import structural_equal
from tvmhet.emit.short_reductions import short_reduction

SHAPE = (2, 6, 19, 23)
PAIR = st.tuples(st.integers(1, 4), st.integers(1, 4))


def number(value):
    return relax.const(value, "float32")


def by_channel(x, w, b):
    return op.clip(op.add(op.nn.conv2d(x, w, padding=(1, 1), groups=6), b), 0.0, 0.5)


CASES = {
    "means": ([SHAPE], lambda x: op.nn.avg_pool2d(x, (3, 3), padding=(1, 1))),
    "means of what is there": ([SHAPE], lambda x: op.nn.avg_pool2d(x, (3, 3), padding=(1, 1), count_include_pad=False)),
    "by channel, bias, clip": ([SHAPE, (6, 1, 3, 3), (1, 6, 1, 1)], by_channel),
    "rows": ([(997, 5)], lambda x: op.sum(x, axis=1)),
    "rows after and before": ([(997, 5), (997, 5)], lambda x, y: op.exp(op.mean(op.multiply(x, y), axis=1))),
    "columns": ([(7, 1031)], lambda x: op.max(x, axis=0)),
}
LEFT = {
    "long": ([(65, 9001)], lambda x: op.sum(x, axis=0)),
    "few results": ([(5, 500)], lambda x: op.sum(x, axis=0)),
    "one result": ([(5,)], lambda x: op.sum(x)),
    "two reductions": ([(1031, 5)], lambda x: op.nn.softmax(x, axis=-1)),
    "results read more than once": ([(1031, 5)], lambda x: op.subtract(x, op.mean(x, axis=1, keepdims=True))),
    "no reduction": ([(1031, 5)], op.exp),
}


def check(shapes, make):
    func = kernel(make, *shapes)
    fast, report = scheduled(func)
    assert report.applied == {"short reduction": 1}
    text = fast.script()
    assert text.count("threadIdx.x") == 1 and "shared" not in text
    values = [np.random.default_rng(0).uniform(-1, 1, s).astype("float32") for s in shapes]
    np.testing.assert_allclose(run(serial(fast), values), run(func, values), rtol=1e-5, atol=1e-6)
    tvm.compile(tvm.IRModule({"main": fast}), target=CUDA)


@pytest.mark.parametrize("name", CASES)
def test_a_thread_each(name):
    check(*CASES[name])


@few
@given(PAIR, PAIR, PAIR, st.booleans())
def test_windows_of_any_size(size, stride, pad, mean):
    pad = [min(p, n // 2) for p, n in zip(pad, size, strict=True)]
    pool = op.nn.avg_pool2d if mean else op.nn.max_pool2d
    if size != (1, 1):
        check([(8, 9, 41, 43)], lambda x: op.nn.relu(pool(x, size, stride, pad)))


@pytest.mark.parametrize("name", LEFT)
def test_others_are_left(name):
    shapes, make = LEFT[name]
    assert short_reduction(kernel(make, *shapes)) is None


@T.prim_func(private=True, s_tir=True)
def before(x: T.Buffer((T.int64(1024), T.int64(4)), "float32"), y: T.Buffer((T.int64(1024),), "float32")):
    T.func_attr({"tirx.noalias": True})
    s = T.sblock_alloc_buffer((T.int64(1024),))
    for i, k in T.grid(T.int64(1024), T.int64(4)):
        with T.sblock("sum"):
            v_i, v_k = T.axis.remap("SR", [i, k])
            with T.init():
                s[v_i] = T.float32(0.0)
            s[v_i] = s[v_i] + x[v_i, v_k]
    for i in range(T.int64(1024)):
        with T.sblock("exp"):
            v_i = T.axis.spatial(T.int64(1024), i)
            y[v_i] = T.exp(s[v_i])


@T.prim_func(private=True, s_tir=True)
def after(x: T.Buffer((T.int64(1024), T.int64(4)), "float32"), y: T.Buffer((T.int64(1024),), "float32")):
    T.func_attr({"tirx.noalias": True})
    s = T.sblock_alloc_buffer((T.int64(1024),), scope="local")
    for block in T.thread_binding(T.int64(4), thread="blockIdx.x"):
        for thread in T.thread_binding(T.int64(256), thread="threadIdx.x"):
            with T.sblock("sum_init"):
                v_i = T.axis.spatial(T.int64(1024), block * T.int64(256) + thread)
                s[v_i] = T.float32(0.0)
            for k in range(T.int64(4)):
                with T.sblock("sum_update"):
                    v_i = T.axis.spatial(T.int64(1024), block * T.int64(256) + thread)
                    v_k = T.axis.reduce(T.int64(4), k)
                    s[v_i] = s[v_i] + x[v_i, v_k]
            with T.sblock("exp"):
                v_i = T.axis.spatial(T.int64(1024), block * T.int64(256) + thread)
                y[v_i] = T.exp(s[v_i])


def test_the_sum_and_what_follows_it_are_in_one_thread():
    assert structural_equal(short_reduction(before).mod["main"], after)
