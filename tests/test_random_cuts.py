"""No placement changes the result: random kernels, random stages, random device types, all small models."""

from functools import cache

import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.placed import assert_same, cpus, plain, plan_of, random_plan, run_stages, singles
from tests.small_models import SMALL_MODELS
from tvmhet.deploy import check_plan_fits, deploy
from tvmhet.emit.cache import StageCache
from tvmhet.graph.placement import StagePlacement
from tvmhet.ir.importers import from_torch
from tvmhet.ir.prepare import prepare
from tvmhet.plans import Plan

CLUSTER = cpus(v2=2, v3=1)


@cache
def case(name):
    """The prepared model, its inputs, and the undivided model's answer."""
    module, inputs = SMALL_MODELS[name]()
    prepared = prepare(from_torch(module, inputs))
    assert prepared.graph is not None
    return prepared, inputs, plain(prepared.model, *inputs)


@pytest.fixture(scope="module")
def cache_of(tmp_path_factory):
    return StageCache(tmp_path_factory.mktemp("cache"))


def run(prepared, plan, inputs, stages_cache):
    check_plan_fits(plan, prepared, CLUSTER)
    return run_stages(deploy(prepared, plan, CLUSTER, stages_cache), *inputs)


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_random_cuts_never_change_the_result(name, cache_of):
    prepared, inputs, want = case(name)

    @settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(st.integers(0, 2**32 - 1), st.sampled_from([("tvm", "library"), ("tvm",), ("library",)]))
    def check(seed, makers):
        plan = random_plan(prepared, CLUSTER, seed, makers)
        assert Plan.from_json(plan.to_json()) == plan
        assert_same(run(prepared, plan, inputs, cache_of), want)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_many_random_cuts(name, cache_of):
    prepared, inputs, want = case(name)
    for seed in range(25):
        plan = random_plan(prepared, CLUSTER, seed)
        assert_same(run(prepared, plan, inputs, cache_of), want)


@pytest.mark.parametrize("name", ["conv", "branches"])
def test_every_operator_a_stage_of_its_own(name, cache_of):
    prepared, inputs, want = case(name)
    group = CLUSTER.groups()[0]
    placed = [StagePlacement(i, (k,), group.device.name, group.device_ids[:1]) for i, k in enumerate(singles(prepared))]
    assert_same(run(prepared, plan_of(prepared, CLUSTER, placed), inputs, cache_of), want)


def test_a_cut_of_plain_kernels_changes_no_bit(tmp_path):
    """Kernels of one operator each, for the reference's own target: the code is the same wherever it runs."""
    prepared, inputs, _ = case("branches")
    cluster = cpus(v3=1)
    device = cluster.groups()[0]
    kernels = singles(prepared)
    whole = plan_of(prepared, cluster, [StagePlacement(0, tuple(kernels), device.device.name, device.device_ids)])
    cut = [
        StagePlacement(i, tuple(kernels[a:b]), device.device.name, device.device_ids)
        for i, (a, b) in enumerate([(0, 3), (3, 4), (4, len(kernels))])
    ]
    cache = StageCache(tmp_path)
    results = [
        run_stages(deploy(prepared, p, cluster, cache), *inputs) for p in (whole, plan_of(prepared, cluster, cut))
    ]
    for a, b in zip(*results, strict=True):
        assert a.tobytes() == b.tobytes()


def test_the_module_is_not_changed_by_a_build(tmp_path):
    prepared, _, _ = case("branches")
    before = tvm.ir.save_json(prepared.mod)
    deploy(prepared, random_plan(prepared, CLUSTER, 7), CLUSTER, StageCache(tmp_path))
    assert tvm.ir.save_json(prepared.mod) == before
