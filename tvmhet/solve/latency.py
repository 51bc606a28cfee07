"""Latency of one input: a bound and first plans, before stages are searched.

node weights ──► chain of stages, two-device cut: the bound
            └──► HEFT, ETF, two-device cut: node -> device ──► cheapest kernels per device ──► stages
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tvmhet.solve.bounds import cheapest_cover
from tvmhet.solve.evaluate import StageChoice, evaluate
from tvmhet.solve.favourites import sct
from tvmhet.solve.list_schedule import Slot, Tasks, etf, heft
from tvmhet.solve.move_nodes import move_nodes
from tvmhet.solve.objective import Objective
from tvmhet.solve.orders import order_by
from tvmhet.solve.pack import StateGraph, predecessors
from tvmhet.solve.pipeline import Found
from tvmhet.solve.problem import Problem
from tvmhet.solve.stage_chain import node_weights_s, stage_chain_s
from tvmhet.solve.two_devices import two_device_cuts

_MAX_NODES = 1000  # beyond, list schedules take longer than the stage search
_FAR = 0.02  # gap from which local search is worth its time
_TRIES_PER_NODE = 5  # evaluations of local search ...
_TRIED_NODES = 50_000  # ... but no more than this many nodes together
_MAX_SLOTS = 8  # devices of one group that a list schedule may use


def latency_start(
    problem: Problem, graph: StateGraph, time_s: NDArray[np.float64], found: Found | None
) -> tuple[Found | None, str, float]:
    """Return (a plan quicker than `found` or None, which algorithm made it, a lower bound in seconds)."""
    weight_s = np.array([node_weights_s(problem, time_s[:, g]) for g in range(len(problem.groups))])
    lower = stage_chain_s(problem, weight_s)
    if math.isinf(lower):
        return None, "", 0.0  # some node runs nowhere
    cut_s, cuts = two_device_cuts(problem, weight_s)
    lower = max(lower, cut_s)
    if found and found.objective_s <= lower * (1 + 1e-9):
        return None, "", lower
    slots = list_slots(problem)

    def planned(home: Sequence[int]) -> Found | None:
        return plan_of(problem, graph, time_s, home, slots)

    best, name = found, ""
    for label, home in _homes(problem, weight_s, slots, cuts, planned, lower):
        plan = planned(home)
        if plan and (best is None or plan.objective_s < best.objective_s * (1 - 1e-9)):
            best, name = plan, label
    return (best if name else None), name, lower


def _homes(
    problem: Problem,
    weight_s: NDArray[np.float64],
    slots: Sequence[Slot],
    cuts: Sequence[list[int]],
    planned: Callable[[Sequence[int]], Found | None],
    lower: float,
) -> list[tuple[str, list[int]]]:
    """Return placements (the slot of each node) with the algorithm that made each."""

    def value(home: Sequence[int]) -> float:
        plan = planned(home)
        return plan.objective_s if plan else math.inf

    homes = [("minimum cut", h) for h in cuts]
    if problem.num_nodes > _MAX_NODES or len(slots) < 2:
        return homes
    tasks = list_tasks(problem, weight_s, slots)
    homes += [(n, h) for n, h in (("HEFT", heft(tasks)), ("ETF", etf(tasks)), ("SCT", sct(tasks))) if h]
    start = min([[s] * problem.num_nodes for s in range(len(slots))] + [h for _, h in homes], key=value)
    if value(start) - lower > _FAR * value(start):
        tries = min(_TRIES_PER_NODE * problem.num_nodes, _TRIED_NODES // problem.num_nodes)
        homes.append(("local search", move_nodes(start, tasks.preds, len(slots), value, tries)[0]))
    return homes


def list_slots(problem: Problem) -> tuple[Slot, ...]:
    """Return the devices that list schedules may use, group after group; no teams, who would take them twice."""
    return tuple(
        Slot(g, group.memory_bytes)
        for g, group in enumerate(problem.groups)
        if group.team_of < 0
        for _ in range(min(max(0, group.num_devices), _MAX_SLOTS, problem.num_nodes))
    )


def list_tasks(problem: Problem, weight_s: NDArray[np.float64], slots: Sequence[Slot]) -> Tasks:
    """Return nodes as tasks: `weight_s` (groups, nodes) are their times; memory counts weights and results."""
    num_groups = len(problem.groups)
    move = np.zeros((problem.num_nodes, num_groups, num_groups))
    memory = np.zeros(problem.num_nodes)
    for e in problem.edges:
        if e.src >= 0:
            memory[e.src] += e.size_bytes
            move[e.src] += [[x.transfer_s(e.size_bytes) for x in row] for row in problem.links]
    for w in problem.weights:
        if w.nodes:
            memory[w.nodes[0]] += w.size_bytes
    return Tasks(weight_s.T, predecessors(problem), move, memory, slots)


def plan_of(
    problem: Problem,
    graph: StateGraph,
    time_s: NDArray[np.float64],
    home: Sequence[int],
    slots: Sequence[Slot],
    objective: Objective = Objective.LATENCY,
) -> Found | None:
    """Return the stages of a placement, one per device, with the cheapest kernels that stay on one; None if illegal."""
    masked = np.full(len(problem.kernels), math.inf)
    for i, k in enumerate(problem.kernels):
        where = {home[v] for v in k.nodes}
        if len(where) == 1:
            masked[i] = time_s[i, slots[where.pop()].kind]
    cover = cheapest_cover(graph, masked)
    if not cover or not np.isfinite(masked[list(cover)]).all():
        return None
    kernels: dict[int, list[int]] = {}
    for i in cover:
        kernels.setdefault(home[problem.kernels[i].nodes[0]], []).append(i)
    before: dict[int, set[int]] = {s: set() for s in kernels}
    for e in problem.edges:
        if e.src >= 0:
            for d in e.dsts:
                before[home[d]] |= {home[e.src]} - {home[d]}
    index = {s: i for i, s in enumerate(kernels)}
    order = order_by([[index[p] for p in sorted(before[s])] for s in kernels], lambda i: i)
    if len(order) < len(kernels):
        return None
    used = list(kernels)
    stages, value = evaluate(
        problem, [StageChoice(tuple(kernels[used[i]]), slots[used[i]].kind) for i in order], objective
    )
    fits = all(s.memory_bytes <= problem.groups[s.group].memory_bytes for s in stages)
    return Found(stages, value, -math.inf, 0) if fits and math.isfinite(value) else None
