"""Products of weights in panels: as fast a tile as without, right for every shape, and nothing is packed at a run."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import tvm
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import tvmhet
from tests.emit.cpu.kernels import LEVELS, few, run, scheduled, target
from tests.placed import cpus, plan_of, singles
from tvmhet.deploy import plan_panels
from tvmhet.emit.cpu.blocks import CpuTarget
from tvmhet.emit.cpu.contraction import choose_tile
from tvmhet.emit.cpu.panels import columns_of as width_of
from tvmhet.emit.cpu.panels import panel_columns
from tvmhet.emit.lower import kernel_passes
from tvmhet.graph.panels import panel_weights
from tvmhet.graph.placement import KernelPlacement, StagePlacement
from tvmhet.ir.prepare import Prepared, prepare
from tvmhet.ir.transform.fuse_by_plan import FuseByPlan
from tvmhet.ir.transform.pack_weights import PackWeights, in_panels

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}


class Product(nn.Module):
    """gelu(x @ w + b), of stacked weights if there is a batch."""

    def __init__(self, k: int, n: int, batch: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.b = nn.Parameter(torch.rand(*batch, k, n) - 0.5), nn.Parameter(torch.rand(n) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x @ self.w + self.b)


def made(k: int, n: int, *rows: int, batch: tuple[int, ...] = ()) -> tuple[Prepared, torch.Tensor, torch.Tensor]:
    module, x = Product(k, n, batch), torch.rand(*batch, *rows, k) - 0.5
    return prepare(tvmhet.from_torch(module, (x,))), x, module(x).detach()


def columns_of(prepared: Prepared, level: str) -> dict[str, int]:
    graph = prepared.operator_graph
    return panel_columns(graph, panel_weights(graph), {"kind": "llvm", "mcpu": level})


def kernel_of(prepared: Prepared, columns: dict[str, int], level: str) -> object:
    """The whole model as one kernel."""
    names = tuple(op.name for op in prepared.operator_graph.operators)
    passes = [PackWeights(columns), FuseByPlan([KernelPlacement(names[-1], names, "tvm")]), *kernel_passes()]
    with target(level):
        mod = tvm.transform.Sequential(passes)(prepared.mod)
    (func,) = [f for f in mod.functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
    return func


@few
@given(
    st.sampled_from([3, 7, 40, 65]),
    st.sampled_from([16, 24, 48, 80, 96, 128]),
    st.sampled_from([(2,), (5,), (33,), (2, 3)]),
    st.sampled_from([(), (3,)]),
    st.sampled_from(LEVELS),
    st.sampled_from([1, 2]),
)
def test_a_product_of_panels_equals_torch(k, n, rows, batch, level, num_cores):
    if batch and len(rows) > 1:
        rows = rows[:1]
    prepared, x, want = made(k, n, *rows, batch=batch)
    columns = columns_of(prepared, level)
    assume(columns)
    rule, fast = scheduled(kernel_of(prepared, columns, level), level, num_cores)
    assert rule == "contraction" and "w_reindex" not in fast.script()
    values = {name: np.asarray(v.numpy()) for name, v in prepared.params.items()}
    values |= {name: in_panels(values[name], c) for name, c in columns.items()}
    inputs = [values.get(str(p.name), x.numpy()) for p in fast.params[:-1]]
    np.testing.assert_allclose(run(fast, inputs, level, num_cores), want.numpy(), rtol=1e-5, atol=1e-5)


@given(st.integers(2, 300), st.integers(1, 60), st.sampled_from([(128, 16, 4), (256, 16, 8), (512, 32, 16)]))
def test_panels_keep_a_good_tile(rows, vectors, machine):
    bits, registers, lanes = machine
    cpu = CpuTarget(bits, registers, 1)
    columns = vectors * lanes
    width = width_of(rows, columns, cpu, lanes)
    assume(width)
    assert columns % width == 0
    best, kept = (choose_tile(rows, columns, cpu, lanes, within=w).cycles(rows, columns, cpu) for w in (0, width))
    assert kept <= 1.5 * best


@pytest.mark.parametrize(
    ("rows", "n", "level", "want"),
    [
        (128, 768, "x86-64-v4", 48), (128, 768, "x86-64-v3", 24), (128, 512, "x86-64-v3", 16),
        (128, 512, "x86-64-v4", 64),
        (128, 80, "x86-64-v4", 16), (128, 100, "x86-64-v4", 0), (128, 768, "x86-64-v2", 16),
    ],
)  # fmt: skip
def test_how_wide_panels_are(rows, n, level, want):
    assert list(columns_of(made(8, n, rows)[0], level).values()) == ([want] if want else [])


def test_a_gpu_reads_weights_as_they_came():
    graph = made(8, 64, 5)[0].operator_graph
    assert panel_columns(graph, panel_weights(graph), {"kind": "cuda", "arch": "sm_80"}) == {}
    assert list(panel_columns(graph, panel_weights(graph), V4).values()) == [64]


def test_a_built_model_holds_panels_and_a_library_kernel_the_weight():
    module, x = Product(16, 64), torch.rand(7, 16)
    cluster = tvmhet.ClusterSpec.of({"cpu-x86-64-v2": 1})
    for makers, rank in ((("tvm",), 3), (("library",), 2)):
        with tvmhet.build(tvmhet.from_torch(module, (x,)), cluster=cluster, makers=makers, inline=True) as lib:
            (weight,) = [v for v in lib.program.params.values() if v.size == 16 * 64]
            assert weight.ndim == rank
            np.testing.assert_allclose(lib(x.numpy()), module(x).detach().numpy(), rtol=1e-5, atol=1e-5)


class Steps(nn.Module):
    """What a recurrent network does: one weight, step after step."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(16, 16) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ self.w) @ self.w) @ self.w


@pytest.mark.parametrize(
    ("last", "stages", "want"), [("tvm", (5,), True), ("tvm", (2, 3), False), ("library", (5,), False)]
)
def test_a_weight_of_several_steps_comes_in_panels_to_one_stage_of_generated_kernels(last, stages, want):
    prepared = prepare(tvmhet.from_torch(Steps(), (torch.rand(7, 16),)))
    cluster = cpus(v2=1, v3=1)
    kernels = [*singles(prepared)[:-1], replace(singles(prepared)[-1], maker=last)]
    assert len(kernels) == 5
    ends = list(itertools.accumulate(stages, initial=0))
    types = ("cpu-x86-64-v2", "cpu-x86-64-v3")
    devices = {t: next(g.device_ids[:1] for g in cluster.groups() if g.device.name == t) for t in types}
    placed = [
        StagePlacement(i, tuple(kernels[a:b]), types[i], devices[types[i]])
        for i, (a, b) in enumerate(itertools.pairwise(ends))
    ]
    plan = plan_of(prepared, cluster, placed)
    assert bool(plan_panels(prepared.operator_graph, plan, cluster)) == want


def test_a_weight_of_several_steps_is_right_in_panels():
    module, x = Steps(), torch.rand(7, 16)
    cluster = tvmhet.ClusterSpec.of({"cpu-x86-64-v2": 1})
    with tvmhet.build(tvmhet.from_torch(module, (x,)), cluster=cluster, makers=("tvm",), inline=True) as lib:
        assert [v.ndim for v in lib.program.params.values()] == [3]
        np.testing.assert_allclose(lib(x.numpy()), module(x).detach().numpy(), rtol=1e-5, atol=1e-5)


def test_a_plan_says_which_weights_its_stages_keep_from_being_in_panels():
    model = tvmhet.from_torch(Steps(), (torch.rand(7, 16),))
    first, *_, last = (op.name for op in tvmhet.extract_graph(model).operators)
    pin = {first: "cpu-x86-64-v2", last: "cpu-x86-64-v3"}
    plan = tvmhet.plan(model, cluster=cpus(v2=1, v3=1), makers=("tvm",), pin=pin)
    assert [n for n in plan.notes if "in no panels" in n and "p_w; generated products" in n]
    alone = tvmhet.plan(model, cluster=cpus(v2=1), makers=("tvm",))
    assert not [n for n in alone.notes if "panels" in n]
