"""Why there is no plan, and the smallest change that makes one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tvmhet.solve.evaluate import Uses, stage_memory_bytes
from tvmhet.solve.pack import allowed_times
from tvmhet.solve.problem import Problem
from tvmhet.solve.splits import with_devices

_GIB = 1024.0**3


def size_text(num_bytes: float) -> str:
    """Return bytes in a unit that people read."""
    if num_bytes >= _GIB:
        return f"{num_bytes / _GIB:.3g} GiB"
    return f"{num_bytes / 1024**2:.3g} MiB" if num_bytes >= 1024**2 else f"{math.ceil(num_bytes)} bytes"


def no_kernel_reason(problem: Problem) -> str | None:
    """Return which node no kernel can run on any allowed group, or None if every node has one."""
    time_s = allowed_times(problem)
    runs = np.isfinite(time_s.min(axis=1))
    covered = {v for i, k in enumerate(problem.kernels) if runs[i] for v in k.nodes}
    for v in range(problem.num_nodes):
        if v in covered:
            continue
        if (pin := problem.pins.get(v)) is not None:
            names = sorted(problem.groups[g].name for g in pin if 0 <= g < len(problem.groups))
            return f"node {v} is pinned to {names}, where no kernel can run it; unpin it or add a device"
        return f"node {v} has no kernel with a finite time on any device; give it a kernel that runs alone"
    return None


def memory_reason(problem: Problem) -> str | None:
    """Return the node whose smallest kernel alone exceeds every device it may run on, or None."""
    time_s = allowed_times(problem)
    best = [(math.inf, 0, 0.0)] * problem.num_nodes  # missing bytes, group, needed bytes
    uses = Uses.of(problem)
    for i, k in enumerate(problem.kernels):
        needs = {d: stage_memory_bytes(problem, (i,), uses, d) for d in {g.degree for g in problem.groups}}
        for g, group in enumerate(problem.groups):
            need = needs[group.degree]
            if math.isfinite(time_s[i, g]):
                for v in k.nodes:
                    best[v] = min(best[v], (need - group.memory_bytes, g, need))
    worst = max(((*b, v) for v, b in enumerate(best) if 0 < b[0] < math.inf), default=None)
    if worst is None:
        return None
    missing, g, need, v = worst
    group = problem.groups[g]
    return (
        f"memory: node {v} alone needs {size_text(need)} on one device; {group.name!r} has "
        f"{size_text(group.memory_bytes)}; the smallest mend is {size_text(missing)} more memory on {group.name!r}"
    )


def smallest_mend(problem: Problem, feasible: Callable[[Problem], bool]) -> str:
    """Return the reason when each node fits by itself: not enough devices or memory together. `feasible` re-solves."""
    mends: list[str] = []
    own = [g for g in problem.groups if g.team_of < 0]
    for g, group in enumerate(own):
        for extra in (1, 2, 4, 8, 16):
            if feasible(_with_group(problem, g, num_devices=group.num_devices + extra)):
                while extra > 1 and feasible(_with_group(problem, g, num_devices=group.num_devices + extra - 1)):
                    extra -= 1
                mends.append(f"{extra} more device{'s' if extra > 1 else ''} of {group.name!r}")
                break
    low, high = 1.0, 2.0
    while high < 1024 and not feasible(_scaled(problem, high)):
        low, high = high, 2 * high
    if high < 1024:
        for _ in range(12):
            middle = (low + high) / 2
            low, high = (low, middle) if feasible(_scaled(problem, middle)) else (middle, high)
        mends.append(f"{(high - 1) * 100:.3g} % more memory on every device")
    have = ", ".join(f"{g.num_devices} x {g.name!r} of {size_text(g.memory_bytes)}" for g in own)
    remedy = " or ".join(mends) if mends else "no number of devices helps: no acyclic set of kernels covers the model"
    return f"memory and device counts together: the model does not fit {have}; the smallest mend is {remedy}"


def _with_group(problem: Problem, g: int, *, num_devices: int) -> Problem:
    return with_devices(problem, [num_devices if i == g else x.num_devices for i, x in enumerate(problem.groups)])


def _scaled(problem: Problem, factor: float) -> Problem:
    return replace(problem, groups=tuple(replace(g, memory_bytes=g.memory_bytes * factor) for g in problem.groups))
