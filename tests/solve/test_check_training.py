"""The checker accepts what the solver answers and refuses every kind of change to it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.solve.training_problems import equal_chain, random_iteration
from tvmhet.errors import BrokenSolution
from tvmhet.solve import IterationSolution, Link, Schedule, Status, check_training, solve_iteration


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 100_000))
@example(42160)  # a ring of unlike tensor degrees
def test_every_answer_of_the_solver_passes(seed):
    problem = random_iteration(seed, most_nodes=5, most_devices=4)
    check_training(problem, solve_iteration(problem))


PROBLEM = equal_chain(4, 8, size=4, weight=10, link=Link(0.0, 1e3), devices=3, schedules=(Schedule.ONE_F_ONE_B,))
ANSWER = solve_iteration(replace(PROBLEM, options=(PROBLEM.options[0],)))


def first(**changes: object) -> IterationSolution:
    stage = ANSWER.stages[0]
    return replace(ANSWER, stages=(replace(stage, placing=replace(stage.placing, **changes)), *ANSWER.stages[1:]))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (first(kernels=ANSWER.stages[0].placing.kernels[1:]), "is run 0 times"),
        (first(kernels=ANSWER.stages[0].placing.kernels[::-1]), "runs later"),
        (first(num_replicas=9), "devices of 'g' are used"),
        (first(group=7), "no group"),
        (first(recompute=True), "not"),
        (replace(ANSWER, iteration_s=ANSWER.iteration_s * 0.9), "the iteration takes"),
        (replace(ANSWER, pipeline_s=ANSWER.pipeline_s * 1.1), "the pipeline takes"),
        (replace(ANSWER, lower_bound_s=ANSWER.iteration_s * 2), "lower bound"),
        (replace(ANSWER, status=Status.OPTIMAL, lower_bound_s=ANSWER.iteration_s / 2), "called optimal"),
        (replace(ANSWER, num_microbatches=7), "micro-batches are claimed"),
        (replace(ANSWER, schedule=Schedule.GPIPE), "was not allowed"),
        (replace(ANSWER, option=3), "no micro-batch option"),
        (replace(ANSWER, stages=(replace(ANSWER.stages[0], memory_bytes=1), *ANSWER.stages[1:])), "claims 1 bytes"),
        (replace(ANSWER, status=Status.INFEASIBLE), "infeasible, yet"),
    ],
)
def test_a_changed_answer_is_refused(broken, said):
    check_training(PROBLEM, ANSWER)
    with pytest.raises(BrokenSolution, match=said):
        check_training(PROBLEM, broken)


def test_too_little_memory_is_seen():
    groups = tuple(replace(g, memory_bytes=50) for g in PROBLEM.groups)
    micro = replace(PROBLEM.options[0], forward=replace(PROBLEM.options[0].forward, groups=groups))
    with pytest.raises(BrokenSolution, match="a device has 50"):
        check_training(replace(PROBLEM, options=(micro,)), ANSWER)


def test_a_kernel_without_a_time_is_seen():
    micro = replace(PROBLEM.options[0], backward_s=((math.inf,), *PROBLEM.options[0].backward_s[1:]))
    with pytest.raises(BrokenSolution, match="cannot run"):
        check_training(replace(PROBLEM, options=(micro,)), ANSWER)
