"""Library kernels: every family computes what TVM's kernel of the same operators computes, on random shapes."""

import itertools
import json

import numpy as np
import pytest
import torch
import tvm
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tvm import relax

from tvmhet.emit.build import compile_to
from tvmhet.emit.library import compile_spec
from tvmhet.emit.library_folds import fold
from tvmhet.emit.library_steps import FOLDED, STEPS, WRITES
from tvmhet.errors import BadBundle
from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.library import LIBRARY_FAMILIES, library_kernels, library_spec, place_kernel
from tvmhet.graph.placement import KernelPlacement
from tvmhet.ir.attrs import LIBRARY_FUNCTION
from tvmhet.ir.extract import extract
from tvmhet.ir.kernel_module import kernels_module
from tvmhet.ir.model import from_torch_tensor
from tvmhet.ir.transform.name_operators import NameOperators

TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 2e-2, "bfloat16": 8e-2}
FEW = settings(
    max_examples=4,
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
op = relax.op
_count = itertools.count()
sizes = st.integers(1, 7)
dtypes = st.sampled_from(["float32", "float32", "float64", "float16"])


def model(shapes, dtypes_of, num_inputs, build):
    """A module whose main(args..) returns `build(emit, *args)`; the arguments after `num_inputs` are weights."""
    builder = relax.BlockBuilder()
    types = [relax.TensorType(s, d) for s, d in zip(shapes, dtypes_of, strict=True)]
    params = [relax.Var(f"p{i}_weight", t) for i, t in enumerate(types)]
    with builder.function("main", params, attrs={"num_input": num_inputs}):
        with builder.dataflow():
            out = builder.emit_output(build(builder.emit, *params))
        builder.emit_func_output(out)
    return NameOperators()(builder.get())


def arguments(mod, high, positive=False):
    """Random arguments: normal floats, or their absolute values; integers below `high`; coins."""
    rng = np.random.default_rng(0)
    out = []
    for p in mod["main"].params:
        shape, dtype = tuple(int(d) for d in p.ty.shape.values), str(p.ty.dtype)
        if dtype.startswith("int"):
            out.append(tvm.runtime.tensor(rng.integers(0, high, shape).astype(dtype)))
        elif dtype == "bool":
            out.append(tvm.runtime.tensor(rng.integers(0, 2, shape).astype(bool)))
        else:
            normal = rng.standard_normal(shape)
            values = torch.from_numpy(np.abs(normal) + 0.1 if positive else normal).to(getattr(torch, dtype))
            out.append(from_torch_tensor(values))
    return out


def compare(mod, tmp_path, high=1, positive=False):
    """Run `mod` as one library kernel and as TVM's kernels one by one; compare, scaled to the output."""
    library = tmp_path / f"{next(_count)}.so"  # a path loads once: each example has its own
    graph = extract(mod)
    ops = tuple(range(len(graph.operators)))
    assert LegalKernel(ops, "library") in library_kernels(graph), [(o.family, o.attrs) for o in graph.operators]
    ours = place_kernel(graph, LegalKernel(ops, "library"))
    names = tuple(o.name for o in graph.operators)
    theirs = [KernelPlacement(n, (n,), "tvm") for n in names]
    compile_to(kernels_module(mod, [ours, *theirs]), {"kind": "llvm"}, library)
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    args = arguments(mod, high, positive)
    by_name = {p.name: a for p, a in zip(mod["main"].params, args, strict=True)}
    (got,) = machine["k0"](*args)
    for i, o in enumerate(graph.operators):
        reads = dict.fromkeys(graph.tensors[t].name for t in o.inputs)
        (by_name[o.name],) = machine[f"k{i + 1}"](*[by_name[r] for r in reads])
    got, want = (torch.from_dlpack(t).double().numpy() for t in (got, by_name[names[-1]]))
    dtype = graph.tensors[graph.outputs[0]].dtype
    scale = max(1.0, float(np.abs(np.nan_to_num(want, posinf=0, neginf=0)).max()))
    assert np.array_equal(np.isfinite(got), np.isfinite(want))
    known = np.isfinite(want)
    np.testing.assert_allclose(got[known], want[known], rtol=0, atol=TOLERANCE[dtype] * scale)


# ---- one strategy per family: (shapes, dtypes, number of inputs, builder)


@st.composite
def _matmul(draw):
    m, k, n, dtype = draw(sizes), draw(sizes), draw(sizes), draw(dtypes)
    batch = draw(st.sampled_from([((), ()), ((2,), ()), ((3, 2), (3, 2)), ((2, 1), (3,)), ((), (2,))]))
    return [(*batch[0], m, k), (*batch[1], k, n)], [dtype] * 2, 1, lambda emit, x, w: op.matmul(x, w)


@st.composite
def _conv2d(draw):
    groups, per, out, dtype = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(dtypes)
    kernel = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    strides, dilation = [draw(st.integers(1, 2)), draw(st.integers(1, 3))], [draw(st.integers(1, 2)) for _ in range(2)]
    padding = [draw(st.integers(0, 2)) for _ in range(2)]
    shapes = [(draw(st.integers(1, 2)), groups * per, 7, 6), (groups * out, per, *kernel)]
    return (
        shapes,
        [dtype] * 2,
        1,
        lambda emit, x, w: op.nn.conv2d(x, w, strides=strides, padding=padding * 2, dilation=dilation, groups=groups),
    )


def _pool(pool):
    @st.composite
    def strategy(draw):
        size = [draw(st.integers(1, 3)) for _ in range(2)]
        padding = [draw(st.integers(0, s // 2)) for s in size] * 2
        strides, ceil, dtype = [draw(st.integers(1, 3)) for _ in range(2)], draw(st.booleans()), draw(dtypes)
        more = {"count_include_pad": draw(st.booleans())} if pool is op.nn.avg_pool2d else {}
        return [(1, 2, 7, 8)], [dtype], 1, lambda emit, x: pool(x, size, strides, padding, [1, 1], ceil, **more)

    return strategy()


def _unary(call):
    return st.tuples(st.lists(sizes, min_size=1, max_size=4), dtypes).map(
        lambda drawn: ([tuple(drawn[0])], [drawn[1]], 1, lambda emit, x: call(x))
    )


def _along(call):
    @st.composite
    def strategy(draw):
        shape = tuple(draw(st.lists(sizes, min_size=1, max_size=4)))
        axis = draw(st.integers(-len(shape), len(shape) - 1))
        return [shape], [draw(dtypes)], 1, lambda emit, x: call(x, axis)

    return strategy()


@st.composite
def _layer_norm(draw):
    shape = tuple(draw(st.lists(st.integers(2, 6), min_size=2, max_size=4)))
    dtype = draw(st.sampled_from(["float32", "float16"]))  # TVM has no other layer norm to compare with
    num_axes = draw(st.integers(1, len(shape) - 1))
    axes = list(range(-num_axes, 0)) if draw(st.booleans()) else list(range(len(shape) - num_axes, len(shape)))
    inner = shape[-num_axes:]
    return [shape, inner, inner], [dtype] * 3, 1, lambda emit, x, g, b: op.nn.layer_norm(x, g, b, axes, 1e-3)


@st.composite
def _conv2d_transpose(draw):
    groups, per, out, dtype = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(dtypes)
    strides, kernel = [draw(st.integers(1, 2)) for _ in range(2)], [draw(st.integers(1, 3)) for _ in range(2)]
    padding = [draw(st.integers(0, k - 1)) for k in kernel]
    extra = [draw(st.integers(0, s - 1)) for s in strides]
    options = {"strides": strides, "padding": padding * 2, "output_padding": extra, "groups": groups}
    shapes = [(2, groups * per, 5, 4), (groups * per, out, *kernel)]
    return shapes, [dtype] * 2, 1, lambda emit, x, w: op.nn.conv2d_transpose(x, w, **options)


def _pool_backward(pool, backward):
    @st.composite
    def strategy(draw):
        size = [draw(st.integers(1, 3)) for _ in range(2)]
        padding = [draw(st.integers(0, s // 2)) for s in size]
        strides = [draw(st.integers(1, 2)) for _ in range(2)]
        made = [(n + 2 * p - k) // s + 1 for n, p, k, s in zip((7, 8), padding, size, strides, strict=True)]
        dtype = draw(st.sampled_from(["float32", "float64"]))
        shapes = [(1, 2, *made), (1, 2, 7, 8)]
        return shapes, [dtype] * 2, 1, lambda emit, g, x: backward(g, x, size, strides, padding * 2)

    return strategy()


def _adaptive(draw_size):
    return st.tuples(draw_size, dtypes).map(
        lambda drawn: ([(2, 3, 6, 8)], [drawn[1]], 1, lambda emit, x: op.nn.adaptive_avg_pool2d(x, drawn[0]))
    )


@st.composite
def _attention(draw, bias=False):
    batch, q, kv, heads, width = (draw(st.integers(1, 5)) for _ in range(5))
    shapes = [(batch, q, heads, width), (batch, kv, heads, width), (batch, kv, heads, draw(st.integers(1, 5)))]
    scale = draw(st.sampled_from([None, 0.5]))
    if bias:
        shapes.append((batch, heads, q, kv))
    return shapes, ["float32"] * len(shapes), 1, lambda emit, *a: op.nn.attention(*a, scale=scale)


@st.composite
def _arithmetic(draw, call):
    """Two tensors that broadcast, or a tensor and a number on either side."""
    shape, dtype = tuple(draw(st.lists(sizes, min_size=1, max_size=4))), draw(dtypes)
    number, left = relax.const(draw(st.sampled_from([0.5, 2.0, 3.0])), dtype), draw(st.booleans())
    if draw(st.booleans()):
        return [shape], [dtype], 1, lambda emit, x: call(number, x) if left else call(x, number)
    other = tuple(draw(st.sampled_from([1, n])) for n in shape)
    return [shape, other], [dtype] * 2, 1, lambda emit, x, y: call(x, y)


@st.composite
def _where(draw):
    shape, dtype = tuple(draw(st.lists(sizes, min_size=1, max_size=3))), draw(dtypes)
    if draw(st.booleans()):
        hidden = relax.const(float("-inf") if draw(st.booleans()) else 1.5, dtype)
        return [shape, shape], ["bool", dtype], 1, lambda emit, c, x: op.where(c, x, hidden)
    return [shape] * 3, ["bool", dtype, dtype], 1, lambda emit, c, x, y: op.where(c, x, y)


@st.composite
def _reduction(draw, call):
    shape, dtype = tuple(draw(st.lists(sizes, min_size=1, max_size=4))), draw(dtypes)
    axis = draw(st.one_of(st.none(), st.sets(st.integers(0, len(shape) - 1), min_size=1).map(sorted)))
    keepdims = draw(st.booleans())
    return [shape], [dtype], 1, lambda emit, x: call(x, axis, keepdims)


@st.composite
def _permute(draw):
    shape = tuple(draw(st.lists(sizes, min_size=1, max_size=4)))
    axes = draw(st.one_of(st.none(), st.permutations(range(len(shape)))))
    return [shape], [draw(dtypes)], 1, lambda emit, x: op.permute_dims(x, axes)


@st.composite
def _concat(draw):
    shape, axis, dtype = draw(st.lists(sizes, min_size=2, max_size=3)), draw(st.integers(-2, 1)), draw(dtypes)
    shapes = []
    for _ in range(draw(st.integers(1, 3))):
        shape[axis] = draw(sizes)
        shapes.append(tuple(shape))
    return shapes, [dtype] * len(shapes), 1, lambda emit, *a: op.concat(list(a), axis)


@st.composite
def _cut(draw):
    shape = tuple(draw(st.lists(sizes, min_size=1, max_size=4)))
    axes = draw(st.sets(st.integers(0, len(shape) - 1), min_size=1).map(sorted))
    begin = [draw(st.integers(0, shape[a] - 1)) for a in axes]
    end = [draw(st.integers(b + 1, shape[a])) for a, b in zip(axes, begin, strict=True)]
    return [shape], [draw(dtypes)], 1, lambda emit, x: op.strided_slice(x, axes, begin, end)


def _moved(call, *shape):
    return dtypes.map(lambda dtype: ([shape], [dtype], 1, lambda emit, x: call(x)))


@st.composite
def _take(draw):
    rows, shape = draw(st.integers(5, 9)), tuple(draw(st.lists(sizes, min_size=1, max_size=3)))
    types = [draw(dtypes), draw(st.sampled_from(["int32", "int64"]))]
    if draw(st.integers(0, 3)) == 0:
        index, axis = relax.const(draw(st.integers(0, 1)), "int64"), draw(st.integers(0, 1))
        return [(rows, 2, 3)], types[:1], 1, lambda emit, w: op.take(w, index, axis=axis)
    return [(rows, draw(sizes)), shape], types, 1, lambda emit, w, i: op.take(w, i, axis=0)


@st.composite
def _added_rows(draw):
    rows, width, count = draw(st.integers(5, 9)), draw(sizes), draw(sizes)
    shape = draw(st.sampled_from([(width,), (), (width, 2)]))
    dtype = draw(dtypes)
    shapes, types = (
        [(rows, *shape), (count, 1), (count, *shape)],
        [dtype, draw(st.sampled_from(["int32", "int64"])), dtype],
    )
    return shapes, types, 3, lambda emit, x, i, updates: op.scatter_nd(x, i, updates, "add")


STRATEGIES = {
    "matmul": _matmul(),
    "nn.conv2d": _conv2d(),
    "nn.max_pool2d": _pool(op.nn.max_pool2d),
    "nn.avg_pool2d": _pool(op.nn.avg_pool2d),
    "nn.softmax": _along(op.nn.softmax),
    "nn.log_softmax": _along(op.nn.log_softmax),
    "nn.layer_norm": _layer_norm(),
    "nn.gelu": _unary(op.nn.gelu),
    "nn.gelu_tanh": _unary(op.nn.gelu_tanh),
    "nn.silu": _unary(op.nn.silu),
    "nn.relu": _unary(op.nn.relu),
    "tanh": _unary(op.tanh),
    "sigmoid": _unary(op.sigmoid),
    "exp": _unary(op.exp),
    "erf": _unary(op.erf),
    "take": _take(),
    "nn.conv2d_transpose": _conv2d_transpose(),
    "nn.adaptive_avg_pool2d": _adaptive(st.sampled_from([(1, 1), (2, 4), (6, 8)])),
    "grad.max_pool2d_backward": _pool_backward(op.nn.max_pool2d, op.grad.max_pool2d_backward),
    "grad.avg_pool2d_backward": _pool_backward(op.nn.avg_pool2d, op.grad.avg_pool2d_backward),
    "nn.attention": _attention(),
    "nn.attention_bias": _attention(bias=True),
    "negative": _unary(op.negative),
    "abs": _unary(op.abs),
    "log": _unary(op.log),
    "sqrt": _unary(op.sqrt),
    "rsqrt": _unary(op.rsqrt),
    "clip": _unary(lambda x: op.clip(x, -1, 1)),
    **{name: _arithmetic(getattr(op, name)) for name in
       ("add", "subtract", "multiply", "divide", "power", "maximum", "minimum")},
    "where": _where(),
    **{name: _reduction(getattr(op, name)) for name in ("sum", "mean", "max", "min")},
    "reshape": _moved(lambda x: op.reshape(x, (4, -1)), 2, 6, 2),
    "expand_dims": _moved(lambda x: op.expand_dims(x, [0, 2]), 3, 4),
    "squeeze": _moved(lambda x: op.squeeze(x, [1]), 3, 1, 4),
    "permute_dims": _permute(),
    "concat": _concat(),
    "strided_slice": _cut(),
    "scatter_nd": _added_rows(),
}  # fmt: skip

_POSITIVE = {"log", "sqrt", "rsqrt", "power"}  # functions that are compared where they are defined


def test_the_tables_name_the_same_families():
    assert set(STEPS) == set(LIBRARY_FAMILIES) == set(STRATEGIES)
    assert set(WRITES) <= set(STEPS)
    assert not set(FOLDED) & set(STEPS)


@pytest.mark.parametrize("family", sorted(LIBRARY_FAMILIES))
def test_a_family_computes_what_tvm_computes(family, tmp_path):
    @FEW
    @given(STRATEGIES[family])
    def check(drawn):
        compare(model(*drawn), tmp_path, high=5, positive=family in _POSITIVE)

    check()


@st.composite
def _chain(draw):
    """A product, a bias or none, an activation or none: whatever `library_kernels` may join."""
    convolution, dtype = draw(st.booleans()), draw(st.sampled_from(["float32", "float64"]))
    activation = draw(st.sampled_from([None, op.nn.relu, op.nn.gelu, op.nn.gelu_tanh, op.nn.silu, op.tanh, op.sigmoid]))
    bias = draw(st.booleans()) or activation is None
    if convolution:
        (x, w), _, _, product = draw(_conv2d())
        b = draw(st.sampled_from([(1, w[0], 1, 1), (w[0], 1, 1)]))
    else:
        batch, m, k, n = tuple(draw(st.lists(sizes, max_size=2))), draw(sizes), draw(sizes), draw(sizes)
        x, w, b = (*batch, m, k), (k, n), draw(st.sampled_from([(n,), (1, n)]))

        def product(emit, x, w):
            return op.matmul(x, w)

    flip = draw(st.booleans())

    def build(emit, x, w, b=None):
        value = product(emit, x, w)
        if b is not None:
            value = emit(value)
            value = op.add(b, value) if flip else op.add(value, b)
        return activation(emit(value)) if activation else value

    shapes = [x, w, b] if bias else [x, w]
    return shapes, [dtype] * len(shapes), 1, build


@settings(FEW, max_examples=20)
@given(_chain())
def test_products_with_bias_and_activation(tmp_path, drawn):
    compare(model(*drawn), tmp_path)


@pytest.mark.parametrize("family", ["matmul", "nn.relu", "nn.softmax"])
def test_bfloat16(family, tmp_path):
    builds = {"matmul": op.matmul, "nn.relu": op.nn.relu, "nn.softmax": lambda x: op.nn.softmax(x, -1)}
    shapes = [(4, 6), (6, 5)] if family == "matmul" else [(4, 6)]
    compare(model(shapes, ["bfloat16"] * len(shapes), 1, lambda emit, *a: builds[family](*a)), tmp_path)


@pytest.mark.parametrize("family", sorted(WRITES))
def test_writing_in_place_equals_making_anew_also_from_strided_inputs(family):
    torch.manual_seed(0)
    attrs = {"axis": [1] if family in ("sum", "mean", "max", "min") else -1, "keepdims": False}
    inputs = [torch.rand(12, 8)[::2, ::2].t() + 0.1]  # neither dense nor in row order
    if family == "matmul":
        inputs.append(torch.randn(5, 6).t())
    if family == "take":
        inputs = [torch.randn(9, 10)[:, ::2], torch.arange(8)[::3]]
    if family in ("add", "subtract", "multiply", "divide", "power", "maximum", "minimum", "where", "concat"):
        inputs.append(torch.rand(6, 4).t())
    if family == "where":
        inputs.insert(0, torch.rand(6, 4).t() > 0.5)
    if family == "scatter_nd":
        inputs += [torch.tensor([[0], [3], [0]]), torch.rand(6, 3).t()]
    if family == "clip":
        inputs += [0.2, 0.7]
    want = STEPS[family](attrs)(inputs)
    out = torch.empty_like(want, memory_format=torch.contiguous_format)
    WRITES[family](attrs)(inputs, out)
    torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)


def attention_program(scale, mask):
    """The steps of attention over i0 = queries, i1 = keys, i2 = values, i3 = mask, keys permuted in place."""
    steps = [["permute_dims", {"axes": [0, 1, 3, 2]}, ["i1"]], ["matmul", {}, ["i0", "o0"]]]
    if scale:
        steps.append([scale, {}, [f"o{len(steps) - 1}", {"dtype": "float32", "value": 0.25}]])
    if mask == "where":
        steps.append(["where", {}, ["i3", f"o{len(steps) - 1}", {"dtype": "float32", "value": "-inf"}]])
    if mask == "add":
        steps.append(["add", {}, ["i3", f"o{len(steps) - 1}"]])
    steps.append(["nn.softmax", {"axis": -1}, [f"o{len(steps) - 1}"]])
    return [*steps, ["matmul", {}, [f"o{len(steps) - 1}", "i2"]]]


@pytest.mark.parametrize("scale", [None, "multiply", "divide"])
@pytest.mark.parametrize("mask", [None, "where", "add"])
def test_attention_folds_into_one_call_and_computes_the_same(scale, mask):
    torch.manual_seed(0)
    program = attention_program(scale, mask)
    assert [s.family for s in fold(program)] == ["permute_dims", "attention"]
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    hidden = torch.rand(5, 7) > 0.3 if mask == "where" else torch.randn(2, 1, 5, 7)
    scores = q @ k.transpose(-1, -2)
    scores = scores * {"multiply": 0.25, "divide": 4.0, None: 1.0}[scale]
    if mask == "where":
        hidden[:, 0] = True  # a row that sees nothing has no softmax
        scores = torch.where(hidden, scores, float("-inf"))
    elif mask == "add":
        scores = scores + hidden
    out = torch.empty(2, 3, 5, 4)
    compile_spec(json.dumps(program))([q, k, v, *([hidden] if mask else [])], out)
    torch.testing.assert_close(out, torch.softmax(scores, -1) @ v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_residual_folds_into_its_convolution(dtype, relu, bias):
    torch.manual_seed(0)
    attrs = {"strides": [2, 1], "padding": [1, 0, 1, 0], "dilation": [1, 1], "groups": 2}
    steps = [["nn.conv2d", attrs, ["i0", "i1"]]] + [["bias", {}, ["o0", "i2"]]] * bias
    steps.append(["add", {}, ["i3", f"o{len(steps) - 1}"]])
    steps += [["nn.relu", {}, [f"o{len(steps) - 1}"]]] * relu
    assert [s.family for s in fold(steps)] == ["conv2d_residual"]
    x, w, b = (torch.randn(s, dtype=dtype) for s in ((2, 4, 6, 5), (6, 2, 3, 1), (1, 6, 1, 1)))
    want = torch.nn.functional.conv2d(x, w, b.reshape(-1) if bias else None, (2, 1), (1, 0), 1, 2)
    other = torch.randn_like(want)
    out = torch.empty_like(want)
    compile_spec(json.dumps(steps))([x, w, b, other], out)
    want = want + other
    torch.testing.assert_close(out, torch.relu(want) if relu else want, rtol=1e-5, atol=1e-5)


@FEW
@given(st.lists(sizes, min_size=1, max_size=4), st.data(), dtypes, st.booleans(), st.booleans())
def test_the_gradient_of_a_softmax_is_one_library_kernel(tmp_path, shape, data, dtype, flip, flip_too):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))

    def build(emit, *operands):
        both, y = emit(op.multiply(*operands)), operands[0 if flip else 1]
        total = emit(op.sum(both, axis=[axis], keepdims=True))
        shared = emit(op.multiply(total, y) if flip_too else op.multiply(y, total))
        return op.subtract(both, shared)

    mod = model([shape, shape], [dtype] * 2, 2, build)
    graph = extract(mod)
    assert [s.family for s in fold(json.loads(library_spec(graph, (0, 1, 2, 3))))] == ["softmax_backward"]
    compare(mod, tmp_path)


@pytest.mark.parametrize("what", ["no axis kept", "of another tensor", "the other way round", "read outside"])
def test_what_is_no_gradient_of_a_softmax_is_not_joined(what):
    def build(emit, g, y):
        both = emit(op.multiply(g, y))
        total = emit(op.sum(both, axis=[0], keepdims=what != "no axis kept"))
        shared = emit(op.multiply(op.exp(y) if what == "of another tensor" else y, total))
        out = op.subtract(shared, both) if what == "the other way round" else op.subtract(both, shared)
        return op.add(emit(out), both) if what == "read outside" else out

    graph = extract(model([(4, 4)] * 2, ["float32"] * 2, 2, build))
    assert all(len(k.ops) == 1 for k in library_kernels(graph))


@FEW
@given(st.data(), dtypes, st.booleans(), *[st.integers(1, 3)] * 4)
def test_the_gradient_of_a_convolutions_weight_is_one_library_kernel(
    tmp_path, data, dtype, own, kernel, stride, dilation, batch
):
    padding = data.draw(st.integers(0, 2))
    height = data.draw(st.integers(max(1, dilation * (kernel - 1) + 1 - 2 * padding), 9))
    rows = (height + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    made = (height + 2 * padding - stride * (rows - 1) - 1) // dilation + 1

    def build(emit, x, gradient):
        if own:
            x, gradient = (emit(op.permute_dims(a, [1, 0, 2, 3])) for a in (x, gradient))
        walk = {"strides": [dilation] * 2, "padding": [padding] * 4, "dilation": [stride] * 2}
        product = emit(op.nn.conv2d(x, gradient, **walk))
        if made != kernel:
            product = emit(op.strided_slice(product, [2, 3], [0, 0], [kernel, kernel]))
        return op.permute_dims(product, [1, 0, 2, 3])

    channels = ((batch, 3), (batch, 2)) if own else ((3, batch), (2, batch))
    mod = model([(*channels[0], height, height), (*channels[1], rows, rows)], [dtype] * 2, 2, build)
    graph = extract(mod)
    whole = max((k.ops for k in library_kernels(graph)), key=len)
    assert len(whole) == len(graph.operators)
    assert fold(json.loads(library_spec(graph, whole)))[-1].family == "conv2d_weight_gradient"
    compare(mod, tmp_path)


@pytest.mark.parametrize("what", ["another exchange", "cut channels", "cut too much", "read outside"])
def test_what_is_no_gradient_of_a_weight_is_not_joined(what):
    def build(emit, x, gradient):
        product = emit(op.nn.conv2d(x, gradient, dilation=[2, 2]))
        last = [2, 2, 1, 1] if what == "cut too much" else [2, 2, 3, 3]
        if what.startswith("cut"):
            product = emit(op.strided_slice(product, [0, 1, 2, 3], [0, 1 if what == "cut channels" else 0, 0, 0], last))
        out = op.permute_dims(product, [1, 0, 3, 2] if what == "another exchange" else [1, 0, 2, 3])
        return op.add(emit(out), emit(op.permute_dims(product, [1, 0, 2, 3]))) if what == "read outside" else out

    graph = extract(model([(2, 2, 9, 9), (2, 2, 4, 4)], ["float32"] * 2, 2, build))
    ops = [[graph.operators[i].family for i in k.ops] for k in library_kernels(graph)]
    assert not any("nn.conv2d" in o and "permute_dims" in o for o in ops)


def test_a_result_used_twice_and_inputs_in_any_order():
    spec = json.dumps([["matmul", {}, ["i1", "i0"]], ["bias", {}, ["o0", "i2"]], ["nn.relu", {}, ["o1"]]])
    w, x, b = torch.randn(6, 5), torch.randn(2, 3, 6), torch.randn(1, 5)
    out = torch.empty(2, 3, 5)
    compile_spec(spec)([w, x, b], out)
    torch.testing.assert_close(out, torch.relu(x @ w + b))


@pytest.mark.parametrize("spec", ["", "[]", "{}", '[["no.such.family", {}, ["i0"]]]', '[["bias", {}, ["o0", "i1"]]]'])
def test_a_spec_that_cannot_be_run_is_refused(spec):
    with pytest.raises(BadBundle, match="TVMHET-E011"):
        compile_spec(spec)


def test_a_failing_call_carries_the_kernels_name():
    spec = json.dumps([["take", {"axis": 0, "mode": "fast"}, ["i0", "i1"]]])
    call = tvm.get_global_func(LIBRARY_FUNCTION)
    table, index, out = (tvm.runtime.tensor(a) for a in (
        np.zeros((3, 2), "float32"), np.array([7], "int64"), np.zeros((1, 2), "float32")))  # fmt: skip
    with pytest.raises(Exception, match=r"library kernel take on \(3, 2\) float32, \(1,\) int64[\s\S]*range"):
        call(spec, table, index, out)


def test_the_spec_of_a_real_graph_runs():
    drawn = (
        [(2, 6), (6, 5), (5,)],
        ["float32"] * 3,
        1,
        lambda emit, x, w, b: op.nn.relu(emit(op.add(emit(op.matmul(x, w)), b))),
    )
    graph = extract(model(*drawn))
    x, w, b = torch.randn(2, 6), torch.randn(6, 5), torch.randn(5)
    out = torch.empty(2, 5)
    compile_spec(library_spec(graph, (0, 1, 2)))([x, w, b], out)
    torch.testing.assert_close(out, torch.relu(x @ w + b))


def test_clipped_rows_take_the_nearest_row():
    spec = json.dumps([["take", {"axis": 0, "mode": "clip"}, ["i0", "i1"]]])
    table, out = torch.arange(6.0).reshape(3, 2), torch.empty(4, 2)
    compile_spec(spec)([table, torch.tensor([-5, 0, 2, 9])], out)
    assert out.tolist() == [[0, 1], [0, 1], [4, 5], [4, 5]]
