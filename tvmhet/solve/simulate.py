"""An event-driven run of a solution: what each stage does, input by input.

    stage 0, replica 0  |compute 0|send 0|        |compute 2|send 2|
    stage 0, replica 1            |compute 1|send 1|
    stage 1                               |receive 0|compute 0|receive 1|compute 1|

A device does one thing at a time (with `overlap_transfers`: one computation, one receive and one send at a time). A
transfer needs its sender and its receiver at once. Inputs take the replicas of a stage in turn. A device works
on its earliest input first, and sends a result before it computes the next (with `overlap_transfers`: one later). The
mean distance between the last results is the steady period.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from tvmhet.errors import BadInput
from tvmhet.solve.problem import Problem
from tvmhet.solve.solution import Solution, Status


@dataclass(frozen=True, slots=True)
class Event:
    """One interval of one device: `kind` is compute, receive or send; `peer` the other stage (-1: host)."""

    stage: int
    replica: int
    input_index: int
    kind: str
    start_s: float
    finish_s: float
    peer: int = -1


@dataclass(frozen=True, slots=True)
class Timeline:
    """Events by start time. `period_s` is the mean distance between results in the second half of the run."""

    events: tuple[Event, ...]
    makespan_s: float
    period_s: float


@dataclass(frozen=True, slots=True)
class _Task:
    """A computation (one resource) or a transfer (one resource at each end) that waits for other tasks."""

    stage: int
    peer: int
    input_index: int
    kind: str  # compute, or move (from `stage` to `peer`; either may be -1, the host)
    seconds: float
    resources: tuple[tuple[int, int, str], ...]


def simulate(problem: Problem, solution: Solution, num_inputs: int = 8) -> Timeline:
    """Run `num_inputs` inputs, all waiting at the host from time 0. Raises BadInput for an infeasible solution."""
    if solution.status is Status.INFEASIBLE or num_inputs < 1:
        raise BadInput(
            f"cannot simulate {num_inputs} inputs of a {solution.status.value} solution",
            "simulate a solution with stages, and at least one input",
        )
    tasks, waits_for = _tasks(problem, solution, num_inputs)
    start, finish = _run(tasks, waits_for)
    events: list[Event] = []
    done = [0.0] * num_inputs
    for task, s, f in zip(tasks, start, finish, strict=True):
        done[task.input_index] = max(done[task.input_index], f)
        for stage, replica, _ in task.resources:
            kind = "compute" if task.kind == "compute" else "send" if stage == task.stage else "receive"
            peer = -1 if task.kind == "compute" else task.peer if stage == task.stage else task.stage
            if f > s:
                events.append(Event(stage, replica, task.input_index, kind, s, f, peer))
    events.sort(key=lambda e: (e.start_s, e.stage, e.replica, e.input_index, e.finish_s))
    done.sort()
    half = num_inputs // 2
    period = (done[-1] - done[half - 1]) / (num_inputs - half) if half else done[-1]
    return Timeline(tuple(events), max(done), period)


def _tasks(problem: Problem, solution: Solution, num_inputs: int) -> tuple[list[_Task], list[list[int]]]:
    """All work of all inputs, and for each task the tasks that must end first."""
    moves = _moves(problem, solution)
    tasks: list[_Task] = []
    waits_for: list[list[int]] = []
    sends: dict[tuple[int, int], list[int]] = {}  # (stage, input) -> its outgoing moves
    behind = 2 if problem.overlap_transfers else 1  # results a replica may hold back before it must send them
    for n in range(num_inputs):
        compute_id: dict[int, int] = {}
        arriving: dict[int, list[int]] = {i: [] for i in range(len(solution.stages))}
        for i, stage in enumerate(solution.stages):
            if (-1, i) in moves:
                arriving[i].append(_add(tasks, waits_for, _move(problem, solution, n, -1, i, moves[-1, i]), []))
            seconds = stage.compute_s + problem.groups[stage.group].stage_overhead_s
            before = arriving[i] + sends.get((i, n - behind * stage.num_replicas), [])
            here = (i, n % stage.num_replicas, "compute" if problem.overlap_transfers else "device")
            compute_id[i] = _add(tasks, waits_for, _Task(i, -1, n, "compute", seconds, (here,)), before)
            for (a, b), moved_s in moves.items():
                if a == i:
                    move = _add(tasks, waits_for, _move(problem, solution, n, a, b, moved_s), [compute_id[i]])
                    sends.setdefault((i, n), []).append(move)
                    if b >= 0:
                        arriving[b].append(move)
    return tasks, waits_for


def _add(tasks: list[_Task], waits_for: list[list[int]], task: _Task, after: list[int]) -> int:
    tasks.append(task)
    waits_for.append(list(after))
    return len(tasks) - 1


def _move(problem: Problem, solution: Solution, n: int, a: int, b: int, seconds: float) -> _Task:
    ends = []
    for stage, way in ((a, "send"), (b, "receive")):
        if stage >= 0:
            replica = n % solution.stages[stage].num_replicas
            ends.append((stage, replica, way if problem.overlap_transfers else "device"))
    return _Task(a, b, n, "move", seconds, tuple(ends))


def _moves(problem: Problem, solution: Solution) -> dict[tuple[int, int], float]:
    """Seconds of one input's transfers per (from stage, to stage); -1 is the host."""
    home = {v: i for i, s in enumerate(solution.stages) for k in s.kernels for v in problem.kernels[k].nodes}
    moves: dict[tuple[int, int], float] = {}
    for e in problem.edges:
        a = home[e.src] if e.src >= 0 else -1
        targets = sorted({home[d] for d in e.dsts} - {a}) + ([-1] if e.is_output and a >= 0 else [])
        for b in targets:
            near = solution.stages[b if a < 0 else a].group
            link = problem.host_links[near] if min(a, b) < 0 else problem.links[near][solution.stages[b].group]
            moves[a, b] = moves.get((a, b), 0.0) + link.transfer_s(e.size_bytes)
    return dict(sorted(moves.items()))


def _run(tasks: list[_Task], waits_for: list[list[int]]) -> tuple[list[float], list[float]]:
    """Start every task as soon as what it waits for is done and its resources are free; earlier inputs go first."""
    followers: list[list[int]] = [[] for _ in tasks]
    missing = [len(w) for w in waits_for]
    for t, before in enumerate(waits_for):
        for b in before:
            followers[b].append(t)
    queue: dict[tuple[int, int, str], list[int]] = {}
    start, finish = [0.0] * len(tasks), [0.0] * len(tasks)
    busy: set[tuple[int, int, str]] = set()
    running: list[tuple[float, int]] = []

    def offer(t: int) -> None:
        for r in tasks[t].resources:
            heapq.heappush(queue.setdefault(r, []), t)

    def begin(now: float, resources: set[tuple[int, int, str]]) -> None:
        candidates = sorted({t for r in resources if r not in busy for t in queue.get(r, ())})
        for t in candidates:
            if any(r in busy for r in tasks[t].resources):
                continue
            for r in tasks[t].resources:
                busy.add(r)
                queue[r].remove(t)
                heapq.heapify(queue[r])
            start[t], finish[t] = now, now + tasks[t].seconds
            heapq.heappush(running, (finish[t], t))

    for t, m in enumerate(missing):
        if m == 0:
            offer(t)
    begin(0.0, set(queue))
    while running:
        now, t = heapq.heappop(running)
        freed = set(tasks[t].resources)
        busy -= freed
        for f in followers[t]:
            missing[f] -= 1
            if missing[f] == 0:
                offer(f)
                freed |= set(tasks[f].resources)
        begin(now, freed)
    return start, finish
