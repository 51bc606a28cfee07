"""The lesser searches that the joint one is compared with: they decide fusion and placement one after the other.

    fuse-first   the best kernels of one device, chosen for the type that runs the model fastest alone; then the
                 placement of exactly these, each by the better maker of its device
    place-first  the placement of single operators; then the best kernels inside each stage, for that stage's type
    no-fusion    kernels of one operator only

All take the same times as `solve`, and answer with plans of the same problem: the same checker takes them. The joint
search is a heuristic where it proves nothing, so `jointly` also asks the first two and is never worse than either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from tvmhet.errors import BadInput
from tvmhet.solve.exact_cover import covered_again, exact_cover
from tvmhet.solve.objective import Objective
from tvmhet.solve.pack import allowed_times
from tvmhet.solve.problem import Kernel, Problem
from tvmhet.solve.search import solve
from tvmhet.solve.solution import Solution, Status


class Solver(Protocol):
    """What a search gets plans from: `solve` with all its options but `bounded`, or what stands for it."""

    def __call__(self, problem: Problem, objective: Objective, /, *, bounded: bool = True) -> Solution: ...


Search = Callable[[Problem, Objective, Solver], Solution]

_FUSED_FIRST, _PLACED_FIRST = "fusion first, then placement", "placement first, then fusion"


def together(problem: Problem, objective: Objective, solver: Solver = solve) -> Solution:
    """Return what the solver alone finds."""
    return solver(problem, objective)


def jointly(problem: Problem, objective: Objective, solver: Solver = solve) -> Solution:
    """Return what the solver finds, or, where that is not proved, a better plan of `fuse_first` or `place_first`.

    Stages of theirs get the cheapest kernels of their own device type.
    """
    found = solver(problem, objective)
    if found.status is not Status.FEASIBLE:
        return found
    for search in (fuse_first, place_first):
        other = search(problem, objective, partial(solver, bounded=False))
        if other.status is Status.INFEASIBLE:
            continue
        stages, value = covered_again(problem, allowed_times(problem), other.stages, objective)
        if value < found.objective:
            bound = found.lower_bound
            found = replace(other, stages=stages, objective=value, lower_bound=bound, status=Status.FEASIBLE)
    return found


def virtually(search: Search) -> Search:
    """Return `search` with plans in which a device may run several stages."""

    def found(problem: Problem, objective: Objective, solver: Solver) -> Solution:
        def with_virtual(part: Problem, goal: Objective, /, *, bounded: bool = True) -> Solution:
            return solver(part, goal, bounded=bounded, virtual_stages=True)  # type: ignore[call-arg]

        return search(problem, objective, with_virtual)

    return found


def is_sequential(solver: str) -> bool:
    """Return whether a plan is one of the lesser searches', by its `solver`."""
    return solver.startswith((_FUSED_FIRST, _PLACED_FIRST))


def fuse_first(problem: Problem, objective: Objective, solver: Solver = solve) -> Solution:
    """Return the best placement of the kernels that are best on the fastest device type."""
    time_s = np.array([k.time_s if _placeable(problem, k) else [math.inf] * len(k.time_s) for k in problem.kernels])
    covers = {g: exact_cover(problem, time_s[:, g]).kernels for g in _usable(problem)}
    covers = {g: cover for g, cover in covers.items() if cover}
    if not covers:  # no type runs the whole model: nothing to fuse for
        return no_fusion(problem, objective, solver)
    fastest = min(covers, key=lambda g: (math.fsum(problem.kernels[k].time_s[g] for k in covers[g]), g))
    chosen = {problem.kernels[k].nodes for k in covers[fastest]}
    kept = [i for i, k in enumerate(problem.kernels) if k.nodes in chosen]
    return _over(problem, kept, objective, solver, _FUSED_FIRST)


def place_first(problem: Problem, objective: Objective, solver: Solver = solve) -> Solution:
    """Return the best fusion inside the stages that are best for single operators. The bound is not known: 0."""
    placed = no_fusion(problem, objective, solver)
    if placed.status is Status.INFEASIBLE:
        return placed
    stages, value = covered_again(problem, allowed_times(problem), placed.stages, objective)
    return Solution(stages, value, 0.0, Status.FEASIBLE, placed.steps, _PLACED_FIRST)


def no_fusion(problem: Problem, objective: Objective, solver: Solver = solve) -> Solution:
    """Return the best plan of single operators. Raises BadInput if a node has no kernel of its own."""
    kept = [i for i, k in enumerate(problem.kernels) if len(k.nodes) == 1]
    if len({problem.kernels[i].nodes for i in kept}) < problem.num_nodes:
        raise BadInput("some operators have no kernel of their own", "give every operator a kernel, or do not ablate")
    return _over(problem, kept, objective, solver, "without fusion")


#: By the names of the command line.
SEARCHES: dict[str, Search] = {
    "fuse-first": fuse_first,
    "place-first": place_first,
    "no-fusion": no_fusion,
}


def _usable(problem: Problem) -> list[int]:
    return [g for g, group in enumerate(problem.groups) if group.num_devices > 0]


def _over(problem: Problem, kept: Sequence[int], objective: Objective, solver: Solver, name: str) -> Solution:
    """Solve with some of the kernels. The bound holds for this lesser search only."""
    found = solver(replace(problem, kernels=tuple(problem.kernels[i] for i in kept)), objective)
    stages = tuple(replace(s, kernels=tuple(kept[k] for k in s.kernels)) for s in found.stages)
    return replace(found, stages=stages, solver=f"{name}: {found.solver}")


def _placeable(problem: Problem, kernel: Kernel) -> bool:
    """Do the pins of all its nodes leave a group for the kernel?"""
    allowed = [problem.pins[v] for v in kernel.nodes if v in problem.pins]
    return not allowed or bool(frozenset.intersection(*allowed))
