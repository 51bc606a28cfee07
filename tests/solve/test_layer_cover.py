"""Shares of rates: bounds that no layout exceeds, and that prove the published ones."""

from __future__ import annotations

import pytest

from tests.solve.test_layers import exhaustive, random_cluster
from tvmhet.solve.layer_cover import flow_bound, out_of_reach
from tvmhet.solve.layers import coverage_bound


@pytest.mark.parametrize("seed", range(60))
def test_no_layout_exceeds_the_bound(seed):
    problem = random_cluster(seed)
    best, upper = exhaustive(problem), coverage_bound(problem)
    if best > 0:
        assert flow_bound(problem.rate, problem.num_layers, best * 1e-3, upper) >= best * (1 - 1e-9)
        assert flow_bound(problem.rate, problem.num_layers, best, upper) >= best


def test_a_node_that_is_just_too_slow_needs_a_second_one():
    # 2 nodes, 6 layers: 10 tokens/s with 2 layers, 9 with 3. Two of them hold 4 layers at 10, so only 9 is left.
    kinds = {(20.0, 10.0, 9.0): 2}
    assert not out_of_reach(kinds, 6, 9.0)
    assert out_of_reach(kinds, 6, 9.1)
    assert out_of_reach({(0.0, 0.0): 3}, 2, 1.0)


def test_the_bound_is_between_the_value_and_the_bound_given():
    rates = ((20.0, 10.0, 9.0),) * 2
    assert flow_bound(rates, 6, 9.0, 9.6) == pytest.approx(9.0, rel=1e-5)
    assert flow_bound(rates, 6, 9.0, 9.0) == pytest.approx(9.0, rel=1e-5)
    assert flow_bound(rates, 2, 3.0, 20.0) == pytest.approx(20.0)
