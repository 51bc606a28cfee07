"""The largest of values that are all -inf is -inf, as torch's is: in windows, in rows, where threads share a row."""

import re

import numpy as np
import pytest
import torch
import tvm
from torch.nn import functional as F
from tvm import relax
from tvm.relax import op
from tvm.script import tirx as T

import tvmhet
from tests.emit.cpu.kernels import LEVELS, kernel, run, scheduled
from tests.emit.test_apart import CUDA
from tests.emit.test_apart import scheduled as scheduled_for_cuda
from tests.emit.test_cuda_kernels import f32, stage
from tests.emit.test_keep_nan import CASES as EXTREMES
from tests.emit.test_keep_nan import SHAPE
from tests.emulated_cuda.kernels import check_whole
from tests.placed import cpus
from tvmhet._tvm import structural_equal
from tvmhet.emit.begin_at_infinity import BeginAtInfinity, begin_at_infinity
from tvmhet.emit.nvrtc import compile_cubin

LOWEST = float(np.finfo("float32").min)
#: By name: a function of ours, and torch's.
CASES = {n: EXTREMES[n] for n in ("largest of a row", "smallest of a column", "largest of all", "window")} | {
    "window of an activation": (
        lambda x: op.nn.max_pool2d(op.add(x, x), (3, 3), strides=(1, 1), padding=(1, 1)),
        lambda x: F.max_pool2d(x + x, 3, 1, 1),
    ),
}


@T.prim_func(s_tir=True)
def added(x: T.Buffer((8,), "float32"), p: T.Buffer((10,), "float32"), m: T.Buffer((1,), "float32")):
    s = T.sblock_alloc_buffer((1,))
    m[0] = T.float32(-340282346638528859811704183484516925440.0)
    s[0] = T.float32(-340282346638528859811704183484516925440.0)
    for i in range(10):
        p[i] = T.if_then_else(i >= 1 and i < 9, x[i - 1], T.float32(-340282346638528859811704183484516925440.0))
    for i in range(8):
        m[0] = T.max(T.if_then_else(i < 7, p[i], T.float32(-340282346638528859811704183484516925440.0)), m[0])
        s[0] = s[0] + p[i]


@T.prim_func(s_tir=True)
def added_after(x: T.Buffer((8,), "float32"), p: T.Buffer((10,), "float32"), m: T.Buffer((1,), "float32")):
    """A sum reads `p`, and begins at what it begins at."""
    s = T.sblock_alloc_buffer((1,))
    m[0] = T.float32("-inf")
    s[0] = T.float32(-340282346638528859811704183484516925440.0)
    for i in range(10):
        p[i] = T.if_then_else(i >= 1 and i < 9, x[i - 1], T.float32(-340282346638528859811704183484516925440.0))
    for i in range(8):
        m[0] = T.max(m[0], T.if_then_else(i < 7, p[i], T.float32("-inf")))
        s[0] = s[0] + p[i]


@T.prim_func(s_tir=True)
def padded(x: T.Buffer((8,), "float32"), p: T.Buffer((10,), "float32"), y: T.Buffer((8,), "float32")):
    for i in range(10):
        p[i] = T.if_then_else(i >= 1 and i < 9, x[i - 1], T.float32(340282346638528859811704183484516925440.0))
    for i in range(8):
        y[i] = T.float32(340282346638528859811704183484516925440.0)
        for k in range(3):
            y[i] = T.min(y[i], p[i + k])


@T.prim_func(s_tir=True)
def padded_after(x: T.Buffer((8,), "float32"), p: T.Buffer((10,), "float32"), y: T.Buffer((8,), "float32")):
    for i in range(10):
        p[i] = T.if_then_else(i >= 1 and i < 9, x[i - 1], T.float32("inf"))
    for i in range(8):
        y[i] = T.float32("inf")
        for k in range(3):
            y[i] = T.min(y[i], p[i + k])


@T.prim_func(s_tir=True)
def masked(x: T.Buffer((8,), "float32"), b: T.Buffer((8,), "bool"), m: T.Buffer((1,), "float32")):
    """The number that a condition on a tensor chooses is the model's own, and a maximum may begin elsewhere."""
    m[0] = T.float32(-1.0)
    for i in range(8):
        m[0] = T.max(m[0], T.if_then_else(b[i], x[i], T.float32(-340282346638528859811704183484516925440.0)))


@pytest.mark.parametrize(("func", "after"), [(added, added_after), (padded, padded_after), (masked, masked)])
def test_first_numbers_and_paddings_become_infinite(func, after):
    mod = BeginAtInfinity(is_cuda=False)(tvm.IRModule({"main": func}))
    assert structural_equal(mod["main"], after.with_attr("global_symbol", func.attrs["global_symbol"]))


def values(generator):
    """Rows, columns and windows of which every value is an infinity, or the lowest number."""
    x = generator.uniform(-1, 1, SHAPE).astype("float32")
    x[0], x[1, 0], x[1, 1], x[2, :, 3], x[2, :, 5] = -np.inf, np.inf, LOWEST, np.inf, -np.inf
    return x


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CASES)
def test_scheduled_kernels_of_cpus(name, level):
    x = values(np.random.default_rng(0))
    got = run(begin_at_infinity(scheduled(kernel(CASES[name][0], SHAPE), level)[1]), [x], level)
    np.testing.assert_array_equal(got, CASES[name][1](torch.from_numpy(x)).numpy())


@pytest.mark.parametrize("name", CASES)
def test_kernels_of_gpus(name):
    """Emulated: threads give what the kernels of CPUs give."""
    check_whole(stage([([f32(*SHAPE)], CASES[name][0])], fused=True), [values(np.random.default_rng(0))])


def test_rows_that_threads_share():
    """One kernel, whose difference shows at which number the largest of a row began."""
    builder = relax.BlockBuilder()
    x, y = (relax.Var(n, relax.TensorType(SHAPE, "float32")) for n in "xy")
    with builder.function("fused", [x], attrs={"Primitive": True}, private=True):
        with builder.dataflow():
            out = builder.emit_output(op.subtract(x, op.max(x, axis=-1, keepdims=True)))
        builder.emit_func_output(out)
    with builder.function("main", [y]):
        with builder.dataflow():
            made = builder.emit(relax.Call(builder.get().get_global_var("fused"), [y]))
            results = builder.emit_output(relax.Tuple([made]))
        builder.emit_func_output(results)
    report = check_whole(builder.finalize(), [values(np.random.default_rng(0))])
    assert report.applied["GeneralReduction"] == 1


@pytest.mark.parametrize("make", [lambda x: op.nn.softmax(x, axis=-1), lambda x: op.max(x, axis=-1)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_reductions_that_threads_share_are_written_out_before(dtype, make):
    """TVM knows them by the number they begin at; a lane without a value adds infinity, too."""
    func = scheduled_for_cuda(kernel(make, (4, 3000), dtype=dtype))[0]
    assert "thread_allreduce" not in str(func)
    made = BeginAtInfinity(is_cuda=True)(tvm.IRModule({"main": func}))
    text = made.script()
    assert "thread_allreduce" in text
    assert re.search(rf'comm_reducer\(.*: T.max\(.*\), \[T.{dtype}\("-inf"\)\]', text)
    source = tvm.compile(made, target=CUDA).mod.imports[0].inspect_source("cuda")
    assert compile_cubin(source, "sm_80").code
    assert "3.402823" not in source and "6.550400e+04" not in source


class Masked(torch.nn.Module):
    """Attention with an additive mask, whose rows may be all infinite (zeros), or all the lowest number (the mean)."""

    def forward(self, q, mask):
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


@pytest.mark.parametrize("makers", [("tvm",), ("tvm", "library")])
def test_rows_of_attention_that_masks_leave_empty(makers):
    q = torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(6, 6)
    mask[1], mask[2], mask[3, 2:] = -torch.inf, LOWEST, -torch.inf
    model = tvmhet.from_torch(Masked(), (q, mask))
    with tvmhet.build(model, cluster=cpus(v3=1), makers=makers, inline=True) as lib:
        torch.testing.assert_close(lib(q, mask), Masked()(q, mask), rtol=1e-5, atol=1e-6)
