"""Memory curves of simulated runs against the planner's peaks."""

from __future__ import annotations

import pytest

from tests.solve.problems import random_problem
from tvmhet.solve import Status, simulate, solve
from tvmhet.solve.memory_over_time import of_inference


@pytest.mark.parametrize("seed", range(25))
def test_a_device_peaks_at_what_the_planner_says_where_it_holds_one_input(seed):
    problem = random_problem(seed, most_groups=3, one_link=False)
    solution = solve(problem)
    if solution.status is Status.INFEASIBLE:
        return
    line = simulate(problem, solution, 5)
    curves = of_inference(problem, solution, line)
    assert {(c.place, c.replica) for c in curves} == {
        (i, r) for i, s in enumerate(solution.stages) for r in range(min(5, s.num_replicas)) if s.compute_s > 0
    }
    for curve in curves:
        stage = solution.stages[curve.place]
        assert list(curve.times_s) == sorted(curve.times_s)
        assert curve.bytes[-1] == pytest.approx(min(curve.bytes))  # only the weights stay
        assert curve.peak_bytes >= stage.memory_bytes - 1
        senders = {e.peer for e in line.events if e.stage == curve.place and e.kind == "receive"}
        if not problem.overlap_transfers and len(senders) < 2:
            assert curve.peak_bytes <= stage.memory_bytes + 1
