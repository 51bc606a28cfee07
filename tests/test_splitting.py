"""Plans with tensor split: predicted or given times, devices of one machine, what is printed, refused and kept."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import tvmhet
from tests.graph.test_cutting import Block
from tvmhet.cluster import ClusterSpec
from tvmhet.errors import BadInput, Infeasible, NotSupported
from tvmhet.plans import Plan

GPU = "h100-sxm-80gb"


def gpus(count: int, machines: int = 1) -> ClusterSpec:
    """Machines with GPUs of one type."""
    network = {"bandwidth": "100 Gbit/s", "latency": "5 us"}
    return ClusterSpec.from_dict({"nodes": [{"count": machines, "devices": {GPU: count}}], "network": network})


def small_gpus(count: int, memory_bytes: int) -> ClusterSpec:
    """One machine with GPUs that have little memory."""
    cluster = gpus(count)
    (node,) = cluster.nodes
    ((device, _),) = node.devices
    return replace(cluster, nodes=(replace(node, devices=((replace(device, memory_bytes=memory_bytes), count),)),))


@cache
def model():
    """Two layers, wide enough that a product is worth more than its launch."""
    layers = torch.nn.Sequential(Block(1024, 16), Block(1024, 16)).eval()
    return tvmhet.from_torch(layers, (torch.randn(8, 256, 1024),))


@pytest.fixture(autouse=True)
def own_database(tmp_path, monkeypatch):
    monkeypatch.setenv("TVMHET_CACHE_DIR", str(tmp_path))


def test_one_input_takes_less_on_devices_that_share_its_kernels():
    alone = tvmhet.plan(model(), cluster=gpus(4), objective="latency")
    plan = tvmhet.plan(model(), cluster=gpus(4), objective="latency", splits=[2, 4])
    assert plan.objective_value < 0.6 * alone.objective_value
    assert [(s.degree, len(s.placement.devices)) for s in plan.stages] == [(4, 4)]
    assert plan.lower_bound <= plan.objective_value
    assert f"1 x 4 split {GPU}" in str(plan) and "split over 4 devices" in str(plan)
    assert f"on 1 x 4 split {GPU}" in plan.explain("0_fc1")
    assert {e.device for e in plan.timeline} == set(plan.stages[0].placement.devices)
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(NotSupported, match="stage 0 of the plan is split over 4 devices"):
        tvmhet.build(model(), cluster=gpus(4), plan=plan)


def test_a_plan_that_splits_nothing_is_the_plan_without_splits():
    alone, plan = tvmhet.plan(model(), cluster=gpus(4)), tvmhet.plan(model(), cluster=gpus(4), splits=[2])
    assert plan.to_json() == alone.to_json() and '"degree"' not in alone.to_json()


def test_given_times_are_taken_and_a_file_says_the_same(tmp_path):
    file = tmp_path / "splits.yaml"
    file.write_text(f"- degree: 2\n  device: {GPU}\n  times_s: {{'*_fc2': 1e-7, '*_fc1+*': 2e-7}}\n")
    plan = tvmhet.plan(model(), cluster=gpus(2), objective="latency", splits=file)
    times = {k.ops: p for s in plan.stages for k, p in zip(s.kernels, s.predictions, strict=True)}
    assert times["0_fc2",].time_s == 1e-7 and times["0_fc2",].source == "given"
    row = {"degree": 2, "device": GPU, "times_s": {"*_fc2": 1e-7, "*_fc1+*": 2e-7}}
    assert tvmhet.plan(model(), cluster=gpus(2), objective="latency", splits=[row]).to_json() == plan.to_json()


def test_teams_stay_in_their_machine():
    plan = tvmhet.plan(model(), cluster=gpus(2, machines=2), objective="latency", splits=[2, 4])
    assert {s.degree for s in plan.stages} == {2}
    for stage in plan.stages:
        assert len({d.split("/")[0] for d in stage.placement.devices}) == 1


def test_a_model_that_fits_only_where_it_is_split():
    layer = tvmhet.from_torch(Block(1024, 16).eval(), (torch.randn(1, 16, 1024),))  # 48 MiB of weights, up to 16 each
    cluster = small_gpus(8, 10 * 2**20)
    with pytest.raises(Infeasible, match="alone needs 16"):
        tvmhet.plan(layer, cluster=cluster)
    plan = tvmhet.plan(layer, cluster=cluster, splits=[4])
    assert max(s.memory_bytes for s in plan.stages) <= 10 * 2**20 and 4 in {s.degree for s in plan.stages}
    assert len({d for s in plan.stages for d in s.placement.devices}) == 8


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([1], "at least 2"),
        ([2.0], "whole number"),
        (3, "give degrees"),
        ([2, 2], "the same degree"),
        ([2, {"degree": 3, "times_s": {"0_fc1": 1e-6}}], "divide each other"),
        ([{"degree": 2, "devise": GPU}], "devise"),
        ([{"degree": 2, "device": "t4"}], "name a GPU type"),
        ([{"degree": 2, "times_s": {"no such": 1e-6}}], "no such kernel"),
        ([{"degree": 2, "times_s": {"0_fc1": -1e-6}}], "above 0"),
        ([{"degree": 2, "times_s": {"0_fc1": "soon"}}], "above 0"),
        ("nowhere.yaml", "cannot be read"),
    ],
)
def test_bad_splits_are_refused(splits, message):
    with pytest.raises(BadInput, match=message):
        tvmhet.plan(model(), cluster=gpus(6), splits=splits)


def test_a_split_that_no_machine_can_hold_is_said():
    plan = tvmhet.plan(model(), cluster=gpus(6), splits=[4])
    assert plan.notes[-1].startswith("no split over 4 devices") and {s.degree for s in plan.stages} == {1}


def test_training_takes_no_splits():
    with pytest.raises(NotSupported, match="splits with mode='training'"):
        tvmhet.plan(model(), cluster=gpus(2), mode="training", global_batch=8, splits=[2])
