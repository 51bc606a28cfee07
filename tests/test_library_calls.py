"""Library kernels on a GPU are priced as the calls they make."""

import json

import pytest
import torch
from torch import nn

import tvmhet
from tvmhet import zoo
from tvmhet.cost.boosted import LearnedModel
from tvmhet.cost.model import KernelDesc, OpDesc
from tvmhet.cost.predict import Assumed
from tvmhet.cost.workload import counts, kernel_of
from tvmhet.emit.library_folds import fold
from tvmhet.emit.library_products import is_long_product, is_product_on_gpu
from tvmhet.emit.library_steps import WRITES
from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.library import library_kernels, library_spec
from tvmhet.ir.prepare import prepare
from tvmhet.library_calls import library_calls, result_copy
from tvmhet.times import Candidates, gpu_entries, time_table


def op(family, *sizes, name="", dtype="float32"):
    return OpDesc(family, sizes, dtype, name)


def ends(*names, write=25_088, bias=512):
    """Element-wise operators on one tensor; "bias" is the addition of a value per channel."""
    reads = {"bias": write + bias, "add": 2 * write}
    return [
        op("elementwise", reads.get(name, write), write, name=name.replace("bias", "add"))
        for name in names
    ]  # fmt: skip


def kernel(*ops):
    flop, read, write = (sum(values) for values in zip(*map(counts, ops), strict=True))
    return KernelDesc(tuple(ops), flop, 4 * read, 4 * write, ops[0].dtype, "library")


def names(desc):
    """The family of each call, or its operator's name."""
    return [call.root.name or call.root.family for call in library_calls(desc)]


CONV = op("conv2d", 1, 512, 7, 7, 512, 3, 3, 7, 7, 1)
WIDE_CONV = op("conv2d", 1, 512, 7, 7, 512, 1, 7, 7, 7, 1)
TRANSPOSED = op("conv2d", 1, 512, 7, 7, 512, 3, 3, 7, 7, 1, name="transpose")
BY_CHANNEL = op("conv2d", 1, 512, 7, 7, 512, 3, 3, 7, 7, 512)
POINTWISE, STRIDED = (
    op("conv2d", 1, 64, 56, 56, 256, 1, 1, 56, 56, 1),
    op("conv2d", 1, 64, 56, 56, 256, 1, 1, 28, 28, 1),
)
LONG = op("conv2d", 1, 2048, 7, 7, 512, 1, 1, 7, 7, 1)
FEW_RESULTS, MANY_RESULTS = op("linear", 1, 128, 768, 3072), op("linear", 1, 1024, 3072, 768)
POOL, NORM = op("pooling", 1, 8, 8, 8, 2, 2, 4, 4), op("layer_norm", 128, 768)
MOVE = op("movement", 98_304, 98_304, name="permute_dims")


@pytest.mark.parametrize(
    "ops, want",
    [
        ([CONV], ["conv2d"]),
        ([CONV, *ends("bias")], ["conv2d", "add"]),
        ([CONV, *ends("relu")], ["conv2d", "copy"]),
        ([CONV, *ends("bias", "relu")], ["conv2d", "copy"]),
        ([CONV, *ends("bias", "add", "relu")], ["conv2d", "copy"]),
        ([CONV, *ends("add", "relu", "tanh")], ["conv2d", "tanh"]),
        ([CONV, *ends("bias", "add")], ["conv2d", "add", "add"]),
        ([WIDE_CONV, *ends("bias", "relu")], ["conv2d", "copy"]),
        ([TRANSPOSED, *ends("bias", "relu")], ["transpose", "add", "relu", "copy"]),
        ([BY_CHANNEL, *ends("bias", "relu")], ["conv2d", "relu"]),
        ([LONG, *ends("bias", "relu")], ["linear", "add", "relu"]),
        ([POINTWISE, *ends("bias", "relu")], ["conv2d", "copy"]),
        ([POINTWISE, *ends("bias", "tanh")], ["linear", "add", "tanh"]),
        ([STRIDED, *ends("bias")], ["conv2d", "add"]),
        ([FEW_RESULTS, *ends("bias", "gelu")], ["linear", "add", "gelu"]),
        ([MANY_RESULTS, *ends("bias", "gelu")], ["linear", "gelu"]),
        ([FEW_RESULTS, *ends("add")], ["linear", "add"]),
        ([MOVE, FEW_RESULTS], ["linear"]),
        ([FEW_RESULTS, MOVE], ["linear", "copy"]),
        ([POOL], ["pooling", "copy"]),
        ([NORM], ["layer_norm", "copy"]),
        ([MOVE], ["permute_dims"]),
        (ends("add", "relu"), ["add", "relu"]),
    ],
)
def test_what_is_joined_is_one_call(ops, want):
    assert names(kernel(*ops)) == want


def test_a_lone_operator_is_its_own_call():
    assert library_calls(kernel(FEW_RESULTS)) == (kernel_of(FEW_RESULTS),)


def test_what_is_copied_is_the_result():
    _, copy = library_calls(kernel(CONV, *ends("relu")))
    assert copy.read_bytes == copy.write_bytes == 4 * 25_088


@pytest.mark.parametrize("mask", [None, "where", "add"])
def test_attention_is_one_operator(mask):
    scores, softmax = op("matmul", 12, 128, 256, 64), op("softmax", 12 * 128, 256)
    inside = ends("multiply", *filter(None, [mask]), write=12 * 128 * 256)
    desc = kernel(MOVE, scores, *inside, softmax, op("matmul", 12, 128, 64, 256))
    *made, attention, copy = library_calls(desc)
    assert copy.write_bytes == 4 * 12 * 128 * 64
    assert [call.root.name for call in made] == (["where"] if mask == "where" else [])
    assert attention.root.family == "attention_prefill"
    assert attention.root.sizes == (1, 12, 12, 128, 256, 64, 0)
    assert attention.flop == pytest.approx(sum(counts(o)[0] for o in desc.ops if o.family == "matmul"))


def test_the_gradient_of_a_softmax_is_one_call():
    rows, cols = 128, 64
    both, minus = (ends(name, write=rows * cols)[0] for name in ("multiply", "subtract"))
    call, _ = library_calls(kernel(both, op("reduction", rows, cols, name="sum"), both, minus))
    assert (call.root.family, call.root.sizes, call.root.backward) == ("softmax", (rows, cols), True)


class OnGpu:
    """As much of a tensor as the library's rules look at."""

    device, dtype = torch.device("cuda"), torch.float32

    def __init__(self, *shape):
        self.shape = shape


@pytest.mark.parametrize("c, oc, pixels", [(192, 256, 14), (191, 256, 14), (2048, 512, 7)])
def test_products_are_those_of_the_library(c, oc, pixels):
    conv = op("conv2d", 1, c, pixels, pixels, oc, 1, 1, pixels, pixels, 1)
    tensors = OnGpu(1, c, pixels, pixels), OnGpu(oc, c, 1, 1), (0, 0), 1
    assert is_product_on_gpu(*tensors) and names(kernel(conv)) == ["linear"]
    joined = names(kernel(conv, *ends("bias", "relu")))
    assert joined == (["linear", "add", "relu"] if is_long_product(*tensors) else ["conv2d", "copy"])


class Tail(nn.Module):
    """A convolution that nothing joins with what follows it."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(64, 64, (1, 7), padding=(0, 3))

    def forward(self, x):
        return torch.tanh(torch.relu(self.conv(x)))


def test_a_plan_fuses_behind_a_convolution_that_joins_nothing():
    """The library would take three passes over the result; a generated kernel takes one."""
    model = tvmhet.from_torch(Tail().eval(), (torch.randn(1, 64, 56, 56),))
    plan = tvmhet.plan(model, cluster=tvmhet.ClusterSpec.of({"h100-sxm-80gb": 1}))
    kernels = [k for stage in plan.stages for k in stage.kernels]
    assert [(k.maker, len(k.ops)) for k in kernels] == [("library", 1), ("tvm", 3)]


def test_no_generated_kernel_takes_less_than_its_launch():
    """Generated pooling takes a third of the library's time, but as long to start."""
    device = tvmhet.device_type("h100-sxm-80gb")
    pool = op("pooling", 1, 1, 4, 4, 2, 2, 2, 2, name="avg_pool2d")
    kernels = [LegalKernel((0,), maker) for maker in ("library", "tvm")]
    descs = tuple(kernel_of(pool, kernel.maker) for kernel in kernels)
    library_s, generated_s = time_table(
        Candidates(tuple(kernels), ("a", "b"), descs, ("pool",)), [device], None
    ).seconds
    assert device.launch_s <= generated_s < 1.1 * device.launch_s < library_s


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("maker", ["library", "tvm"])
def test_queued_predictions_are_those_of_plans(maker, dtype):
    device = tvmhet.device_type("a100-40gb")
    ops = [
        op("linear", 1, 128, 768, 3072, dtype=dtype), op("embedding", 128, 1000, 64, dtype=dtype),
        op("reduction", 128, 64, name="sum", dtype=dtype), op("generic", dtype=dtype),
    ]  # fmt: skip
    descs = [kernel_of(o, maker) for o in ops]
    predicted = Assumed(device, LearnedModel.load(device, "queued"), queued=True).predict(descs).seconds
    assert [e.seconds for e in gpu_entries(device, descs)] == pytest.approx(list(predicted))


class Net(nn.Module):
    """Convolutions that end in every way, pooling and norms."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(5))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        a, b, c, d, e = self.convs
        x = a(x)
        x = torch.relu(b(x))
        x = torch.relu(x + c(x))
        x = x + d(x)
        x = nn.functional.max_pool2d(torch.sigmoid(e(x)), 2)
        x = nn.functional.adaptive_avg_pool2d(x, 1).flatten(1)
        return torch.softmax(nn.functional.gelu(self.head(self.norm(x))), dim=-1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (Net().eval(), (torch.randn(2, 4, 8, 8),)),
        lambda: zoo.get("bert_base", layers=1, length=8, vocab=50),
    ],
    ids=["convolutions", "attention"],
)
def test_what_is_copied_is_what_the_library_does_not_write_in_place(make):
    """Against the steps that the library's programs end in; on a GPU cuDNN's relu is copied, too."""
    graph = prepare(tvmhet.from_torch(*make())).graph
    kernels = library_kernels(graph)
    seen = set()
    for kernel_, desc in zip(kernels, Candidates.of(graph, kernels).descs, strict=True):
        end = fold(json.loads(library_spec(graph, kernel_.ops)))[-1]
        last, joined = end.family, end.family == "convolution_relu" or end.attrs.get("relu", False)
        if any(op.family != "movement" for op in desc.ops):  # movement alone is a copy by itself
            copied = last not in WRITES or joined
            assert bool(result_copy(desc)) == copied, last
            seen.add((last, copied))
    assert {copied for _, copied in seen} == {True, False} and len(seen) >= 3
