"""CP-SAT on a load problem, warm-started from our own placement: it improves it, or raises the lower bound."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from tvmhet.solve.contract import Blocks
from tvmhet.solve.loads import LoadProblem

_UNITS = 1_000_000  # integer units in the incumbent's objective


def polish(
    problem: LoadProblem,
    blocks: Blocks,
    home: NDArray[np.int32],
    slots: tuple[int, ...],
    value: float,
    lower: float,
    time_limit_s: float,
) -> tuple[NDArray[np.int32], float]:
    """Return (a placement, a lower bound on every placement). One worker, work counted: repeatable."""
    if time_limit_s <= 0 or not math.isfinite(value) or blocks.count * len(slots) > 4000:
        return home, lower
    model = cp_model.CpModel()
    unit = value / _UNITS
    x = [
        [model.new_bool_var("") if math.isfinite(blocks.time_s[b, t]) else model.new_constant(0) for t in slots]
        for b in range(blocks.count)
    ]
    for row in x:
        model.add_exactly_one(row)
    # Rounding down keeps the bound valid; placements are valued exactly by the caller.
    objective = model.new_int_var(math.floor(lower / unit), _UNITS, "largest load")
    size_bytes = [math.floor(m) for m in blocks.memory_bytes.tolist()]
    of_all = max(1, math.gcd(*size_bytes))
    for d, t in enumerate(slots):
        runs = [b for b in range(blocks.count) if math.isfinite(blocks.time_s[b, t])]
        terms = [(x[b][d], math.floor(blocks.time_s[b, t] / unit)) for b in runs]
        scale = problem.types[t].transfer_scale
        terms += [
            (pay, math.floor(blocks.net_cost_s[e] * scale / unit))
            for e, pay in enumerate(_payments(model, blocks, x, d) if scale > 0 else [])
        ]
        model.add(sum(c * v for v, c in terms if c > 0) <= objective)
        if math.isfinite(problem.types[t].memory_bytes):
            most = math.floor(problem.types[t].memory_bytes * (1 + 1e-12)) // of_all
            model.add(sum(k // of_all * x[b][d] for b, k in enumerate(size_bytes)) <= most)
    home = _renamed(home, slots)
    _break_symmetry(model, x, slots)
    model.minimize(objective)
    for b in range(blocks.count):
        for d in range(len(slots)):
            model.add_hint(x[b][d], int(home[b] == d))
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = time_limit_s  # repeatable; wall-clock is only the second limit
    solver.parameters.max_time_in_seconds = 3 * time_limit_s
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    bound = max(lower, solver.best_objective_bound * unit * (1 - 1e-9)) if status != cp_model.MODEL_INVALID else lower
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return home, min(bound, value)
    found = np.array([next(d for d in range(len(slots)) if solver.value(row[d])) for row in x], np.int32)
    return found, min(bound, value)


def _renamed(home: NDArray[np.int32], slots: tuple[int, ...]) -> NDArray[np.int32]:
    """Number the devices of each type by their first block, as `_break_symmetry` asks."""
    first = [int(np.flatnonzero(home == d)[0]) if (home == d).any() else len(home) for d in range(len(slots))]
    order = sorted(range(len(slots)), key=lambda d: (slots[d], first[d]))
    places = {t: [d for d, kind in enumerate(slots) if kind == t] for t in set(slots)}
    rename = {d: places[slots[d]].pop(0) for d in order}
    return np.array([rename[int(d)] for d in home], np.int32)


def _break_symmetry(model: cp_model.CpModel, x: list[list[cp_model.IntVar]], slots: tuple[int, ...]) -> None:
    """Among devices of one type, a block may open the next one only after an earlier block opened the one before."""
    for d, t in enumerate(slots):
        before = max((c for c in range(d) if slots[c] == t), default=None)
        if before is None:
            continue
        for b in range(len(x)):
            model.add_bool_or(x[b][d].negated(), *(x[a][before] for a in range(b)))


def _payments(
    model: cp_model.CpModel, blocks: Blocks, x: list[list[cp_model.IntVar]], device: int
) -> list[cp_model.IntVar]:
    """One variable per net: 1 when `device` sends or receives it."""
    out = []
    for src, readers in zip(blocks.net_src, blocks.net_readers, strict=True):
        pay = model.new_bool_var("")
        for r in readers:
            model.add_bool_or(pay, x[src][device].negated(), x[r][device])  # sends
            model.add_bool_or(pay, x[src][device], x[r][device].negated())  # receives
        out.append(pay)
    return out
