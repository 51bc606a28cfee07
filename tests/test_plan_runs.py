"""Plans run as they are: what their kernels took there is kept, and the plan is chosen anew until it has run."""

import random
from dataclasses import replace
from functools import partial

import pytest

import tvmhet
from benchmarks.profiling import Oracle
from tests.placed import cpus
from tests.small_models import SMALL_MODELS
from tvmhet.campaign import Campaign
from tvmhet.candidates import MAKERS, candidate_kernels
from tvmhet.context import beside, keep_context, kernel_factors
from tvmhet.cost.measure import Measurement
from tvmhet.ir.prepare import prepare
from tvmhet.known_times import known_times
from tvmhet.plan_runs import PlanRuns
from tvmhet.profiling import Profiler, ProfileReport
from tvmhet.proposing import variant_of
from tvmhet.rewriting import Planner, Wanted
from tvmhet.solve import Objective
from tvmhet.times import Candidates

TWO = cpus(v2=1, v3=1)
TYPES = TWO.device_types()
FOREVER_S = float("inf")


class Truth:
    """Every kernel has been measured alone; what it takes inside the model is up to dice, and known by running."""

    def __init__(self, model, database, part):
        self.prepared, self.database, self.part = prepare(tvmhet.from_torch(*SMALL_MODELS[model]())), database, part
        self.candidates = Candidates.of(self.prepared.graph, candidate_kernels(self.prepared.graph, MAKERS))
        oracle = Oracle(self.candidates, TWO, seed="alone")
        for device in TYPES:
            oracle.record(database, device, range(len(self.candidates.keys)))
            keep_context(database, self.prepared.key, device, (1.25,), 1.0)
            keep_context(database, self.prepared.key, device, (1.25,), 1.0, part)
        self.alone = known_times(self.prepared, self.candidates, database, TWO, in_context=False)
        self.asked = []  # of each choice, whether it hopes
        self.ran, self.values_s = [], []  # of each plan that ran: seconds of its stages' kernels, and its objective

    def factor(self, key, device):
        return random.Random(f"{key} {device}").uniform(1.0, 1.5)

    def stage_s(self, compiled):
        """What each kernel of a stage takes where it is."""
        device = compiled.device.name
        found = self.candidates.indices(compiled.stage.kernels)
        return [self.alone.entry(i, device).seconds * self.factor(self.candidates.keys[i], device) for i in found]

    def time(self, stages):
        """In place of `PlanRuns._time`."""
        runs = [(stage, Measurement("ok", tuple(self.stage_s(stage)))) for stage in stages]
        took_s = [sum(run.times_s) for _, run in runs]
        more_s = [t - s.compute_s for t, s in zip(took_s, self.plan.stages, strict=True)]
        loads_s = [s.load_s + more for s, more in zip(self.plan.stages, more_s, strict=True)]
        self.ran.append(took_s)
        # of one input alone at most: stages on two paths do not add up
        self.values_s.append(max(loads_s) if self.part else self.plan.objective_value + sum(more_s))
        return runs

    def best(self, hopeful):
        """The best plan by what is known, no operator rewritten."""
        self.asked.append(hopeful)
        objective = Objective.THROUGHPUT if self.part else Objective.LATENCY
        price = partial(
            known_times, database=self.database, cluster=TWO, in_context=True, together=bool(self.part), hopeful=hopeful
        )
        wanted = Wanted(objective, MAKERS, {}, kinds=frozenset())
        self.plan, variant = Planner(TWO, price, wanted).best(variant_of(self.prepared, MAKERS, price))
        return self.plan, variant


@pytest.mark.parametrize("part", ["", beside(1)])
@pytest.mark.parametrize("model", ["conv", "branches"])
def test_the_plan_is_in_the_end_the_best_of_all_that_ran_and_takes_what_it_says(model, part, database, monkeypatch):
    truth, report = Truth(model, database, part), ProfileReport()
    monkeypatch.setattr(PlanRuns, "_time", lambda _, stages: truth.time(stages))
    first, _ = truth.best(hopeful=False)
    with Profiler(truth.prepared, truth.candidates, database) as profiler:
        runs = PlanRuns(truth.prepared, TWO, database, profiler, TYPES, together=bool(part))
        runs.run(truth.best, lambda _: truth.alone, FOREVER_S, report)
    plan, _ = truth.best(hopeful=False)
    assert report.plans_run == len(truth.ran) > 1
    assert [stage.compute_s for stage in plan.stages] in [pytest.approx(ran) for ran in truth.ran]
    assert plan.objective_value <= min(truth.values_s) * (1 + 1e-3)
    if part or len(plan.stages) == 1:
        assert plan.objective_value == pytest.approx(min(truth.values_s), rel=1e-3)
    assert truth.asked[1]  # those that may be fast come first
    assert first.objective_value != plan.objective_value


def test_one_plan_is_run_whatever_the_time(database, monkeypatch):
    truth, report = Truth("conv", database, ""), ProfileReport()
    monkeypatch.setattr(PlanRuns, "_time", lambda _, stages: truth.time(stages))
    with Profiler(truth.prepared, truth.candidates, database) as profiler:
        runs = PlanRuns(truth.prepared, TWO, database, profiler, TYPES, together=False)
        runs.run(truth.best, lambda _: truth.alone, 0.0, report)
    assert report.plans_run == len(truth.ran) == 1
    assert "one plan was run as planned" in str(report)


def test_a_plan_that_does_not_run_is_said_and_teaches_nothing(database, monkeypatch):
    truth, report = Truth("conv", database, ""), ProfileReport()
    monkeypatch.setattr(
        PlanRuns, "_time", lambda _, stages: [(stage, Measurement("timeout", note="after 1 s")) for stage in stages]
    )
    before, _ = truth.best(hopeful=False)
    with Profiler(truth.prepared, truth.candidates, database) as profiler:
        runs = PlanRuns(truth.prepared, TWO, database, profiler, TYPES, together=False)
        runs.run(truth.best, lambda _: truth.alone, FOREVER_S, report)
    assert report.plans_run == 0 and "run as planned" not in str(report)
    assert report.failed and all("timeout after 1 s" in text for text in report.failed)
    assert truth.best(hopeful=False)[0] == before


def test_a_plan_whose_calls_are_not_its_kernels_teaches_nothing(database, monkeypatch):
    truth, report = Truth("conv", database, ""), ProfileReport()
    longer = Measurement("ok", (1e-3,) * 100)
    monkeypatch.setattr(PlanRuns, "_time", lambda _, stages: [(stage, longer) for stage in stages])
    before, _ = truth.best(hopeful=False)
    with Profiler(truth.prepared, truth.candidates, database) as profiler:
        runs = PlanRuns(truth.prepared, TWO, database, profiler, TYPES, together=False)
        runs.run(truth.best, lambda _: truth.alone, FOREVER_S, report)
    assert report.plans_run == 0 and not report.failed
    assert truth.best(hopeful=False)[0] == before


def test_a_kernel_that_was_not_measured_alone_is_not_kept(database, monkeypatch):
    """What it took inside over a mere estimate is no factor."""
    truth, report = Truth("conv", database, ""), ProfileReport()
    monkeypatch.setattr(PlanRuns, "_time", lambda _, stages: truth.time(stages))
    kept = []
    monkeypatch.setattr("tvmhet.plan_runs.keep_run", lambda *args: kept.extend(args[3]))
    plan, _ = truth.best(hopeful=False)
    first, *others = truth.candidates.indices(plan.stages[0].kernels)
    rank = truth.alone.rank.copy()
    rank[first] = 0
    alone = replace(truth.alone, rank=rank)
    with Profiler(truth.prepared, truth.candidates, database) as profiler:
        runs = PlanRuns(truth.prepared, TWO, database, profiler, TYPES, together=False)
        runs.run(truth.best, lambda _: alone, 0.0, report)
    assert report.plans_run == 1 and kept
    assert truth.candidates.keys[first] not in kept
    assert {truth.candidates.keys[i] for i in others} - {truth.candidates.keys[first]} <= set(kept)


@pytest.mark.slow
@pytest.mark.parametrize("objective", [Objective.THROUGHPUT, Objective.LATENCY])
def test_a_real_campaign_runs_its_plan(objective, database):
    """Real kernels: those of the plans that ran are priced by their runs, no longer by their operators' factor."""
    prepared = prepare(tvmhet.from_torch(*SMALL_MODELS["conv"]()))
    candidates = Candidates.of(prepared.graph, candidate_kernels(prepared.graph, MAKERS))
    report = Campaign(prepared, candidates, database, TWO, objective, makers=MAKERS).run(120.0)
    assert not report.failed
    assert report.plans_run >= 1
    part = beside(1) if objective is Objective.THROUGHPUT else ""
    names = [[candidates.names[o] for o in k.ops] for k in candidates.kernels]
    factors = [
        (
            kernel_factors(database, prepared.key, device, names, part),
            kernel_factors(database, prepared.key, device, names, part, ran=[[key] for key in candidates.keys]),
        )
        for device in TYPES
    ]
    assert any((by_operators != own).any() for by_operators, own in factors)
