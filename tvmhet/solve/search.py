"""`solve`: the entry point that runs the searches on a problem, keeps the best answer and states its bound.

    phases (phases.py) ──► virtual stages ──► bounds by links ──► the best simulated

Each phase leaves the best plan and the best bound so far in one record, so a limit or Ctrl-C between two of them, or
inside one, costs nothing that was found.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tvmhet.errors import BadInput
from tvmhet.solve.apart_bound import apart_bound_s
from tvmhet.solve.assign_bound import assign_bound_s
from tvmhet.solve.evaluate import StageChoice, evaluate
from tvmhet.solve.floor import floor_bound_s, node_floors
from tvmhet.solve.infeasible import memory_reason, no_kernel_reason, smallest_mend
from tvmhet.solve.objective import Objective
from tvmhet.solve.pack import allowed_times
from tvmhet.solve.phases import PROVED, Record, is_far, phases
from tvmhet.solve.pipeline import Found
from tvmhet.solve.problem import Link, Problem
from tvmhet.solve.simulated import best_simulated, simulated_s
from tvmhet.solve.solution import Solution, Status
from tvmhet.solve.splits import without_teams
from tvmhet.solve.state_graphs import all_graphs
from tvmhet.solve.virtual import virtual_bound_s, virtual_plans


def solve(
    problem: Problem,
    objective: Objective = Objective.THROUGHPUT,
    *,
    max_steps: int = 24_000_000,
    time_limit_s: float = 60.0,
    seed: int = 0,
    virtual_stages: bool = False,
    simulated: bool = False,
    bounded: bool = True,
) -> Solution:
    """Return the best plan found, its lower bound and its status.

    Work is counted in steps (label extensions of the stage search): the same `max_steps` gives the same answer on any
    machine; `time_limit_s` is the second limit, checked between searches. Where that limit or KeyboardInterrupt
    (Ctrl-C) ends the search, the best plan so far comes back and `solver` says so; without any plan yet,
    KeyboardInterrupt is raised. `seed` is reserved for random restarts.
    With `virtual_stages` a device may run several stages with others between them (throughput only), where such a plan
    is better and does not lose it again by waiting (`simulate`); the bound is then one over such plans too, which knows
    less. Without `bounded` no time goes into what only raises the bound. With `simulated` the answer is the best in the
    simulator of the few best plans found (see simulated.py); its objective stays the closed form. Infeasible problems
    come back with status INFEASIBLE, the binding constraint and the smallest mend as `reason`.
    """
    if objective is Objective.COST:
        raise BadInput("solve minimises seconds, not cost", "use tvmhet.solve.cheapest.cheapest")
    if reason := no_kernel_reason(problem):
        return _infeasible(reason)
    virtual = virtual_stages and objective is Objective.THROUGHPUT
    solution = _search(problem, objective, max_steps, time_limit_s, virtual, simulated, bounded)
    if solution.status is not Status.INFEASIBLE:
        return solution
    if reason := memory_reason(problem) or _link_reason(problem, max_steps):
        return _infeasible(reason, solution.steps)

    def feasible(changed: Problem) -> bool:
        return _search(changed, Objective.LATENCY, max_steps // 8, 1.0).status is not Status.INFEASIBLE

    return _infeasible(smallest_mend(problem, feasible), solution.steps)


def _link_reason(problem: Problem, max_steps: int) -> str:
    """Return that missing links are what stops every plan, or an empty text if they are not."""
    missing = [
        f"{a.name!r} -> {b.name!r}"
        for a, row in zip(problem.groups, problem.links, strict=True)
        for b, link in zip(problem.groups, row, strict=True)
        if link.byte_per_s == 0
    ]
    missing += [
        f"host <-> {g.name!r}" for g, x in zip(problem.groups, problem.host_links, strict=True) if not x.byte_per_s
    ]
    if not missing:
        return ""
    joined = replace(
        problem,
        links=tuple(tuple(x if x.byte_per_s else Link() for x in row) for row in problem.links),
        host_links=tuple(x if x.byte_per_s else Link() for x in problem.host_links),
    )
    if _search(joined, Objective.LATENCY, max_steps // 8, 1.0).status is Status.INFEASIBLE:
        return ""
    return f"links: every plan needs a transfer where there is no link ({', '.join(missing[:4])}); give one a rate > 0"


def _infeasible(reason: str, steps: int = 0) -> Solution:
    return Solution((), math.inf, math.inf, Status.INFEASIBLE, steps, "none", reason)


def _search(
    problem: Problem,
    objective: Objective,
    max_steps: int,
    time_limit_s: float,
    virtual: bool = False,
    simulated: bool = False,
    bounded: bool = True,
) -> Solution:
    deadline = time.monotonic() + time_limit_s
    if problem.num_nodes == 0:
        return Solution((), 0.0, 0.0, Status.OPTIMAL, 0, "empty")
    record, stopped, shared_s = Record(), "", 0.0
    parts = [phases(problem, objective, record, max_steps), *([_virtual(problem, record)] if virtual else [])]
    try:
        _offer_unsplit(problem, objective, record, max_steps, time_limit_s)
        for part in parts:
            for _ in part:
                if record.proved or record.steps >= max_steps:
                    break
                if time.monotonic() > deadline:
                    stopped = f", stopped by the time limit of {time_limit_s:g} s"
                    break
            if stopped:
                break
        if objective is Objective.THROUGHPUT and bounded and not stopped and is_far(record):
            record.lower_s = apart_bound_s(problem, record.lower_s, record.value_s, _side_bound_s)
            shared_s = _assigned_s(problem, record)
    except KeyboardInterrupt:
        if record.best is None:
            raise
        stopped = ", interrupted"
    if record.best is None or math.isinf(record.value_s):
        return _infeasible("", record.steps)
    best, name = record.best
    if simulated and not stopped:
        best, name = best_simulated(problem, objective, record.kept, _again(problem, objective, max_steps, deadline))
    if virtual:  # the bounds so far are of plans with devices of its own for each stage
        record.lower_s = virtual_bound_s(problem, allowed_times(problem))
    lower_s = min(max(record.lower_s, shared_s), best.objective_s)
    status = Status.OPTIMAL if best.objective_s - lower_s <= PROVED * best.objective_s else Status.FEASIBLE
    return Solution(best.stages, best.objective_s, lower_s, status, record.steps, name + stopped)


def _offer_unsplit(problem: Problem, objective: Objective, record: Record, max_steps: int, time_limit_s: float) -> None:
    """Offer the best plan found without teams, so that a split that is no use never hurts."""
    unsplit = without_teams(problem)
    if unsplit is problem:
        return
    found = _search(unsplit, objective, max_steps, time_limit_s, bounded=False)
    if found.status is not Status.INFEASIBLE:
        record.offer(Found(found.stages, found.objective, -math.inf, 0), found.solver)


def _again(
    problem: Problem, objective: Objective, max_steps: int, deadline: float
) -> Callable[[Problem], Found | None]:
    def plan(changed: Problem) -> Found | None:
        found = _search(changed, objective, max_steps // 4, max(0.0, deadline - time.monotonic()), bounded=False)
        if found.status is Status.INFEASIBLE:
            return None
        choices = [StageChoice(s.kernels, s.group, s.num_replicas, s.shares) for s in found.stages]
        return Found(*evaluate(problem, choices, objective), -math.inf, found.steps)

    return plan


def _virtual(problem: Problem, record: Record) -> Iterator[None]:
    """Improve `record` by plans in which devices run several stages; each `yield` is a place to stop."""
    record.lower_s = 0.0
    best = record.best[0] if record.best else None
    for found in virtual_plans(problem, list(all_graphs(problem)), allowed_times(problem), best):
        if found and found.objective_s < record.value_s and _keeps_up(problem, found, record):
            record.offer(found, "virtual stages")
        yield


def _keeps_up(problem: Problem, found: Found, record: Record) -> bool:
    """Is `found` not slower than the best plan so far in the simulator, where devices wait for each other?"""
    if record.best is None:
        return True

    mine, other = (simulated_s(problem, Objective.THROUGHPUT, plan) for plan in (found, record.best[0]))
    return mine <= other


def _side_bound_s(problem: Problem, lower_s: float, upper_s: float) -> float:
    return floor_bound_s(problem, allowed_times(problem), lower_s, upper_s)


def _assigned_s(problem: Problem, record: Record) -> float:
    """Return a bound by what passes between groups, where the plan is still far from the bound so far; else 0.

    It holds where stages share devices, too.
    """
    if not is_far(record):
        return 0.0
    return assign_bound_s(problem, node_floors(problem, allowed_times(problem), alike=True), 0.0, record.value_s)
