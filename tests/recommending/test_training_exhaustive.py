"""Training recommendations equal exhaustive search: 8 layers, 3 types, up to 6 devices, deadlines and budgets."""

import math

import pytest

from tests.recommending.training_cases import exhaustive, iterations, random_job, random_study
from tvmhet.errors import Infeasible
from tvmhet.recommending.option import meets, value
from tvmhet.recommending.training_choice import train


def compare(seed: int) -> str:
    """Check one instance; return whether it was solved, refused or holds no plan at all."""
    study = random_study(seed)
    table = iterations(study)
    if not any(map(math.isfinite, table.values())):
        return "empty"
    job = random_job(seed, table, study)
    expected = exhaustive(study, job, table)
    try:
        made = train(study, job)
    except Infeasible as error:
        assert math.isinf(expected), (seed, expected, error)
        assert all(n in str(error) for n in job.limits()) and "nearest" in str(error)
        return "refused"
    assert meets(made.best, job.limits())
    assert value(job, made.best) == pytest.approx(expected, rel=1e-6), seed
    assert made.homogeneous is None or value(job, made.best) <= value(job, made.homogeneous)
    assert made.bound <= value(job, made.best) * (1 + 1e-9)
    return "solved"


@pytest.mark.parametrize("seed", range(4))
def test_the_best_fleet_is_found(seed):
    compare(seed)


@pytest.mark.slow
def test_the_best_fleet_is_found_in_more_cases():
    outcomes = [compare(seed) for seed in range(100, 120)]
    assert outcomes.count("solved") > 8
