"""Library kernels: every family computes what TVM's kernel of the same operators computes, on random shapes."""

import json

import numpy as np
import pytest
import torch
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from tests.emit.library_cases import FEW, compare, dtypes, model, sizes
from tvmhet.emit.library import compile_spec
from tvmhet.emit.library_steps import FOLDED, STEPS, WRITES
from tvmhet.errors import BadBundle
from tvmhet.graph.library import LIBRARY_FAMILIES, library_spec
from tvmhet.graph.library_rows import CONVOLUTIONS
from tvmhet.ir.attrs import LIBRARY_FUNCTION
from tvmhet.ir.extract import extract

op = relax.op


# ---- one strategy per family: (shapes, dtypes, number of inputs, builder)


@st.composite
def _matmul(draw):
    m, k, n, dtype = draw(sizes), draw(sizes), draw(sizes), draw(dtypes)
    batch = draw(st.sampled_from([((), ()), ((2,), ()), ((3, 2), (3, 2)), ((2, 1), (3,)), ((), (2,))]))
    return [(*batch[0], m, k), (*batch[1], k, n)], [dtype] * 2, 1, lambda emit, x, w: op.matmul(x, w)


CONVOLUTION_OF = {1: op.nn.conv1d, 2: op.nn.conv2d, 3: op.nn.conv3d}


@st.composite
def _convolution(draw, rank):
    groups, per, out, dtype = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(dtypes)
    kernel, strides, dilation, padding = (
        [draw(st.integers(*of)) for _ in range(rank)] for of in ((1, 3), (1, 3), (1, 2), (0, 2))
    )
    shapes = [(draw(st.integers(1, 2)), groups * per, *(7, 6, 5)[:rank]), (groups * out, per, *kernel)]
    options = {"strides": strides, "padding": padding * 2, "dilation": dilation, "groups": groups}
    return shapes, [dtype] * 2, 1, lambda emit, x, w: CONVOLUTION_OF[rank](x, w, **options)


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


TRANSPOSED_OF = {1: op.nn.conv1d_transpose, 2: op.nn.conv2d_transpose, 3: op.nn.conv3d_transpose}


@st.composite
def _convolution_transpose(draw, rank):
    groups, per, out, dtype = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(dtypes)
    strides, kernel = ([draw(st.integers(1, most)) for _ in range(rank)] for most in (2, 3))
    padding = [draw(st.integers(0, k - 1)) for k in kernel]
    extra = [draw(st.integers(0, s - 1)) for s in strides]
    options = {"strides": strides, "padding": padding * 2, "output_padding": extra, "groups": groups}
    shapes = [(2, groups * per, *(5, 4, 3)[:rank]), (groups * per, out, *kernel)]
    return shapes, [dtype] * 2, 1, lambda emit, x, w: TRANSPOSED_OF[rank](x, w, **options)


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
    **{f"nn.conv{rank}d": _convolution(rank) for rank in (1, 2, 3)},
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
    **{f"nn.conv{rank}d_transpose": _convolution_transpose(rank) for rank in (1, 2, 3)},
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

POSITIVE = {"log", "sqrt", "rsqrt", "power"}  # functions that are compared where they are defined


def test_the_tables_name_the_same_families():
    assert set(STEPS) == set(LIBRARY_FAMILIES) == set(STRATEGIES)
    assert set(WRITES) <= set(STEPS) | set(FOLDED)
    assert not set(FOLDED) & set(STEPS)


@pytest.mark.parametrize("family", sorted(LIBRARY_FAMILIES))
def test_a_family_computes_what_tvm_computes(family, tmp_path):
    @FEW
    @given(STRATEGIES[family])
    def check(drawn):
        compare(model(*drawn), tmp_path, high=5, positive=family in POSITIVE)

    check()


@st.composite
def _chain(draw):
    """A product, a bias or none, an activation or none: whatever `library_kernels` may join."""
    convolution, dtype = draw(st.booleans()), draw(st.sampled_from(["float32", "float64"]))
    activation = draw(st.sampled_from([None, op.nn.relu, op.nn.gelu, op.nn.gelu_tanh, op.nn.silu, op.tanh, op.sigmoid]))
    bias = draw(st.booleans()) or activation is None
    if convolution:
        rank = draw(st.sampled_from([1, 2, 3]))
        (x, w), _, _, product = draw(_convolution(rank))
        b = draw(st.sampled_from([(1, w[0], *[1] * rank), (w[0], *[1] * rank)]))
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


@settings(FEW, max_examples=30)
@given(_chain())
def test_products_with_bias_and_activation(tmp_path, drawn):
    compare(model(*drawn), tmp_path)


def test_along_three_axes_onednn_convolves_on_a_cpu(monkeypatch):
    """One core of torch's own would gather windows that move by one."""
    x, w = torch.randn(1, 3, 5, 6, 7), torch.randn(4, 3, 3, 3, 3)
    want = torch.nn.functional.conv3d(x, w, padding=1)
    monkeypatch.setattr(torch.nn.functional, "conv3d", None)
    attrs = {"strides": [1] * 3, "padding": [1] * 6, "dilation": [1] * 3, "groups": 1}
    torch.testing.assert_close(STEPS["nn.conv3d"](attrs)([x, w]), want)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_convolution_with_a_residual(rank, bias, relu, dtype, tmp_path):
    def build(emit, x, w, *others):
        *biases, y = others
        made = CONVOLUTION_OF[rank](x, w, padding=[1] * 2 * rank)
        for b in biases:
            made = op.add(emit(made), b)
        total = op.add(emit(made), y)
        return op.nn.relu(emit(total)) if relu else total

    image = (7, 6, 5)[:rank]
    shapes = [(2, 3, *image), (4, 3, *[3] * rank), *([(4, *[1] * rank)] if bias else []), (2, 4, *image)]
    compare(model(shapes, [dtype] * len(shapes), 1, build), tmp_path)


@pytest.mark.parametrize("family", ["matmul", "nn.relu", "nn.softmax"])
def test_bfloat16(family, tmp_path):
    builds = {"matmul": op.matmul, "nn.relu": op.nn.relu, "nn.softmax": lambda x: op.nn.softmax(x, -1)}
    shapes = [(4, 6), (6, 5)] if family == "matmul" else [(4, 6)]
    compare(model(shapes, ["bfloat16"] * len(shapes), 1, lambda emit, *a: builds[family](*a)), tmp_path)


@pytest.mark.parametrize("family", sorted(set(WRITES) & set(STEPS)))
def test_writing_in_place_equals_making_anew_also_from_strided_inputs(family):
    torch.manual_seed(0)
    attrs = {"axis": [1] if family in ("sum", "mean", "max", "min") else -1, "keepdims": False}
    rank = int(family[-2]) if family in CONVOLUTIONS else 2
    attrs |= {"strides": [1] * rank, "padding": [1] * 2 * rank, "dilation": [1] * rank, "groups": 1}
    inputs = [torch.rand(12, 8)[::2, ::2].t() + 0.1]  # neither dense nor in row order
    if family == "matmul":
        inputs.append(torch.randn(5, 6).t())
    if family in CONVOLUTIONS:
        image, window = torch.randn(2, *(9, 10, 7)[:rank], 3), torch.randn(*[3] * rank, 3, 4)
        inputs = [image.movedim(-1, 1), window.movedim((-1, -2), (0, 1))]
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
