"""A training problem solved, checked and, where devices allocate memory, fitted into it, round by round.

solve ──► check ──► write down ──► what its devices allocate ──► fits: done
  ▲──────────── less memory for the groups that it exceeds ◄──────┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from tvmhet.cluster.groups import Group
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.errors import Infeasible
from tvmhet.ir.prepare import Prepared
from tvmhet.planning import named_reason
from tvmhet.planning_problem import resolve_pins
from tvmhet.planning_training import (
    MAX_STEPS,
    TrainingGoal,
    TrainingGraph,
    dividing,
    make_training_problem,
)
from tvmhet.plans import Plan
from tvmhet.solve import IterationProblem, IterationSolution, Status, check_training, solve_simulated
from tvmhet.solve.cheapest_iteration import cheapest_iteration
from tvmhet.solve.schedules import PREFERRED
from tvmhet.training_plan import plan_of

_MEMORY_ROUNDS, _LESS = 8, 0.98  # in each round with less memory than before, at least
_RESERVE = 1.05  # of a device's memory, for what kernels take while they run

#: Bytes that each device will take, by its id, when a plan runs.
Allocated = Callable[[Plan], Mapping[str, int]]
_Solver = Callable[[IterationProblem], IterationSolution]


def make_training_plan(
    prepared: Prepared,
    graphs: Sequence[TrainingGraph],
    cluster: ClusterSpec,
    goal: TrainingGoal,
    pin: Mapping[str, str],
    time_limit_s: float,
    notes: Sequence[str] = (),
    max_steps: int = MAX_STEPS,
    allocated: Allocated | None = None,
    explain: bool = True,
) -> Plan:
    """Solve, check independently, simulate, and write the answer down by name. `graphs[0]` is that of `prepared`.

    With `allocated` the plan fits by what its devices will take, to the byte, not only by the solver's sums. Raises
    Infeasible with the binding constraint and (with `explain`) the mend, BadInput for a global batch that no size
    divides.
    """
    groups = cluster.groups()
    fitting = dividing(graphs, goal.global_batch)
    pins = resolve_pins(graphs[0].graph, groups, pin)
    problem = make_training_problem(fitting, cluster, groups, pins, goal)
    search = solve_simulated if goal.price is None else partial(cheapest_iteration, limits=goal.price)
    solver = partial(search, max_steps=max_steps, time_limit_s=time_limit_s, explain=explain)
    write = partial(plan_of, prepared, fitting, problem, groups=groups, cluster=cluster, goal=goal, notes=notes)
    if allocated is None:
        return write(_solved(problem, solver, graphs[0], groups))
    return _fitting(problem, solver, write, allocated, graphs[0], groups)


def _solved(
    problem: IterationProblem, solver: _Solver, graph: TrainingGraph, groups: Sequence[Group]
) -> IterationSolution:
    solution = solver(problem)
    if solution.status is Status.INFEASIBLE:
        raise Infeasible(*named_reason(solution.reason, graph.graph, groups))
    check_training(problem, solution)
    return solution


def _fitting(
    problem: IterationProblem,
    solver: _Solver,
    write: Callable[[IterationSolution], Plan],
    allocated: Allocated,
    graph: TrainingGraph,
    groups: Sequence[Group],
) -> Plan:
    """Return the first plan that fits by what is allocated, giving the solver less memory in each round.

    Where no plan of its choice of schedules fits so, those that keep fewer micro-batches are asked for alone.
    """
    for schedules in dict.fromkeys((problem.schedules, *((s,) for s in PREFERRED if s in problem.schedules))):
        tighter = replace(problem, schedules=schedules)
        for round_ in range(_MEMORY_ROUNDS):
            try:
                solution = _solved(tighter, solver, graph, groups)
            except Infeasible:
                if round_ == 0 and schedules == problem.schedules:
                    raise
                break
            plan = write(solution)
            plan = _with_memory(plan, allocated(plan))
            if not (beyond := _beyond(plan, solution, groups)):
                return plan
            tighter = _with_less_memory(tighter, {i: groups[i].memory_bytes - b for i, b in beyond.items()})
    raise Infeasible(
        f"memory: no stages fit by what they allocate when they run; the last exceed {groups[min(beyond)].name!r}",
        "add devices or memory, or import the step with a smaller micro-batch",
    )


def _with_memory(plan: Plan, taken: Mapping[str, int]) -> Plan:
    stages = tuple(replace(s, memory_bytes=max(taken[d] for d in s.placement.devices)) for s in plan.stages)
    return replace(plan, stages=stages)


def _beyond(plan: Plan, solution: IterationSolution, groups: Sequence[Group]) -> dict[int, float]:
    """By group whose memory a stage exceeds: how much it takes beyond what the solver counts."""
    found: dict[int, float] = {}
    for stage, solved in zip(plan.stages, solution.stages, strict=True):
        group = solved.placing.group
        if stage.memory_bytes * _RESERVE > groups[group].memory_bytes:
            excess = stage.memory_bytes * _RESERVE - solved.memory_bytes
            found[group] = max(excess, found.get(group, 0.0))
    return found


def _with_less_memory(problem: IterationProblem, most: Mapping[int, float]) -> IterationProblem:
    """Return the problem with at most so much memory on some groups, and less than before."""
    groups = tuple(
        replace(g, memory_bytes=int(min(most[i], _LESS * g.memory_bytes))) if i in most else g
        for i, g in enumerate(problem.groups)
    )
    options = tuple(replace(o, forward=replace(o.forward, groups=groups)) for o in problem.options)
    return replace(problem, options=options)
