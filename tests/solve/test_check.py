"""The checker refuses every kind of broken solution."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.solve.problems import random_problem
from tvmhet.errors import BrokenSolution
from tvmhet.solve import IN_SECONDS, DeviceGroup, Edge, Kernel, Link, Objective, Problem, Status, Weight, check, solve


@pytest.fixture
def problem():
    return Problem(
        3,
        tuple(Kernel((v,), (1.0, 2.0)) for v in range(3)),
        (Edge(-1, (0,), 8), Edge(0, (1,), 8), Edge(1, (2,), 8), Edge(2, (), 8, True)),
        tuple(Weight((v,), 40) for v in range(3)),
        (DeviceGroup("a", 2, 120), DeviceGroup("b", 1, 120)),
        ((Link(0.1, 100.0),) * 2,) * 2,
        (Link(0.1, 100.0),) * 2,
    )


@pytest.fixture
def solution(problem):
    return solve(problem)


def altered(solution, **changes):
    """Change fields of the first stage."""
    return replace(solution, stages=(replace(solution.stages[0], **changes), *solution.stages[1:]))


def test_a_good_solution_passes(problem, solution):
    check(problem, solution)
    latency = solve(problem, Objective.LATENCY)
    check(problem, latency, Objective.LATENCY)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: replace(s, stages=s.stages[1:]), "is run 0 times"),
        (lambda s: replace(s, stages=(*s.stages, s.stages[0])), "is run 2 times"),
        (lambda s: replace(s, stages=s.stages[::-1]), "runs later"),
        (lambda s: altered(s, num_replicas=9), "devices of"),
        (lambda s: altered(s, num_replicas=0), "0 replicas"),
        (lambda s: altered(s, group=5), "does not exist"),
        (lambda s: altered(s, kernels=(77,)), "no kernel 77"),
        (lambda s: altered(s, load_s=0.5), "of load"),
        (lambda s: altered(s, compute_s=0.5), "of compute"),
        (lambda s: altered(s, transfer_s=9.0), "of transfers"),
        (lambda s: altered(s, memory_bytes=1), "claims 1 bytes"),
        (lambda s: replace(s, objective=0.1), "the objective is"),
        (lambda s: replace(s, lower_bound=1e9), "exceeds the objective"),
        (lambda s: replace(s, status=Status.OPTIMAL, lower_bound=0.0), "called optimal"),
        (lambda s: replace(s, status=Status.INFEASIBLE), "yet it has stages"),
    ],
)
def test_a_broken_solution_is_refused(problem, solution, change, says):
    assert len(solution.stages) > 1
    with pytest.raises(BrokenSolution, match=says):
        check(problem, change(solution))


def test_memory_and_pins_are_enforced(problem, solution):
    with pytest.raises(BrokenSolution, match="needs"):
        check(replace(problem, groups=(DeviceGroup("a", 2, 30), DeviceGroup("b", 1, 30))), solution)
    with pytest.raises(BrokenSolution, match="pinned elsewhere"):
        check(replace(problem, pins={0: frozenset()}), solution)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("objective", IN_SECONDS)
def test_every_solution_under_tight_memory_passes(seed, objective):
    problem = random_problem(seed, most_nodes=9, most_groups=3, most_devices=6, tight=True, one_link=False)
    check(problem, solve(problem, objective), objective)
