"""Split stages run: random ones, on workers, with replicas, from a bundle; what does not fit is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import tvmhet
from tests.graph.test_cutting import Block, Gated, Rotary, Sliced
from tests.ir.transform.test_split_tensors import Tuples
from tests.placed import BEST, assert_same, cpus, plain, plan_of, random_kernels, run_stages
from tests.zoo.test_zoo import SMALL
from tvmhet import zoo
from tvmhet.deploy import check_plan_fits, deploy
from tvmhet.emit.cache import StageCache
from tvmhet.errors import NotSupported, PlanMismatch
from tvmhet.graph.cutting import part_of
from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.library import place_kernel
from tvmhet.graph.placement import StagePlacement
from tvmhet.ir.prepare import prepare
from tvmhet.plans import Plan
from tvmhet.runtime.machines import parts_of
from tvmhet.runtime.stats import StageRun, planned_runs, stage_stats
from tvmhet.team_plans import runnable

CASES = {
    "block": (lambda: Block(32, 4), (2, 6, 32)),
    "gated": (Gated, (3, 8)),
    "rotary": (lambda: Rotary(32, 8, 4, True), (2, 6, 32)),
    "sliced": (lambda: Sliced(32, 8, 4, True), (2, 6, 32)),
    "tuples": (Tuples, (3, 8)),
}
CLUSTER = cpus(v2=4, v3=4)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return StageCache(tmp_path_factory.mktemp("cache"))


def case(name):
    """The prepared model, its input, and the answer of the undivided one."""
    make, shape = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(shape)
    prepared = prepare(tvmhet.from_torch(make().eval(), (x,)))
    return prepared, x, plain(prepared.model, x)


def random_team_plan(prepared, seed, makers):
    """A valid plan by dice, some of whose stages are split; no kernel of those reads sums that are to be added up."""
    rng, graph = random.Random(seed), prepared.operator_graph
    parts = {d: part_of(graph, d, joins=True) for d in (2, 4)}
    kernels = []
    for kernel in random_kernels(graph, rng, makers):
        runs = all(part.can_run(kernel.ops) for part in parts.values())
        kernels += [kernel] if runs else [LegalKernel((op,)) for op in kernel.ops]
    kernels = [place_kernel(graph, k) for k in kernels]
    cuts = sorted(rng.sample(range(1, len(kernels)), rng.randint(0, 3)))
    placed, degrees = [], []
    for i, (a, b) in enumerate(pairwise([0, *cuts, len(kernels)])):
        group = rng.choice(CLUSTER.groups())
        degrees.append(rng.choice([1, 2, 2, 4]))
        devices = tuple(rng.sample(group.device_ids, degrees[-1] * rng.randint(1, 4 // degrees[-1])))
        placed.append(StagePlacement(i, tuple(kernels[a:b]), group.device.name, devices))
    plan = plan_of(prepared, CLUSTER, placed)
    stages = tuple(replace(s, degree=d) for s, d in zip(plan.stages, degrees, strict=True))
    return replace(plan, stages=stages)


@pytest.mark.parametrize("name", CASES)
def test_random_teams_never_change_the_result(name, cache):
    prepared, x, want = case(name)

    @settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(st.integers(0, 2**32 - 1), st.sampled_from([("tvm", "library"), ("tvm",), ("library",)]))
    def check(seed, makers):
        plan = random_team_plan(prepared, seed, makers)
        check_plan_fits(plan, prepared, CLUSTER)
        assert Plan.from_json(plan.to_json()) == plan
        program = deploy(prepared, plan, CLUSTER, cache)
        assert_same(run_stages(program, x), want)
        for stage in plan.stages:
            own = [s for s in program.stages if program.planned(s.index) == stage.index]
            assert {d for s in own for d in s.devices} <= set(stage.placement.devices)
            assert all(len(s.devices) == len(stage.placement.devices) // stage.degree for s in own)

    check()


def wide(num_layers=1, makers=("tvm", "library"), objective="latency", devices=2):
    """A model of which every stage is split over two devices of this machine, its plan, inputs and torch's answers."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(Block(256, 8) for _ in range(num_layers))).eval()
    x = [torch.randn(2, 32, 256) for _ in range(3)]
    cluster = cpus(**{BEST: devices})
    fast = [{"degree": 2, "times_s": {"*": 1e-9}}]
    options = {"cluster": cluster, "objective": objective, "splits": fast, "makers": makers}
    model = tvmhet.from_torch(layers, (x[0],))
    plan = tvmhet.plan(model, **options)
    assert {s.degree for s in plan.stages} == {2}
    with torch.no_grad():
        return model, cluster, plan, x, [layers(one).numpy() for one in x]


@pytest.fixture(autouse=True)
def own_database(tmp_path, monkeypatch):
    monkeypatch.setenv("TVMHET_CACHE_DIR", str(tmp_path))


def test_a_team_runs_on_workers(tmp_path):
    """Several inputs in flight, each time the same bits; the bundle too."""
    model, cluster, plan, inputs, want = wide(2)
    with tvmhet.build(model, cluster=cluster, plan=plan) as lib:
        first = [lib(x).numpy() for x in inputs]
        for got, right in zip(first, want, strict=True):
            np.testing.assert_allclose(got, right, rtol=0, atol=2e-5 * np.abs(right).max())
        for got, again in zip(lib.map(inputs * 4), first * 4, strict=True):
            assert got.numpy().tobytes() == again.tobytes()
        stats = lib.benchmark(inputs[0], num_inputs=4)
        assert [s.stage for s in stats.stages] == [0] and set(stats.stages[0].devices) == set(
            plan.stages[0].placement.devices
        )
        assert {run.device for run in stats.timeline} == set(plan.stages[0].placement.devices)
        assert {run.stage for run in stats.timeline} == {0}
        said = " ".join(lib.report(stats).split())
        assert "1 x 2 split" in said and "from which those of a split stage follow" in said
        lib.export(tmp_path / "bundle")
    with tvmhet.load(tmp_path / "bundle") as lib:
        assert lib(inputs[0]).numpy().tobytes() == first[0].tobytes() and lib.plan == plan
        assert [s.stage for s in lib.benchmark(inputs[0], num_inputs=2).stages] == [0]


def test_teams_take_inputs_in_turn():
    model, cluster, plan, inputs, want = wide(objective="throughput", devices=4)
    (stage,) = plan.stages
    assert stage.devices_text == f"2 x 2 split cpu-x86-64-{BEST}"
    with tvmhet.build(model, cluster=cluster, plan=plan) as lib:
        for got, right in zip(lib.map(inputs * 2), want * 2, strict=True):
            np.testing.assert_allclose(got.numpy(), right, rtol=0, atol=2e-5 * np.abs(right).max())
        teams = [s.devices for s in lib.program.stages]
    a, b, c, d = stage.placement.devices
    assert set(teams) == {(a, c), (b, d)}


@pytest.mark.parametrize("makers", [("tvm",), ("library",)])
def test_each_device_has_its_share_of_the_weights(makers):
    model, cluster, plan, inputs, want = wide(makers=makers)
    with tvmhet.build(model, cluster=cluster, plan=plan, makers=makers) as lib:
        np.testing.assert_allclose(lib(inputs[0]).numpy(), want[0], rtol=0, atol=2e-5 * np.abs(want[0]).max())
        sizes = {}
        for stage in lib.program.stages:
            own = sizes.setdefault(stage.devices, {})
            own |= {name: lib.program.params[name].nbytes for name in stage.params}
    whole = sum(v.nbytes for v in (np.asarray(p.detach()) for p in Block(256, 8).parameters()))
    assert all(0.5 * whole < sum(own.values()) < 0.51 * whole for own in sizes.values())


def test_the_order_of_devices_decides_which_has_what_share():
    model, cluster, plan, *_ = wide()
    with tvmhet.build(model, cluster=cluster, plan=plan) as lib:
        for stage in lib.program.stages:
            rank = plan.stages[0].placement.devices.index(stage.devices[0])
            assert stage.name.endswith(f"of device {rank} of 2")
            assert all(name.endswith(f"rank{rank}") for name in stage.params if "_rank" in name)


def test_a_plan_that_was_changed_is_refused():
    model, cluster, plan, *_ = wide(devices=4)
    devices = tuple(d for group in cluster.groups() for d in group.device_ids)[:3]
    placement = replace(plan.stages[0].placement, devices=devices)
    other = replace(plan, stages=(replace(plan.stages[0], placement=placement),))
    with pytest.raises(PlanMismatch, match="split over 2 of its 3 devices: they are no whole teams"):
        tvmhet.build(model, cluster=cluster, plan=other)


def test_what_cannot_be_cut_is_not_built_by_given_times():
    """A convolution, by times that somebody measured: good for figures."""
    model = tvmhet.from_torch(nn.Conv2d(4, 4, 3).eval(), (torch.randn(1, 4, 8, 8),))
    options = {"cluster": cpus(**{BEST: 2}), "objective": "latency", "splits": [{"degree": 2, "times_s": {"*": 1e-9}}]}
    assert [s.degree for s in tvmhet.plan(model, **options).stages] == [2]
    with pytest.raises(NotSupported, match="nothing of the model can be cut so"):
        tvmhet.build(model, **options)


def test_a_kernel_that_reads_sums_is_refused():
    prepared, _, _ = case("block")
    graph = prepared.operator_graph
    at = graph.index
    kernels = [LegalKernel((i,)) for i in range(at("fc2"))] + [
        LegalKernel(tuple(range(at("fc2"), len(graph.operators))))
    ]
    group = CLUSTER.groups()[0]
    placed = StagePlacement(0, tuple(place_kernel(graph, k) for k in kernels), group.device.name, group.device_ids[:2])
    plan = plan_of(prepared, CLUSTER, [placed])
    plan = replace(plan, stages=(replace(plan.stages[0], degree=2),))
    with pytest.raises(PlanMismatch, match="reads sums that are still to be added up"):
        runnable(prepared, plan)


def test_a_team_is_one_part_of_its_machine():
    """Over several machines, what a team hands over stays in its own."""
    model, cluster, plan, *_ = wide()
    with tvmhet.build(model, cluster=cluster, plan=plan) as lib:
        (part,) = parts_of(lib.program)
        assert len(part.stages) == len(lib.program.stages) > 2


def test_a_teams_run_is_from_its_first_step_to_its_last_or_what_the_busiest_worked():
    model, cluster, plan, *_ = wide()
    with tvmhet.build(model, cluster=cluster, plan=plan) as lib:
        program = lib.program
    devices = [s.devices[0] for s in program.stages]
    runs = [
        StageRun(i, d, 7, i * 10.0, i * 10.0 + 1, i * 10.0 + 4 + i, i * 10.0 + 6 + i) for i, d in enumerate(devices)
    ]
    (alone,), (busy,) = (planned_runs(program, runs, x) for x in (True, False))
    last = runs[-1]
    assert (alone.stage, alone.input_index, alone.start_s, alone.end_s) == (0, 7, 0.0, last.end_s)
    assert alone.compute_s == last.computed_s - 1 and alone.transfer_s == 1 + 2
    worked = {d: [r for r in runs if r.device == d] for d in devices}
    most = max(worked.values(), key=lambda own: sum(r.end_s - r.start_s for r in own))
    assert busy.compute_s == pytest.approx(sum(r.compute_s for r in most))
    assert busy.transfer_s == pytest.approx(sum(r.transfer_s for r in most))
    (stats,) = stage_stats(program, [alone], with_hops=True)
    assert stats.name == "stage 0" and stats.hop is None


QUICK = {"bert_base", "t5_small"}
OTHERS = {"convnext_t", "dlrm", "gpt2_small", "moe", "vit_b16"}


@pytest.mark.parametrize("name", [*sorted(QUICK), *(pytest.param(n, marks=pytest.mark.slow) for n in sorted(OTHERS))])
def test_models_of_the_zoo_on_a_team(name, cache):
    """As planned with merged products, attention kernels and the library; both latency's plan and a random one."""
    module, inputs = zoo.get(name, **SMALL[name])
    prepared = prepare(tvmhet.from_torch(module, inputs))
    want = plain(prepared.model, *inputs)
    cluster = cpus(**{BEST: 2})
    splits = [{"degree": 2, "times_s": {"*": 1e-9}}]
    plan = tvmhet.plan(prepared.model, cluster=cluster, objective="latency", splits=splits)
    assert 2 in {s.degree for s in plan.stages}
    assert_same(run_stages(deploy(prepared, plan, cluster, cache), *inputs), want)
    plan = random_team_plan(prepared, name, ("tvm", "library"))
    assert_same(run_stages(deploy(prepared, plan, CLUSTER, cache), *inputs), want)
