"""Generated CUDA kernels compute what they say: run on this CPU, a block's threads in turn, forwards and backwards."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tests.emulated_cuda import A100
from tests.emulated_cuda.kernels import check_stage, check_whole, prim_funcs
from tvmhet._tvm import dlight, structural_equal
from tvmhet.emit import schedule
from tvmhet.emit.bool_vectors import unroll_bool_vectors
from tvmhet.emit.lower import lower_plain, lower_stage, make_target
from tvmhet.emit.nvrtc import compile_cubin, cuda_sources
from tvmhet.emit.one_thread_each import has_host_blocks, launches_threads
from tvmhet.emit.schedule import ScheduleReport, schedule_kernels
from tvmhet.emit.source_only import source_only
from tvmhet.ir.legalize import legalize_ops

T = relax.transform
FUSED = tvm.transform.Sequential([legalize_ops(), T.AnnotateTIROpPattern(), T.FuseOps(), T.FuseTIR()])


def stage(cases, fused):
    """One function of all cases, so that their kernels are compiled together: (operands' types, expression) each."""
    builder = relax.BlockBuilder()
    groups = [
        [relax.Var(f"x{i}_{k}", relax.TensorType(shape, dtype)) for k, (shape, dtype) in enumerate(types)]
        for i, (types, _) in enumerate(cases)
    ]
    with builder.function("main", [v for group in groups for v in group]):
        with builder.dataflow():
            made = [builder.emit(f(*group)) for group, (_, f) in zip(groups, cases, strict=True)]
            out = builder.emit_output(relax.Tuple(made))
        builder.emit_func_output(out)
    mod = builder.get()
    return FUSED(mod) if fused else mod


def f32(*shape):
    return shape, "float32"


def number(value, dtype="float32"):
    return relax.const(value, dtype)


#: Operands, and what is made of them: every rule, shapes of 1, primes, and what is no multiple of a warp.
SINGLE = {
    "product": ([f32(7, 33), f32(33, 13)], op.matmul),
    "row times matrix": ([f32(1, 129), f32(129, 67)], op.matmul),
    "batched product": ([f32(3, 5, 31), f32(3, 31, 2)], op.matmul),
    "sum of rows": ([f32(5, 1031)], lambda x: op.sum(x, axis=-1)),
    "sum of columns": ([f32(131, 3)], lambda x: op.sum(x, axis=0)),
    "sum of all": ([f32(37, 41)], lambda x: op.sum(x)),
    "greatest": ([f32(3, 257)], lambda x: op.max(x, axis=1, keepdims=True)),
    "softmax": ([f32(2, 3, 45)], lambda x: op.nn.softmax(x, axis=-1)),
    "softmax of one": ([f32(4, 1)], lambda x: op.nn.softmax(x, axis=-1)),
    "group norm": (
        [f32(2, 12, 5, 7), f32(12), f32(12)],
        lambda x, s, b: op.nn.relu(op.nn.group_norm(x, s, b, 3, 1, [2, 3])),
    ),
    "group norm of rows longer than a block": (
        [f32(1, 8, 37, 31), f32(8), f32(8), f32(1, 8, 37, 31)],
        lambda x, s, b, y: op.nn.silu(op.add(op.nn.group_norm(x, s, b, 2, 1, [2, 3]), y)),
    ),
    "mean spread over its image": ([f32(3, 5, 6, 7)], lambda x: op.multiply(x, op.mean(x, [2, 3], keepdims=True))),
    "instance norm": ([f32(2, 5, 9, 4), f32(5), f32(5)], lambda x, s, b: op.nn.instance_norm(x, s, b, 1, [2, 3])),
    "layer norm": ([f32(3, 97), f32(97), f32(97)], lambda x, s, b: op.nn.layer_norm(x, s, b, axes=[-1])),
    "strided convolution": (
        [f32(1, 3, 11, 13), f32(5, 3, 3, 3)],
        lambda x, w: op.nn.conv2d(x, w, strides=(2, 2), padding=(1, 1)),
    ),
    "depthwise convolution": (
        [f32(2, 6, 7, 7), f32(6, 1, 3, 3)],
        lambda x, w: op.nn.conv2d(x, w, padding=(1, 1), groups=6),
    ),
    "convolution in groups, nothing padded": (
        [f32(1, 32, 6, 6), f32(8, 8, 3, 3)],
        lambda x, w: op.nn.conv2d(x, w, groups=4),
    ),
    "largest of windows": ([f32(1, 3, 9, 9)], lambda x: op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1))),
    "mean of windows": ([f32(1, 2, 8, 8)], lambda x: op.nn.adaptive_avg_pool2d(x, (3, 3))),
    "transposition": ([f32(17, 1, 23)], lambda x: op.permute_dims(x, [2, 1, 0])),
    "rows by index": ([f32(11, 7), ((2, 5), "int64")], lambda x, i: op.take(x, i, axis=0)),
    "concatenation": ([f32(3, 5), f32(3, 8)], lambda x, y: op.concat([x, y], axis=1)),
    "no columns": ([f32(3, 5)], lambda x: op.strided_slice(x, [1], [5], [5])),
    "one element": ([((), "float32"), ((), "float32")], op.add),
    "64-bit integers": ([((3, 37), "int64"), ((3, 37), "int64")], op.multiply),
    "bytes": ([((5, 13), "int8"), ((5, 13), "int8")], op.maximum),
    "comparison": ([f32(7, 9), f32(7, 9)], op.greater),
    "cumulative sum": ([f32(4, 19)], lambda x: op.cumsum(x, axis=1)),
    "bilinear resizing": (
        [f32(1, 2, 3, 5)],
        lambda x: op.image.resize2d(x, relax.ShapeExpr([6, 10]), layout="NCHW", method="linear"),
    ),
    "upsampling": ([f32(1, 2, 3, 5)], lambda x: op.image.resize2d(x, relax.ShapeExpr([6, 10]), layout="NCHW")),
}
GROUPS = {
    "masked product": (
        [f32(2, 8, 16), f32(2, 16, 8), ((8, 8), "bool")],
        lambda q, k, m: op.where(m, op.multiply(op.matmul(q, k), number(0.25)), number(-1.0)),
    ),
    "linear, gelu": ([f32(9, 24), f32(24, 40), f32(40)], lambda x, w, b: op.nn.gelu(op.add(op.matmul(x, w), b))),
    "row, bias, relu": ([f32(1, 65), f32(65, 9), f32(9)], lambda x, w, b: op.nn.relu(op.add(op.matmul(x, w), b))),
    "convolution, bias, relu, residual": (
        [f32(1, 4, 6, 6), f32(8, 4, 1, 1), f32(1, 8, 1, 1), f32(1, 8, 6, 6)],
        lambda x, w, b, r: op.nn.relu(op.add(op.add(op.nn.conv2d(x, w), b), r)),
    ),
    "transposed convolution, bias, relu": (
        [f32(1, 16, 6, 5), f32(16, 8, 4, 4), f32(1, 8, 1, 1)],
        lambda x, w, b: op.nn.relu(op.add(op.nn.conv2d_transpose(x, w, strides=(2, 2), padding=(1, 1)), b)),
    ),
    "no columns beside others": (
        [f32(2, 3, 16)],
        lambda x: op.concat([op.exp(x), op.negative(op.strided_slice(x, [2], [16], [16]))], axis=2),
    ),
    "negated mask": (
        [((4, 32), "bool"), f32(4, 32)],
        lambda m, x: op.where(op.logical_not(m), op.exp(x), op.multiply(x, x)),
    ),
}


def split(cases, every):
    """Parts of the cases: a compiler process each."""
    names = sorted(cases)
    return [names[i::every] for i in range(every)]


@pytest.mark.parametrize("names", split(SINGLE, 3), ids="-".join)
def test_single_operators(names):
    report = check_stage(stage([SINGLE[n] for n in names], fused=False))
    assert sum(report.applied.values()) >= len(names) - 1


def test_groups_of_operators():
    report = check_stage(stage(list(GROUPS.values()), fused=True))
    assert report.applied["Matmul"] >= 1 and report.applied["two parts"] == 1


def test_bilinear_resizing_is_one_kernel():
    (func,) = prim_funcs(stage([SINGLE["bilinear resizing"]], fused=False), make_target(A100)).values()
    with make_target(A100):
        source = schedule_kernels(tvm.IRModule({"main": func}), make_target(A100), ScheduleReport())["main"].script()
    assert source.count('thread="blockIdx.x"') == 1


def prim_funcs_of(name):
    (func,) = prim_funcs(stage([GROUPS[name]], fused=True), make_target(A100)).values()
    return tvm.IRModule({"main": func})


def test_a_transposed_convolution_is_a_product_in_tiles_and_a_sum():
    kernels = prim_funcs_of("transposed convolution, bias, relu")
    source = schedule_kernels(kernels, make_target(A100), ScheduleReport())["main"].script()
    assert 'scope="shared"' in source and source.count('thread="blockIdx.x"') == 2


def test_rules_that_raise_on_a_part_are_counted(monkeypatch):
    def raises(func):
        raise RuntimeError("a kernel it does not know")

    target = make_target(A100)
    rules = (("Raises", raises), *schedule.rules_for(target))
    monkeypatch.setattr(schedule, "rules_for", lambda target: rules)
    report = ScheduleReport()
    schedule_kernels(prim_funcs_of("transposed convolution, bias, relu"), target, report)
    assert report.applied == {"two parts": 1} and report.raised == {"Raises": 2}


#: Kernels that bind their threads themselves (TVM's sort and scatter), and functions of several kernels. TVM's cumsum
#: is left out: its threads read what others of their warp write in the same step, which only a warp in lockstep bears.
WHOLE = {
    "sort": ([f32(4, 37)], lambda x: op.sort(x, axis=1, descending=True)),
    "argmax": ([f32(3, 33)], lambda x: op.argmax(x, axis=1)),
    "scatter, added": (
        [f32(5, 7), ((2, 7), "int64"), f32(2, 7)],
        lambda d, i, u: op.scatter_elements(d, i, u, axis=0, reduction="add"),
    ),
    "gradient of an embedding": (
        [f32(5, 7), ((4, 1), "int64"), f32(4, 7)],
        lambda d, i, u: op.scatter_nd(d, i, u, "add"),
    ),
    "gradient of a max-pool": (
        [f32(1, 2, 4, 4), f32(1, 2, 8, 8)],
        lambda g, x: op.grad.max_pool2d_backward(g, x, (2, 2), (2, 2)),
    ),
    "gradient of a mean-pool": (
        [f32(1, 2, 4, 4), f32(1, 2, 8, 8)],
        lambda g, x: op.grad.avg_pool2d_backward(g, x, (2, 2), (2, 2)),
    ),
    "batch norm in training": (
        [f32(4, 3, 5, 5), f32(3), f32(3), f32(3), f32(3)],
        lambda x, g, b, m, v: op.nn.batch_norm(x, g, b, m, v, axis=1, training=True)[0],
    ),
    "loss": ([f32(4, 7), ((4,), "int64")], lambda x, t: op.nn.nll_loss(op.nn.log_softmax(x), t, reduction="mean")),
    "update": ([f32(7, 9), f32(7, 9)], lambda w, g: op.subtract(w, op.multiply(g, number(0.1)))),
}


def inputs_of(cases):
    """Values for the operands of the cases: indices are 0 and 1."""
    generator = np.random.default_rng(1)
    return [
        generator.integers(0, 2, shape).astype(dtype)
        if dtype[0] in "iub"
        else generator.uniform(0.1, 1, shape).astype(dtype)
        for types, _ in cases
        for shape, dtype in types
    ]


DEEP = ["group norm", "group norm of rows longer than a block", "instance norm", "mean spread over its image"]


@pytest.mark.parametrize("name", DEEP)
def test_rows_of_several_axes_have_a_block_each(name):
    kernels = prim_funcs(stage([SINGLE[name]], fused=True), make_target(A100))
    report = ScheduleReport()
    with make_target(A100):
        scheduled = schedule_kernels(tvm.IRModule(kernels), make_target(A100), report)
    assert report.applied["deep rows"] == 1
    source = "".join(f.script() for _, f in scheduled.functions_items())
    assert source.count("blockIdx.x") == 1 and source.count("threadIdx.x") >= 2


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nvrtc_compiles_rows_of_several_axes(dtype):
    types = [((2, 12, 9, 7), dtype), ((12,), dtype), ((12,), dtype)]
    norm = stage([(types, lambda x, s, b: op.nn.group_norm(x, s, b, 3, 1, [2, 3]))], fused=False)
    for source in cuda_sources(lower_stage(norm, A100)[0].mod):
        assert compile_cubin(source, A100["arch"]).code


def test_functions_of_kernels():
    cases = list(WHOLE.values())
    assert check_whole(stage(cases, fused=False), inputs_of(cases)).applied["by hand"] >= 3


@pytest.mark.parametrize("name", WHOLE)
def test_no_part_of_a_kernel_is_left_to_the_host(name):
    """Which could not read a GPU's memory: TVM's scatter_nd leaves the transposition of its indices there."""
    target = make_target(A100)
    kernels = prim_funcs(stage([WHOLE[name]], fused=False), target)
    report = ScheduleReport()
    with target:
        scheduled = schedule_kernels(tvm.IRModule(kernels), target, report)
    assert not report.unscheduled and not any(has_host_blocks(f) for _, f in scheduled.functions_items())


def test_a_scatter_has_a_part_that_its_author_left_to_the_host():
    (func,) = prim_funcs(stage([WHOLE["gradient of an embedding"]], fused=False), make_target(A100)).values()
    assert launches_threads(func.body) and has_host_blocks(func)


def test_vectors_of_bools_are_read_one_by_one():
    """As TVM would make the kernel, two bools are read as four bytes: CUDA takes it as misaligned or reads others."""
    funcs = {"main": prim_funcs(stage([GROUPS["masked product"]], fused=True), make_target(A100)).popitem()[1]}
    with make_target(A100):
        made = dlight.ApplyDefaultSchedule(dlight.gpu.Matmul())(tvm.IRModule(funcs))["main"]
    assert "T.vectorized" in str(made) and structural_equal(
        unroll_bool_vectors(unroll_bool_vectors(made)), unroll_bool_vectors(made)
    )
    plain, mended = (cuda_source(f) for f in (made, unroll_bool_vectors(made)))
    assert "(ushort2*)(" in plain and "(ushort2*)(" not in mended
    assert mended.count("(float2*)") > 10  # of other tensors vectors are left


def test_a_model_placed_whole_is_mended_too():
    (source,) = cuda_sources(lower_plain(stage([GROUPS["masked product"]], fused=False), A100).mod)
    assert "(float2*)" in source and "(ushort2*)" not in source


def cuda_source(func):
    with source_only():
        (source,) = cuda_sources(tvm.compile(func.with_attr("global_symbol", "main"), target=make_target(A100)).mod)
    return source


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype):
    """Sums of bfloat16 over threads are left out: TVM has no shuffles of them, and counts on a warp's lockstep."""

    def half(*shape):
        return shape, dtype

    cases = [
        ([half(7, 33), half(33, 13)], op.matmul),
        ([half(3, 24), half(24)], lambda x, b: op.nn.relu(op.add(x, b))),
        ([half(3, 24)], lambda x: op.astype(op.exp(x), "float32")),
    ]
    sums = [
        ([half(1, 129), half(129, 67)], op.matmul),
        ([half(5, 131)], lambda x: op.nn.softmax(x, axis=-1)),
        ([half(5, 131)], lambda x: op.sum(x, axis=-1)),
    ]
    check_stage(stage(cases + sums * (dtype == "float16"), fused=False), rtol=2e-2)
