"""A lower bound on the latency of one input: the quickest chain of stages along a path of the graph.

The nodes of a path run one after the other, and a stage that runs two of them runs all that lies between, for a stage
is convex and starts only when its last input has arrived. So the path is cut into intervals, each of them a stage on
some group, and the quickest cut bounds every plan:

    path   o──o──o│o──o──o        interval i..j costs: overhead + work on all nodes between P[i] and P[j]
              o──'   `──o         a cut costs: moving the path's own tensor between the two groups

A stage's work is bounded by node weights that no kernel exceeds, the dual of its cover by kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from tvmhet.solve.orders import successors
from tvmhet.solve.pack import predecessors
from tvmhet.solve.problem import Problem

_MAX_PATH = 800  # longer paths are thinned to their heaviest nodes: the chain is quadratic in them
_MAX_LP_NODES = 2000  # beyond, a kernel's time is shared equally among its nodes
_MICROSECOND = 1e-6  # the unit of the LP, whose tolerances are absolute


def stage_chain_s(problem: Problem, weight_s: NDArray[np.float64]) -> float:
    """Return a lower bound on the makespan in seconds; inf if some node runs nowhere.

    `weight_s`: (groups, nodes), from `node_weights_s` of each group.
    """
    if not problem.num_nodes:
        return 0.0
    fastest = weight_s.min(axis=0)
    if not np.isfinite(fastest).all():
        return math.inf
    preds = predecessors(problem)
    paths = {tuple(_heaviest_path(preds, w)) for w in (fastest, np.ones(problem.num_nodes))}
    return max(_chain_s(problem, weight_s, preds, _thinned(p, fastest)) for p in sorted(paths)) * (1 - 1e-9)


def node_weights_s(problem: Problem, time_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return seconds per node on one group so that no kernel's nodes weigh more than its `time_s`; inf: cannot run."""
    runs = [i for i, t in enumerate(time_s) if math.isfinite(t)]
    weight = np.full(problem.num_nodes, math.inf)
    for i in runs:
        nodes = list(problem.kernels[i].nodes)
        weight[nodes] = np.minimum(weight[nodes], time_s[i] / len(nodes))
    if problem.num_nodes > _MAX_LP_NODES or not runs:
        return weight
    solver = pywraplp.Solver.CreateSolver("GLOP")
    share = [solver.NumVar(0.0, solver.infinity() if math.isfinite(w) else 0.0, "") for w in weight]
    for i in runs:
        row = solver.RowConstraint(-solver.infinity(), float(time_s[i]) / _MICROSECOND, "")
        for v in problem.kernels[i].nodes:
            row.SetCoefficient(share[v], 1.0)
    for x in share:
        solver.Objective().SetCoefficient(x, 1.0)
    solver.Objective().SetMaximization()
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return weight
    best = np.array([x.solution_value() for x in share]) * _MICROSECOND
    over = max((float(best[list(problem.kernels[i].nodes)].sum()) - time_s[i] for i in runs), default=0.0)
    best = np.maximum(best - max(0.0, over), 0.0)  # the LP's tolerance, taken off every node
    return np.where(np.isfinite(weight), best, math.inf)


def _heaviest_path(preds: Sequence[Sequence[int]], weight: NDArray[np.float64]) -> list[int]:
    total = np.zeros(len(preds))
    back = [-1] * len(preds)
    for v, before in enumerate(preds):
        back[v] = max(before, key=lambda u: (total[u], -u), default=-1)
        total[v] = weight[v] + (total[back[v]] if back[v] >= 0 else 0.0)
    path = [int(total.argmax())]
    while back[path[-1]] >= 0:
        path.append(back[path[-1]])
    return path[::-1]


def _thinned(path: Sequence[int], weight: NDArray[np.float64]) -> list[int]:
    kept = set(sorted(path, key=lambda v: (-weight[v], v))[:_MAX_PATH])
    return [v for v in path if v in kept]


def _chain_s(problem: Problem, weight_s: NDArray[np.float64], preds: list[list[int]], path: list[int]) -> float:
    """The shortest chain: best[g] after j nodes of the path, the last of them in a stage on group g."""
    groups = range(len(problem.groups))
    cost = _interval_costs_s(problem, weight_s, preds, path)
    enter = np.full((len(path), len(groups)), math.inf)
    enter[0] = [
        sum(x.transfer_s(e.size_bytes) for e in problem.edges if e.src < 0 and path[0] in e.dsts)
        for x in problem.host_links
    ]
    best = enter[0]
    for j in range(1, len(path) + 1):
        best = (enter[:j] + cost[:, :j, j - 1].T).min(axis=0)
        if j < len(path):
            moved = [e.size_bytes for e in problem.edges if e.src == path[j - 1] and path[j] in e.dsts]
            for g in groups:
                enter[j, g] = min(best[a] + sum(problem.links[a][g].transfer_s(b) for b in moved) for a in groups)
    home = [
        sum(x.transfer_s(e.size_bytes) for e in problem.edges if e.src == path[-1] and e.is_output)
        for x in problem.host_links
    ]
    return float((best + home).min())


def _interval_costs_s(
    problem: Problem, weight_s: NDArray[np.float64], preds: list[list[int]], path: list[int]
) -> NDArray[np.float64]:
    """Return seconds, shape (groups, path, path): a stage that runs path[i..j] and all between; inf: impossible.

    v lies between P[i] and P[j] when the last path node at or above v is at i or later, and the first at or below it
    at j or earlier. So sums over what lies between are two-dimensional prefix sums.
    """
    n, length = problem.num_nodes, len(path)
    place = {v: i for i, v in enumerate(path)}
    readers = successors(preds)
    last, first = np.full(n, -1), np.full(n, length)
    for v in range(n):
        last[v] = place.get(v, max((last[u] for u in preds[v]), default=-1))
    for v in reversed(range(n)):
        first[v] = place.get(v, min((first[u] for u in readers[v]), default=length))
    between = np.flatnonzero((last >= 0) & (first < length))

    def sums(value: NDArray[np.float64]) -> NDArray[np.float64]:
        grid = np.zeros((length, length))
        np.add.at(grid, (last[between], first[between]), value[between])
        return np.cumsum(np.cumsum(grid[::-1], axis=0)[::-1], axis=1)

    held = np.zeros(n)
    for w in problem.weights:
        if w.nodes:
            held[w.nodes[0]] += w.size_bytes
    memory = sums(held)
    cost = np.empty((len(problem.groups), length, length))
    for g, group in enumerate(problem.groups):
        barred = sums((~np.isfinite(weight_s[g])).astype(np.float64)) > 0
        cost[g] = sums(np.where(np.isfinite(weight_s[g]), weight_s[g], 0.0)) + group.stage_overhead_s
        if group.num_devices > 0:
            cost[g][barred | (memory > group.memory_bytes * group.degree * (1 + 1e-9))] = math.inf
        else:
            cost[g] = math.inf
    return cost
