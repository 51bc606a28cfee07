"""objective="cost": the cheapest plan by the prices of the cluster's device types, from Python and the command line."""

from __future__ import annotations

import math

import pytest
import torch

import tvmhet
from tvmhet.errors import BadInput, Infeasible, NotSupported
from tvmhet.report.table import plan_to_text

PRICES = {"v100": 3.06, "t4": 0.53}
BOX = tvmhet.ClusterSpec.of({"v100": 2, "t4": 2}).with_prices(PRICES)


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    return torch.nn.Sequential(*[x for layer in layers for x in (layer, torch.nn.ReLU())]).eval()


@pytest.fixture(scope="module")
def model(net):
    return tvmhet.from_torch(net, (torch.randn(64, 256),))


def usd(plan) -> float:
    return plan.usd_per_h * plan.period_s / 3600


@pytest.fixture(scope="module")
def cheap(model):
    return tvmhet.plan(model, cluster=BOX, objective="cost")


def test_it_costs_no_more_than_the_fastest_plan_and_than_any_one_type(model, cheap):
    assert cheap.objective == "cost"
    assert cheap.objective_value == pytest.approx(usd(cheap))
    assert 0 < cheap.lower_bound <= cheap.objective_value
    fast = tvmhet.plan(model, cluster=BOX)
    assert cheap.objective_value <= usd(fast) * (1 + 1e-9)
    for name in PRICES:
        one = tvmhet.ClusterSpec.of({name: 1}).with_prices({name: PRICES[name]})
        alone = tvmhet.plan(model, cluster=one, objective="cost")
        assert cheap.objective_value <= alone.objective_value * (1 + 1e-9)


def test_the_table_says_the_price_and_the_plan_is_saved_with_it(cheap, tmp_path):
    text = plan_to_text(cheap)
    assert "objective" in text and "cost" in text
    assert "USD per million inputs, by these times; the plan has" in text
    cheap.save(tmp_path / "p.json")
    assert tvmhet.Plan.load(tmp_path / "p.json") == cheap


def test_a_floor_takes_more_devices_and_what_cannot_be_is_refused_with_the_nearest(model, cheap):
    floor = 1.2 * cheap.throughput_per_s
    more = tvmhet.plan(model, cluster=BOX, objective="cost", throughput_per_s=floor)
    assert more.throughput_per_s >= floor * (1 - 1e-9)
    assert more.objective_value >= cheap.objective_value
    with pytest.raises(Infeasible) as refused:
        tvmhet.plan(model, cluster=BOX, objective="cost", throughput_per_s=1e9)
    rate = float(refused.value.remedy.split("a throughput floor of ")[1].split(" /s")[0])
    assert tvmhet.plan(model, cluster=BOX, objective="cost", throughput_per_s=rate).throughput_per_s >= rate
    with pytest.raises(Infeasible, match="one input within 1e-07 s"):
        tvmhet.plan(model, cluster=BOX, objective="cost", deadline_s=1e-7)


def test_a_job_is_done_in_time_and_says_what_it_costs(model, cheap):
    job = {"samples": 10**6, "deadline_s": 0.85e6 * cheap.period_s}
    plan = tvmhet.plan(model, cluster=BOX, objective="cost", **job)
    assert plan.period_s * 1e6 <= job["deadline_s"] * (1 + 1e-9)
    assert any("the job of 1000000 samples takes" in n and f"{usd(plan) * 1e6:.4g} USD" in n for n in plan.notes)


def test_training_is_priced_by_the_iteration(model):
    ask = {"cluster": BOX, "mode": "training", "global_batch": 512, "objective": "cost"}
    plan = tvmhet.plan(model, **ask)
    assert plan.objective_value == pytest.approx(plan.usd_per_h * plan.training.iteration_s / 3600)
    assert 0 < plan.lower_bound <= plan.objective_value
    assert "USD per iteration" in plan_to_text(plan)
    fast = tvmhet.plan(model, cluster=BOX, mode="training", global_batch=512)
    assert plan.objective_value <= fast.usd_per_h * fast.training.iteration_s / 3600 * 1.05
    soon = max(fast.training.iteration_s, fast.training.simulated_s)
    kept = tvmhet.plan(model, **ask, samples=5120, deadline_s=10 * soon * 1.05)
    assert max(kept.training.iteration_s, kept.training.simulated_s) <= soon * 1.05 * (1 + 1e-9)
    with pytest.raises(Infeasible, match="give a deadline of"):
        tvmhet.plan(model, **ask, deadline_s=soon / 10)


def test_a_build_runs_on_the_cheapest_devices(net, model, tmp_path, monkeypatch):
    monkeypatch.setenv("TVMHET_CACHE_DIR", str(tmp_path))
    cluster = tvmhet.ClusterSpec.of({"cpu-x86-64-v2": 1, "cpu-x86-64-v3": 1})
    cluster = cluster.with_prices({"cpu-x86-64-v2": 0.01, "cpu-x86-64-v3": 9.0})
    x = torch.randn(64, 256)
    with tvmhet.build(model, cluster=cluster, objective="cost", throughput_per_s=1e-3) as lib:
        assert {s.placement.device_type for s in lib.plan.stages} == {"cpu-x86-64-v2"}
        torch.testing.assert_close(lib(x), net(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"cluster": tvmhet.ClusterSpec.of({"v100": 1, "t4": 1})}, BadInput, "t4, v100-sxm2-16gb have no price"),
        ({"cluster": tvmhet.ClusterSpec.of({"t4": 1})}, BadInput, "t4 has no price"),
        ({"objective": "latency", "deadline_s": 1.0}, BadInput, "deadline_s was given and the objective is 'latency'"),
        ({"deadline_s": -1.0}, BadInput, "the deadline is -1.0 s"),
        ({"budget_usd": math.nan}, BadInput, "the budget is nan USD"),
        ({"samples": 1.5}, BadInput, "a job of 1.5 samples"),
        ({"virtual_stages": True}, NotSupported, "virtual stages with the objective cost"),
    ],
)
def test_what_makes_no_sense_is_refused(model, options, error, says):
    with pytest.raises(error, match=says):
        tvmhet.plan(model, **{"cluster": BOX, "objective": "cost", **options})


def test_prices_of_types_that_are_not_there_are_refused():
    with pytest.raises(BadInput, match="no device type 'l4'"):
        BOX.with_prices({"l4": 1.0})
    with pytest.raises(BadInput, match="-1"):
        BOX.with_prices({"t4": -1})
    read = tvmhet.ClusterSpec.from_yaml(BOX.to_yaml())
    assert {g.device.name: g.usd_per_h for g in read.groups()} == {"v100-sxm2-16gb": 3.06, "t4": 0.53}
