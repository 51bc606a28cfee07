"""An event-driven run of one training iteration: passes by the schedule, transfers, all-reduce, update.

    place 0  |F0|F1|    |B0|F2|   |B1|F3| ...  |all-reduce|update|
    place 1     |F0|B0|F1|B1| ...

Each device runs its passes in the fixed order of the schedule. A transfer needs its sender and its receiver at once
(with `overlap_transfers`: the sender's way out and the receiver's way in), and comes before the sender's next pass
(with overlap: the one after it). Model inputs are read just before their pass (with overlap: one pass ahead). The
all-reduce of a stage starts when the last backward pass of every replica is done, or as far into it as `reduce_overlap`
says; it takes the network, not the devices; updates follow. Named wires are shared fairly, as in simulate.py, by
transfers and by the all-reduces that cross them; what of an all-reduce hides behind its pass takes no part in that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from graphlib import TopologicalSorter

from tvmhet.errors import BadInput
from tvmhet.solve.events import Task, run
from tvmhet.solve.iteration import IterationProblem, IterationSolution, teams
from tvmhet.solve.iteration_memory import home_of, replica_shares, spans
from tvmhet.solve.iteration_reduce import over_wires_s
from tvmhet.solve.schedules import Pass, Schedule, deal, interleaved_order, lags, linear_order
from tvmhet.solve.solution import Status


@dataclass(frozen=True, slots=True)
class Processors:
    """The cores of a device that others compute on too, and the seconds from the end of one's pass to another's."""

    cores: tuple[int, ...]
    handover_s: float = 0.0


Shared = Mapping[tuple[int, int], Processors]  # of (place, replica)


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
    """Events by start time, the end of the last backward pass, the end of the last update."""

    events: tuple[TrainingEvent, ...]
    pipeline_s: float
    iteration_s: float

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
    processors: Shared | None = None,
) -> TrainingTimeline:
    """Run one iteration of `solution`. Devices that share `processors` take turns, pass by pass:
    what has the longest chain of passes behind it goes first, a backward pass counted as two.

    Raises BadInput for an infeasible solution.
    """
    return _simulation(problem, solution, processors).timeline()


def simulated_s(problem: IterationProblem, solution: IterationSolution) -> float:
    """Return `simulate_training(problem, solution).iteration_s` alone: events are not written down."""
    return max(_simulation(problem, solution, None).ends()[1])


def _simulation(problem: IterationProblem, solution: IterationSolution, processors: Shared | None) -> _Simulation:
    if solution.status is Status.INFEASIBLE or not solution.stages:
        raise BadInput("cannot simulate a training plan without stages", "simulate a feasible solution")
    return _Simulation(problem, solution, processors or {})


class _Simulation:
    def __init__(self, problem: IterationProblem, solution: IterationSolution, processors: Shared) -> None:
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
        self.host_s = [self._host_s(i) for i in range(len(self.placings))]
        self.num_before_updates = 0
        self.updates: dict[tuple[int, int], int] = {}

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
        """Run it and write down what happened when."""
        start, finish = self.ends()
        return self._with_ends(start, finish, max(finish[: self.num_before_updates]), self.updates)

    def ends(self) -> tuple[list[float], list[float]]:
        """Run it; return start and finish of every task."""
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
        if self.processors:
            self._rank_by_urgency()
        self.num_before_updates = len(self.tasks)
        self.updates = self._add_updates()
        return run(self.tasks)

    def _add_pass(self, device: tuple[int, int], stage: int, x: Pass) -> None:
        s = self.solution.stages[stage]
        idle = self.problem.groups[s.placing.group].stage_overhead_s
        seconds = idle + (s.backward_s if x.backward else s.forward_s)
        if not x.backward and not self.micro.forward.overlap_transfers:
            seconds += sum(self.host_s[stage])
        if device in self.processors:
            seconds += self.processors[device].handover_s
        kind = "backward" if x.backward else "forward"
        self.pass_of[stage, x.microbatch, x.backward] = len(self.tasks)
        self.events.append((TrainingEvent(*device, stage, x.microbatch, kind, 0.0, 0.0),))
        self.tasks.append(Task(seconds, self._computes_on(device), rank=(1, x.microbatch)))

    def _add_move(self, src: int, dst: int, m: int, seconds: float, size_bytes: float, backward: bool) -> int:
        ends = [(self.placings[s].place, self.runs[self.stage_of[s], m][1]) for s in (src, dst)]
        self.events.append(
            (
                TrainingEvent(*ends[0], src, m, "send", 0.0, 0.0, dst),
                TrainingEvent(*ends[1], dst, m, "receive", 0.0, 0.0, src),
            )
        )
        needs: tuple[Hashable, ...] = (self._resource(ends[0], "send"), self._resource(ends[1], "receive"))
        if self.problem.posted:
            needs = needs[:1]
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
                read, made = self.host_s[stage]
                for seconds, way in ((read, "receive"), (made, "send")):
                    if seconds <= 0 or x.backward:
                        continue
                    after = tuple(ids[k - 2 : k - 1]) if way == "receive" and k >= 2 else ()
                    after = after if way == "receive" else (ids[k],)
                    self.events.append((TrainingEvent(*device, stage, x.microbatch, way, 0.0, 0.0),))
                    self.tasks.append(Task(seconds, (self._resource(device, way),), after, (), (0, x.microbatch)))
                    (arriving if way == "receive" else sent).setdefault(ids[k], []).append(len(self.tasks) - 1)

    def _computes_on(self, device: tuple[int, int]) -> tuple[Hashable, ...]:
        if device in self.processors:
            return tuple(("processor", core) for core in self.processors[device].cores)
        return (self._resource(device, "compute"),)

    def _resource(self, device: tuple[int, int], way: str) -> Hashable:
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

    def _rank_by_urgency(self) -> None:
        """Let passes go by the longest chain of passes behind them, as `runtime.training_program` has it."""
        weight = {i: 1 + backward for (_, _, backward), i in self.pass_of.items()}
        order = TopologicalSorter({i: t.after for i, t in enumerate(self.tasks)}).static_order()
        chain = dict.fromkeys(range(len(self.tasks)), 0)  # the longest behind each, then with itself
        for i in reversed(list(order)):
            chain[i] += weight.get(i, 0)
            for before in self.tasks[i].after:
                chain[before] = max(chain[before], chain[i])
        for i in weight:
            self.tasks[i] = replace(self.tasks[i], rank=(1, -chain[i]))

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

    def _add_updates(self) -> dict[tuple[int, int], int]:
        """Each replica updates its stages when its passes are done and sums are there; (placing, replica) -> task."""
        last: dict[int, list[int]] = {}  # placing -> its backward passes
        for (stage, _, backward), i in self.pass_of.items():
            if backward:
                last.setdefault(stage, []).append(i)
        ids = {d: [self.pass_of[k, x.microbatch, x.backward] for k, x in order] for d, order in self.orders.items()}
        out = {}
        over_wires = self._reduces_over_wires()
        for parts in self.stages:
            done = tuple(i for part in parts for i in last[part])
            for i in parts:
                s, p = self.solution.stages[i], self.placings[i]
                reduced = len(self.tasks)
                self.events.append(())
                seconds, wires = over_wires.get(i, (s.exposed_s, ()))
                self.tasks.append(Task(seconds, (), done, wires))
                for r in range(p.num_replicas):
                    device = p.place, r
                    out[i, r] = len(self.tasks)
                    self.events.append((TrainingEvent(*device, i, -1, "update", 0.0, 0.0),))
                    after = (reduced, ids[device][-1])
                    self.tasks.append(Task(s.update_s, self._computes_on(device), after, rank=(2, i)))
        return out

    def _reduces_over_wires(self) -> dict[int, tuple[float, tuple[tuple[str, float], ...]]]:
        """Placing -> seconds of its all-reduce after its last pass, without others, and of those on wires by name."""
        taken = over_wires_s(self.problem, self.micro, self.placings, self.stages)
        out = {}
        for i, (seconds, wire_s) in taken.items():
            shown = max(0.0, seconds - self.problem.reduce_overlap * self.solution.stages[i].backward_s)
            wires = zip(self.micro.forward.wires, wire_s, strict=True)
            out[i] = shown, tuple((w.name, x * shown / seconds) for w, x in wires if x > 0)
        return out

    def _with_ends(
        self, start: list[float], finish: list[float], pipeline_s: float, updates: Mapping[tuple[int, int], int]
    ) -> TrainingTimeline:
        events = [
            TrainingEvent(e.place, e.replica, e.stage, e.microbatch, e.kind, s, f, e.peer)
            for kinds, s, f in zip(self.events, start, finish, strict=True)
            for e in kinds
            if f > s
        ]
        for i, r in updates:
            s, p = self.solution.stages[i], self.placings[i]
            if s.all_reduce_s > 0:
                reduced = self.tasks[updates[i, r]].after[0]
                at = finish[reduced]
                begin = at - s.all_reduce_s
                if self.tasks[reduced].wires:
                    hidden = min(s.all_reduce_s, self.problem.reduce_overlap * s.backward_s)
                    begin = start[reduced] - hidden
                events.append(TrainingEvent(p.place, r, i, -1, "all-reduce", begin, at))
        events.sort(key=lambda e: (e.start_s, e.place, e.replica, e.stage, e.microbatch, e.finish_s))
        return TrainingTimeline(tuple(events), pipeline_s, max(finish))
