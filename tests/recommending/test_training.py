"""Training jobs on a small model and a market of three types, against a loop over every fleet, written apart."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from functools import partial

import pytest
import torch
from torch import nn

import tvmhet
from tvmhet.cluster import ClusterSpec, Market
from tvmhet.errors import BadBatch, BadInput, Infeasible
from tvmhet.ir.optimizers import AdamW
from tvmhet.ir.training_step import forward_prepared, read_step
from tvmhet.recommending import recommend
from tvmhet.recommending.flow import training_study_of
from tvmhet.recommending.job import Goal, Job
from tvmhet.recommending.measurements import Measured
from tvmhet.recommending.option import make_option, value
from tvmhet.recommending.training_choice import train, what_to_measure
from tvmhet.recommending.training_fleets import prices_apart
from tvmhet.training_solve import make_training_plan

BATCH, ITERATIONS = 1024, 2_000_000
MARKET = Market.from_text("""
network: {bandwidth: 100 Gbit/s, latency: 10 us}
running: {startup: 60 s, checkpoint: 5 s}
offers:
  - {type: t4, price: 0.53 USD/h, max_instances: 2}
  - {name: pair, type: l4, devices: 2, price: 1.50 USD/h, max_instances: 1}
  - {type: a100-40gb, price: 3.67 USD/h, max_instances: 2}
""")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return tvmhet.from_torch(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)), torch.zeros(256, 512))


@pytest.fixture(scope="module")
def study(model):
    return training_study_of(model, market=MARKET, global_batch=BATCH)


@pytest.fixture(scope="module")
def every(study):
    """(counts of instances, hours, USD) of each fleet, each planned alone as a cluster."""
    found = []
    for counts in itertools.product(range(3), range(2), range(3)):
        if not any(counts):
            continue
        nodes = "".join(
            f"  - {{name: n{i}, devices: {{{o.device.name}: {o.num_devices}}}, count: {n}}}\n"
            for i, (o, n) in enumerate(zip(MARKET.offers, counts, strict=True))
            if n
        )
        cluster = ClusterSpec.from_yaml(
            "nodes:\n  - {name: gateway, devices: {}}\n" + nodes + "network: {bandwidth: 100 Gbit/s, latency: 10 us}\n"
        )
        plan = make_training_plan(study.prepared, study.graphs, cluster, study.goal, {}, math.inf)
        seconds = max(plan.training.iteration_s, plan.training.simulated_s)
        hours = (60 + ITERATIONS * seconds * (1 + 5 / 3600)) / 3600
        found.append((counts, hours, hours * sum(n * o.usd_per_h for n, o in zip(counts, MARKET.offers, strict=True))))
    return found


def ask(study, objective="price", **limits):
    return train(study, Job(Goal(objective), ITERATIONS * BATCH, global_batch=BATCH, **limits))


@pytest.fixture(scope="module")
def cheapest(study):
    return ask(study)


@pytest.fixture(scope="module")
def fastest(study):
    return ask(study, "time")


def test_the_public_call_says_the_same(model, cheapest):
    made = recommend(model, market=MARKET, global_batch=BATCH, iterations=ITERATIONS)
    assert made.to_json() == cheapest.to_json()


def test_it_equals_a_loop_over_every_fleet(every, cheapest, fastest):
    assert cheapest.best.usd == pytest.approx(min(u for _, _, u in every), rel=1e-6)
    assert fastest.best.hours == pytest.approx(min(h for _, h, _ in every), rel=1e-6)
    front = [
        (h, u)
        for _, h, u in sorted(every, key=lambda e: (e[2], e[1]))
        if not any(g < h * (1 + 1e-9) and v < u * (1 - 1e-9) for _, g, v in every)
    ]
    for point in cheapest.front:
        assert any(point.option.hours == pytest.approx(h) and point.option.usd == pytest.approx(u) for h, u in front)
    for h, u in front:
        assert any(p.option.hours <= h * (1 + 1e-6) and p.option.usd <= u * (1 + 1e-6) for p in cheapest.front)


def test_each_single_type_has_its_best(every, cheapest):
    for i, (_, option) in enumerate(cheapest.by_type):
        alone = [u for counts, _, u in every if counts[i] and sum(n > 0 for n in counts) == 1]
        assert option.usd == pytest.approx(min(alone), rel=1e-6)


def test_it_is_never_worse_than_one_type(cheapest, fastest):
    for made in (cheapest, fastest):
        assert made.homogeneous is not None
        assert value(made.job, made.best) <= value(made.job, made.homogeneous)
        assert all(p.homogeneous is None or p.option.cost() <= p.homogeneous.cost() for p in made.front)


def test_a_deadline_and_a_budget_are_kept(study, every, cheapest, fastest):
    deadline = (cheapest.best.hours + fastest.best.hours) / 2
    made = ask(study, deadline_h=deadline)
    assert made.best.hours <= deadline
    simulated_s = made.pipelines[0].plan.training.simulated_s
    assert MARKET.running.hours(ITERATIONS * simulated_s, 0) <= deadline
    assert made.best.usd == pytest.approx(min(u for _, h, u in every if h <= deadline), rel=1e-6)
    budget = (cheapest.best.usd + fastest.best.usd) / 2
    made = ask(study, "time", budget_usd=budget)
    assert made.best.usd <= budget
    assert made.best.hours == pytest.approx(min(h for _, h, u in every if u <= budget), rel=1e-6)


def test_limits_out_of_reach_are_refused_with_the_nearest(study, cheapest, fastest):
    with pytest.raises(Infeasible, match="nearest: deadline_h=") as caught:
        ask(study, deadline_h=fastest.best.hours / 2)
    said = float(caught.value.remedy.split("deadline_h=")[1].split()[0])
    assert ask(study, deadline_h=said).best.hours <= said
    with pytest.raises(Infeasible, match="contradict each other"):
        ask(study, deadline_h=fastest.best.hours * 1.001, budget_usd=cheapest.best.usd * 1.001)


def test_the_plan_is_of_the_rented_instances(cheapest, fastest):
    for made in (cheapest, fastest):
        (pipeline,) = made.pipelines
        assert pipeline.cluster.counts() == made.best.devices
        figures = pipeline.plan.training
        assert max(figures.iteration_s, figures.simulated_s) == made.best.latency_s
        assert "per iteration" in str(made)


def test_a_last_iteration_is_whole():
    def hours(samples: int) -> float:
        bought = [(MARKET.offers[0], 2)]
        return make_option(Job(samples=samples, global_batch=BATCH), MARKET.running, bought, (), BATCH / 0.5, 0.5).hours

    assert hours(BATCH + 1) == hours(2 * BATCH) == pytest.approx((60 + 2 * 0.5 * (1 + 5 / 3600)) / 3600)
    assert hours(BATCH) < hours(BATCH + 1)


def test_what_to_measure_fits_the_budget_and_changes_the_answer(model, study, cheapest):
    job = Job(Goal.PRICE, ITERATIONS * BATCH, global_batch=BATCH)
    campaign = what_to_measure(study, job, 0.5)
    assert campaign.choices and campaign.usd <= 0.5
    rows = [json.loads(line) for line in study.measuring_list(campaign).splitlines()]
    assert {r["device"] for r in rows} <= {d.name for d in MARKET.device_types()}
    assert all(r["ops"] and r["seconds"] is None for r in rows)
    (best,) = cheapest.best.devices
    every = {key for g in study.graphs for key in g.candidates.keys}
    slow = [Measured(best, key, 1.0) for key in every]
    measured = training_study_of(model, market=MARKET, global_batch=BATCH, measurements=slow)
    assert best not in train(measured, job).best.devices
    assert (measured.graphs[0].backward[:, measured.graphs[0].forward.column(best)] > 0.1).all()
    with pytest.raises(BadInput, match="profiling budget is 0"):
        what_to_measure(study, job, 0)


def test_the_micro_batch_is_chosen_for_each_fleet():
    """Of the sizes that are best on each type alone; a given one is kept to."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    step = tvmhet.from_torch(layers, torch.zeros(32, 512), mode="training", loss="mse", optimizer=AdamW(1e-3))
    market = MARKET.where(types=["t4", "l4"])
    asked = partial(recommend, step, market=market, global_batch=BATCH, iterations=ITERATIONS)
    own, auto = asked(), asked(microbatch="auto")
    assert [g.size for g in training_study_of(step, market=market, global_batch=BATCH, microbatch=64).graphs] == [64]
    figures = [m.pipelines[0].plan.training.microbatch_size for m in (own, auto)]
    assert figures[0] == 32 < figures[1]
    assert auto.best.usd < own.best.usd
    assert auto.pipelines[0].plan.module_key != own.pipelines[0].plan.module_key
    assert auto.pipelines[0].plan.module_key == forward_prepared(read_step(step.at_batch(figures[1]))).key
    assert not any("micro-batch" in n for n in auto.notes) and any("micro-batch" in n for n in own.notes)
    with pytest.raises(BadInput, match="no single step"):
        recommend(
            tvmhet.from_torch(layers, torch.zeros(32, 512)),
            market=MARKET,
            global_batch=BATCH,
            iterations=5,
            microbatch="auto",
        )


def test_bad_input(model):
    asked = partial(recommend, model, market=MARKET, global_batch=BATCH, iterations=ITERATIONS)
    for given in ({"latency_ms": 5.0}, {"samples": 5}):
        with pytest.raises(BadInput):
            asked(**given)
    with pytest.raises(BadInput, match="'k' is none of"):
        asked(measurements=[Measured("t4", "k", 1.0)])
    with pytest.raises(BadInput, match="risk is 2"):
        asked(risk=2)
    with pytest.raises(BadInput, match="never ends"):
        Job(Goal.PRICE, global_batch=BATCH)
    with pytest.raises(BadBatch, match="no multiple"):
        recommend(model, market=MARKET, global_batch=BATCH + 1, iterations=5)
    with pytest.raises(BadInput, match="iterations"):
        recommend(model, market=MARKET, iterations=5)


SMALL = """
device_types:
  half: {like: t4, memory: 9 MiB}
  third: {like: l4, memory: 7.8 MiB}
offers:
  - {type: half, price: 0.53 USD/h, max_instances: 3}
  - {type: third, price: 0.70 USD/h, max_instances: 3}
"""


def test_a_model_that_no_device_holds_is_trained_in_stages(model):
    made = recommend(model, market=Market.from_text(SMALL), global_batch=BATCH, iterations=1000)
    assert sum(made.best.devices.values()) >= 2
    assert len(made.pipelines[0].plan.stages) >= 2
    alone = Market.from_text(SMALL.replace("max_instances: 3", "max_instances: 1"))
    assert recommend(model, market=alone, global_batch=BATCH, iterations=1000).best.devices == {"half": 1, "third": 1}
    with pytest.raises(Infeasible, match="memory"):
        recommend(model, market=alone.without("third"), global_batch=BATCH, iterations=1000)


def test_a_refusal_says_whether_it_is_proved(study, fastest):
    """Below the bound of every fleet it is; just below what was planned it is not, where the bound is lower."""
    bound_h = min(MARKET.running.hours(ITERATIONS * float(s), 0) for s in study.fleets.bound_s)
    with pytest.raises(Infeasible, match="proved: no plan of all 17 fleets is below deadline_h="):
        ask(study, deadline_h=0.9 * bound_h)
    if bound_h < 0.98 * fastest.best.hours:
        with pytest.raises(Infeasible, match="not proved"):
            ask(study, deadline_h=0.99 * fastest.best.hours)


def test_an_operator_that_fits_no_device_is_refused_without_planning(model):
    small = [dataclasses.replace(o, device=dataclasses.replace(o.device, memory_bytes=1 << 20)) for o in MARKET.offers]
    tight = training_study_of(model, market=dataclasses.replace(MARKET, offers=tuple(small)), global_batch=BATCH)
    with pytest.raises(Infeasible, match="alone needs"):
        ask(tight)
    assert not tight.plans


def test_instances_that_differ_in_their_price_alone_are_planned_as_one_kind():
    offer = MARKET.offers[0]
    spot = dataclasses.replace(offer, usd_per_h=offer.usd_per_h / 2, spot=True, max_instances=3)
    other = MARKET.offers[1]
    (joined, count), last = prices_apart(((offer, 1), (other, 2), (spot, 3)))
    assert (joined.name, count, last) == (offer.name, 4, (other, 2))
    assert count * joined.usd_per_h == pytest.approx(offer.usd_per_h + 3 * spot.usd_per_h)
    assert prices_apart(((offer, 1), (other, 2))) == ((offer, 1), (other, 2))
