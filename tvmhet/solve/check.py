"""The independent checker: recomputes everything a solution claims from `Problem` alone and names every broken rule.

It shares no code with the solvers or with their closed forms, and is written for plainness, not for speed.
"""

from __future__ import annotations

import math

from tvmhet.errors import BrokenSolution
from tvmhet.solve.objective import Objective
from tvmhet.solve.problem import Edge, Problem
from tvmhet.solve.solution import Solution, Status

_TOLERANCE = 1e-9  # relative, for sums taken in another order


def check(problem: Problem, solution: Solution, objective: Objective = Objective.THROUGHPUT) -> None:
    """Return quietly if `solution` is a legal answer with the objective it claims; else raise BrokenSolution.

    Checked: each node in exactly one kernel, kernels convex, the stages in topological order (an acyclic quotient),
    kernels inside a stage in topological order, finite times, pins, counts, memory, every per-stage figure, the
    objective and the side of the lower bound. An infeasible solution must give a reason and no stages.
    """
    broken = violations(problem, solution, objective)
    if broken:
        raise BrokenSolution("the solution is not legal: " + "; ".join(broken), "this is a defect of the solver")


def violations(problem: Problem, solution: Solution, objective: Objective) -> list[str]:
    """Return one sentence per broken rule; empty if the solution is legal."""
    if solution.status is Status.INFEASIBLE:
        broken = ["infeasible, yet it has stages"] if solution.stages else []
        return broken if solution.reason else [*broken, "infeasible without a reason"]
    broken = _cover(problem, solution) or _devices(problem, solution)
    if broken:
        return broken  # the figures mean nothing without a cover
    broken = [*_order(problem, solution), *_memory(problem, solution)]
    if broken:
        return broken
    return [*_figures(problem, solution), *_objective(problem, solution, objective)]


def _cover(problem: Problem, solution: Solution) -> list[str]:
    count = [0] * problem.num_nodes
    for stage in solution.stages:
        for k in stage.kernels:
            if not 0 <= k < len(problem.kernels):
                return [f"there is no kernel {k}"]
            for v in problem.kernels[k].nodes:
                count[v] += 1
    return [f"node {v} is run {c} times" for v, c in enumerate(count) if c != 1]


def _devices(problem: Problem, solution: Solution) -> list[str]:
    broken: list[str] = []
    used = [0] * len(problem.groups)
    for i, stage in enumerate(solution.stages):
        if not 0 <= stage.group < len(problem.groups):
            return [f"stage {i} is on group {stage.group}, which does not exist"]
        if stage.num_replicas < 1 or not stage.kernels:
            broken.append(f"stage {i} has {stage.num_replicas} replicas and {len(stage.kernels)} kernels")
        if stage.shares >= 0:
            if not stage.shares < i:
                return [f"stage {i} shares the devices of stage {stage.shares}, which is not before it"]
            other = solution.stages[stage.shares]
            if other.shares >= 0 or (other.group, other.num_replicas) != (stage.group, stage.num_replicas):
                broken.append(f"stage {i} shares the devices of stage {stage.shares}, yet not its group or replicas")
        else:
            team = problem.groups[stage.group]
            used[stage.group if team.team_of < 0 else team.team_of] += stage.num_replicas * team.degree
        for k in stage.kernels:
            if not math.isfinite(problem.kernels[k].time_s[stage.group]):
                broken.append(f"stage {i}: kernel {k} cannot run on {problem.groups[stage.group].name!r}")
            for v in problem.kernels[k].nodes:
                if v in problem.pins and stage.group not in problem.pins[v]:
                    broken.append(f"node {v} is pinned elsewhere than {problem.groups[stage.group].name!r}")
    for n, group in zip(used, problem.groups, strict=True):
        if n > max(0, group.num_devices):
            broken.append(f"{n} devices of {group.name!r} are used, there are {group.num_devices}")
    return broken


def _places(problem: Problem, solution: Solution) -> dict[int, tuple[int, int]]:
    """node -> (stage, position of its kernel in the stage)."""
    return {
        v: (i, j)
        for i, stage in enumerate(solution.stages)
        for j, k in enumerate(stage.kernels)
        for v in problem.kernels[k].nodes
    }


def _order(problem: Problem, solution: Solution) -> list[str]:
    """A total order of kernels in which no tensor flows backwards proves both quotients acyclic and kernels convex."""
    place = _places(problem, solution)
    return [
        f"node {d} (stage {place[d][0]}) reads node {e.src} (stage {place[e.src][0]}), which runs later"
        for e in problem.edges
        if e.src >= 0
        for d in e.dsts
        if place[d] < place[e.src]
    ]


def _memory(problem: Problem, solution: Solution) -> list[str]:
    broken: list[str] = []
    place = _places(problem, solution)
    for i, stage in enumerate(solution.stages):
        limit, degree = problem.groups[stage.group].memory_bytes, problem.groups[stage.group].degree
        need = _stage_bytes(problem, place, i, stage.kernels, degree)
        if need > limit * (1 + _TOLERANCE):
            broken.append(f"stage {i} needs {need:.0f} bytes, {problem.groups[stage.group].name!r} has {limit:.0f}")
        if abs(need - stage.memory_bytes) > 1 + _TOLERANCE * need:
            broken.append(f"stage {i} claims {stage.memory_bytes} bytes, it needs {need:.0f}")
        together = [_stage_bytes(problem, place, j, solution.stages[j].kernels, degree) for j in _together(solution, i)]
        if len(together) > 1 and sum(together) > limit * (1 + _TOLERANCE):
            name = problem.groups[stage.group].name
            broken.append(f"stages {_together(solution, i)} need {sum(together):.0f} bytes, {name!r} has {limit:.0f}")
    return broken


def _together(solution: Solution, first: int) -> list[int]:
    """The stages on the devices of stage `first`, which is the first there; none if it is not."""
    if solution.stages[first].shares >= 0:
        return []
    return [first, *(j for j, s in enumerate(solution.stages) if s.shares == first)]


def _stage_bytes(
    problem: Problem, place: dict[int, tuple[int, int]], stage: int, kernels: tuple[int, ...], degree: int
) -> float:
    """One device's bytes; each device of a team of `degree` holds its share of the weights that are not whole."""
    held = [w for w in problem.weights if any(place[v][0] == stage for v in w.nodes)]
    weights = sum(w.size_bytes if w.is_whole else w.size_bytes / degree for w in held)
    arriving = sum(
        e.size_bytes
        for e in problem.edges
        if (e.src < 0 or place[e.src][0] != stage) and any(place[d][0] == stage for d in e.dsts)
    )
    spans: list[tuple[int, int, int]] = []  # first and last kernel position at which a result takes memory, bytes
    for e in problem.edges:
        if e.src < 0 or place[e.src][0] != stage:
            continue
        made = place[e.src][1]
        leaves = e.is_output or any(place[d][0] != stage for d in e.dsts)
        last = len(kernels) - 1 if leaves else max((place[d][1] for d in e.dsts), default=-1)
        inside_only = not leaves and all(place[d] == place[e.src] for d in e.dsts)
        if not inside_only:
            spans.append((made, last, e.size_bytes))
    peak = max(
        sum(size for first, last, size in spans if first <= j <= last) + problem.kernels[k].workspace_bytes
        for j, k in enumerate(kernels)
    )
    return float(weights + arriving + peak)


def _hops(problem: Problem, solution: Solution) -> list[tuple[int, int, Edge, float]]:
    """(from stage or -1, to stage or -1, tensor, seconds) of every transfer of one input; -1 is the host."""
    place = _places(problem, solution)
    group = [s.group for s in solution.stages]
    rows = [_together(solution, i) for i in range(len(solution.stages))]
    hops: list[tuple[int, int, Edge, float]] = []
    for e in problem.edges:
        a = place[e.src][0] if e.src >= 0 else -1
        for b in sorted({place[d][0] for d in e.dsts} - {a}):
            if a >= 0 and any(a in row and b in row for row in rows):
                hops.append((a, b, e, 0.0))
                continue
            link = problem.host_links[group[b]] if a < 0 else problem.links[group[a]][group[b]]
            hops.append((a, b, e, link.latency_s + e.size_bytes / link.byte_per_s))
        if e.is_output and a >= 0:
            link = problem.host_links[group[a]]
            hops.append((a, -1, e, link.latency_s + e.size_bytes / link.byte_per_s))
    return hops


def _differs(a: float, b: float) -> bool:
    return abs(a - b) > _TOLERANCE * max(abs(a), abs(b))


def _figures(problem: Problem, solution: Solution) -> list[str]:
    broken: list[str] = []
    hops = _hops(problem, solution)
    for i, stage in enumerate(solution.stages):
        compute = sum(problem.kernels[k].time_s[stage.group] for k in stage.kernels)
        receive = sum(s for _, b, _, s in hops if b == i)
        send = sum(s for a, _, _, s in hops if a == i)
        busy = compute + problem.groups[stage.group].stage_overhead_s
        load = max(busy, receive, send) if problem.overlap_transfers else busy + receive + send
        for name, claimed, real in (
            ("compute", stage.compute_s, compute),
            ("transfers", stage.transfer_s, receive + send),
            ("load", stage.load_s, load / stage.num_replicas),
        ):
            if _differs(claimed, real):
                broken.append(f"stage {i} claims {claimed} s of {name}, it is {real} s")
    return broken


def _objective(problem: Problem, solution: Solution, objective: Objective) -> list[str]:
    hops = _hops(problem, solution)
    if objective is not Objective.LATENCY:
        real = max((_device_s(problem, solution, i, hops) for i in range(len(solution.stages))), default=0.0)
    else:
        end: list[float] = []
        for i, stage in enumerate(solution.stages):
            arrived = [sum(s for a, b, _, s in hops if a < 0 and b == i)]
            for p in range(i):
                mine = [s for a, b, _, s in hops if (a, b) == (p, i)]
                arrived += [end[p] + sum(mine)] if mine else []
            first = i if stage.shares < 0 else stage.shares
            arrived += [end[p] for p in _together(solution, first) if p < i]  # the device is busy until then
            work = sum(problem.kernels[k].time_s[stage.group] for k in stage.kernels)
            end.append(max(arrived) + problem.groups[stage.group].stage_overhead_s + work)
        home = [sum(s for a, b, _, s in hops if a == i and b < 0) for i in range(len(end))]
        real = max((e + h for e, h in zip(end, home, strict=True)), default=0.0)
    real, unit = max([real, *_wires_s(problem, solution, hops)]), "s"
    if objective is Objective.COST:
        unit = "USD"
        rents = [s.num_replicas * problem.groups[s.group].usd_per_h for s in solution.stages if s.shares < 0]
        real *= sum(rents) / 3600
    claimed, lower = solution.objective, solution.lower_bound
    broken = [f"the objective is {real} {unit}, not {claimed} {unit}"] if _differs(real, claimed) else []
    if lower > real * (1 + 1e-6):
        broken.append(f"the lower bound {lower} {unit} exceeds the objective {real} {unit}")
    if solution.status is Status.OPTIMAL and real - lower > 1e-5 * real:
        broken.append(f"called optimal with bound {lower} {unit} under {real} {unit}")
    return broken


def _device_s(problem: Problem, solution: Solution, first: int, hops: list[tuple[int, int, Edge, float]]) -> float:
    """Seconds in which one input keeps a device of stage `first` busy, with all the stages that share it."""
    mine = _together(solution, first)
    work = sum(
        sum(problem.kernels[k].time_s[solution.stages[j].group] for k in solution.stages[j].kernels)
        + problem.groups[solution.stages[j].group].stage_overhead_s
        for j in mine
    )
    receive = sum(s for _, b, _, s in hops if b in mine)
    send = sum(s for a, _, _, s in hops if a in mine)
    load = max(work, receive, send) if problem.overlap_transfers else work + receive + send
    return load / solution.stages[first].num_replicas


def _wires_s(problem: Problem, solution: Solution, hops: list[tuple[int, int, Edge, float]]) -> list[float]:
    """Seconds of each wire that one input takes."""
    group = {-1: -1, **{i: s.group for i, s in enumerate(solution.stages)}}
    first = {i: i if s.shares < 0 else s.shares for i, s in enumerate(solution.stages)}
    out = []
    for wire in problem.wires:
        crossing = [
            e.size_bytes
            for a, b, e, _ in hops
            if (group[a], group[b]) in wire.ways and (min(a, b) < 0 or first[a] != first[b])
        ]
        out.append(sum(crossing) / wire.byte_per_s)
    return out
