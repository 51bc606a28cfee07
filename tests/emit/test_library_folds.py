"""Operators that become one call of the library: attention, a convolution's residual, gradients; and what must not."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax

from tests.emit.library_cases import FEW, compare, dtypes, model, sizes
from tvmhet.emit.library import compile_spec
from tvmhet.emit.library_cudnn import ConvolutionOnGpu
from tvmhet.emit.library_folds import fold
from tvmhet.graph.library import library_kernels, library_spec
from tvmhet.ir.extract import extract

op = relax.op


def attention_program(scale, mask, rank=4):
    """The steps of attention over i0 = queries, i1 = keys, i2 = values, i3 = mask, keys permuted in place."""
    axes = [*range(rank - 2), rank - 1, rank - 2]
    steps = [["permute_dims", {"axes": axes}, ["i1"]], ["matmul", {}, ["i0", "o0"]]]
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
@pytest.mark.parametrize("lead", [(2, 3), (6,), (), (2, 1, 3)])
def test_attention_folds_into_one_call_and_computes_the_same(scale, mask, lead):
    torch.manual_seed(0)
    program = attention_program(scale, mask, len(lead) + 2)
    assert [s.family for s in fold(program)] == ["permute_dims", "attention"]
    q, k, v = torch.randn(*lead, 5, 4), torch.randn(*lead, 7, 4), torch.randn(*lead, 7, 4)
    hidden = torch.rand(5, 7) > 0.3 if mask == "where" else torch.randn(*(1 if n == 3 else n for n in lead), 5, 7)
    scores = q @ k.transpose(-1, -2)
    scores = scores * {"multiply": 0.25, "divide": 4.0, None: 1.0}[scale]
    if mask == "where":
        hidden[:, 0] = True  # a row that sees nothing has no softmax
        scores = torch.where(hidden, scores, float("-inf"))
    elif mask == "add":
        scores = scores + hidden
    out = torch.empty(*lead, 5, 4)
    compile_spec(json.dumps(program))([q, k, v, *([hidden] if mask else [])], out)
    torch.testing.assert_close(out, torch.softmax(scores, -1) @ v, rtol=1e-5, atol=1e-5)


def convolution(bias, dtype, *after):
    """The steps of a convolution of i0 by i1, perhaps with a bias i2, then of others; its operands, and its result."""
    torch.manual_seed(0)
    attrs = {"strides": [2, 1], "padding": [1, 0, 1, 0], "dilation": [1, 1], "groups": 2}
    steps = [["nn.conv2d", attrs, ["i0", "i1"]]] + [["bias", {}, ["o0", "i2"]]] * bias
    for family, *others in after:
        steps.append([family, {}, [*others, f"o{len(steps) - 1}"]])
    operands = [torch.randn(s, dtype=dtype) for s in ((2, 4, 6, 5), (6, 2, 3, 1), (1, 6, 1, 1))]
    x, w, b = operands
    return steps, operands, torch.nn.functional.conv2d(x, w, b.reshape(-1) if bias else None, (2, 1), (1, 0), 1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_residual_folds_into_its_convolution(dtype, relu, bias):
    steps, operands, want = convolution(bias, dtype, ("add", "i3"), *[("nn.relu",)] * relu)
    assert [s.family for s in fold(steps)] == ["convolution_residual"]
    other = torch.randn_like(want)
    out = torch.empty_like(want)
    compile_spec(json.dumps(steps))([*operands, other], out)
    want = want + other
    torch.testing.assert_close(out, torch.relu(want) if relu else want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_a_relu_folds_into_its_convolution(dtype, bias, last):
    steps, operands, want = convolution(bias, dtype, ("nn.relu",), *[] if last else [("tanh",)])
    assert [s.family for s in fold(steps)] == ["convolution_relu", *([] if last else ["tanh"])]
    out = torch.empty_like(want)
    compile_spec(json.dumps(steps))(operands, out)
    want = torch.relu(want)
    torch.testing.assert_close(out, want if last else torch.tanh(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("residual", [False, True])
def test_where_cudnn_has_no_kernel_a_relu_follows_its_convolution(residual, monkeypatch):
    """As on this CPU, for which cuDNN has none; float64, which oneDNN does not join."""
    tried = []
    monkeypatch.setattr(ConvolutionOnGpu, "_joins", lambda *_: tried.append(1) or True)
    steps, operands, want = convolution(True, torch.float64, *[("add", "i3")] * residual, ("nn.relu",), ("tanh",))
    other = torch.randn_like(want)
    run, out = compile_spec(json.dumps(steps)), torch.empty_like(want)
    for _ in range(2):
        run([*operands, other], out)
        torch.testing.assert_close(out, torch.tanh(torch.relu(want + other if residual else want)))
    assert len(tried) == 2  # asked again, and left for good


def test_a_convolution_read_twice_keeps_its_relu_apart():
    attrs = {"strides": [1, 1], "padding": [0] * 4, "dilation": [1, 1], "groups": 1}
    steps = [["nn.conv2d", attrs, ["i0", "i1"]], ["nn.relu", {}, ["o0"]], ["multiply", {}, ["o0", "o1"]]]
    assert [s.family for s in fold(steps)] == ["nn.conv2d", "nn.relu", "multiply"]


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
