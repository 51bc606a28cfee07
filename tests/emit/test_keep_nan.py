"""Maxima and minima of floats are NaN where an operand is, as torch's are; on GPUs those with a constant. Comparisons
with NaN fail, and what is not compared so holds."""

import numpy as np
import pytest
import torch
import tvm
from torch import nn
from torch.nn import functional as F
from tvm import relax
from tvm.relax import op
from tvm.script import tirx as T

import tvmhet
from tests.emit.cpu.kernels import LEVELS, kernel, run, scheduled
from tests.emit.test_apart import CUDA, serial
from tests.emit.test_apart import scheduled as scheduled_for_cuda
from tests.placed import cpus
from tvmhet._tvm import structural_equal
from tvmhet.emit.keep_nan import KeepNan, keep_nan
from tvmhet.emit.nvrtc import compile_cubin

SHAPE = (3, 4, 9, 11)
#: By name: a function of ours, and torch's.
CASES = {
    "relu": (op.nn.relu, F.relu),
    "relu of a sum": (lambda x: op.nn.relu(op.add(x, op.multiply(x, x))), lambda x: F.relu(x + x * x)),
    "clip": (lambda x: op.clip(x, -0.5, 0.25), lambda x: x.clamp(-0.5, 0.25)),
    "largest of two": (lambda x: op.maximum(x, op.multiply(x, relax.const(2.0))), lambda x: torch.maximum(x, 2 * x)),
    "smallest of two": (lambda x: op.minimum(op.multiply(x, relax.const(2.0)), x), lambda x: torch.minimum(2 * x, x)),
    "largest of a row": (lambda x: op.max(x, axis=-1), lambda x: x.amax(-1)),
    "smallest of a column": (lambda x: op.min(x, axis=1), lambda x: x.amin(1)),
    "largest of all": (op.max, torch.amax),
    "window": (
        lambda x: op.nn.max_pool2d(x, (3, 3), strides=(2, 2), padding=(1, 1)),
        lambda x: F.max_pool2d(x, 3, 2, 1),
    ),
    "softmax": (lambda x: op.nn.softmax(x, axis=-1), lambda x: x.softmax(-1)),
}
ONE = relax.const(1.0)
#: Comparisons by name: a function of ours of tensors x and y, and torch's.
COMPARISONS = {
    "unlike": (op.not_equal, torch.ne),
    "unlike a number": (lambda x, y: op.not_equal(op.add(x, y), ONE), lambda x, y: (x + y) != 1),
    "not equal": (lambda x, y: op.logical_not(op.equal(x, y)), lambda x, y: ~(x == y)),
    "not unlike": (lambda x, y: op.logical_not(op.not_equal(x, y)), lambda x, y: ~(x != y)),
    "not less": (lambda x, y: op.logical_not(op.less(x, y)), lambda x, y: ~(x < y)),
    "not at most": (lambda x, y: op.logical_not(op.less_equal(x, y)), lambda x, y: ~(x <= y)),
    "not more": (lambda x, y: op.logical_not(op.greater(x, y)), lambda x, y: ~(x > y)),
    "not at least": (lambda x, y: op.logical_not(op.greater_equal(x, y)), lambda x, y: ~(x >= y)),
    "chosen": (
        lambda x, y: op.where(op.logical_not(op.less(x, y)), x, y),
        lambda x, y: torch.where(~(x < y), x, y),
    ),
}


@T.prim_func(s_tir=True)
def before(x: T.Buffer((8,), "float32"), n: T.Buffer((8,), "int32"), z: T.Buffer((1,), "float32")):
    for i in range(8):
        x[i] = T.max(x[i], T.float32(0))
        n[i] = T.max(n[i], T.int32(0))
        z[0] = T.min(z[0], x[i])


@T.prim_func(s_tir=True)
def after(x: T.Buffer((8,), "float32"), n: T.Buffer((8,), "int32"), z: T.Buffer((1,), "float32")):
    for i in range(8):
        x[i] = T.max(T.float32(0), x[i])
        n[i] = T.max(n[i], T.int32(0))
        z[0] = T.Select(x[i] <= T.float32("inf"), T.min(x[i], z[0]), x[i])


@T.prim_func(s_tir=True)
def after_for_cuda(x: T.Buffer((8,), "float32"), n: T.Buffer((8,), "int32"), z: T.Buffer((1,), "float32")):
    for i in range(8):
        x[i] = T.Select(T.float32(0) > x[i], T.float32(0), x[i])
        n[i] = T.max(n[i], T.int32(0))
        z[0] = T.min(z[0], x[i])


@pytest.mark.parametrize(("is_cuda", "expected"), [(False, after), (True, after_for_cuda)])
def test_constants_come_first_and_what_arrives_is_compared(is_cuda, expected):
    mod = KeepNan(is_cuda)(tvm.IRModule({"main": before}))
    assert structural_equal(mod["main"], expected.with_attr("global_symbol", "before"))


def values(generator):
    """Numbers of which some are none: NaN and both infinities, first, last and in between."""
    x = generator.uniform(-1, 1, SHAPE).astype("float32")
    places = generator.choice(x.size, 12, replace=False)
    x.flat[places] = [np.nan, np.inf, -np.inf] * 4
    x.flat[[0, -1]] = np.nan
    return x


def wanted(name, x):
    return CASES[name][1](torch.from_numpy(x).double()).numpy()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CASES)
def test_scheduled_kernels_of_cpus(name, level):
    func = scheduled(kernel(CASES[name][0], SHAPE), level)[1]
    for seed in range(4):
        x = values(np.random.default_rng(seed))
        got = run(keep_nan(func, is_cuda=False), [x], level)
        np.testing.assert_allclose(got, wanted(name, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["relu", "relu of a sum", "clip"])
def test_scheduled_kernels_of_gpus(name, dtype):
    """Their threads as loops; their source compiles for a GPU."""
    func = keep_nan(scheduled_for_cuda(kernel(CASES[name][0], SHAPE, dtype=dtype))[0], is_cuda=True)
    module = tvm.compile(tvm.IRModule({"main": func}), target=CUDA).mod.imports[0]
    assert compile_cubin(module.inspect_source("cuda"), "sm_80").code
    if dtype == "float32":
        x = values(np.random.default_rng(0))
        np.testing.assert_allclose(run(serial(func), [x]), wanted(name, x), rtol=1e-5, atol=1e-6)


def test_comparisons_say_before_what_they_mean():
    @T.prim_func(s_tir=True)
    def unlike(x: T.Buffer((8,), "float32"), n: T.Buffer((8,), "int32"), b: T.Buffer((3, 8), "bool")):
        for i in range(8):
            b[0, i] = x[i] != T.float32(1)
            b[1, i] = n[i] != 1
            b[2, i] = not x[i] < T.float32(1)

    @T.prim_func(s_tir=True)
    def unlike_after(x: T.Buffer((8,), "float32"), n: T.Buffer((8,), "int32"), b: T.Buffer((3, 8), "bool")):
        for i in range(8):
            b[0, i] = x[i] != T.float32(1) or T.isnan(x[i])
            b[1, i] = n[i] != 1
            b[2, i] = x[i] >= T.float32(1) or T.isnan(x[i])

    mod = KeepNan(is_cuda=False)(tvm.IRModule({"main": unlike}))
    assert structural_equal(mod["main"], unlike_after.with_attr("global_symbol", "unlike"))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_on_cpus(name, level):
    make, theirs = COMPARISONS[name]
    func = scheduled(kernel(make, SHAPE, SHAPE), level)[1]
    x, y = values(np.random.default_rng(0)), values(np.random.default_rng(1))
    y.flat[::7] = x.flat[::7]
    got = run(keep_nan(func, is_cuda=False), [x, y], level)
    np.testing.assert_array_equal(got, theirs(torch.from_numpy(x), torch.from_numpy(y)).numpy())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", [n for n in COMPARISONS if n != "unlike a number"])  # which is of float32
def test_comparisons_on_gpus(name, dtype):
    """Their threads as loops; their source compiles for a GPU."""
    func = keep_nan(scheduled_for_cuda(kernel(COMPARISONS[name][0], SHAPE, SHAPE, dtype=dtype))[0], is_cuda=True)
    assert compile_cubin(
        tvm.compile(tvm.IRModule({"main": func}), target=CUDA).mod.imports[0].inspect_source("cuda"), "sm_80"
    ).code
    if dtype == "float32":
        x, y = values(np.random.default_rng(0)), values(np.random.default_rng(1))
        y.flat[::7] = x.flat[::7]
        if name != "unlike":  # as loops they are LLVM's, which CUDA's `!=` is not
            want = COMPARISONS[name][1](torch.from_numpy(x), torch.from_numpy(y)).numpy()
            np.testing.assert_array_equal(run(serial(func), [x, y]), want)


class Diverged(nn.Module):
    """A network whose first weights are no numbers any more."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
        self.conv.weight.data.fill_(float("nan"))

    def forward(self, x):
        return self.head(F.max_pool2d(F.relu6(self.conv(x)), 2).mean((2, 3)))


@pytest.mark.parametrize("makers", [("tvm",), ("library",)])
def test_a_network_that_diverged_shows_it(makers):
    x = torch.rand(1, 3, 8, 8)
    model = tvmhet.from_torch(Diverged().eval(), (x,))
    with tvmhet.build(model, cluster=cpus(v3=1), makers=makers, inline=True) as lib:
        assert torch.isnan(lib(x)).all()
