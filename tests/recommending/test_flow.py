"""From a model and a market to plans that run: end to end, on real kernels and predicted times."""

import dataclasses
import json
import math

import pytest
import torch

import tvmhet
from tests.placed import assert_same, plain
from tests.small_models import Conv
from tvmhet.cluster import Market
from tvmhet.errors import BadInput, Infeasible
from tvmhet.recommending import flow, recommend, service
from tvmhet.recommending.job import Goal, Job
from tvmhet.recommending.measurements import Measured
from tvmhet.recommending.option import meets, value
from tvmhet.recommending.space import make_space
from tvmhet.recommending.what_if import FASTER
from tvmhet.solve import Solution, Status, simulate

GPUS = """
running: {startup: 60 s, checkpoint: 5 s}
offers:
  - {type: t4, price: 0.53 USD/h, max_instances: 3}
  - {name: quad, type: l4, devices: 4, price: 3.00 USD/h, max_instances: 1}
  - {type: a100-40gb, price: 3.67 USD/h, max_instances: 2}
"""
CPUS = """
network: {bandwidth: 10 Gbit/s, latency: 20 us}
offers:
  - {type: cpu-x86-64-v2, price: 0.02 USD/h, max_instances: 2}
  - {type: cpu-x86-64-v3, price: 0.05 USD/h, max_instances: 2}
"""


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return tvmhet.from_torch(Conv().eval(), (torch.randn(1, 3, 8, 8),))


@pytest.fixture(scope="module")
def study(model):
    return flow.study_of(model, market=Market.from_text(GPUS))


@pytest.fixture(scope="module")
def fastest(study):
    return service.answer(study, Job(Goal.TIME), plans=False).best.rate_per_s


@pytest.fixture(scope="module")
def wide():
    """The same model with so many inputs at once that kernels count more than their launches; its highest rate."""
    model = tvmhet.from_torch(Conv().eval(), (torch.randn(512, 3, 8, 8),))
    study = flow.study_of(model, market=Market.from_text(GPUS))
    return study, service.answer(study, Job(Goal.TIME), plans=False).best.rate_per_s


def test_the_groups_of_a_market():
    space = make_space(Market.from_text(GPUS))
    stand_for = [(space.offers[o].device.name, g.num_devices, sorted(s)) for o, g, s in
                 zip(space.offer_of, space.groups, space.sizes, strict=True)]  # fmt: skip
    assert stand_for == [("t4", 3, [1, 2, 3]), ("l4", 4, [1, 2, 4]), ("a100-sxm-40gb", 2, [1, 2])]
    t4, l4, _ = space.groups
    inside, across = space.cluster.link(l4, l4), space.cluster.link(t4, t4)
    assert inside.byte_per_s > across.byte_per_s == space.market.network.byte_per_s
    assert all(space.cluster.host_link(g).byte_per_s <= space.market.network.byte_per_s for g in space.groups)


@pytest.mark.parametrize("goal", list(Goal))
def test_a_service_keeps_its_throughput(study, fastest, goal):
    job = Job(goal, throughput_per_s=0.4 * fastest)
    made = service.answer(study, job)
    assert meets(made.best, job.limits())
    assert made.homogeneous is None or value(job, made.best) <= value(job, made.homogeneous)
    assert sum(p.copies / p.plan.period_s for p in made.pipelines) == pytest.approx(made.best.rate_per_s)
    bought = {o.device.name: n * o.num_devices for o, n in made.best.instances}
    used: dict[str, int] = {}
    for p in made.pipelines:
        for stage in p.plan.stages:
            name = stage.placement.device_type
            used[name] = used.get(name, 0) + p.copies * len(stage.placement.devices)
    assert all(used[name] <= bought[name] for name in used)


def test_a_deadline_holds_in_the_simulator(study, fastest):
    """Every pipeline takes its share of the samples; the last is done before the deadline."""
    for tightness in (1.02, 1.5, 4.0):
        samples = 200
        work_h = samples / fastest / 3600
        hours = (60 + 1.0) / 3600 + work_h * tightness
        job = Job(Goal.PRICE, samples, deadline_h=hours)
        made = service.answer(study, job)
        used = [made.units[u] for u, _ in made.best.pipelines]
        for unit, (_, copies) in zip(used, made.best.pipelines, strict=True):
            share = math.ceil(samples * unit.rate_per_s / made.best.rate_per_s)
            assert copies >= 1
            solution = Solution(unit.stages, unit.period_s, 0.0, Status.FEASIBLE, 0, "unit")
            work_s = simulate(study.problem, solution, share).makespan_s
            assert study.market.running.hours(work_s, 0) <= hours * (1 + 1e-6)


def test_a_latency_limit(study):
    quickest = min(u.latency_s for u in service.answer(study, Job(Goal.TIME), plans=False).units)
    made = service.answer(study, Job(Goal.PRICE, latency_ms=quickest * 1e3 * 1.01))
    assert made.best.latency_s <= quickest * 1.011
    with pytest.raises(Infeasible, match="nearest: latency_ms=") as caught:
        service.answer(study, Job(Goal.PRICE, latency_ms=quickest * 1e3 * 0.5))
    said = float(caught.value.remedy.split("latency_ms=")[1].split()[0])
    assert service.answer(study, Job(Goal.PRICE, latency_ms=said), plans=False).best.latency_s <= said / 1e3


def test_risk_pays_for_room(study, fastest):
    job = Job(Goal.PRICE, throughput_per_s=0.45 * fastest)
    plain_, careful = (service.answer(study, job, risk=r, plans=False) for r in (None, 0.95))
    assert careful.confidence.keeps_limits >= plain_.confidence.keeps_limits
    assert careful.best.usd_per_h >= plain_.best.usd_per_h


def test_what_if(study, fastest):
    made = service.with_what_if(
        study, service.answer(study, Job(Goal.PRICE, throughput_per_s=0.4 * fastest), plans=False)
    )
    assert {c.what for c in made.changes} >= {f"{t} sold out" for t in made.best.devices}
    assert f"network {FASTER:g} times as fast" in {c.what for c in made.changes}
    for even in made.break_evens:
        assert (even.factor > 1) == (even.device_type in made.best.devices) or even.option is None
        if even.option is not None:
            assert even.option.devices != made.best.devices
            just = study.on(study.market.with_price(even.device_type, even.factor))
            again = service.answer(just, made.job, plans=False)
            assert value(made.job, again.best) == pytest.approx(value(made.job, even.option))


def test_what_if_is_chosen_by_risk_too(wide):
    study, fastest = wide
    table = dataclasses.replace(study.table, low=study.table.low / 2, high=study.table.high * 2)
    study = dataclasses.replace(study, table=table)
    jobs = (Job(Goal.PRICE, throughput_per_s=i / 20 * fastest) for i in range(1, 20))
    both = ([service.answer(study, job, risk=r, plans=False) for r in (None, 0.95)] for job in jobs)
    careful = next(c for plain, c in both if plain.best != c.best)
    made = service.with_what_if(study, careful)
    assert made.winner(lambda o: o) == made.best
    assert all(even.option is None or abs(even.factor - 1) > 1e-3 for even in made.break_evens)
    for change in made.changes:
        name = change.what.removesuffix(" sold out")
        if change.option is not None and name in made.best.devices:
            less = study.on(study.market.without(name))
            assert change.option == service.answer(less, made.job, risk=0.95, plans=False).best


def test_what_to_measure_fits_the_budget_and_changes_the_answer(wide):
    study, fastest = wide
    jobs = [Job(Goal.PRICE, throughput_per_s=share * fastest) for share in (0.3, 0.4, 0.5, 0.6, 0.7)]
    campaigns = [service.what_to_measure(study, job, 0.5) for job in jobs]
    assert all(c.usd <= 0.5 for c in campaigns)
    job, campaign = next((j, c) for j, c in zip(jobs, campaigns, strict=True) if c.choices)
    rows = [json.loads(line) for line in study.measuring_list(campaign).splitlines()]
    assert [(r["device"], r["kernel"]) for r in rows] == [(c.device_type, c.key) for c in campaign.choices]
    assert all(r["ops"] and r["seconds"] is None for r in rows)
    with pytest.raises(BadInput, match="the profiling budget is 0"):
        service.what_to_measure(study, job, 0)


def test_measured_kernels_are_believed(model, study):
    name = service.answer(study, Job(Goal.PRICE), plans=False).best
    (kind,) = name.devices
    slow = [Measured(kind, key, 1.0) for key in set(study.candidates.keys)]
    again = recommend(model, market=Market.from_text(GPUS), measurements=slow)
    assert kind not in again.best.devices


def test_plans_build_and_run(model):
    """Two CPU types stand for a market: what is recommended is compiled, run, and equal to plain TVM."""
    market = Market.from_text(CPUS)
    one = recommend(model, market=market)
    made = recommend(model, market=market, throughput_per_s=1.5 * one.best.rate_per_s)
    x = torch.randn(1, 3, 8, 8)
    for pipeline in made.pipelines:
        with tvmhet.build(model, cluster=pipeline.cluster, plan=pipeline.plan) as lib:
            assert_same(lib(x), plain(model, x))


def test_it_is_saved_and_printed(model, tmp_path):
    made = recommend(model, market=Market.from_text(GPUS), samples=1_000_000, what_if=True)
    made.save(tmp_path / "out")
    files = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert files[0] == "cluster-0.yaml" and "recommendation.json" in files and "plan-0.json" in files
    spec = tvmhet.ClusterSpec.from_file(tmp_path / "out" / "cluster-0.yaml")
    assert spec.content_hash() == made.pipelines[0].cluster.content_hash()
    tree = json.loads((tmp_path / "out" / "recommendation.json").read_text())
    assert tree["best"]["usd"] == made.best.usd and tree["job"]["goal"] == "price"
    text = str(made)
    assert made.best.fleet.split(" (")[0] in text and "what if" in text and "sure" in text


def test_the_same_seed_gives_the_same_text(model):
    texts = {str(recommend(model, market=Market.from_text(GPUS), samples=10_000)) for _ in range(2)}
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"objective": "fast"}, "objective 'fast' is unknown"),
        ({"deadline_h": 2.0}, "a service without samples= never ends"),
        ({"budget_usd": -1.0}, "budget_usd is -1"),
        ({"samples": 0}, "samples is 0"),
        ({"throughput_per_s": float("nan")}, "throughput_per_s is nan"),
        ({"risk": 1.5}, "risk is 1.5"),
    ],
)
def test_limits_that_make_no_sense(model, arguments, said):
    with pytest.raises(BadInput, match=said):
        recommend(model, market=Market.from_text(GPUS), **arguments)


def test_a_refusal_says_whether_it_is_proved_and_what_is_nearest(study, fastest):
    with pytest.raises(Infeasible, match=r"\(proved: no plan of this market is above throughput_per_s=.*/s\)") as far:
        service.answer(study, Job(throughput_per_s=100 * fastest))
    nearest = float(str(far.value).rpartition("nearest: throughput_per_s=")[2].split()[0])
    assert 0.99 * fastest < nearest <= fastest
    with pytest.raises(Infeasible, match=r"\(proved: no plan of this market is below budget_usd=0.53 USD/h\)"):
        service.answer(study, Job(budget_usd=0.01))
    with pytest.raises(Infeasible, match=r"\(not proved: .*, no bound excludes throughput_per_s="):
        service.answer(study, Job(throughput_per_s=1.0001 * fastest))
    with pytest.raises(Infeasible, match=r"\(proved: no plan of this market is below latency_ms="):
        service.answer(study, Job(latency_ms=1e-6))


def test_a_refused_latency_has_the_nearest_latency_that_does(study):
    free = service.answer(study, Job(Goal.TIME), plans=False).best
    least = min(u.latency_s for u in study.units().units)
    job = Job(Goal.PRICE, throughput_per_s=free.rate_per_s, latency_ms=1.001e3 * least)
    with pytest.raises(Infeasible, match=r"or latency_ms=[0-9.]+ ms with") as caught:
        service.answer(study, job)
    nearest = float(str(caught.value).rpartition("latency_ms=")[2].split()[0])
    assert service.answer(study, dataclasses.replace(job, latency_ms=nearest), plans=False).best.rate_per_s > 0


def test_a_market_where_nothing_fits(model):
    small = "device_types: {tiny: {like: t4, memory: 1 KiB}}\noffers: [{type: tiny, price: 1 USD/h}]\n"
    with pytest.raises(Infeasible, match=r"the market has tiny"):
        recommend(model, market=Market.from_text(small))


def test_spot_offers_are_asked_for(model):
    market = Market.from_text("offers: [{type: t4, price: 1 USD/h, spot_price: 0.2 USD/h}]\n")
    assert recommend(model, market=market).best.usd_per_h == 1.0
    assert recommend(model, market=market, spot=True).best.usd_per_h == 0.2


def test_a_large_market_is_narrowed_and_says_so(model):
    made = recommend(model, market=Market.shipped(), samples=10_000_000)
    assert not made.complete
    assert any("offers were compared" in n for n in made.notes)
    assert dataclasses.asdict(made.job)["samples"] == 10_000_000


def test_machines_that_cost_nothing_are_all_used_and_nothing_is_regretted(model):
    owned = Market.from_text("GPU 0: Tesla T4 (UUID: GPU-1)\nGPU 1: NVIDIA L4 (UUID: GPU-2)\n")
    made = recommend(model, market=owned)
    assert made.best.devices == {"t4": 1, "l4": 1}
    assert made.gain == 0 and made.confidence.regret == 0 and made.confidence.probability == 1
    assert "nan" not in str(made)


def test_a_model_too_large_for_all_machines_together_says_how_much_there_is():
    with torch.device("meta"):
        layers = torch.nn.Sequential(*(torch.nn.Linear(16384, 16384) for _ in range(20)))
    model = tvmhet.from_torch(layers, (torch.zeros(8, 16384),))
    market = "offers: [{type: t4, price: 0.5 USD/h, max_instances: N}]"
    with pytest.raises(Infeasible, match=r"weights take 20.0 GiB; the market has t4 with .*, in all"):
        recommend(model, market=Market.from_text(market.replace("N", "1")))
    made = recommend(model, market=Market.from_text(market.replace("N", "2")))
    assert made.best.devices == {"t4": 2} and len(made.pipelines[0].plan.stages) == 2
