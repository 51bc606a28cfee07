"""Does a load problem fit into memory? What is in the way, the smallest mend, and a first placement that fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from tvmhet.solve.contract import Blocks
from tvmhet.solve.loads import LoadProblem

_WORK = 4.0  # CP-SAT's deterministic seconds
_MOST = 20_000  # blocks times devices: beyond, packing is not searched


def impossible(problem: LoadProblem, blocks: Blocks) -> str:
    """Return why no placement at all can fit, or an empty text: one block alone, or all together."""
    for b, nodes in enumerate(blocks.nodes):
        runs = [
            t for t, kind in enumerate(problem.types) if kind.num_devices > 0 and math.isfinite(blocks.time_s[b, t])
        ]
        if not runs:
            return f"nodes {list(nodes)[:8]} must share a device, and no type can run them all; split the group"
        if blocks.memory_bytes[b] > (most := max(problem.types[t].memory_bytes for t in runs)):
            return (
                f"memory: nodes {list(nodes)[:8]} must share a device and need {blocks.memory_bytes[b]:.0f} bytes, "
                f"{blocks.memory_bytes[b] - most:.0f} more than the largest that can run them"
            )
    room = sum(k.num_devices * k.memory_bytes for k in problem.types if k.num_devices > 0)
    if (total := math.fsum(problem.memory_bytes)) > room:
        return f"memory: the nodes need {total:.0f} bytes, {total - room:.0f} more than all devices hold together"
    return ""


def smallest_mend(problem: LoadProblem, fits: Callable[[LoadProblem], bool]) -> str:
    """Return how much more memory on every device makes a placement fit, to 1 %, as far as `fits` can tell."""
    low, high = 1.0, 1.25
    while high < 64 and not fits(_scaled(problem, high)):
        low, high = high, 2 * high
    if high >= 64:
        return "more memory alone does not help; add a device that can run the nodes"
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(_scaled(problem, middle)) else (middle, high)
    return f"the smallest mend is {(high - 1) * 100:.3g} % more memory on every device"


def _scaled(problem: LoadProblem, factor: float) -> LoadProblem:
    types = tuple(replace(t, memory_bytes=t.memory_bytes * factor) for t in problem.types)
    return replace(problem, types=types)


def packing(problem: LoadProblem, blocks: Blocks, slots: tuple[int, ...]) -> tuple[NDArray[np.int32] | None, bool]:
    """Return (a device for each block so that memory holds or None, is it known that there is none)."""
    if blocks.count * len(slots) > _MOST:
        return None, False
    model = cp_model.CpModel()
    x = [[model.new_bool_var("") for _ in slots] for _ in range(blocks.count)]
    for b, row in enumerate(x):
        model.add_exactly_one(row)
        for d, t in enumerate(slots):
            if not math.isfinite(blocks.time_s[b, t]):
                model.add(row[d] == 0)
    size = [math.ceil(m) for m in blocks.memory_bytes]
    for d, t in enumerate(slots):
        if math.isfinite(problem.types[t].memory_bytes):
            model.add(sum(n * row[d] for n, row in zip(size, x, strict=True)) <= int(problem.types[t].memory_bytes))
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = _WORK  # repeatable; wall-clock is only the second limit
    solver.parameters.max_time_in_seconds = 3 * _WORK
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        whole = all(float(m).is_integer() for m in problem.memory_bytes)  # else rounding up may be what is in the way
        return None, status == cp_model.INFEASIBLE and whole
    return np.array([next(d for d in range(len(slots)) if solver.value(row[d])) for row in x], np.int32), False
