"""The simulator against the closed forms."""

from __future__ import annotations

import pytest

from tests.solve.problems import random_problem
from tvmhet.errors import BadInput
from tvmhet.solve import DeviceGroup, Edge, Kernel, Link, Problem, Solution, Status, simulate, solve


def pipeline(count: int) -> Problem:
    """Three kernels of 1, 4 and 1 s, free transfers, one group."""
    return Problem(
        3,
        tuple(Kernel((v,), (t,)) for v, t in enumerate((1.0, 4.0, 1.0))),
        (Edge(-1, (0,), 0), Edge(0, (1,), 0), Edge(1, (2,), 0), Edge(2, (), 0, True)),
        (),
        (DeviceGroup("g", count, 10),),
        ((Link(),),),
        (Link(),),
    )


def test_the_period_is_the_bottleneck():
    problem = pipeline(2)
    solution = solve(problem)
    line = simulate(problem, solution, 40)
    assert line.period_s == pytest.approx(solution.objective, rel=0.05)


def test_one_input_takes_the_sum_of_its_work():
    problem = pipeline(1)
    assert simulate(problem, solve(problem), 1).makespan_s == pytest.approx(6.0)


def refused(problem, solution):
    """A plan that does not exist cannot be simulated."""
    with pytest.raises(BadInput, match="infeasible"):
        simulate(problem, solution, 1)


@pytest.mark.parametrize("seed", range(40))
def test_a_device_never_does_two_things_at_once(seed):
    problem = random_problem(seed, most_groups=3, one_link=False)
    solution = solve(problem)
    if solution.status is Status.INFEASIBLE:
        return refused(problem, solution)
    busy: dict[tuple, float] = {}
    for e in simulate(problem, solution, 6).events:
        lane = (e.stage, e.replica, e.kind if problem.overlap_transfers else "")
        assert e.start_s >= busy.get(lane, 0.0) - 1e-9
        busy[lane] = e.finish_s


@pytest.mark.parametrize("seed", range(40))
def test_a_long_run_is_never_faster_than_the_bottleneck(seed):
    problem = random_problem(seed, most_groups=3, one_link=False)
    solution = solve(problem)
    if solution.status is Status.INFEASIBLE:
        return refused(problem, solution)
    inputs = 4 * max(s.num_replicas for s in solution.stages)
    line = simulate(problem, solution, inputs)
    most = max(s.num_replicas for s in solution.stages)
    assert line.makespan_s >= solution.objective * (inputs - most + 1) * (1 - 1e-9)


def test_results_keep_the_order_of_events_and_bad_calls_are_refused():
    problem = pipeline(2)
    events = simulate(problem, solve(problem), 5).events
    assert list(events) == sorted(events, key=lambda e: e.start_s)
    with pytest.raises(BadInput):
        simulate(problem, solve(problem), 0)
    with pytest.raises(BadInput):
        simulate(problem, Solution((), 0.0, 0.0, Status.INFEASIBLE, 0, "none", "no"), 3)
