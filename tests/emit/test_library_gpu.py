"""Library kernels on an NVIDIA GPU: every family computes there what it computes on the CPU. Skipped without one."""

import json

import pytest
import torch
from hypothesis import given

from tests.emit.library_cases import FEW, TOLERANCE, arguments, model
from tests.emit.test_library import POSITIVE, STRATEGIES
from tvmhet.emit.library import compile_spec
from tvmhet.graph.library import LIBRARY_FAMILIES, library_spec
from tvmhet.ir.extract import extract

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU, which library kernels need"),
]


@pytest.mark.parametrize("family", sorted(LIBRARY_FAMILIES))
def test_a_family_computes_on_a_gpu_what_it_computes_on_the_cpu(family):
    @FEW
    @given(STRATEGIES[family])
    def check(drawn):
        mod = model(*drawn)
        graph = extract(mod)
        run = compile_spec(library_spec(graph, tuple(range(len(graph.operators)))))
        result = graph.tensors[graph.outputs[0]]
        given_here = [torch.from_dlpack(a) for a in arguments(mod, 5, family in POSITIVE)]
        want = torch.full(result.shape, 77, dtype=getattr(torch, result.dtype))
        run(given_here, want)
        got = torch.full_like(want, 55, device="cuda")
        run([t.cuda() for t in given_here], got)
        scale = max(1.0, float(want.double().nan_to_num(0, 0, 0).abs().max()))
        atol = TOLERANCE.get(result.dtype, 0.0) * scale
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=atol, equal_nan=True)

    check()


def conv(channels, out, side, window, stride, chain, num=1, groups=1):
    """A convolution and what follows it, as a program and its operands' shapes."""
    pad = window // 2
    attrs = {"strides": [stride] * 2, "padding": [pad] * 4, "dilation": [1, 1], "groups": groups}
    size = (side + 2 * pad - window) // stride + 1
    shapes = [(num, channels, side, side), (out, channels // groups, window, window)]
    return _chain([["nn.conv2d", attrs, ["i0", "i1"]]], shapes, chain, (1, out, 1, 1), (num, out, size, size))


def product(m, k, n, chain):
    """A product and what follows it."""
    return _chain([["matmul", {}, ["i0", "i1"]]], [(m, k), (k, n)], chain, (n,), (m, n))


def _chain(steps, shapes, chain, bias, result):
    for family in chain:
        before = f"o{len(steps) - 1}"
        if family in ("bias", "add"):
            shapes.append(bias if family == "bias" else result)
            steps.append([family, {}, [before, f"i{len(shapes) - 1}"]])
        else:
            steps.append([family, {}, [before]])
    return steps, shapes, result


CHAINS = {
    "3 x 3, relu": conv(8, 6, 9, 3, 2, ["bias", "nn.relu"]),
    "3 x 3, residual, relu": conv(8, 6, 9, 3, 1, ["bias", "add", "nn.relu"], num=2),
    "residual alone": conv(8, 6, 9, 3, 1, ["add"]),
    "by channel, relu": conv(8, 8, 9, 3, 1, ["bias", "nn.relu"], groups=8),
    "1 x 1 of many channels, relu": conv(1024, 8, 7, 1, 1, ["bias", "nn.relu"]),
    "1 x 1 of many channels, residual": conv(1024, 8, 7, 1, 1, ["bias", "add", "nn.relu"], num=2),
    "1 x 1 alone": conv(64, 8, 7, 1, 1, [], num=2),
    "1 x 1 with a bias": conv(64, 8, 7, 1, 1, ["bias"], num=2),
    "1 x 1 of many channels, strides": conv(1024, 8, 7, 1, 2, ["nn.relu"]),
    "product, bias": product(128, 768, 96, ["bias"]),
    "product, bias, gelu": product(128, 768, 96, ["bias", "nn.gelu"]),
    "a row, bias": product(1, 768, 96, ["bias"]),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_computes_on_a_gpu_what_it_computes_on_the_cpu_in_double_precision(name, dtype):
    steps, shapes, result = CHAINS[name]
    torch.manual_seed(0)
    operands = [torch.randn(s).to(getattr(torch, dtype)) for s in shapes]
    run = compile_spec(json.dumps(steps))
    want = torch.full(result, 77.0, dtype=torch.float64)
    run([t.double() for t in operands], want)
    got = torch.full(result, 55, dtype=getattr(torch, dtype), device="cuda")
    run([t.cuda() for t in operands], got)
    scale = float(want.abs().max())
    torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=TOLERANCE[dtype] * scale)
