"""Raise a lower bound on the latency of one input when a host calls accelerators: a CP-SAT relaxation.

Relaxed: contiguity and the host's memory. Kept: where each block runs, memory, transfers inside a call, precedence.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from tvmhet.solve.contract import Blocks
from tvmhet.solve.loads import LoadProblem

Home = NDArray[np.int32]  # per node: its accelerator 1.., 0 for the host

_MAX_CHOICES = 500  # blocks times devices: beyond, CP-SAT has raised no bound in its time
_UNITS = 1_000_000  # integer units in the incumbent's makespan


def latency_bound(
    problem: LoadProblem, blocks: Blocks, home: Home | None, value: float, lower: float, time_limit_s: float
) -> tuple[float, Home | None]:
    """Return (a lower bound on the makespan of every placement, at least `lower`; the placement it comes from).

    `home`, `value`: the incumbent, or None and a makespan that no sensible placement exceeds. The bound is inf if there
    is no placement. The placement may break what is relaxed, or be None.
    """
    count = min(max(0, problem.types[0].num_devices), problem.num_nodes)
    if time_limit_s <= 0 or blocks.count * (count + 1) > _MAX_CHOICES or value - lower <= 1e-9 * value:
        return min(lower, value), None
    model, makespan, chosen = _model(problem, blocks, home, value, lower, count)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = time_limit_s  # repeatable; wall-clock is only the second limit
    solver.parameters.max_time_in_seconds = 3 * time_limit_s
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE and home is None:
        return math.inf, None
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return min(lower, value), None
    proved = float(solver.best_objective_bound) * value / _UNITS * (1 - 1e-9)
    found = np.zeros(problem.num_nodes, np.int32)
    for nodes, row in zip(blocks.nodes, chosen, strict=True):
        found[list(nodes)] = next(d for d, x in enumerate(row) if solver.boolean_value(x))
    return min(value, max(lower, proved)), found


def _model(
    problem: LoadProblem, blocks: Blocks, home: Home | None, value: float, lower: float, count: int
) -> tuple[cp_model.CpModel, cp_model.IntVar, list[list[cp_model.IntVar]]]:
    model = cp_model.CpModel()
    unit = value / _UNITS

    def ticks(seconds: float) -> int:
        return math.floor(seconds / unit)

    x = [[model.new_bool_var("") for _ in range(count + 1)] for _ in range(blocks.count)]
    of = {v: b for b, nodes in enumerate(blocks.nodes) for v in nodes}
    start = [model.new_int_var(0, _UNITS, "") for _ in range(count + 1)]
    makespan = model.new_int_var(ticks(lower), _UNITS, "makespan")
    done = [model.new_int_var(0, _UNITS, "") for _ in range(problem.num_nodes)]
    for b, row in enumerate(x):
        model.add_exactly_one(row)
        for d in range(count + 1):
            if home is not None:
                model.add_hint(row[d], int(home[blocks.nodes[b][0]] == d))
            if not math.isfinite(blocks.time_s[b, 1 if d == 0 else 0]):
                model.add(row[d] == 0)
    for d in range(2, count + 1):  # accelerators are alike: open them in order
        for b in range(blocks.count):
            model.add_bool_or(x[b][d].negated(), *(x[a][d - 1] for a in range(b)))
    for v in range(problem.num_nodes):
        model.add(done[v] <= makespan)
        if math.isfinite(problem.time_s[v][1]):
            model.add(done[v] >= ticks(problem.time_s[v][1])).only_enforce_if(x[of[v]][0])
    for u, v in sorted(set(problem.edges)):
        model.add(done[v] >= done[u])
        if math.isfinite(problem.time_s[v][1]):
            model.add(done[v] >= done[u] + ticks(problem.time_s[v][1])).only_enforce_if(x[of[v]][0])
    size = [math.floor(min(m, 2.0**50)) for m in blocks.memory_bytes]
    work = []
    for d in range(1, count + 1):
        if math.isfinite(problem.types[0].memory_bytes):
            held = sum(k * row[d] for k, row in zip(size, x, strict=True))
            model.add(held <= math.floor(min(problem.types[0].memory_bytes, 2.0**60)))
        call = [ticks(blocks.time_s[b, 0]) * x[b][d] for b in range(blocks.count) if math.isfinite(blocks.time_s[b, 0])]
        for src, readers, cost in zip(blocks.net_src, blocks.net_readers, blocks.net_cost_s, strict=True):
            pay = model.new_bool_var("")
            call.append(ticks(cost) * pay)
            for r in readers:
                model.add_bool_or(pay, x[src][d].negated(), x[r][d])
                model.add_bool_or(pay, x[src][d], x[r][d].negated())
        end = model.new_int_var(0, _UNITS, "")
        model.add(end >= start[d] + sum(call))
        work.append(end)
        for v in range(problem.num_nodes):
            model.add(done[v] >= end).only_enforce_if(x[of[v]][d])
        for u, v in sorted(set(problem.edges)):
            if of[u] != of[v]:
                model.add(start[d] >= done[u]).only_enforce_if(x[of[v]][d], x[of[u]][d].negated())
    return model, makespan, x
