"""Why no training plan exists, and the smallest change that makes one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from tvmhet.solve.infeasible import size_text
from tvmhet.solve.iteration import IterationProblem, StagePlacing
from tvmhet.solve.iteration_memory import MicroUses, stage_bytes
from tvmhet.solve.pack import allowed_times
from tvmhet.solve.problem import DeviceGroup


def training_reason(problem: IterationProblem, feasible: Callable[[IterationProblem], bool]) -> str:
    """Return the binding constraint and the smallest mend. `feasible` tells whether a changed problem has a plan."""
    if reason := _one_kernel_reason(problem):
        return reason
    mends: list[str] = []
    for g, group in enumerate(problem.groups):
        for extra in (1, 2, 4, 8, 16):
            if feasible(_with_group(problem, g, replace(group, num_devices=group.num_devices + extra))):
                while extra > 1 and feasible(
                    _with_group(problem, g, replace(group, num_devices=group.num_devices + extra - 1))
                ):
                    extra -= 1
                mends.append(f"{extra} more device{'s' if extra > 1 else ''} of {group.name!r}")
                break
    if factor := _memory_factor(problem, feasible):
        more = ", ".join(f"{size_text((factor - 1) * g.memory_bytes)} on {g.name!r}" for g in problem.groups)
        mends.append(f"{more} more per device")
    have = ", ".join(f"{g.num_devices} x {g.name!r} of {size_text(g.memory_bytes)}" for g in problem.groups)
    remedy = " or ".join(mends) if mends else "neither devices nor memory help: look at links, pins and times"
    return (
        f"memory and device counts together: weights, gradients, optimiser state and stashes of a global batch of "
        f"{problem.global_batch} do not fit {have}; the smallest mend is {remedy}"
    )


def _memory_factor(problem: IterationProblem, feasible: Callable[[IterationProblem], bool]) -> float:
    low, high = 1.0, 2.0
    while high < 1024 and not feasible(_scaled(problem, high)):
        low, high = high, 2 * high
    if high >= 1024:
        return 0.0
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (low, middle) if feasible(_scaled(problem, middle)) else (middle, high)
    return high


def _one_kernel_reason(problem: IterationProblem) -> str:
    """The kernel that exceeds every device even alone, recomputing, with one micro-batch of the smallest size."""
    option = min(range(len(problem.options)), key=lambda o: problem.options[o].size)
    micro = problem.options[option]
    time_s = allowed_times(micro.forward)
    uses = MicroUses.of(micro)
    best = [(math.inf, 0, 0.0)] * micro.forward.num_nodes  # missing bytes, group, needed bytes
    for k, kernel in enumerate(micro.forward.kernels):
        for g, group in enumerate(problem.groups):
            if not math.isfinite(time_s[k, g]):
                continue
            need = _least_bytes(problem, option, k, g, uses)
            for v in kernel.nodes:
                best[v] = min(best[v], (need - group.memory_bytes, g, need))
    worst = max(((*b, v) for v, b in enumerate(best) if 0 < b[0] < math.inf), default=None)
    if worst is None:
        return ""
    missing, g, need, v = worst
    return (
        f"memory: training node {v} alone needs {size_text(need)} on one device; {problem.groups[g].name!r} has "
        f"{size_text(problem.groups[g].memory_bytes)}; the smallest mend is {size_text(missing)} more memory on it"
    )


def _least_bytes(problem: IterationProblem, option: int, kernel: int, group: int, uses: MicroUses) -> float:
    """Bytes on a device of one kernel, split or not, as the last stage of a pipeline: one micro-batch in flight."""
    splits = [s for s in problem.options[option].splits if s.group == group and math.isfinite(s.forward_s[kernel])]
    needs = [
        stage_bytes(problem, option, StagePlacing((kernel,), group, 1, 0, again, degree), uses)
        for again in (False, True)[: 1 + problem.may_recompute]
        for degree in (1, *(s.degree for s in splits if s.degree <= problem.groups[group].num_devices))
    ]
    return min(n.state + n.working + n.stash for n in needs)


def _with_group(problem: IterationProblem, g: int, group: DeviceGroup) -> IterationProblem:
    return _with_groups(problem, (*problem.groups[:g], group, *problem.groups[g + 1 :]))


def _scaled(problem: IterationProblem, factor: float) -> IterationProblem:
    return _with_groups(problem, tuple(replace(g, memory_bytes=g.memory_bytes * factor) for g in problem.groups))


def _with_groups(problem: IterationProblem, groups: tuple[DeviceGroup, ...]) -> IterationProblem:
    options = tuple(replace(o, forward=replace(o.forward, groups=groups)) for o in problem.options)
    return replace(problem, options=options)
