"""Recommendations whose pipelines have teams of GPUs: never worse, bounds hold, and what is said is what is planned."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

import tvmhet
from tests.recommending.markets import random_case, space_of
from tests.recommending.training_cases import random_study
from tvmhet.cluster import Market, Running
from tvmhet.errors import Infeasible
from tvmhet.plans import Plan
from tvmhet.recommending import flow, service, training_choice
from tvmhet.recommending.job import Goal, Job
from tvmhet.recommending.option import value
from tvmhet.recommending.service_bounds import rates_of
from tvmhet.recommending.training_fleets import one_of_each
from tvmhet.recommending.training_search import FleetSearch
from tvmhet.solve import Split, with_splits
from tvmhet.solve.units import find_units
from tvmhet.splitting import Wish
from tvmhet.training_splits import with_team_times

WIDTH, LAYERS = 8192, 6
MARKET = Market.shipped("lambda").where(types=["a100-sxm-80gb", "rtx-a6000"], spot=False)


@pytest.fixture(scope="module")
def model():
    """Products in pairs, in bfloat16, without their weights."""
    with torch.device("meta"):
        module = nn.Sequential(
            *(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)))
        )
        example = (torch.zeros(64, WIDTH, dtype=torch.bfloat16),)
    return tvmhet.from_torch(module.to(torch.bfloat16).eval(), example)


@pytest.fixture(scope="module")
def quick(model):
    """A limit on one input that no device keeps by itself, and the answer with teams of two and four."""
    alone = flow.study_of(model, market=MARKET).units()
    limit_ms = 0.6e3 * min(u.latency_s for u in alone.units)
    study = flow.study_of(model, market=MARKET, splits=[2, 4])
    return limit_ms, study, service.answer(study, Job(Goal.PRICE, throughput_per_s=10.0, latency_ms=limit_ms))


def test_teams_answer_sooner_than_any_device(model, quick):
    limit_ms, _, made = quick
    with pytest.raises(Infeasible, match="no pipeline of this market answers within"):
        tvmhet.recommend(model, market=MARKET, throughput_per_s=10.0, latency_ms=limit_ms)
    (pipeline,) = made.pipelines
    assert pipeline.plan.latency_s <= made.best.latency_s * (1 + 1e-9) <= limit_ms * 1e-3
    assert max(s.degree for s in pipeline.plan.stages) > 1
    assert " split " in str(made)


def test_the_plan_of_a_recommendation_is_saved_and_read_again(quick, tmp_path):
    quick[2].save(tmp_path)
    plan = Plan.load(tmp_path / "plan-0.json")
    assert plan == quick[2].pipelines[0].plan
    assert plan.period_s <= quick[2].units[quick[2].best.pipelines[0][0]].period_s * (1 + 1e-9)


def test_measuring_the_whole_kernel_tells_about_its_parts(model, quick):
    limit_ms, study, made = quick
    job = Job(Goal.PRICE, throughput_per_s=10.0, latency_ms=limit_ms)
    campaign = service.what_to_measure(study, job, 1.0)
    assert {c.key for c in campaign.choices} <= set(study.candidates.keys)
    unit = made.units[made.best.pipelines[0][0]]
    beliefs = study.beliefs([unit])
    assert all(b.key in study.candidates.keys and not b.measured for b in beliefs.values())


def test_given_times_have_no_error(model):
    given = [{"degree": 2, "device": "a100-sxm-80gb", "times_s": {"*": 1e-7}}]
    study = flow.study_of(model, market=MARKET, splits=given)
    (team, *_) = (g for g, group in enumerate(study.problem.groups) if group.team_of >= 0)
    unit = next(u for u in study.units().units if any(s.group >= len(study.space.groups) for s in u.stages))
    beliefs = [b for (_, g), b in study.beliefs([unit]).items() if g >= team]
    assert beliefs and all(b.sigma == 0 and b.measured and b.key.endswith("in 2") for b in beliefs)


def test_a_split_that_no_machine_has_devices_for_is_named(model):
    made = tvmhet.recommend(model, market=MARKET.where(types=["rtx-a6000"]), throughput_per_s=10.0, splits=[16])
    assert any("no split over 16 devices" in note for note in made.notes)


@pytest.mark.parametrize("seed", range(12))
def test_no_unit_goes_beyond_the_bounds_of_single_devices(seed):
    case = random_case(seed)
    groups = case.problem.groups
    made = [
        Split(g, 2, tuple(0.3 * k.time_s[g] for k in case.problem.kernels))
        for g, group in enumerate(groups)
        if group.num_devices >= 2
    ]
    problem, space = with_splits(case.problem, made), space_of(case, Running())
    rates = rates_of(problem, space)
    for unit in find_units(problem, max_devices=6).units:
        most = math.fsum(n * rates.per_s[space.offer_of[g]] for g, n in enumerate(unit.devices))
        assert unit.rate_per_s <= most * (1 + 1e-6) and unit.latency_s >= rates.latency_s * (1 - 1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_training_with_teams_is_never_worse_and_never_below_its_bound(seed):
    study = random_study(seed)
    job = Job(Goal.TIME, samples=100_000, global_batch=study.goal.global_batch)
    devices = study.market.device_types()
    every = one_of_each(study.market)
    graphs = tuple(with_team_times(g, [Wish(2)], every, devices) for g in study.graphs)
    both = dataclasses.replace(study, graphs=graphs, plans={})
    assert any(g.splits for g in graphs) or not any(o.num_devices > 1 for o in study.market.offers)
    try:
        plain = training_choice.train(study, job)
    except Infeasible:
        plain = None
    try:
        split = training_choice.train(both, job)
    except Infeasible:
        assert plain is None
        return
    assert plain is None or value(job, split.best) <= value(job, plain.best) * (1 + 1e-9)
    search = FleetSearch(both, job).run()
    for row, found in search.planned.items():
        if not isinstance(found, Infeasible):
            assert found.iteration_s >= both.fleets.bound_s[row] * (1 - 1e-9)


def test_training_that_no_device_holds_a_layer_of_runs_on_teams():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(8192, 131072), nn.GELU(), nn.Linear(131072, 8192))
        example = (torch.zeros(16, 8192),)
    model = tvmhet.from_torch(module, example)
    market = Market.shipped("lambda").where(types=["v100-sxm2-16gb"], spot=False)
    asked = dict(market=market, samples=16_000, global_batch=64, optimizer="adamw")
    with pytest.raises(Infeasible):
        tvmhet.recommend(model, **asked)
    made = tvmhet.recommend(model, splits=[2, 4, 8], **asked)
    assert max(s.degree for s in made.pipelines[0].plan.stages) > 1
    assert made.bound is not None and made.bound <= value(made.job, made.best)
