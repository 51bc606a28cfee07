"""Memory curves of simulated runs against the planner's peaks."""

from __future__ import annotations

import pytest

from tests.solve.problems import random_problem
from tvmhet.solve import Status, simulate, solve
from tvmhet.solve.memory_over_time import of_inference
from tvmhet.solve.simulate import Timeline


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
        if _holds_one_input(line, curve.place, curve.replica):
            assert curve.peak_bytes <= stage.memory_bytes + 1


def test_some_devices_hold_one_input_and_others_two():
    held = set()
    for seed in range(25):
        problem = random_problem(seed, most_groups=3, one_link=False)
        solution = solve(problem)
        if solution.status is not Status.INFEASIBLE:
            line = simulate(problem, solution, 5)
            held |= {_holds_one_input(line, c.place, c.replica) for c in of_inference(problem, solution, line)}
    assert held == {True, False}


def _holds_one_input(line: Timeline, stage: int, replica: int) -> bool:
    """Is a device done with each input before it receives any of the next?"""
    done_s = 0.0
    for n in sorted({e.input_index for e in line.events}):
        mine = [e for e in line.events if (e.stage, e.replica, e.input_index) == (stage, replica, n)]
        if mine and min(e.start_s for e in mine) < done_s:
            return False
        done_s = max([done_s, *(e.finish_s for e in mine)])
    return True
