"""Proofs of refusals: no fleet of an exhaustive search goes beyond a bound; bounds by parts are below those of all."""

import dataclasses
import math

import pytest

from tests.recommending.markets import SAMPLES, every_fleet, random_case, random_job, space_of
from tvmhet.cluster import Running
from tvmhet.recommending import service_bounds
from tvmhet.recommending.feasibility import proof_by_bounds
from tvmhet.recommending.option import make_option, measured, meets
from tvmhet.recommending.service_bounds import reach_of

RUNNING = Running(startup_s=600.0, checkpoint_s=30.0)


def exhaustive_edges(case, space, job):
    """For each limit, the best figure of the fleets that keep the others."""
    options = [
        make_option(job, RUNNING, tuple(zip(space.offers, counts, strict=True)), (), rate, 0.0)
        for counts, rate in every_fleet(case).items()
        if rate > 0
    ]
    edges = {}
    for name in job.limits():
        rest = {n: v for n, v in job.limits().items() if n != name}
        kept = [measured(name, o) for o in options if meets(o, rest)]
        rate = name == "throughput_per_s"
        edges[name] = max(kept, default=0.0) if rate else min(kept, default=math.inf)
    return edges


def beyond(name, a, b):
    """Whether figure a is better than b by more than rounding and one input's latency."""
    slack = 1e-6
    return a > b * (1 + slack) if name == "throughput_per_s" else a < b * (1 - slack)


@pytest.mark.parametrize("seed", range(12))
def test_no_fleet_goes_beyond_a_bound(seed, monkeypatch):
    case = random_case(seed)
    space = space_of(case, RUNNING)
    job = random_job(seed, every_fleet(case), case) if any(every_fleet(case).values()) else None
    if job is None or not job.limits():
        return
    found, truth = reach_of(case.problem, space, job), exhaustive_edges(case, space, job)
    for name, edge in found.items():
        assert not beyond(name, truth[name], edge), name
    monkeypatch.setattr(service_bounds, "is_small", lambda _: False)
    for name, edge in reach_of(case.problem, space, job).items():
        assert not beyond(name, found[name], edge), name


def test_nothing_that_can_be_kept_is_proved_impossible():
    proved = 0
    for seed in range(20):
        case = random_case(seed)
        table = every_fleet(case)
        if not any(table.values()):
            continue
        job = random_job(seed, table, case)
        truth = exhaustive_edges(case, space_of(case, RUNNING), job)
        refused = any(beyond(n, job.limits()[n], truth[n]) for n in job.limits())
        text = proof_by_bounds(job.limits(), reach_of(case.problem, space_of(case, RUNNING), job), "this market")
        assert refused or text.startswith("not proved"), (seed, text)
        far = {n: v * 4 if n == "throughput_per_s" else v / 4 for n, v in job.limits().items()}
        beyond_all = dataclasses.replace(job, **far)
        edges = reach_of(case.problem, space_of(case, RUNNING), beyond_all)
        proved += proof_by_bounds(far, edges, "this market").startswith("proved")
    assert proved > 5


def test_a_budget_below_every_price_leaves_no_rate(monkeypatch):
    monkeypatch.setattr(service_bounds, "is_small", lambda _: False)
    case = random_case(0)
    space = space_of(case, RUNNING)
    job = service_bounds.Job(samples=SAMPLES, deadline_h=100.0, budget_usd=1e-9)
    assert reach_of(case.problem, space, job)["deadline_h"] == math.inf
