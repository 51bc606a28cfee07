"""`solve`: the entry point that chooses the searches for a problem, keeps the best answer and states its bound."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tvmhet.solve.bounds import cheapest_cover, latency_bound_s, tails_s, throughput_bound_s
from tvmhet.solve.evaluate import StageChoice, evaluate
from tvmhet.solve.infeasible import memory_reason, no_kernel_reason, smallest_mend
from tvmhet.solve.latency import latency_start
from tvmhet.solve.objective import Objective
from tvmhet.solve.orders import linear_orders
from tvmhet.solve.pack import StateGraph, allowed_times, predecessors, state_graph
from tvmhet.solve.pipeline import Found, StageSearch, crossing_bytes, near_cuts, pick_cuts, progress_s
from tvmhet.solve.problem import Link, Problem
from tvmhet.solve.solution import Solution, Status

_FULL_STATES = 1500  # every downset is a state up to here
_LINEAR_STATES = 6000  # and beyond it, states of one linear order
_EXACT_STATES = 300  # up to here branch and bound is tried
_EXACT_STEPS = 150_000
_MAX_LABELS = 48
_REFINEMENTS = 5  # searches among cuts near those of the best answer so far
_PROVED = 1e-6  # a gap up to this is called optimal


def solve(
    problem: Problem,
    objective: Objective = Objective.THROUGHPUT,
    *,
    max_steps: int = 12_000_000,
    time_limit_s: float = 60.0,
    seed: int = 0,
) -> Solution:
    """Return the best plan found, its lower bound and its status.

    Work is counted in steps (label extensions of the stage search): the same `max_steps` gives the same answer on any
    machine; `time_limit_s` is the second limit, checked between searches. `seed` is reserved for random restarts.
    Infeasible problems come back with status INFEASIBLE, the binding constraint and the smallest mend as `reason`.
    """
    if reason := no_kernel_reason(problem):
        return _infeasible(reason)
    solution = _search(problem, objective, max_steps, time_limit_s)
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


def _search(problem: Problem, objective: Objective, max_steps: int, time_limit_s: float) -> Solution:
    started = time.monotonic()
    if problem.num_nodes == 0:
        return Solution((), 0.0, 0.0, Status.OPTIMAL, 0, "empty")
    time_s = allowed_times(problem)
    full = state_graph(problem, range(problem.num_nodes), full=True, max_states=_FULL_STATES)
    graphs = [full] if full.num_states else _linear_graphs(problem)
    if not graphs:
        return _infeasible("")
    complete = next((g for g in graphs if not g.truncated), None)
    bound = throughput_bound_s if objective is Objective.THROUGHPUT else latency_bound_s
    lower = bound(problem, complete, time_s) if complete else 0.0
    best: Found | None = _whole(problem, objective, graphs[0], time_s)
    name = "whole model on one device"
    steps = 0
    if objective is Objective.LATENCY:
        quicker, label, proved = latency_start(problem, graphs[0], time_s, best)
        best, name = (quicker, label) if quicker else (best, name)
        lower = max(lower, proved)
    for graph in graphs:
        if best and best.objective_s - lower <= _PROVED * best.objective_s:
            break
        if steps >= max_steps or time.monotonic() - started > time_limit_s:
            break
        found, proved, spent = _stages(problem, objective, graph, time_s, lower, max_steps // len(graphs))
        steps += spent
        lower = max(lower, proved)
        if found and (best is None or found.objective_s < best.objective_s):
            best, name = found, "stages over all downsets" if graph.full else "stages over linear orders"
    if full.num_states and (best is None or best.objective_s - lower > _PROVED * best.objective_s):
        upper = best.objective_s if best else math.inf
        search = StageSearch(problem, full, time_s, objective)
        budget = min(max_steps, _EXACT_STEPS) if full.num_states <= _EXACT_STATES else 0
        found, exhaustive, spent = search.exact(upper, tails_s(problem, time_s.min(axis=1)), budget)
        steps += spent
        if found:
            best, name = found, "branch and bound"
        if exhaustive and best and _roomy(problem):
            lower = best.objective_s
    if best is None or math.isinf(best.objective_s):
        return _infeasible("", steps)
    optimal = best.objective_s - lower <= _PROVED * best.objective_s
    status = Status.OPTIMAL if optimal else Status.FEASIBLE
    lower = min(lower, best.objective_s)
    return Solution(best.stages, best.objective_s, lower, status, steps, name)


def _linear_graphs(problem: Problem) -> list[StateGraph]:
    graphs = [
        state_graph(problem, o, full=False, max_states=_LINEAR_STATES) for o in linear_orders(predecessors(problem))
    ]
    return [g for g in graphs if g.num_states]


def _whole(problem: Problem, objective: Objective, graph: StateGraph, time_s: NDArray[np.float64]) -> Found | None:
    """Return the best plan with a single stage on a single device: an incumbent within milliseconds."""
    best: Found | None = None
    for g, group in enumerate(problem.groups):
        if group.num_devices <= 0 or not (cover := cheapest_cover(graph, np.ascontiguousarray(time_s[:, g]))):
            continue
        if not math.isfinite(float(time_s[list(cover), g].sum())):
            continue
        stages, value = evaluate(problem, (StageChoice(cover, g),), objective)
        if (
            stages[0].memory_bytes <= group.memory_bytes
            and math.isfinite(value)
            and (best is None or value < best.objective_s)
        ):
            best = Found(stages, value, -math.inf, 0)
    return best


def _stages(
    problem: Problem,
    objective: Objective,
    graph: StateGraph,
    time_s: NDArray[np.float64],
    lower_s: float,
    max_steps: int,
) -> tuple[Found | None, float, int]:
    """Search one state graph, coarse then fine. Return (best, lower bound it proves, steps)."""
    search = StageSearch(problem, graph, time_s, objective)
    crossing = crossing_bytes(problem, graph)
    progress = progress_s(graph, time_s.min(axis=1))
    cuts = pick_cuts(crossing, progress, _num_cuts(problem, max_steps))
    found = search.over(cuts, lower_s, math.inf, _MAX_LABELS)
    if found is None:
        return None, 0.0, 0
    if len(cuts) == graph.num_states:
        proved = found.proved_s if graph.full and _dp_is_exact(problem, objective) else 0.0
        return found, proved, found.steps
    best, steps = found, found.steps
    for g, group in enumerate(problem.groups):  # with many groups the label limit may hide even these
        if 0 < group.num_devices < sum(d.num_devices for d in problem.groups):
            alone = search.over(cuts, lower_s, best.objective_s * (1 - 1e-9), _MAX_LABELS, only=g)
            best, steps = (alone, steps + alone.steps) if alone else (best, steps)
    for _ in range(_REFINEMENTS):
        if len(best.stages) == 1 or steps >= max_steps:
            break
        near = near_cuts(search.cuts_of(best), crossing, progress, len(cuts))
        finer = search.over(near, lower_s, best.objective_s * (1 - 1e-9), _MAX_LABELS)
        if finer is None or finer.objective_s >= best.objective_s:
            break
        best, steps = finer, steps + finer.steps
    return best, 0.0, steps


def _num_cuts(problem: Problem, max_steps: int) -> int:
    """How many cuts the step budget pays for: about 25 searches of cuts^2 / 2 * groups * labels each."""
    groups = sum(g.num_devices > 0 for g in problem.groups)
    combinations = math.prod(1 + max(0, g.num_devices) for g in problem.groups)
    labels = min(_MAX_LABELS, max(1, combinations // 4))
    return max(32, min(700, math.isqrt(max_steps * 2 // (25 * groups * labels))))


def _dp_is_exact(problem: Problem, objective: Objective) -> bool:
    """Does the stage search's own bound hold for every plan? With unlike links it does not, nor where memory binds."""
    if objective is Objective.LATENCY:
        return False
    return len({(x.latency_s, x.byte_per_s) for row in problem.links for x in row}) == 1 and _roomy(problem)


def _roomy(problem: Problem) -> bool:
    """Does everything fit every device at once, so that memory never decides which kernels a stage has?"""
    total = sum(w.size_bytes for w in problem.weights) + sum(e.size_bytes for e in problem.edges)
    total += max((k.workspace_bytes for k in problem.kernels), default=0)
    return all(total <= g.memory_bytes for g in problem.groups)
