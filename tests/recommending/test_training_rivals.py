"""Fleets without a plan, as rivals: the drawn seconds, what they are made of, and that they count."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import tvmhet
from tests.recommending.training_cases import random_study
from tvmhet.cluster import Market
from tvmhet.recommending.flow import training_study_of
from tvmhet.recommending.job import Goal, Job
from tvmhet.recommending.training import Planned
from tvmhet.recommending.training_choice import train, what_to_measure, with_what_if
from tvmhet.recommending.training_rivals import Rival, rivals_of
from tvmhet.recommending.training_search import FleetSearch
from tvmhet.recommending.uncertainty import Draws, KernelBelief
from tvmhet.recommending.what_if import break_even, repriced

BATCH = 8192
CLOSE = Market.from_text("""
network: {bandwidth: 400 Gbit/s, latency: 5 us}
offers:
  - {type: t4, price: 0.53 USD/h, max_instances: 7}
  - {type: l4, price: 1.80 USD/h, max_instances: 7}
""")


@pytest.fixture(scope="module")
def study():
    """A small model on two types, 63 fleets of them."""
    with torch.device("meta"):
        layers = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048))
    return training_study_of(tvmhet.from_torch(layers, torch.zeros(512, 2048)), market=CLOSE, global_batch=BATCH)


def test_draws_follow_the_formula():
    def known(name: str) -> tuple[KernelBelief, ...]:
        return tuple(KernelBelief(s, 0.2, name, "linear", key, "learned") for key, s in (("a", 1.0), ("b", 3.0)))

    rng = np.random.default_rng(0)
    errors = {(t, k): rng.normal(0, 0.3, 7) for t in ("t4", "l4") for k in "ab"}
    place = rng.random(7)
    drawn = Rival(2.0, 3.0, 1.5, ((1.0, known("t4")), (3.0, known("l4")))).draws(Draws(errors, 7), place)
    for i in range(7):
        t4, l4 = ((math.exp(errors[t, "a"][i]) + 3 * math.exp(errors[t, "b"][i])) / 4 for t in ("t4", "l4"))
        assert drawn[i] == pytest.approx(2 + place[i] + 1.5 * (4 / (1 / t4 + 3 / l4) - 1))


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_what_is_known_of_each_fleet(seed):
    """Between the bound and whole copies; the compute is the chain's seconds, divided by speed."""
    study = random_study(seed)
    job = Job(Goal.PRICE, 16_000, global_batch=study.goal.global_batch)
    search = FleetSearch(study, job)
    rows = range(len(study.fleets.counts))
    rivals = rivals_of(search, rows)
    (graph,) = study.graphs
    each = (graph.forward.seconds + graph.backward).sum(axis=0)  # by type, in the order of the offers
    micro = study.goal.global_batch / graph.size
    fleets = study.fleets
    assert set(rivals) >= set(np.flatnonzero(np.isfinite(fleets.copies_s)).tolist())
    for row, rival in rivals.items():
        devices = fleets.counts[row] * [o.num_devices for o in study.market.offers]
        assert rival.compute_s == pytest.approx(micro / (devices / each).sum())
        assert fleets.bound_s[row] * (1 - 1e-9) <= rival.low_s <= rival.high_s
        if math.isfinite(fleets.copies_s[row]):
            assert rival.high_s == fleets.copies_s[row]
        assert {b.device_type for b in rival.beliefs} == {o.device.name for o, _ in search.fleet(row)}


def test_fleets_without_a_plan_may_prove_better(study):
    job = Job(Goal.PRICE, 10**5 * BATCH, global_batch=BATCH)
    made = train(study, job)
    planned = {name for p in study.plans.values() if isinstance(p, Planned) for name in p.cluster.counts()}
    assert planned and len(study.plans) < len(study.fleets.counts)
    assert made.confidence.probability < 1 and made.confidence.rivals
    assert any("fleets timed again in each draw" in n for n in made.notes)
    measured = {c.device_type for c in what_to_measure(study, job, 5.0).choices}
    assert measured and measured <= {"t4", "l4"}


def test_break_even_is_against_the_choice_by_risk(study):
    hours = train(study, Job(Goal.TIME, 10**5 * BATCH, global_batch=BATCH)).best.hours
    for tight in (1.2, 1.3, 2.5, 4.0):
        job = Job(Goal.PRICE, 10**5 * BATCH, global_batch=BATCH, deadline_h=tight * hours)
        plain, careful = train(study, job), train(study, job, risk=0.95)
        if plain.best.devices != careful.best.devices:
            break
    assert plain.best.devices != careful.best.devices, "else this tests nothing"
    assert careful.winner(lambda o: o).devices == careful.best.devices

    def at(name: str, factor: float):
        return careful.winner(lambda o: repriced(job, CLOSE.running, o, name, factor)).devices

    for name in ("t4", "l4"):
        even = break_even(job, CLOSE.running, careful.best, name, careful.winner)
        if even.option is None:
            continue
        assert abs(even.factor - 1) > 1e-3
        assert at(name, even.factor) == even.option.devices != careful.best.devices
        assert at(name, even.factor**0.99) == careful.best.devices


def test_what_changes_is_chosen_by_risk_too():
    study = random_study(0)
    job = Job(Goal.PRICE, 10**6 * study.goal.global_batch, global_batch=study.goal.global_batch)
    made = with_what_if(study, train(study, job, risk=0.95))
    assert "least price that 0.95 of draws stay below" in str(made)
    for change in made.changes:
        name = change.what.removesuffix(" sold out")
        if name in made.best.devices:
            assert change.option.devices == train(study.on(study.market.without(name)), job, risk=0.95).best.devices
