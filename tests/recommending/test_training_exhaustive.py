"""Training recommendations against every plan of every fleet: 8 layers, 3 types, up to 6 devices, random limits.

More cases than the default ones, with what each was: python -m tests.recommending.test_training_exhaustive 100 600
"""

import math
import sys
from collections import Counter

import pytest

from tests.recommending.training_cases import exhaustive, iterations, random_job, random_study
from tvmhet.errors import Infeasible
from tvmhet.recommending.option import meets, value
from tvmhet.recommending.training_choice import train

NEAR = 1e-4  # limits are so much looser where a refusal is checked


def compare(seed: int) -> str:
    """Check one instance; return whether its answer is the best, refused, or there is no plan at all."""
    study = random_study(seed)
    table = iterations(study)
    fleets = study.fleets
    for counts, bound_s in zip(fleets.counts.tolist(), fleets.bound_s, strict=True):
        assert bound_s <= table[tuple(counts)] * (1 + 1e-9), (seed, counts)
    if not any(map(math.isfinite, table.values())):
        return "empty"
    job = random_job(seed, table, study)
    expected = exhaustive(study, job, table)
    try:
        made = train(study, job)
    except Infeasible as error:
        limits = job.limits()
        loose = type(job)(job.goal, job.samples, *(limits.get(n) and limits[n] / (1 + NEAR) for n in LIMITS),
                          global_batch=job.global_batch)  # fmt: skip
        assert math.isinf(exhaustive(study, loose, table)), (seed, expected, error)
        assert all(n in str(error) for n in limits) and "nearest" in str(error)
        return "refused"
    assert meets(made.best, job.limits())
    mine = value(job, made.best)
    assert expected * (1 - 1e-6) <= mine <= expected * (1 + 1e-6), (seed, mine / expected)
    assert made.homogeneous is None or mine <= value(job, made.homogeneous)
    assert made.bound <= mine * (1 + 1e-9)
    return "the best"


LIMITS = ("deadline_h", "budget_usd")


@pytest.mark.parametrize("seed", range(3))
def test_the_best_fleet_is_found(seed):
    compare(seed)


@pytest.mark.slow
def test_the_best_fleet_is_found_in_more_cases():
    outcomes = Counter(compare(seed) for seed in range(100, 112))
    assert outcomes["the best"] > 6, outcomes


if __name__ == "__main__":
    found: Counter[str] = Counter()
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            found[compare(number)] += 1
        except AssertionError as error:
            found["wrong"] += 1
            sys.stdout.write(f"{number}: {error}\n")
    sys.stdout.write(f"{dict(found)}\n")
