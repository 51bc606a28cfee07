"""The zoo's models over CPU device types give plain TVM's and torch's answer: some small ones over two, and, among the
slow tests, all over three, cut at random, and in the published sizes.
"""

from functools import cache

import numpy as np
import pytest
import torch

import tvmhet
from tests.placed import THREE, assert_same, cpus, plain, random_plan, run_stages
from tests.zoo.test_zoo import SMALL
from tvmhet import zoo
from tvmhet.deploy import deploy
from tvmhet.emit.cache import StageCache, default_cache_dir
from tvmhet.ir.prepare import prepare

CLUSTERS = {"two": cpus(v2=1, v3=1), "three": THREE}

#: Published widths and depths; sequences and images of a length that a test can wait for, where noted.
REAL = {
    "resnet50": {},
    "inception_v3": {"image": 171},  # 299 in the paper
    "bert_base": {"length": 16},  # 128 in the zoo
    "gpt2_small": {"length": 16},  # 64 in the zoo
    "vit_b16": {"image": 64},  # 224 in the paper: 17 tokens for 197
    "t5_small": {"source_length": 16, "target_length": 8},
    "dlrm": {},
    "lstm": {"source_length": 6, "target_length": 4},
}


@pytest.fixture(autouse=True, scope="module")
def own_caches(tmp_path_factory):
    """A cache of stages and a database of measurements that no other run wrote."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TVMHET_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@cache
def case(name, small):
    """The prepared model, its inputs, torch's answer."""
    module, inputs = zoo.get(name, **(SMALL if small else REAL)[name])
    with torch.no_grad():
        expected = module(*inputs)
    return prepare(tvmhet.from_torch(module, inputs)), inputs, expected


@pytest.mark.parametrize(
    ("name", "cluster"),
    [(name, "two") for name in ("bert_base", "dlrm", "gpt2_small", "moe", "resnet50", "vit_b16")]
    + [pytest.param(name, "three", marks=pytest.mark.slow) for name in sorted(SMALL)],
)
def test_small_models(name, cluster):
    prepared, inputs, expected = case(name, True)
    assert prepared.graph is not None
    plan = tvmhet.plan(prepared.model, cluster=CLUSTERS[cluster])
    got = run_stages(deploy(prepared, plan, CLUSTERS[cluster], StageCache(default_cache_dir())), *inputs)
    assert_same(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SMALL))
def test_small_models_cut_at_random(name):
    prepared, inputs, expected = case(name, True)
    plan = random_plan(prepared, CLUSTERS["two"], seed=len(name))
    assert_same(run_stages(deploy(prepared, plan, CLUSTERS["two"], StageCache(default_cache_dir())), *inputs), expected)


def pins(graph, cluster):
    """Pin an operator early in the model to the first type and one late to the last, so that the plan has a cut."""
    types = [g.device.name for g in cluster.groups()]
    names = [o.name for o in graph.operators]
    return {names[len(names) // 4]: types[0], names[-len(names) // 4]: types[-1]}


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_models_equal_plain_tvm_and_torch(name):
    prepared, inputs, expected = case(name, False)
    want = plain(prepared.model, *inputs)
    assert_same(want, expected)
    cache = StageCache(default_cache_dir())
    for cluster in CLUSTERS.values():
        plan = tvmhet.plan(prepared.model, cluster=cluster, pin=pins(prepared.graph, cluster))
        assert len({s.placement.device_type for s in plan.stages}) > 1
        assert_same(run_stages(deploy(prepared, plan, cluster, cache), *inputs), want)
    case.cache_clear()


@pytest.mark.slow
def test_resnet50_in_workers_gives_the_same_bits_for_every_input():
    module, inputs = zoo.get("resnet50", image=64)
    model = tvmhet.from_torch(module, inputs)
    cluster = CLUSTERS["two"]
    plan = tvmhet.plan(model, cluster=cluster, pin=pins(tvmhet.extract_graph(model), cluster))
    with tvmhet.build(model, cluster=cluster, plan=plan) as lib:
        answers = list(lib.map([inputs[0].numpy()] * 8))
        with torch.no_grad():
            assert_same(answers[0], module(*inputs))
    assert all(np.array_equal(a, answers[0]) for a in answers)
