"""Favourite children for SCT (Hanen & Munier, 1995; Baechi, Jeon et al., SoCC 2020), by their linear relaxation.

x[u, v] = 0 says that v follows u on the same device and pays no transfer. Each node has at most one favourite child and
is the favourite of at most one parent; the relaxation minimises the makespan on ample devices, and x < 1/2 is rounded
to a favourite. Unlike devices enter by their mean times and mean transfers.
"""

from __future__ import annotations

import numpy as np
from ortools.linear_solver import pywraplp

from tvmhet.solve.list_schedule import Tasks, etf
from tvmhet.solve.orders import successors


def sct(tasks: Tasks) -> list[int] | None:
    """Return the slot of each node by SCT, or None if some node fits nowhere."""
    return etf(tasks, favourite_children(tasks))


def favourite_children(tasks: Tasks) -> dict[int, int]:
    """Return child -> the parent whose favourite it is."""
    n = len(tasks.preds)
    finite = np.where(np.isfinite(tasks.time_s), tasks.time_s, np.nan)
    work = np.nanmean(finite, axis=1)
    move = np.where(np.isfinite(tasks.move_s), tasks.move_s, 0.0).mean(axis=(1, 2))
    unit = max(float(work.sum()), 1e-300) / 1000.0
    solver = pywraplp.Solver.CreateSolver("GLOP")
    start = [solver.NumVar(0.0, solver.infinity(), "") for _ in range(n)]
    makespan = solver.NumVar(0.0, solver.infinity(), "")
    apart = {(u, v): solver.NumVar(0.0, 1.0, "") for v in range(n) for u in sorted(set(tasks.preds[v]))}
    for v in range(n):
        solver.Add(start[v] + work[v] / unit <= makespan)
    for (u, v), x in apart.items():
        solver.Add(start[u] + work[u] / unit + move[u] / unit * x <= start[v])
    for u, readers in enumerate(successors([sorted(set(p)) for p in tasks.preds])):
        if readers:
            solver.Add(sum(apart[u, v] for v in readers) >= len(readers) - 1)
    for v in range(n):
        if parents := sorted(set(tasks.preds[v])):
            solver.Add(sum(apart[u, v] for u in parents) >= len(parents) - 1)
    solver.Minimize(makespan)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return {}
    return {v: u for (u, v), x in apart.items() if x.solution_value() < 0.5 - 1e-9}
