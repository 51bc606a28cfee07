"""The cheapest kernels that make some nodes on one device, in whatever order: an integer program.

    each node in exactly one kernel ──► least seconds ──► do kernels wait for each other in a ring?  no ──► the cover
                 ▲                                              │ yes
                 └── not all kernels of that ring together ◄────┘

The states of a linear order (state_graphs.py) hold the covers that can follow this order only. Here all are looked at,
and the cover comes with a bound that holds for every one of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from tvmhet.solve.evaluate import StageChoice, evaluate, places
from tvmhet.solve.objective import Objective
from tvmhet.solve.orders import order_by
from tvmhet.solve.pack import predecessors
from tvmhet.solve.problem import Problem
from tvmhet.solve.solution import SolvedStage

_UNITS = 10**10  # integer units in what the model takes at most
_EFFORT = 10.0  # of one integer program, in CP-SAT's deterministic seconds
_ROUNDS = 20  # of rings


@dataclass(frozen=True, slots=True)
class Cover:
    """Kernels in execution order, none where none were found; no cover takes less than `least_s`."""

    kernels: tuple[int, ...]
    least_s: float


def exact_cover(problem: Problem, seconds: NDArray[np.float64], nodes: Collection[int] | None = None) -> Cover:
    """Return the kernels of least `seconds`, shape (kernels,), that make `nodes` (default: all), each of them once.

    Work is counted, by one worker: the same problem gets the same answer.
    """
    wanted = range(problem.num_nodes) if nodes is None else sorted(nodes)
    usable = _fastest(problem, seconds, frozenset(wanted))
    model = cp_model.CpModel()
    takes = {k: model.new_bool_var("") for k in usable}
    makers: dict[int, list[int]] = {v: [] for v in wanted}
    for k in usable:
        for v in problem.kernels[k].nodes:
            makers[v].append(k)
    if not all(makers.values()):
        return Cover((), math.inf)
    for v in wanted:
        model.add_exactly_one(takes[k] for k in makers[v])
    unit_s = sum(min(float(seconds[k]) for k in makers[v]) for v in wanted) / _UNITS or 1.0
    # Rounding down keeps the bound valid.
    model.minimize(sum(math.floor(seconds[k] / unit_s) * x for k, x in takes.items()))
    preds = predecessors(problem)
    least_s = 0.0
    for _ in range(_ROUNDS):
        solver = cp_model.CpSolver()
        solver.parameters.max_deterministic_time = _EFFORT
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        status = solver.solve(model)
        least_s = max(least_s, solver.best_objective_bound * unit_s)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            break
        chosen = [k for k, x in takes.items() if solver.boolean_value(x)]
        before = _waits_for(problem, preds, chosen)
        last = [max(problem.kernels[k].nodes) for k in chosen]
        order = order_by(before, last.__getitem__)
        if len(order) == len(chosen):
            return Cover(tuple(chosen[i] for i in order), least_s)
        for ring in _rings(before, frozenset(order)):
            model.add(sum(takes[chosen[i]] for i in ring) < len(ring))
    return Cover((), least_s)


def covered_again(
    problem: Problem, time_s: NDArray[np.float64], stages: Sequence[SolvedStage], objective: Objective
) -> tuple[tuple[SolvedStage, ...], float]:
    """Return the stages with the cheapest kernels that make what each makes, and their objective.

    `time_s`: allowed times, shape (kernels, groups). Stages that would not fit their devices any more stay as they are.
    """
    same = [StageChoice(s.kernels, s.group, s.num_replicas, s.shares) for s in stages]
    again = []
    for stage in same:
        nodes = [v for k in stage.kernels for v in problem.kernels[k].nodes]
        cover = exact_cover(problem, time_s[:, stage.group], nodes)
        again.append(replace(stage, kernels=cover.kernels or stage.kernels))
    solved, value_s = evaluate(problem, again, objective)
    if not fits(problem, solved):
        limits = [problem.groups[s.group].memory_bytes for s in solved]
        mixed = [b if s.memory_bytes <= most else a for a, b, s, most in zip(same, again, solved, limits, strict=True)]
        solved, value_s = evaluate(problem, mixed, objective)
    return (solved, value_s) if fits(problem, solved) else evaluate(problem, same, objective)


def fits(problem: Problem, stages: Sequence[SolvedStage]) -> bool:
    """Whether devices hold the stages that they run; those that share devices add up."""
    held: dict[int, float] = {}
    for s, place in zip(stages, places(stages), strict=True):
        held[place] = held.get(place, 0.0) + s.memory_bytes
    return all(size <= problem.groups[stages[place].group].memory_bytes for place, size in held.items())


def _fastest(problem: Problem, seconds: NDArray[np.float64], wanted: frozenset[int]) -> list[int]:
    """The kernels inside `wanted`; of those that make the same nodes, the fastest."""
    best: dict[tuple[int, ...], int] = {}
    for k, kernel in enumerate(problem.kernels):
        if math.isfinite(seconds[k]) and wanted.issuperset(kernel.nodes):
            nodes = tuple(sorted(kernel.nodes))
            if nodes not in best or seconds[k] < seconds[best[nodes]]:
                best[nodes] = k
    return sorted(best.values())


def _waits_for(problem: Problem, preds: Sequence[Sequence[int]], chosen: Sequence[int]) -> list[list[int]]:
    """For each chosen kernel, the positions of those whose results it reads."""
    home = {v: i for i, k in enumerate(chosen) for v in problem.kernels[k].nodes}
    return [
        sorted({home[u] for v in problem.kernels[k].nodes for u in preds[v] if u in home} - {i})
        for i, k in enumerate(chosen)
    ]


def _rings(before: Sequence[Sequence[int]], runs: frozenset[int]) -> Iterator[list[int]]:
    """Yield a short ring of each knot of kernels that wait for each other; those in `runs` are in none."""
    import networkx as nx  # 0.2 s, and rings are rare

    waiting = nx.DiGraph((u, i) for i, us in enumerate(before) if i not in runs for u in us if u not in runs)
    for knot in nx.strongly_connected_components(waiting):
        if len(knot) > 1:
            first, inside = min(knot), waiting.subgraph(knot)
            yield min((nx.shortest_path(inside, i, first) for i in sorted(inside[first])), key=len)
