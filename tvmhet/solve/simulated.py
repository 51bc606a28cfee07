"""The plan whose simulated run is the best, among the few best that a search found by closed forms.

A closed form knows what each line carries and each device does, not how long they wait for each other. A plan counts as
the longer of its closed form and its simulated run, so its closed form is a bound on what it counts. Where waiting at
lines is what costs, the search is run again as if the lines were slower by as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from tvmhet.solve.objective import Objective
from tvmhet.solve.pipeline import Found
from tvmhet.solve.problem import Problem
from tvmhet.solve.simulate import simulate
from tvmhet.solve.solution import Solution, Status

_INPUTS = 256  # at most, of one run
_WAITING = 1.05  # from where on a run is so much longer that slower lines are tried
_ROUNDS = 3  # of slower lines

Named = tuple[Found, str]  # a plan and the search that found it


def simulated_s(problem: Problem, objective: Objective, plan: Found) -> float:
    """Return the makespan of one input, or the period of many, in the simulator."""
    solution = Solution(plan.stages, plan.objective_s, 0.0, Status.FEASIBLE, plan.steps, "")
    if objective is Objective.LATENCY:
        return simulate(problem, solution, 1).makespan_s
    inputs = min(_INPUTS, 8 * max(s.num_replicas for s in plan.stages) + 8)
    return simulate(problem, solution, inputs).period_s


def best_simulated(
    problem: Problem, objective: Objective, plans: Sequence[Named], again: Callable[[Problem], Found | None]
) -> Named:
    """Return the plan that counts least, with how many were simulated in its name, if it was more than one.

    `again` returns a plan for another problem, valued for this one.
    """
    best, name, counts_s, runs = plans[0][0], plans[0][1], math.inf, 0
    for plan, label in sorted(plans, key=lambda p: p[0].objective_s):
        if plan.objective_s >= counts_s * (1 - 1e-9):
            break
        runs += 1
        taken = max(plan.objective_s, simulated_s(problem, objective, plan))
        if taken < counts_s * (1 - 1e-9):
            best, name, counts_s = plan, label, taken
    factor = 1.0
    for _ in range(_ROUNDS if problem.wires else 0):
        if counts_s <= _WAITING * best.objective_s:
            break
        factor *= max(0.25, best.objective_s / counts_s)
        slower = replace(problem, wires=tuple(replace(w, byte_per_s=w.byte_per_s * factor) for w in problem.wires))
        other = again(slower)
        if other is None or other.stages == best.stages:
            continue
        runs += 1
        taken = max(other.objective_s, simulated_s(problem, objective, other))
        if taken < counts_s * (1 - 1e-9):
            best, name, counts_s = other, "stages as if lines were slower", taken
    return best, f"{name}, the best of {runs} simulated" if runs > 1 else name
