"""A plan for one iteration as the searches hand it on: with its value, comparable, and turned into an answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvmhet.solve.iteration import IterationProblem, IterationSolution, StagePlacing
from tvmhet.solve.iteration_memory import StageNeeds
from tvmhet.solve.iteration_value import IterationValue, evaluate_iteration
from tvmhet.solve.schedules import Schedule
from tvmhet.solve.solution import Status


@dataclass(frozen=True)
class Candidate:
    """A plan with its value; `proved_s`: no plan over the cuts it was found on has a smaller closed form, else 0."""

    option: int
    schedule: Schedule
    placings: tuple[StagePlacing, ...]
    value: IterationValue
    solver: str

    @property
    def key(self) -> tuple[float, int, int]:
        """Orders candidates: faster first, then fewer devices, then fewer stages."""
        return self.value.iteration_s, sum(p.num_replicas * p.degree for p in self.placings), len(self.placings)


#: Chooses among the plans that were found; says too whether no other plan would be chosen.
Choose = Callable[[Sequence[Candidate]], tuple[Candidate, bool]]


def judge(
    problem: IterationProblem,
    option: int,
    placings: tuple[StagePlacing, ...],
    schedule: Schedule,
    solver: str,
    known: StageNeeds | None = None,
) -> Candidate | None:
    """Return the plan with its closed form, or None if it needs more memory than there is or a missing link."""
    value = evaluate_iteration(problem, option, placings, schedule, known)
    fits = all(s.memory_bytes <= problem.groups[s.placing.group].memory_bytes for s in value.stages)
    if not fits or not value.iteration_s < math.inf:
        return None
    return Candidate(option, schedule, placings, value, solver)


def solution_of(
    problem: IterationProblem, plan: Candidate, lower_s: float, status: Status, steps: int
) -> IterationSolution:
    """Return a plan as an answer."""
    return IterationSolution(
        plan.value.stages,
        plan.option,
        problem.num_microbatches(plan.option),
        plan.schedule,
        plan.value.pipeline_s,
        plan.value.iteration_s,
        plan.value.bubble,
        lower_s,
        status,
        steps,
        plan.solver,
    )


def infeasible(reason: str) -> IterationSolution:
    """Return that there is no plan, and why."""
    none = (math.inf, math.inf, 0.0, math.inf)
    return IterationSolution((), 0, 0, Schedule.ONE_F_ONE_B, *none, Status.INFEASIBLE, 0, "none", reason)


def linear_schedules(problem: IterationProblem) -> tuple[Schedule, ...]:
    """Return the allowed schedules with one stage per device, wavelet only without the others: it is never faster."""
    plain = tuple(s for s in problem.schedules if s in (Schedule.ONE_F_ONE_B, Schedule.GPIPE))
    return plain or tuple(s for s in problem.schedules if s is Schedule.WAVELET)
