"""A deadline that a recommendation keeps is kept in the simulator too: services' jobs and training, random cases."""

import dataclasses
import math
import random
import re

import pytest

from tests.recommending.training_cases import BATCH, ITERATIONS, chain, random_study
from tvmhet.cluster import Running
from tvmhet.errors import Infeasible
from tvmhet.recommending import service
from tvmhet.recommending.job import Goal, Job
from tvmhet.recommending.study import Study
from tvmhet.recommending.training_choice import train
from tvmhet.solve import Solution, Status, simulate

SAMPLES = 400
RUNNING = Running(startup_s=0.02, checkpoint_s=5.0)


def random_service(seed: int) -> Study:
    """Eight layers on a random market of up to six devices; in three of four cases no device holds them all."""
    drawn, rng = random_study(seed), random.Random(seed)
    weights = sum(t.size_bytes for t in chain()[0].graph.tensors if t.is_param)
    offers = [
        dataclasses.replace(o, device=dataclasses.replace(o.device, memory_bytes=int(weights * rng.uniform(0.3, 0.9))))
        for o in drawn.market.offers
    ]
    market = dataclasses.replace(
        drawn.market, running=RUNNING, offers=tuple(offers) if seed % 4 else drawn.market.offers
    )
    return Study(*chain(), drawn.graphs[0].forward, market)


def run_s(study: Study, units, option) -> float:
    """Seconds until the last of the samples, dealt to pipelines by their rates, in the simulator."""
    chosen = [units[u] for u, n in option.pipelines for _ in range(n)]
    rate = sum(u.rate_per_s for u in chosen)
    seconds, left = 0.0, SAMPLES
    for unit in chosen:
        mine = min(left, math.ceil(SAMPLES * unit.rate_per_s / rate))
        left -= mine
        solution = Solution(unit.stages, unit.period_s, 0.0, Status.FEASIBLE, 0, "unit")
        seconds = max(seconds, simulate(study.problem, solution, mine).makespan_s if mine else 0.0)
    assert left == 0
    return seconds


def check_service(seed: int) -> str:
    """Ask for a job within a random deadline; run the answer."""
    study, rng = random_service(seed), random.Random(seed)
    try:
        fastest = service.answer(study, Job(Goal.TIME, SAMPLES), plans=False).best.hours
    except Infeasible:
        return "nothing fits"
    deadline = fastest * rng.uniform(0.8, 1.5)
    try:
        made = service.answer(study, Job(rng.choice(list(Goal)), SAMPLES, deadline_h=deadline), plans=False)
    except Infeasible as error:
        assert deadline < fastest and "nearest: deadline_h=" in str(error), seed
        return "refused"
    assert (
        RUNNING.hours(run_s(study, made.units, made.best), 0) <= made.best.hours * (1 + 1e-9) <= deadline * (1 + 2e-9)
    )
    return "kept"


def check_training(seed: int) -> str:
    """The same for training."""
    study, rng = random_study(seed), random.Random(seed)
    try:
        fastest = train(study, Job(Goal.TIME, BATCH * ITERATIONS, global_batch=BATCH)).best.hours
    except Infeasible:
        return "nothing fits"
    deadline = fastest * rng.uniform(0.8, 1.5)
    asked = Job(rng.choice(list(Goal)), BATCH * ITERATIONS, deadline_h=deadline, global_batch=BATCH)
    try:
        made = train(study, asked)
    except Infeasible as error:
        assert deadline < fastest and "nearest: deadline_h=" in str(error), seed
        return "refused"
    figures = made.pipelines[0].plan.training
    hours = study.market.running.hours(ITERATIONS * figures.simulated_s, 0)
    assert hours <= made.best.hours * (1 + 1e-9) <= deadline * (1 + 2e-9)
    return "kept"


@pytest.mark.parametrize("seed", range(4))
def test_refusals_of_small_markets_are_proved_by_trying_all(seed):
    study = random_service(seed)
    try:
        fastest = service.answer(study, Job(Goal.TIME, SAMPLES), plans=False).best
    except Infeasible:
        return
    with pytest.raises(Infeasible, match=r"\(proved: "):
        service.answer(study, Job(Goal.PRICE, SAMPLES, deadline_h=0.8 * fastest.hours))


def check_nearest(seed: int) -> str:
    """Ask for the deadline that a refusal names: it is kept, in the simulator too."""
    study = random_service(seed)
    try:
        fastest = service.answer(study, Job(Goal.TIME, SAMPLES), plans=False).best.hours
    except Infeasible:
        return "nothing fits"
    with pytest.raises(Infeasible, match=r"nearest: deadline_h=") as refused:
        service.answer(study, Job(Goal.TIME, SAMPLES, deadline_h=0.9 * fastest), plans=False)
    nearest = float(re.search(r"nearest: deadline_h=(\S+) h", str(refused.value))[1])
    made = service.answer(study, Job(Goal.PRICE, SAMPLES, deadline_h=nearest), plans=False)
    assert RUNNING.hours(run_s(study, made.units, made.best), 0) <= nearest * (1 + 2e-9)
    return "kept"


@pytest.mark.parametrize("seed", [5003, 5004, 5021, 5061])
def test_the_nearest_deadline_of_a_refusal_is_kept(seed):
    assert check_nearest(seed) == "kept"


@pytest.mark.parametrize("seed", [*range(12), 5021])
def test_a_job_of_many_inputs_is_done_in_time(seed):
    check_service(seed)


def _training(goal: Goal, deadline_h: float | None = None, budget_usd: float | None = None) -> Job:
    return Job(goal, BATCH * ITERATIONS, deadline_h, budget_usd, global_batch=BATCH)


@pytest.mark.parametrize("seed", [700, 703])
def test_the_nearest_limits_of_refused_training_are_kept(seed):
    """Nearly as fast as the fastest for nearly the price of the cheapest: each limit may move."""
    study = random_study(seed)
    deadline = 1.02 * train(study, _training(Goal.TIME)).best.hours
    budget = 1.01 * train(study, _training(Goal.PRICE)).best.usd
    with pytest.raises(Infeasible) as refused:
        train(study, _training(Goal.PRICE, deadline, budget))
    later = float(re.search(r"deadline_h=(\S+) h with", str(refused.value))[1])
    dearer = float(re.search(r"budget_usd=(\S+) USD with", str(refused.value))[1])
    for limits in ((later, budget), (deadline, dearer)):
        assert train(random_study(seed), _training(Goal.PRICE, *limits)).best.hours <= limits[0] * (1 + 2e-9)


@pytest.mark.slow
def test_more_jobs_are_done_in_time():
    outcomes = [check_service(seed) for seed in range(100, 160)]
    assert outcomes.count("kept") > 30 and outcomes.count("refused") > 3


@pytest.mark.slow
def test_training_is_done_in_time():
    outcomes = [check_training(seed) for seed in range(700, 710)]
    assert outcomes.count("kept") > 5
