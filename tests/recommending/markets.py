"""Small chains on small markets for the tests of recommendations, and the exhaustive answer, written apart."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from tests.solve.fleets import Case, every_fleet, random_case
from tvmhet.cluster import ClusterSpec, InstanceOffer, Market, Running, device_type
from tvmhet.recommending.job import Goal, Job
from tvmhet.recommending.space import Space

TYPES = ("t4", "l4", "a100")
SAMPLES = 10_000_000


def space_of(case: Case, running: Running) -> Space:
    """The market of a case; its problem stands in for the groups."""
    offers = tuple(
        InstanceOffer(f"o{i}", device_type(name), b.size, b.cost, b.limit)
        for i, (name, b) in enumerate(zip(TYPES, case.bundles, strict=True))
    )
    cluster = ClusterSpec.of({"t4": 1})
    return Space(Market(offers, running=running), cluster, cluster.groups(), (0, 1, 2), (frozenset(range(1, 7)),) * 3)


def random_job(seed: int, table: dict[tuple[int, ...], float], case: Case) -> Job:
    """A job or a service with limits that some fleets keep and some do not; sometimes none does."""
    rng = random.Random(10_000 + seed)
    rates = sorted(r for r in table.values() if r > 0)
    goal = rng.choice(list(Goal))
    rate = rng.choice(rates) * rng.uniform(0.5, 1.3)
    rent = sum(b.cost * b.limit for b in case.bundles) * rng.uniform(0.1, 1.1)
    if rng.random() < 0.5:
        hours = SAMPLES / rate / 3600
        deadline = hours * rng.uniform(0.9, 1.5) if rng.random() < 0.7 else None
        budget = rent * hours if rng.random() < 0.5 else None
        return Job(goal, SAMPLES, deadline, budget)
    return Job(goal, None, None, rent if rng.random() < 0.5 else None, rate if rng.random() < 0.7 else None)


@dataclass(frozen=True)
class Exhaustive:
    """The best value over every fleet, of any types and of a single one; inf where none keeps the limits."""

    best: float
    single: float


def exhaustive(case: Case, job: Job, running: Running, table: dict[tuple[int, ...], float] | None = None) -> Exhaustive:
    """Try every number of instances of every offer."""
    table = every_fleet(case, job.latency_limit_s) if table is None else table
    best = single = math.inf
    for counts, rate in table.items():
        if rate <= 0:
            continue
        rent = sum(n * b.cost for n, b in zip(counts, case.bundles, strict=True))
        watts = sum(n * b.size * device_type(t).power_w for n, b, t in zip(counts, case.bundles, TYPES, strict=True))
        if job.samples is None:
            keeps = rent <= (job.budget_usd or math.inf) and rate >= (job.throughput_per_s or 0.0)
            each = 1.0 if job.throughput_per_s else 1 / rate
            value = {Goal.TIME: 1 / rate, Goal.PRICE: rent * each, Goal.ENERGY: watts * each}[job.goal]
        else:
            work = job.samples / rate * (1 + running.checkpoint_s / running.checkpoint_every_s)
            hours = (running.startup_s + work) / 3600
            keeps = hours <= (job.deadline_h or math.inf) and rent * hours <= (job.budget_usd or math.inf)
            value = {Goal.TIME: hours, Goal.PRICE: rent * hours, Goal.ENERGY: watts * hours / 1e3}[job.goal]
        if keeps:
            best = min(best, value)
            if sum(n > 0 for n in counts) == 1:
                single = min(single, value)
    return Exhaustive(best, single)


__all__ = ["SAMPLES", "TYPES", "Exhaustive", "every_fleet", "exhaustive", "random_case", "random_job", "space_of"]
