"""What-if prices: the few options that are compared give the same winner as all of them."""

import random

import pytest

from tests.recommending.markets import TYPES
from tvmhet.cluster import InstanceOffer, Running, device_type
from tvmhet.recommending.job import Goal, Job
from tvmhet.recommending.option import best, make_option, value
from tvmhet.recommending.what_if import contenders, repriced


@pytest.mark.parametrize("seed", [*range(12), 9600001])  # the last: a budget by the hour, the price by the input
def test_who_may_win_at_some_price_is_compared(seed):
    rng = random.Random(seed)
    offers = [InstanceOffer(n, device_type(n), 1, rng.uniform(0.3, 4), 5) for n in TYPES]
    goal, kind = rng.choice(list(Goal)), rng.randrange(3)
    job = (Job(goal, 10**6, deadline_h=rng.choice([None, 0.5]), budget_usd=rng.choice([None, 1.0])),
           Job(goal, throughput_per_s=500), Job(goal, budget_usd=8.0))[kind]  # fmt: skip
    options = []
    for _ in range(200):
        counts = [rng.randrange(5) for _ in offers]
        if any(counts):
            rate = sum(n * r for n, r in zip(counts, (100, 180, 500), strict=True)) * rng.uniform(0.8, 1.2)
            bought = list(zip(offers, counts, strict=True))
            options.append(make_option(job, Running(), bought, ((0, 1),), rate, 0.01))
    for name in TYPES:
        few = contenders(job, options, name)
        assert len(few) < len(options)
        for factor in (0.1, 0.5, 1.0, 1.7, 10.0):
            one, all_ = (
                best(job, [repriced(job, Running(), o, name, factor) for o in some]) for some in (few, options)
            )
            assert (one is None) == (all_ is None)
            assert one is None or value(job, one) == pytest.approx(value(job, all_), rel=1e-9)
