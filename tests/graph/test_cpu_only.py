"""graph/attention, graph/prologues and graph/bags: which kernels they name, and that CPUs alone run them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.emit.cpu.kernels import target
from tvmhet.candidates import candidate_kernels
from tvmhet.cluster.catalog import device_type
from tvmhet.emit.lower import scheduled_kernels
from tvmhet.emit.schedule import ScheduleReport
from tvmhet.graph.attention import attention_kernels, attention_of
from tvmhet.graph.bags import bag_kernels
from tvmhet.graph.fusion import legal_kernels
from tvmhet.graph.placement import KernelPlacement
from tvmhet.graph.pooled import pooled_products
from tvmhet.graph.prologues import with_prologues
from tvmhet.ir.extract import extract
from tvmhet.ir.importers import from_torch
from tvmhet.ir.kernel_module import kernels_module
from tvmhet.ir.transform.name_operators import NameOperators
from tvmhet.times import Candidates, time_table


class Words(nn.Module):
    """Heads of a transformer; `change` stands between scores and softmax."""

    def __init__(self, change=lambda s: s, axis=-1, width=8, keep=False):
        super().__init__()
        self.change, self.axis, self.width, self.keep = change, axis, width, keep

    def forward(self, q, k, v):
        q, k, v = (x.view(1, x.shape[1], 2, -1).transpose(1, 2) for x in (q, k, v))
        scores = torch.softmax(self.change(q @ k.transpose(2, 3)), self.axis)
        out = (scores @ v).transpose(1, 2).reshape(1, q.shape[2], -1)
        return (out, scores) if self.keep else out


class Gated(nn.Module):
    def __init__(self, before, groups=1, window=1, stride=1, channels=8):
        super().__init__()
        self.before = before
        self.conv = nn.Conv2d(8, channels, window, stride, window // 2, groups=groups)

    def forward(self, x, g):
        return torch.relu(self.conv(self.before(x, g)))


def module(model, *args):
    return NameOperators()(from_torch(model.eval(), args).mod)


def words(model, m=6, n=10, width=8):
    return module(model, torch.rand(1, m, 16), torch.rand(1, n, 16), torch.rand(1, n, 2 * width))


def gated(model):
    return module(model, torch.rand(1, 8, 5, 7), torch.rand(1, 8, 1, 1))


def families(graph, ops):
    return [graph.operators[i].family.removeprefix("nn.") for i in ops]


CHAIN = ["matmul", "softmax", "matmul"]
CHANGES = {
    "nothing": (lambda s: s, []),
    "a scale": (lambda s: s * 0.5, ["multiply"]),
    "a scale and a mask": (lambda s: s / 2.0 + torch.ones(6, 10).tril(), ["divide", "add"]),
    "a choice": (lambda s: torch.where(torch.ones(6, 10).tril() > 0, s, -1e9), ["where"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_attention_is_found_with_what_moves_its_operands_and_its_result(name):
    change, between = CHANGES[name]
    graph = extract(words(Words(change)))
    (chain,) = filter(None, (attention_of(graph, i) for i in range(len(graph.operators))))
    assert families(graph, chain) == ["matmul", *between, "softmax", "matmul"]
    found = attention_kernels(graph)
    assert len(found) == 9 and all(k.cpu_only and k.maker == "tvm" for k in found)
    largest = max((k.ops for k in found), key=len)
    outside = [families(graph, [i])[0] for i in range(len(graph.operators)) if i not in largest]
    assert set(families(graph, largest)) >= {"reshape", "permute_dims"} and set(outside) <= {"greater", "tril"}


@pytest.mark.parametrize("name", CHANGES)
def test_attention_is_one_kernel_of_one_rule(name):
    mod = words(Words(CHANGES[name][0]))
    graph = extract(mod)
    largest = max((k.ops for k in attention_kernels(graph)), key=len)
    alone = [(i,) for i in range(len(graph.operators)) if i not in largest]
    kernels = [[graph.operators[i].name for i in ops] for ops in sorted([*alone, largest], key=lambda o: o[-1])]
    report = ScheduleReport()
    with target():
        scheduled_kernels(
            kernels_module(mod, [KernelPlacement(k[-1], tuple(k), "tvm") for k in kernels]), target(), report
        )
    assert report.applied["attention"] == 1 and not report.unscheduled


@pytest.mark.parametrize(
    "model",
    [
        Words(lambda s: s.tanh()),  # a costly function of the scores would be computed twice
        Words(axis=-2),
        Words(keep=True),
        Words(lambda s: s + s.mean()),  # read by more than the softmax
    ],
)
def test_what_is_no_attention(model):
    assert attention_kernels(extract(words(model))) == ()


def test_channels_of_no_whole_vector_are_left_to_kernels_apart():
    assert attention_kernels(extract(words(Words(), width=3))) == ()


BEFORE = {
    "gate": (lambda x, g: x * g, ["multiply"]),
    "norm": (lambda x, g: torch.relu(x * g + g), ["multiply", "add", "relu"]),
    "of two images": (lambda x, g: (x * g) + (x + g), ["add"]),
}


@pytest.mark.parametrize("name", BEFORE)
def test_what_stands_before_a_convolution_of_pixels_joins_it(name):
    before, joined = BEFORE[name]
    graph = extract(gated(Gated(before)))
    known = tuple(legal_kernels(graph))
    found = with_prologues(graph, known)
    assert all(k.cpu_only and k.maker == "tvm" for k in found)
    assert not {k.ops for k in found} & {k.ops for k in known}
    largest = max((k.ops for k in found), key=len)
    assert families(graph, largest) == [*joined, "conv2d", "add", "relu"]
    assert len(found) == 3 * len(joined)  # with the convolution, its bias, its activation


@pytest.mark.parametrize(
    "model",
    [
        Gated(lambda x, g: x * g, window=3),
        Gated(lambda x, g: x * g, stride=2),
        Gated(lambda x, g: x * g, groups=2),
        Gated(lambda x, g: x * g, channels=1),
        Gated(lambda x, g: g * g.sum()),  # one pixel
    ],
)
def test_other_convolutions_take_nothing(model):
    graph = extract(gated(model))
    assert with_prologues(graph, tuple(legal_kernels(graph))) == ()


class Headed(nn.Module):
    def __init__(self, size=1, flat=True):
        super().__init__()
        self.pool, self.flat = nn.AdaptiveAvgPool2d(size), flat
        self.head = nn.Linear(8 * size * size, 5) if flat else nn.Conv2d(8, 5, 1)

    def forward(self, x):
        x = self.pool(x)
        return torch.relu(self.head(x.flatten(1) if self.flat else x))


@pytest.mark.parametrize(("flat", "product"), [(True, ["reshape", "matmul"]), (False, ["conv2d"])])
def test_the_mean_of_an_image_joins_the_product_that_reads_it(flat, product):
    mod = module(Headed(flat=flat), torch.rand(1, 8, 6, 7))
    graph = extract(mod)
    found = [families(graph, k.ops) for k in pooled_products(graph, tuple(legal_kernels(graph)))]
    pooled = ["adaptive_avg_pool2d", *product]
    assert sorted(found, key=len) == [pooled, [*pooled, "add"], [*pooled, "add", "relu"]]
    names = tuple(op.name for op in graph.operators)
    report = ScheduleReport()
    with target():
        scheduled_kernels(kernels_module(mod, [KernelPlacement(names[-1], names, "tvm")]), target(), report)
    assert str(report) == "1 kernels: 1 in turn"


def test_a_pooling_to_more_than_one_pixel_stays_apart():
    graph = extract(module(Headed(size=2), torch.rand(1, 8, 6, 8)))
    assert pooled_products(graph, tuple(legal_kernels(graph))) == ()


class Bags(nn.Module):
    def __init__(self, axis=1, keep=False):
        super().__init__()
        self.table, self.axis, self.keep = nn.Embedding(30, 16), axis, keep

    def forward(self, index):
        rows = self.table(index[:, 1])
        return (rows.sum(self.axis), rows) if self.keep else rows.sum(self.axis)


def test_rows_that_are_looked_up_are_added_up_in_the_same_kernel():
    mod = module(Bags(), torch.randint(0, 30, (5, 3, 4)))
    graph = extract(mod)
    assert [families(graph, k.ops) for k in bag_kernels(graph)] == [["take", "take", "sum"], ["take", "sum"]]
    names = tuple(op.name for op in graph.operators)
    report = ScheduleReport()
    with target():
        scheduled_kernels(kernels_module(mod, [KernelPlacement(names[-1], names, "tvm")]), target(), report)
    assert str(report) == "1 kernels: 1 windows"


@pytest.mark.parametrize("model", [Bags(axis=2), Bags(keep=True)])
def test_sums_along_rows_and_rows_that_are_read_elsewhere_stay_apart(model):
    assert bag_kernels(extract(module(model, torch.randint(0, 30, (5, 3, 4))))) == ()


@pytest.mark.parametrize(
    "mod",
    [
        lambda: words(Words()),
        lambda: gated(Gated(BEFORE["norm"][0])),
        lambda: module(Bags(), torch.randint(0, 30, (5, 3, 4))),
    ],
)
def test_no_gpu_runs_them_and_every_cpu_does(mod):
    graph = extract(mod())
    kernels = candidate_kernels(graph, ("tvm", "library"))
    devices = [device_type(name) for name in ("a100-sxm4-80gb", "cpu-x86-64-v3")]
    table = time_table(Candidates.of(graph, kernels), devices, None)
    assert any(k.cpu_only for k in kernels)
    for i, kernel in enumerate(kernels):
        on_gpu, on_cpu = (table.entry(i, d.name) for d in devices)
        assert math.isinf(on_gpu.seconds) == kernel.cpu_only
        assert math.isfinite(on_cpu.seconds)
    assert "made on CPUs only" in next(
        table.entry(i, devices[0].name).note for i, k in enumerate(kernels) if k.cpu_only
    )
