"""A lower bound on the largest load for models with too many downsets to list (see passes/stage_floor.cc).

One topological order stands for all of them: a downset is known by the first node it lacks. What a stage between two
such marks takes at least, whatever else it runs, makes the table of chain_bound.py. Work that can slip past a mark (the
other branches of a block) is not charged, so the bound is weakest for wide models.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from tvmhet._passes import passes_func
from tvmhet.solve.chain_bound import chain_bound_s
from tvmhet.solve.orders import late_order
from tvmhet.solve.pack import as_tensor, pack_lists, predecessors
from tvmhet.solve.problem import Problem

_MARKS = 600  # beyond them, marks are blocks of nodes
_BLOCKS = 240  # of equal work, where there are more marks
_FIRST = 1e-4  # by how much more a second of the first node counts than one of the last


def floor_bound_s(problem: Problem, time_s: NDArray[np.float64], lower_s: float, upper_s: float) -> float:
    """Return a lower bound on every plan's largest load; no less than `lower_s`, a bound already known.

    `upper_s` is the load of a known plan; `time_s` are the allowed times, shape (kernels, groups).
    """
    order = late_order(predecessors(problem))
    floor_s = node_floors(problem, time_s)[list(order)]
    first = _marks(np.where(np.isfinite(floor_s), floor_s, 0.0).sum(axis=1))
    table = np.empty((len(first), len(first), len(problem.groups)))
    moves = np.empty((len(first), len(first), 8))
    arrays = [as_tensor(a) for a in _arrays(problem, order, floor_s)]
    passes_func("tvmhet.StageFloor")(arrays, as_tensor(first), as_tensor(table), as_tensor(moves))
    return chain_bound_s(problem, table, moves, lower_s, upper_s)


def node_floors(problem: Problem, time_s: NDArray[np.float64], *, alike: bool = False) -> NDArray[np.float64]:
    """Return seconds, shape (nodes, groups), such that no kernel takes less than its nodes together.

    Among all such weights those with the largest sum (the dual of covering the model by kernels); inf: no kernel can
    run the node on the group. With `alike` the first nodes of kernels weigh most, on all groups, and others nothing
    where that is nearly as good.
    """
    first = _FIRST if alike else 0.0
    least = np.full((problem.num_nodes, len(problem.groups)), np.inf)
    for i, k in enumerate(problem.kernels):
        for v in k.nodes:
            least[v] = np.minimum(least[v], time_s[i])
    return np.stack([_floors_of(problem, time_s[:, g], least[:, g], first) for g in range(len(problem.groups))], axis=1)


def _floors_of(
    problem: Problem, time_s: NDArray[np.float64], least_s: NDArray[np.float64], first: float
) -> NDArray[np.float64]:
    """`least_s[v]`: the fastest kernel with node v, which its weight cannot exceed."""
    unit = max(float(least_s[np.isfinite(least_s)].max(initial=0.0)), 1e-300)
    solver = pywraplp.Solver.CreateSolver("GLOP")
    weight = [solver.NumVar(0.0, least / unit if np.isfinite(least) else 0.0, "") for least in least_s]
    for k, t in zip(problem.kernels, time_s, strict=True):
        if len(k.nodes) > 1 and np.isfinite(t):
            row = solver.RowConstraint(-solver.infinity(), float(t) / unit, "")
            for v in k.nodes:
                row.SetCoefficient(weight[v], 1.0)
    for v, x in enumerate(weight):
        solver.Objective().SetCoefficient(x, 1.0 + first * (1 - v / len(weight)))
    solver.Objective().SetMaximization()
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return np.where(np.isfinite(least_s), 0.0, np.inf)
    found = np.array([max(0.0, x.solution_value()) for x in weight]) * unit
    worst = 1.0  # the solver keeps constraints to a tolerance: scale until they hold
    for k, t in zip(problem.kernels, time_s, strict=True):
        if np.isfinite(t) and (total := float(found[list(k.nodes)].sum())) > t:
            worst = min(worst, float(t) / total)
    return np.where(np.isfinite(least_s), found * worst, np.inf)


def _marks(weight: NDArray[np.float64]) -> NDArray[np.int32]:
    """Return the first node of each mark, then the number of nodes; beyond _MARKS nodes, blocks of equal weight."""
    n = len(weight)
    if n <= _MARKS:
        return np.arange(n + 1, dtype=np.int32)
    done = np.cumsum(weight)
    slices = np.minimum((done / max(done[-1], 1e-300) * _BLOCKS).astype(np.int64), _BLOCKS - 1)
    return np.array([*np.flatnonzero(np.diff(slices, prepend=-1)), n], np.int32)


def _arrays(problem: Problem, order: tuple[int, ...], floor_s: NDArray[np.float64]) -> tuple[NDArray[np.generic], ...]:
    rank = {v: i for i, v in enumerate(order)}
    preds = predecessors(problem)
    return (
        *pack_lists([[rank[u] for u in preds[v]] for v in order]),
        floor_s,
        np.array([g.memory_bytes * g.degree for g in problem.groups], np.float64),  # weights are all that counts
        np.array([rank[e.src] if e.src >= 0 else -1 for e in problem.edges], np.int32),
        np.array([e.size_bytes for e in problem.edges], np.float64),
        np.array([e.is_output for e in problem.edges], np.uint8),
        *pack_lists([sorted({rank[d] for d in e.dsts}) for e in problem.edges]),
        np.array([w.size_bytes for w in problem.weights], np.float64),
        *pack_lists([sorted({rank[v] for v in w.nodes}) for w in problem.weights]),
    )
