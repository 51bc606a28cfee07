"""The closed forms: what a list of stages costs, exactly as `Problem` defines it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvmhet.solve.objective import Objective
from tvmhet.solve.problem import Problem
from tvmhet.solve.solution import SolvedStage


@dataclass(frozen=True, slots=True)
class StageChoice:
    """One stage as a search decides it: kernels in execution order, a group, a number of replicas.

    `shares`: the first stage on the same devices, -1 if it is this one.
    """

    kernels: tuple[int, ...]
    group: int
    num_replicas: int = 1
    shares: int = -1


@dataclass(frozen=True, slots=True)
class Transfers:
    """Seconds of one input's transfers: `between[a, b]` from stage a to stage b, `to_stage` and `to_host` per stage.

    `moved_bytes` by (group of the sender, group of the receiver), -1 for the host.
    """

    between: dict[tuple[int, int], float]
    to_stage: tuple[float, ...]
    to_host: tuple[float, ...]
    moved_bytes: dict[tuple[int, int], float]

    def receive_s(self, stage: int) -> float:
        """Seconds in which `stage` receives."""
        return self.to_stage[stage] + sum(s for (_, b), s in self.between.items() if b == stage)

    def send_s(self, stage: int) -> float:
        """Seconds in which `stage` sends."""
        return self.to_host[stage] + sum(s for (a, _), s in self.between.items() if a == stage)


def stage_of_nodes(problem: Problem, stages: Sequence[StageChoice]) -> dict[int, int]:
    """Return the stage index of every node that some stage runs."""
    return {v: i for i, s in enumerate(stages) for k in s.kernels for v in problem.kernels[k].nodes}


def transfers(problem: Problem, stages: Sequence[StageChoice]) -> Transfers:
    """Return every transfer of one input; a tensor crosses once per (producer stage, consuming stage)."""
    home = stage_of_nodes(problem, stages)
    place = places(stages)
    between: dict[tuple[int, int], float] = {}
    moved: dict[tuple[int, int], float] = {}

    def moves(a: int, b: int, size_bytes: float) -> None:
        moved[a, b] = moved.get((a, b), 0.0) + size_bytes

    to_stage = [0.0] * len(stages)
    to_host = [0.0] * len(stages)
    for e in problem.edges:
        if e.src >= 0 and not e.is_output and all(home[d] == home[e.src] for d in e.dsts):
            continue
        readers = sorted({home[d] for d in e.dsts})
        if e.src < 0:
            for b in readers:
                to_stage[b] += problem.host_links[stages[b].group].transfer_s(e.size_bytes)
                moves(-1, stages[b].group, e.size_bytes)
            continue
        a = home[e.src]
        for b in readers:
            if place[b] != place[a]:
                link = problem.links[stages[a].group][stages[b].group]
                between[a, b] = between.get((a, b), 0.0) + link.transfer_s(e.size_bytes)
                moves(stages[a].group, stages[b].group, e.size_bytes)
            elif b != a:
                between[a, b] = 0.0
        if e.is_output:
            to_host[a] += problem.host_links[stages[a].group].transfer_s(e.size_bytes)
            moves(stages[a].group, -1, e.size_bytes)
    return Transfers(between, tuple(to_stage), tuple(to_host), moved)


def places(stages: Sequence[StageChoice | SolvedStage]) -> list[int]:
    """Return, per stage, the first stage on the same devices."""
    return [i if s.shares < 0 else s.shares for i, s in enumerate(stages)]


def wire_loads_s(problem: Problem, moved: Transfers) -> list[float]:
    """Return the seconds of each wire that one input takes."""
    return [
        math.fsum(size for way, size in sorted(moved.moved_bytes.items()) if way in w.ways) / w.byte_per_s
        for w in problem.wires
    ]


def period_s(problem: Problem, stages: Sequence[StageChoice], moved: Transfers | None = None) -> float:
    """Return the largest load of a set of devices or of a wire, in seconds of one input."""
    moved = moved or transfers(problem, stages)
    loads: dict[int, list[float]] = {}
    for i, (s, p) in enumerate(zip(stages, places(stages), strict=True)):
        busy = math.fsum(problem.kernels[k].time_s[s.group] for k in s.kernels)
        busy += problem.groups[s.group].stage_overhead_s
        mine = loads.setdefault(p, [0.0, 0.0, 0.0])
        for j, seconds in enumerate((busy, moved.receive_s(i), moved.send_s(i))):
            mine[j] += seconds / s.num_replicas
    together = [max(x) if problem.overlap_transfers else x[0] + x[1] + x[2] for x in loads.values()]
    return max([*together, *wire_loads_s(problem, moved)], default=0.0)


@dataclass(frozen=True, slots=True)
class Uses:
    """Of each node: the tensors that it makes and reads and its weights, as indices into the problem's."""

    made: tuple[tuple[int, ...], ...]
    read: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, problem: Problem) -> Uses:
        """Return them for a problem; worth keeping where many stages of one problem are looked at."""
        made: list[list[int]] = [[] for _ in range(problem.num_nodes)]
        read: list[list[int]] = [[] for _ in made]
        weights: list[list[int]] = [[] for _ in made]
        for i, e in enumerate(problem.edges):
            if e.src >= 0:
                made[e.src].append(i)
            for d in dict.fromkeys(e.dsts):
                read[d].append(i)
        for i, w in enumerate(problem.weights):
            for v in dict.fromkeys(w.nodes):
                weights[v].append(i)
        return cls(*(tuple(map(tuple, rows)) for rows in (made, read, weights)))


def stage_memory_bytes(problem: Problem, kernels: Sequence[int], uses: Uses | None = None, degree: int = 1) -> float:
    """Return the peak on one device, of a team of `degree`, that runs `kernels` in this order.

    Weights, of which each device of a team holds its share, + live-ins, both kept throughout, + the largest over the
    kernels of: results made so far and still needed, the kernel's own results, its workspace.
    """
    uses = uses or Uses.of(problem)
    edges = problem.edges
    mine = {v for k in kernels for v in problem.kernels[k].nodes}
    held = [problem.weights[w] for w in sorted({w for v in mine for w in uses.weights[v]})]
    fixed = sum(w.size_bytes for w in held if not w.is_whole) / degree + sum(w.size_bytes for w in held if w.is_whole)
    read = sorted({e for v in mine for e in uses.read[v]})
    fixed += sum(edges[e].size_bytes for e in read if edges[e].src not in mine)
    unread = {e: len(set(edges[e].dsts)) + edges[e].is_output for v in mine for e in uses.made[v]}
    live = peak = 0.0
    for k in kernels:
        nodes = problem.kernels[k].nodes
        inside = set(nodes)
        made = [edges[e] for v in nodes for e in uses.made[v]]
        results = sum(e.size_bytes for e in made if e.is_output or any(d not in inside for d in e.dsts))
        peak = max(peak, live + results + problem.kernels[k].workspace_bytes)
        live += results
        for v in nodes:
            for e in uses.read[v]:
                if e in unread:
                    unread[e] -= 1
                    if unread[e] == 0 and edges[e].src not in inside:
                        live -= edges[e].size_bytes
    return fixed + peak


def latency_s(problem: Problem, stages: Sequence[StageChoice], moved: Transfers | None = None) -> float:
    """Return the makespan of one input: a stage starts when its last tensor has arrived; links do not contend.

    Stages on the same devices run one after the other. It is no less than what any wire takes.
    """
    moved = moved or transfers(problem, stages)
    finish = [0.0] * len(stages)
    free: dict[int, float] = {}
    place = places(stages)
    for b, stage in enumerate(stages):
        start = max(moved.to_stage[b], free.get(place[b], 0.0))
        start = max([start, *(finish[a] + s for (a, c), s in moved.between.items() if c == b)])
        busy = sum(problem.kernels[k].time_s[stage.group] for k in stage.kernels)
        free[place[b]] = finish[b] = start + busy + problem.groups[stage.group].stage_overhead_s
    ends = [f + h for f, h in zip(finish, moved.to_host, strict=True)]
    return max([*ends, *wire_loads_s(problem, moved)], default=0.0)


def evaluate(
    problem: Problem,
    stages: Sequence[StageChoice],
    objective: Objective,
    uses: Uses | None = None,
    moved: Transfers | None = None,
) -> tuple[tuple[SolvedStage, ...], float]:
    """Return the stages with their times and memory, and the objective. Stages are in topological order."""
    uses = uses or Uses.of(problem)
    moved = moved or transfers(problem, stages)
    solved: list[SolvedStage] = []
    for i, s in enumerate(stages):
        compute = math.fsum(problem.kernels[k].time_s[s.group] for k in s.kernels)
        busy = compute + problem.groups[s.group].stage_overhead_s
        receive, send = moved.receive_s(i), moved.send_s(i)
        load = max(busy, receive, send) if problem.overlap_transfers else busy + receive + send
        memory = stage_memory_bytes(problem, s.kernels, uses, problem.groups[s.group].degree)
        solved.append(
            SolvedStage(
                s.kernels,
                s.group,
                s.num_replicas,
                load / s.num_replicas,
                compute,
                receive + send,
                math.ceil(memory),
                s.shares,
            )
        )
    if objective is Objective.LATENCY:
        return tuple(solved), latency_s(problem, stages, moved)
    period = period_s(problem, stages, moved)
    return tuple(solved), period * rent_usd_per_h(problem, stages) / 3600.0 if objective is Objective.COST else period


def rent_usd_per_h(problem: Problem, stages: Sequence[StageChoice | SolvedStage]) -> float:
    """Return what the devices cost per hour; those that several stages share are paid once."""
    return math.fsum(s.num_replicas * problem.groups[s.group].usd_per_h for s in stages if s.shares < 0)
