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
from tvmhet.graph.cutting import part_of
from tvmhet.plans import Plan
from tvmhet.recommending import flow, service, space, training_choice
from tvmhet.recommending.job import Goal, Job
from tvmhet.recommending.measurements import Measured, with_measured
from tvmhet.recommending.option import value
from tvmhet.recommending.service_bounds import rates_of
from tvmhet.recommending.study import with_teams
from tvmhet.recommending.training import Planned
from tvmhet.recommending.training_fleets import one_of_each
from tvmhet.recommending.training_search import FleetSearch
from tvmhet.solve import Split, with_splits
from tvmhet.solve.units import find_units
from tvmhet.splitting import Wish, all_reduce_s
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


def test_measuring_the_whole_kernel_tells_about_its_parts(quick):
    """A part takes its share of what the whole is measured at, and has the error of that."""
    limit_ms, study, made = quick
    unit = made.units[made.best.pipelines[0][0]]
    (kernel, group), before = next((k, b) for k, b in study.beliefs([unit]).items() if k[1] >= len(study.space.groups))
    campaign = service.what_to_measure(study, Job(Goal.PRICE, throughput_per_s=10.0, latency_ms=limit_ms), 1.0)
    assert {c.key for c in campaign.choices} <= set(study.candidates.keys)
    seconds = 2 * study.table.entry(kernel, before.device_type).seconds
    table = with_measured(study.table, study.candidates.keys, [Measured(before.device_type, before.key, seconds)])
    again = dataclasses.replace(study, table=table, splits=(), unused_splits=())
    after = with_teams(again, [Wish(2), Wish(4)])._belief(kernel, group)
    assert after.measured and not before.measured and after.sigma < before.sigma
    split = next(s for s in study.splits if s.degree == study.problem.groups[group].degree)
    part = part_of(study.prepared.operator_graph, split.degree)
    a100, summed = study.market.device_types()[0], part.summed_bytes(study.candidates.kernels[kernel].ops)
    assert a100.name == before.device_type
    added = math.fsum(all_reduce_s(a100, split.degree, size) for size in summed)
    assert after.seconds - added == pytest.approx(2 * (before.seconds - added))


def test_pipelines_of_one_offer_are_as_long_as_a_type_that_does_not_hold_the_model_needs(model, monkeypatch):
    """Even where another type holds it, and sets of several devices are too many to look at."""
    monkeypatch.setattr(space, "_SETS", 1)
    room = model.param_bytes // 3
    offers = (
        dataclasses.replace(o, device=dataclasses.replace(o.device, memory_bytes=room))
        if o.device.name == "rtx-a6000"
        else o
        for o in MARKET.offers
    )
    units = flow.study_of(model, market=dataclasses.replace(MARKET, offers=tuple(offers))).units()
    sizes = {sum(u.devices) for u in units.units}
    assert 1 in sizes and max(sizes) >= 4


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
    problem, sold = with_splits(case.problem, made), space_of(case, Running())
    rates = rates_of(problem, sold)
    for unit in find_units(problem, max_devices=6).units:
        most = math.fsum(n * rates.per_s[sold.offer_of[g]] for g, n in enumerate(unit.devices))
        assert unit.rate_per_s <= most * (1 + 1e-6) and unit.latency_s >= rates.latency_s * (1 - 1e-6)


def test_training_with_teams_is_never_worse_and_never_below_its_bound():
    better = 0
    for seed in (0, 1, 3, 11):  # whose machines have two devices
        study = random_study(seed)
        job = Job(Goal.TIME, samples=100_000, global_batch=study.goal.global_batch)
        every = one_of_each(study.market)
        graphs = tuple(with_team_times(g, [Wish(2)], every, study.market.device_types()) for g in study.graphs)
        both = dataclasses.replace(study, graphs=graphs, plans={})
        plain, split = training_choice.train(study, job), training_choice.train(both, job)
        assert value(job, split.best) <= value(job, plain.best) * (1 + 1e-9)
        better += max(s.degree for s in split.pipelines[0].plan.stages) > 1
        planned = [(r, p) for r, p in FleetSearch(both, job).run().planned.items() if isinstance(p, Planned)]
        assert planned and all(p.iteration_s >= both.fleets.bound_s[r] * (1 - 1e-9) for r, p in planned)
    assert better >= 2


def test_a_service_that_no_device_holds_a_layer_of_is_told_of_splits():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(8192, 524288, bias=False), nn.GELU(), nn.Linear(524288, 8192, bias=False))
        example = (torch.zeros(16, 8192),)
    model = tvmhet.from_torch(module, example)
    market = Market.shipped("lambda").where(types=["v100-sxm2-16gb"], spot=False)
    with pytest.raises(Infeasible) as refused:
        tvmhet.recommend(model, market=market, throughput_per_s=1.0)
    assert "splits=[2, 4]" in refused.value.remedy
    made = tvmhet.recommend(model, market=market, throughput_per_s=1.0, splits=[2, 4])
    assert max(s.degree for s in made.pipelines[0].plan.stages) > 1


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
