"""An event-driven run of a solution: what each stage does, input by input.

    stage 0, replica 0  |compute 0|send 0|        |compute 2|send 2|
    stage 0, replica 1            |compute 1|send 1|
    stage 1                               |receive 0|compute 0|receive 1|compute 1|

A device does one thing at a time (with `overlap_transfers`: one computation, one receive and one send at a time). A
transfer needs its sender and its receiver at once. Inputs take the replicas of a stage in turn. A device works
on its earliest input first, and sends a result before it computes the next (with `overlap_transfers`: one later). The
mean distance between the last results is the steady period.

Transfers over the problem's wires share them: while they ask for more than a wire carries, each slows down. Stages on
the same devices take turns there, the earliest input first; what passes between them does not move.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvmhet.errors import BadInput
from tvmhet.solve.events import Task, run
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
class _Work:
    """A computation of a stage, or a move from `stage` to `peer`; either may be -1, the host."""

    stage: int
    peer: int
    input_index: int
    is_move: bool
    ends: tuple[tuple[int, int], ...]  # (stage, replica) of each device that takes part


def simulate(problem: Problem, solution: Solution, num_inputs: int = 8) -> Timeline:
    """Run `num_inputs` inputs, all waiting at the host from time 0. Raises BadInput for an infeasible solution."""
    if solution.status is Status.INFEASIBLE or num_inputs < 1:
        raise BadInput(
            f"cannot simulate {num_inputs} inputs of a {solution.status.value} solution",
            "simulate a solution with stages, and at least one input",
        )
    works, tasks = _tasks(problem, solution, num_inputs)
    start, finish = run(tasks)
    events: list[Event] = []
    done = [0.0] * num_inputs
    for work, s, f in zip(works, start, finish, strict=True):
        done[work.input_index] = max(done[work.input_index], f)
        for stage, replica in work.ends:
            kind = "compute" if not work.is_move else "send" if stage == work.stage else "receive"
            peer = -1 if not work.is_move else work.peer if stage == work.stage else work.stage
            if f > s:
                events.append(Event(stage, replica, work.input_index, kind, s, f, peer))
    events.sort(key=lambda e: (e.start_s, e.stage, e.replica, e.input_index, e.finish_s))
    done.sort()
    half = num_inputs // 2
    period = (done[-1] - done[half - 1]) / (num_inputs - half) if half else done[-1]
    return Timeline(tuple(events), max(done), period)


def _tasks(problem: Problem, solution: Solution, num_inputs: int) -> tuple[list[_Work], list[Task]]:
    """All work of all inputs, and what each piece needs and waits for."""
    moves = _moves(problem, solution)
    stages = solution.stages
    place = [i if s.shares < 0 else s.shares for i, s in enumerate(stages)]
    overlap = problem.overlap_transfers
    works: list[_Work] = []
    tasks: list[Task] = []

    def add(work: _Work, seconds: float, after: list[int], wires: tuple[tuple[str, float], ...] = ()) -> int:
        ways = ("send", "receive") if work.stage >= 0 else ("receive",)
        kinds = ("compute",) if not work.is_move else ways
        needs = tuple(
            (place[stage], replica, kind if overlap else "device")
            for (stage, replica), kind in zip(work.ends, kinds, strict=False)
        )
        works.append(work)
        tasks.append(Task(seconds, needs, tuple(after), wires))
        return len(tasks) - 1

    def move(n: int, a: int, b: int, after: list[int]) -> int:
        ends = tuple((s, n % stages[s].num_replicas) for s in (a, b) if s >= 0)
        seconds, size_bytes = moves[a, b]
        way = (stages[a].group if a >= 0 else -1, stages[b].group if b >= 0 else -1)
        over = tuple((w.name, size_bytes / w.byte_per_s) for w in problem.wires if way in w.ways)
        return add(_Work(a, b, n, True, ends), seconds, after, over)

    sends: dict[tuple[int, int], list[int]] = {}  # (stage, input) -> its outgoing moves
    behind = 2 if overlap else 1  # results a replica may hold back before it must send them
    for n in range(num_inputs):
        arriving: dict[int, list[int]] = {i: [] for i in range(len(stages))}
        for i, stage in enumerate(stages):
            if (-1, i) in moves:
                arriving[i].append(move(n, -1, i, []))
            seconds = stage.compute_s + problem.groups[stage.group].stage_overhead_s
            before = arriving[i] + sends.get((i, n - behind * stage.num_replicas), [])
            compute = add(_Work(i, -1, n, False, ((i, n % stage.num_replicas),)), seconds, before)
            for a, b in moves:
                if a == i and b >= 0 and place[a] == place[b]:
                    arriving[b].append(compute)
                elif a == i:
                    sent = move(n, a, b, [compute])
                    sends.setdefault((i, n), []).append(sent)
                    if b >= 0:
                        arriving[b].append(sent)
    return works, tasks


def _moves(problem: Problem, solution: Solution) -> dict[tuple[int, int], tuple[float, float]]:
    """Seconds and bytes of one input's transfers per (from stage, to stage); -1 is the host."""
    home = {v: i for i, s in enumerate(solution.stages) for k in s.kernels for v in problem.kernels[k].nodes}
    moves: dict[tuple[int, int], tuple[float, float]] = {}
    for e in problem.edges:
        a = home[e.src] if e.src >= 0 else -1
        targets = sorted({home[d] for d in e.dsts} - {a}) + ([-1] if e.is_output and a >= 0 else [])
        for b in targets:
            near = solution.stages[b if a < 0 else a].group
            link = problem.host_links[near] if min(a, b) < 0 else problem.links[near][solution.stages[b].group]
            seconds, size_bytes = moves.get((a, b), (0.0, 0.0))
            moves[a, b] = seconds + link.transfer_s(e.size_bytes), size_bytes + e.size_bytes
    return dict(sorted(moves.items()))
