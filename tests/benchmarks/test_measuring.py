"""The benchmark of what to measure before renting: the budget holds, and what is paid for tells something."""

from statistics import mean

import pytest

from benchmarks.measuring import STRATEGIES, Known, draw_oracle, ours, read_rows


@pytest.mark.slow
@pytest.mark.shared
def test_half_the_exhaustive_cost_finds_a_better_plan_than_nothing(shared_data):
    rows, sizes = read_rows(shared_data)
    oracles = [draw_oracle(rows, sizes, seed) for seed in range(7000, 7004)]
    made = [ours(oracle, oracle.exhaustive_usd() / 2, 0) for oracle in oracles]
    for oracle, outcome in zip(oracles, made, strict=True):
        assert 0 < outcome.usd <= oracle.exhaustive_usd() / 2
        assert outcome.regret >= 0
    assert mean(o.regret for o in made) < mean(Known(o).regret() for o in oracles)


@pytest.mark.shared
@pytest.mark.parametrize("name", ["random", "uncertainty", "BO", "BO, cherry"])
def test_the_others_keep_the_budget_too(shared_data, name):
    oracle = draw_oracle(*read_rows(shared_data), 7000)
    for share in (0.05, 0.3):
        assert STRATEGIES[name](oracle, share * oracle.exhaustive_usd(), 0).usd <= share * oracle.exhaustive_usd()
