"""Races: which plans run, that the fastest is found against dice, and that what fails does not win."""

import math
import random
import time
from collections import Counter
from types import SimpleNamespace

import pytest

import tvmhet
from benchmarks.profiling import Oracle
from tests.placed import cpus
from tests.small_models import SMALL_MODELS
from tvmhet import zoo
from tvmhet.campaign import Campaign
from tvmhet.candidates import MAKERS, candidate_kernels
from tvmhet.choosing import best_plan, predicted_best
from tvmhet.cluster import ClusterSpec
from tvmhet.cluster.local import cuda_ordinals
from tvmhet.errors import WorkerFailed
from tvmhet.ir.prepare import prepare
from tvmhet.profiling import ProfileReport
from tvmhet.raced import Placed, last_race
from tvmhet.racing import _NEAR, _TELLING, Race, Racer, _affordable
from tvmhet.rewriting import Wanted
from tvmhet.runtime.program import DeviceBinding
from tvmhet.solve import Objective
from tvmhet.times import Candidates

TWO = cpus(v2=1, v3=1)
SOON_S, FOREVER_S = 0.0, float("inf")


def race_of(name, database, objective=Objective.THROUGHPUT, cluster=TWO):
    """A race of a small model whose kernels' times are dice, so that stages are worth cutting."""
    small = {"image": 32, "blocks": (1, 1, 1, 1), "base_width": 8}
    model = zoo.resnet50(**small) if name == "resnet" else SMALL_MODELS[name]()
    prepared = prepare(tvmhet.from_torch(*model))
    candidates = Candidates.of(prepared.graph, candidate_kernels(prepared.graph, MAKERS))
    oracle = Oracle(candidates, cluster, seed="race")
    for device in cluster.device_types():
        oracle.record(database, device, range(len(candidates.keys)))
    return Race(prepared, cluster, database, Wanted(objective, MAKERS, {}))


def hidden_s(plan, rng):
    """What a plan takes: up to dice of its own, and a little of the moment."""
    own = random.Random(repr(Placed.of(plan))).uniform(1.0, 1.4)
    return plan.objective_value * own * rng.uniform(0.99, 1.01)


@pytest.fixture
def uncompiled(monkeypatch):
    """Races without a single compiled kernel; `_time` is to be replaced too."""
    monkeypatch.setattr(Race, "_compiled", lambda race, *_: [Racer(plan, None, []) for plan in race._plans()])


@pytest.mark.parametrize("objective", [Objective.THROUGHPUT, Objective.LATENCY])
@pytest.mark.parametrize("name", ["conv", "attention", "resnet"])
def test_plans_that_run_are_unlike_and_near_the_predicted_best(name, objective, database):
    race = race_of(name, database, objective)
    best = predicted_best(race.prepared, TWO, database, race.wanted)
    plans = list(race._plans())
    assert Placed.of(plans[0]) == Placed.of(best)
    assert len({Placed.of(plan) for plan in plans}) == len(plans) > 1
    assert all(plan.objective_value <= _NEAR * best.objective_value for plan in plans)
    assert [plan.to_json() for plan in race._plans()] == [plan.to_json() for plan in plans]


@pytest.mark.parametrize("seed", range(3))
def test_the_fastest_plan_is_found_and_chosen(seed, database, uncompiled, monkeypatch):
    race, report, rng = race_of("resnet", database), ProfileReport(), random.Random(seed)
    monkeypatch.setattr(Race, "_time", lambda _, racer, inputs: hidden_s(racer.plan, rng))
    race.run(FOREVER_S, report)
    raced = last_race(database, race.prepared, TWO, race.wanted)
    assert not report.failed and len(raced) == len(report.raced_s) > 3
    truth = {r.placed: random.Random(repr(r.placed)).uniform(1.0, 1.4) * r.planned_s for r in raced}
    assert truth[min(raced, key=lambda r: r.ran_s).placed] <= 1.01 * min(truth.values())
    # the plan: no slower than any that was surely faster than the one predicted best, of which rounds differ by 2 %
    first = min(raced, key=lambda r: r.planned_s)
    surely = min([truth[r.placed] for r in raced if truth[r.placed] < 0.97 * truth[first.placed]], default=math.inf)
    plan = best_plan(race.prepared, TWO, database, race.wanted)
    assert truth[Placed.of(plan)] <= 1.01 * min(surely, truth[first.placed])
    assert f"{len(raced)} plans were run one against the other" in str(report)
    for r in raced:
        assert r.ran_s == pytest.approx(truth[r.placed], rel=0.01)
    # the fastest of the last race run again
    assert {Placed.of(p) for p in race._plans()} >= {r.placed for r in sorted(raced, key=lambda r: r.ran_s)[:2]}


def test_slow_plans_run_less_often(database, uncompiled, monkeypatch):
    race, rounds = race_of("resnet", database), Counter()

    def clock(_, racer, inputs):
        rounds[racer.plan.objective_value] += 1
        return racer.plan.objective_value

    monkeypatch.setattr(Race, "_time", clock)
    race.run(FOREVER_S, ProfileReport())
    best = min(rounds)
    assert rounds[best] > 2
    assert all(count == 2 for value, count in rounds.items() if value > 1.12 * best)
    rounds.clear()
    race.run(SOON_S, ProfileReport())  # the deadline passes in the first round
    assert set(rounds.values()) == {1}


@pytest.mark.parametrize(
    ("left_s", "rounds", "stay"),
    [
        (math.inf, 1, [3.0, 1.0, 4.0, 2.0]),
        (16.0, 1, [3.0, 1.0, 4.0, 2.0]),  # four more rounds of four runs of a second
        (15.9, 1, [1.0, 4.0, 2.0]),
        (11.9, 1, [1.0, 4.0]),
        (0.1, 1, [1.0, 4.0]),  # the one predicted best and one other, whatever the time
        (11.9, 3, [3.0, 1.0, 4.0, 2.0]),
        (-1.0, 5, [3.0, 1.0, 4.0, 2.0]),  # it is told by now
    ],
)
def test_as_many_plans_stay_as_can_be_told_apart(left_s, rounds, stay):
    """In fewer than five rounds chance may decide: the slowest go, and never the one that is predicted best (4 s)."""
    racing = [Racer(None, None, [s]) for s in (3.0, 1.0, 4.0, 2.0)]
    assert [r.seconds for r in _affordable(racing, racing[2], left_s, 1.0, rounds)] == stay


def test_where_time_is_short_few_plans_run_often(database, uncompiled, monkeypatch):
    """Eight plans, runs of a second, 24 s: after a round of all, four can have four more; then one may be sure."""
    now_s = [0.0]

    def clock(_, racer, inputs):
        now_s[0] += 1.0
        return racer.plan.objective_value

    monkeypatch.setattr("tvmhet.racing.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(Race, "_time", clock)
    values = [1.0, 0.99, 0.98, 0.97, 1.01, 1.02, 1.03, 0.96]
    racers = [Racer(SimpleNamespace(objective_value=value), None, []) for value in values]
    race_of("conv", database)._rounds(racers, 24.0, ProfileReport())
    assert sorted(r.seconds for r in racers if len(r.took_s) >= _TELLING) == [0.96, 0.97, 0.98, 0.99]
    assert all(len(r.took_s) == 1 for r in racers if r.seconds > 0.99)


def test_a_plan_that_fails_is_said_and_does_not_win(database, uncompiled, monkeypatch):
    race, report = race_of("resnet", database), ProfileReport()
    best, tries = Placed.of(predicted_best(race.prepared, TWO, database, race.wanted)), []

    def clock(_, racer, inputs):
        if Placed.of(racer.plan) != best:
            return racer.plan.objective_value
        tries.append(racer)
        if len(tries) > 1:
            raise WorkerFailed("v3:0 died", "try again")
        return 1e-9  # the fastest of its round

    monkeypatch.setattr(Race, "_time", clock)
    race.run(FOREVER_S, report)
    assert report.failed == ["a plan that was run: v3:0 died"] and len(tries) == 2
    raced = last_race(database, race.prepared, TWO, race.wanted)
    assert len(raced) > 1 and best not in {r.placed for r in raced}


def test_nothing_is_kept_where_no_two_plans_ran(database, monkeypatch):
    def fail(_, racer, inputs):
        raise WorkerFailed("v3:0 died", "try again")

    race, report = race_of("conv", database), ProfileReport()
    race.run(SOON_S, report)  # no time to compile one
    assert not report.failed
    monkeypatch.setattr(Race, "_time", fail)
    race.run(FOREVER_S, report)
    assert report.failed and not report.raced_s
    assert last_race(database, race.prepared, TWO, race.wanted) == ()


@pytest.mark.parametrize("devices", ["cores", "GPUs"])
def test_plans_for_more_devices_than_are_here_do_not_race(devices, database, monkeypatch):
    race, report = race_of("resnet", database), ProfileReport()
    assert all(race._fits(plan) for plan in race._plans())  # two devices on two cores or more
    if devices == "cores":
        monkeypatch.setattr("tvmhet.runtime.cores.host_cores", lambda: ((0,),))
    else:
        a100 = {"a100:0": DeviceBinding("a100:0", "cuda", ordinal=len(cuda_ordinals()))}
        monkeypatch.setattr("tvmhet.racing.bind_devices", lambda *_: a100)
    assert not any(race._fits(plan) for plan in race._plans() if len(plan.stages) > 1)
    race.run(FOREVER_S, report)
    assert not report.raced_s and not report.failed


@pytest.mark.parametrize("num_machines", [1, 2])
def test_plans_over_several_machines_do_not_race(num_machines, database):
    """Here nothing that their devices hand over would cross the network."""
    types = ["cpu-x86-64-v2", "cpu-x86-64-v3"]
    places = [types] if num_machines == 1 else [types[:1], types[1:]]
    nodes = [{"name": f"rack-{i}", "devices": dict.fromkeys(place, 1)} for i, place in enumerate(places)]
    cluster = ClusterSpec.from_dict({"nodes": nodes, "network": {"bandwidth": "10 Gbit/s", "latency": "50 us"}})
    prepared = prepare(tvmhet.from_torch(*SMALL_MODELS["conv"]()))
    campaign = Campaign.of(prepared, cluster, database, Objective.THROUGHPUT, MAKERS)
    assert campaign._may_race({t.name: t for t in cluster.device_types()}) is (num_machines == 1)


@pytest.mark.slow
@pytest.mark.parametrize("objective", [Objective.THROUGHPUT, Objective.LATENCY])
def test_a_campaign_races_real_plans(objective, database, monkeypatch):
    """Real workers; the plan is then one that ran, and is chosen by that. It ends by itself, long before its time."""
    monkeypatch.setattr("tvmhet.racing._ROUNDS", 4)
    monkeypatch.setattr("tvmhet.racing._NEAR", 100.0)  # there are rivals, whatever this machine measures
    prepared = prepare(tvmhet.from_torch(*SMALL_MODELS["attention"]()))
    report = Campaign.of(prepared, TWO, database, objective, MAKERS).run(900.0)
    assert not report.failed and len(report.raced_s) > 1
    assert all(1e-6 < ran_s < 1.0 for ran_s in report.raced_s)
    wanted = Wanted(objective, MAKERS, {})
    plan = best_plan(prepared, TWO, database, wanted)
    raced = last_race(database, prepared, TWO, wanted)
    ran = {r.placed: r for r in raced}[Placed.of(plan)]
    first = min(raced, key=lambda r: r.planned_s)
    assert ran is first or ran.is_surely_faster(first)
    assert "when profile ran it against" in plan.notes[-1]


@pytest.mark.parametrize("budget_s", [3.0, 0.0])
def test_a_campaign_keeps_a_part_of_its_budget_for_running_plans(budget_s, database, monkeypatch):
    """Nothing is ever measured, so that the kernels take all the time there is."""
    prepared = prepare(tvmhet.from_torch(*SMALL_MODELS["conv"]()))
    deadlines: dict[str, float] = {}

    def note(name, position):
        return lambda *args: deadlines.setdefault(name, args[position] - started_s)

    monkeypatch.setattr(Campaign, "_measure", lambda *_: time.sleep(0.3))
    monkeypatch.setattr("tvmhet.campaign._MAX_ROUNDS", 100)
    monkeypatch.setattr(Campaign, "_measure_context", lambda *_: None)
    monkeypatch.setattr(Campaign, "_run_plans", note("timed", 3))
    monkeypatch.setattr(Race, "run", note("raced", 1))
    started_s = time.monotonic()
    report = Campaign.of(prepared, TWO, database, Objective.THROUGHPUT, MAKERS).run(budget_s)
    assert not report.complete
    if not budget_s:
        assert not deadlines
        return
    assert deadlines["timed"] == pytest.approx(0.7 * budget_s, abs=0.2)
    assert deadlines["raced"] == pytest.approx(budget_s, abs=0.2)
    assert time.monotonic() - started_s < budget_s
