"""An event-driven run of one training iteration: passes by the schedule, transfers, all-reduce, update, memory.

    place 0  |F0|F1|    |B0|F2|   |B1|F3| ...  |all-reduce|update|
    place 1     |F0|B0|F1|B1| ...

Each device runs its passes in the fixed order of the schedule. A transfer needs its sender and its receiver at once
(with `overlap_transfers`: the sender's way out and the receiver's way in), and comes before the sender's next pass
(with overlap: the one after it). Model inputs are read just before their pass (with overlap: one pass ahead). The
all-reduce of a stage starts when the last backward pass of every replica is done, or as far into it as `reduce_overlap`
says; it takes the network, not the devices; updates follow. Named wires are shared fairly, as in simulate.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache

from tvmhet.errors import BadInput
from tvmhet.solve.events import MemoryCurve, Task, run
from tvmhet.solve.iteration import IterationProblem, IterationSolution, teams
from tvmhet.solve.iteration_memory import home_of, replica_shares, spans, stage_bytes
from tvmhet.solve.schedules import Pass, Schedule, deal, interleaved_order, lags, linear_order
from tvmhet.solve.solution import Status

Processors = Mapping[tuple[int, int], Hashable]  # (place, replica) -> what it computes on, where others do too


@dataclass(frozen=True, slots=True)
class TrainingEvent:
    """One interval of one device. `kind`: forward, backward, send, receive, all-reduce or update.

    `stage` indexes the solution's stages; `replica` counts within its place. `microbatch` is -1 for the last two kinds.
    """

    place: int
    replica: int
    stage: int
    microbatch: int
    kind: str
    start_s: float
    finish_s: float
    peer: int = -1


@dataclass(frozen=True, slots=True)
class TrainingTimeline:
    """Events by start time, the end of the last backward pass, the end of the last update, memory per device."""

    events: tuple[TrainingEvent, ...]
    pipeline_s: float
    iteration_s: float
    memory: tuple[MemoryCurve, ...]

    @property
    def bubble(self) -> float:
        """The share of `pipeline_s` in which the busiest device waits."""
        busy: dict[tuple[int, int], float] = {}
        for e in self.events:
            if e.kind not in ("all-reduce", "update"):
                device = (e.place, e.replica)
                busy[device] = busy.get(device, 0.0) + e.finish_s - e.start_s
        return 1.0 - max(busy.values()) / self.pipeline_s if self.pipeline_s > 0 else 0.0


def simulate_training(
    problem: IterationProblem,
    solution: IterationSolution,
    processors: Processors | None = None,
) -> TrainingTimeline:
    """Run one iteration of `solution`. Devices with equal `processors` take turns on it, pass by pass.

    Raises BadInput for an infeasible solution.
    """
    if solution.status is Status.INFEASIBLE or not solution.stages:
        raise BadInput("cannot simulate a training plan without stages", "simulate a feasible solution")
    return _Simulation(problem, solution, processors or {}).timeline()


class _Simulation:
    def __init__(self, problem: IterationProblem, solution: IterationSolution, processors: Processors) -> None:
        self.problem, self.solution, self.processors = problem, solution, processors
        self.micro = problem.options[solution.option]
        self.placings = [s.placing for s in solution.stages]
        self.stages = teams(self.placings, solution.num_microbatches)
        self.stage_of = {i: t for t, parts in enumerate(self.stages) for i in parts}
        self.events: list[tuple[TrainingEvent, ...]] = []  # per task: its events, without times
        self.tasks: list[Task] = []
        self.pass_of: dict[tuple[int, int, bool], int] = {}  # (placing, micro-batch, backward) -> task
        self.runs: dict[tuple[int, int], tuple[int, int]] = {}  # (stage, micro-batch) -> placing, replica
        self.orders = self._orders()

    def _orders(self) -> dict[tuple[int, int], list[tuple[int, Pass]]]:
        """(place, replica) -> its passes in order, each with its placing."""
        count, schedule = self.solution.num_microbatches, self.solution.schedule
        places: dict[int, list[int]] = {}
        for i, p in enumerate(self.placings):
            places.setdefault(p.place, []).append(i)
        lag = lags(schedule, spans(self.placings, self.stages, count), count)
        out: dict[tuple[int, int], list[tuple[int, Pass]]] = {}
        for t, parts in enumerate(self.stages):
            replicas = [(i, r) for i in parts for r in range(self.placings[i].num_replicas)]
            dealt = deal([n for i in parts for n in replica_shares(self.placings[i], count)])
            for (i, r), mine in zip(replicas, dealt, strict=True):
                self.runs.update({(t, m): (i, r) for m in mine})
                place = self.placings[i].place
                if schedule is not Schedule.INTERLEAVED:
                    out[place, r] = [(i, x) for x in linear_order(mine, lag[t])]
                elif (place, r) not in out:
                    chunks = places[place]
                    order = interleaved_order(mine, place, len(places), len(chunks))
                    out[place, r] = [(chunks[x.chunk], x) for x in order]
        return out

    def timeline(self) -> TrainingTimeline:
        for device, order in self.orders.items():
            for i, x in order:
                self._add_pass(device, i, x)
        sent: dict[int, list[int]] = {}
        arriving: dict[int, list[int]] = {}
        moves = self._moves()
        for maker, reader in self._crossing():
            for m in range(self.solution.num_microbatches):
                (a, _), (b, _) = self.runs[maker, m], self.runs[reader, m]
                there, back = moves(a, b)
                for src, dst, (seconds, size_bytes), backward in ((a, b, there, False), (b, a, back, True)):
                    before = self.pass_of[src, m, backward]
                    if seconds > 0:
                        before = self._add_move(src, dst, m, seconds, size_bytes, backward)
                        sent.setdefault(self.pass_of[src, m, backward], []).append(before)
                    arriving.setdefault(self.pass_of[dst, m, backward], []).append(before)
        self._add_host_moves(sent, arriving)
        self._join(sent, arriving)
        start, finish = run(self.tasks)
        return self._with_ends(start, finish)

    def _add_pass(self, device: tuple[int, int], stage: int, x: Pass) -> None:
        s = self.solution.stages[stage]
        idle = self.problem.groups[s.placing.group].stage_overhead_s
        seconds = idle + (s.backward_s if x.backward else s.forward_s)
        if not x.backward and not self.micro.forward.overlap_transfers:
            seconds += sum(self._host_s(stage))
        kind = "backward" if x.backward else "forward"
        self.pass_of[stage, x.microbatch, x.backward] = len(self.tasks)
        self.events.append((TrainingEvent(*device, stage, x.microbatch, kind, 0.0, 0.0),))
        self.tasks.append(Task(seconds, (self._resource(device, "compute"),), rank=(1, x.microbatch)))

    def _add_move(self, src: int, dst: int, m: int, seconds: float, size_bytes: float, backward: bool) -> int:
        ends = [(self.placings[s].place, self.runs[self.stage_of[s], m][1]) for s in (src, dst)]
        self.events.append(
            (
                TrainingEvent(*ends[0], src, m, "send", 0.0, 0.0, dst),
                TrainingEvent(*ends[1], dst, m, "receive", 0.0, 0.0, src),
            )
        )
        needs = (self._resource(ends[0], "send"), self._resource(ends[1], "receive"))
        way = self.placings[src].group, self.placings[dst].group
        over = tuple((w.name, size_bytes / w.byte_per_s) for w in self.micro.forward.wires if way in w.ways)
        self.tasks.append(Task(seconds, needs, (self.pass_of[src, m, backward],), over, (0, m)))
        return len(self.tasks) - 1

    def _add_host_moves(self, sent: dict[int, list[int]], arriving: dict[int, list[int]]) -> None:
        """With overlap, model inputs and outputs move beside the passes; else they are part of the forward pass."""
        if not self.micro.forward.overlap_transfers:
            return
        for device, order in self.orders.items():
            ids = [self.pass_of[stage, x.microbatch, x.backward] for stage, x in order]
            for k, (stage, x) in enumerate(order):
                read, made = self._host_s(stage)
                for seconds, way in ((read, "receive"), (made, "send")):
                    if seconds <= 0 or x.backward:
                        continue
                    after = tuple(ids[k - 2 : k - 1]) if way == "receive" and k >= 2 else ()
                    after = after if way == "receive" else (ids[k],)
                    self.events.append((TrainingEvent(*device, stage, x.microbatch, way, 0.0, 0.0),))
                    self.tasks.append(Task(seconds, (self._resource(device, way),), after, (), (0, x.microbatch)))
                    (arriving if way == "receive" else sent).setdefault(ids[k], []).append(len(self.tasks) - 1)

    def _resource(self, device: tuple[int, int], way: str) -> Hashable:
        if way == "compute" and device in self.processors:
            return ("processor", self.processors[device])
        return (*device, way if self.micro.forward.overlap_transfers else "device")

    def _join(self, sent: dict[int, list[int]], arriving: dict[int, list[int]]) -> None:
        """Chain each device's passes, and let them wait for what arrives and for what must be sent first."""
        behind = 2 if self.micro.forward.overlap_transfers else 1
        for order in self.orders.values():
            ids = [self.pass_of[stage, x.microbatch, x.backward] for stage, x in order]
            for k, i in enumerate(ids):
                t = self.tasks[i]
                after = [*arriving.get(i, []), *(ids[k - 1 : k] if k else [])]
                stage, x = order[k]
                if x.backward:
                    after.append(self.pass_of[stage, x.microbatch, False])
                if k >= behind:
                    after += sent.get(ids[k - behind], [])
                self.tasks[i] = Task(t.seconds, t.resources, tuple(dict.fromkeys(after)), t.wires, t.rank)

    def _host_s(self, stage: int) -> tuple[float, float]:
        """Seconds in which a stage reads model inputs, and returns results, for one micro-batch."""
        forward = self.micro.forward
        nodes = {v for k in self.placings[stage].kernels for v in forward.kernels[k].nodes}
        link = forward.host_links[self.placings[stage].group]
        read = [e for e in forward.edges if e.src < 0 and not nodes.isdisjoint(e.dsts)]
        made = [e for e in forward.edges if e.src in nodes and e.is_output]
        return sum(link.transfer_s(e.size_bytes) for e in read), sum(link.transfer_s(e.size_bytes) for e in made)

    def _crossing(self) -> dict[tuple[int, int], list[int]]:
        """(from stage, to stage) -> the edges between them."""
        home = home_of(self.micro, self.placings, self.stages)
        out: dict[tuple[int, int], list[int]] = {}
        for index, e in enumerate(self.micro.forward.edges):
            for b in sorted({home[d] for d in e.dsts}) if e.src >= 0 else ():
                if b != home[e.src]:
                    out.setdefault((home[e.src], b), []).append(index)
        return out

    def _moves(self) -> Callable[[int, int], tuple[tuple[float, float], tuple[float, float]]]:
        """Return seconds and bytes of one micro-batch's activations to another placing, and of their gradients back."""
        forward, crossing = self.micro.forward, self._crossing()

        @cache
        def moved(a: int, b: int) -> tuple[tuple[float, float], tuple[float, float]]:
            if self.placings[a].place == self.placings[b].place:
                return (0.0, 0.0), (0.0, 0.0)
            ahead = forward.links[self.placings[a].group][self.placings[b].group]
            behind = forward.links[self.placings[b].group][self.placings[a].group]
            edges = crossing[self.stage_of[a], self.stage_of[b]]
            sizes = [forward.edges[i].size_bytes for i in edges]
            back = [forward.edges[i].size_bytes for i in edges if i not in self.micro.no_gradient]
            return (
                (sum(ahead.transfer_s(x) for x in sizes), sum(sizes)),
                (sum(behind.transfer_s(x) for x in back), sum(back)),
            )

        return moved

    def _with_ends(self, start: list[float], finish: list[float]) -> TrainingTimeline:
        events = [
            TrainingEvent(e.place, e.replica, e.stage, e.microbatch, e.kind, s, f, e.peer)
            for kinds, s, f in zip(self.events, start, finish, strict=True)
            for e in kinds
            if f > s
        ]
        pipeline = max(finish)
        last: dict[int, float] = {}  # placing -> end of its last backward pass
        for (stage, _, backward), i in self.pass_of.items():
            if backward:
                last[stage] = max(last.get(stage, 0.0), finish[i])
        ready = {i: max(last[j] for j in parts) for parts in self.stages for i in parts}
        free: dict[int, float] = {}  # place -> when its devices have updated all stages so far
        for i in sorted(range(len(self.placings)), key=lambda i: (ready[i], i)):
            s, p = self.solution.stages[i], self.placings[i]
            reduced = ready[i] + s.exposed_s
            begin = max(reduced, free.get(p.place, 0.0))
            free[p.place] = begin + s.update_s
            for r in range(p.num_replicas):
                if s.all_reduce_s > 0:
                    at = reduced - s.all_reduce_s
                    events.append(TrainingEvent(p.place, r, i, -1, "all-reduce", at, reduced))
                if s.update_s > 0:
                    events.append(TrainingEvent(p.place, r, i, -1, "update", begin, begin + s.update_s))
        events.sort(key=lambda e: (e.start_s, e.place, e.replica, e.stage, e.microbatch, e.finish_s))
        return TrainingTimeline(tuple(events), pipeline, max(pipeline, *free.values()), self._memory(start, finish))

    def _memory(self, start: list[float], finish: list[float]) -> tuple[MemoryCurve, ...]:
        """What lies on each device: state always, working memory during a pass, a stash from forward to backward."""
        needs = [stage_bytes(self.problem, self.solution.option, p) for p in self.placings]
        ratio = 1 + self.problem.gradient_ratio + self.problem.state_ratio
        curves = []
        for (place, replica), order in sorted(self.orders.items()):
            stages = [i for i, p in enumerate(self.placings) if p.place == place]
            state = sum(self.solution.stages[i].weight_bytes * ratio / self.placings[i].degree for i in stages)
            changes: list[tuple[float, int, float]] = []
            for stage, x in order:
                i = self.pass_of[stage, x.microbatch, x.backward]
                changes += [(start[i], 1, needs[stage].working), (finish[i], 0, -needs[stage].working)]
                at, sign = (finish[i], -1.0) if x.backward else (start[i], 1.0)
                changes.append((at, int(not x.backward), sign * needs[stage].stash))
            held, times, amounts = state, [0.0], [state]
            for at, _, change in sorted(changes):
                held += change
                if at > times[-1]:
                    times.append(at)
                    amounts.append(held)
                else:
                    amounts[-1] = max(held, amounts[-1]) if change > 0 else held
            curves.append(MemoryCurve(place, replica, tuple(times), tuple(amounts)))
        return tuple(curves)
