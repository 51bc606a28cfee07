"""The closed forms of one training iteration: what a list of placed stages costs, exactly as `IterationProblem` says.

With F and B the seconds that one micro-batch keeps a replica busy (compute, overhead, sends and receives), n the micro-
batches of its busiest replica and `fill` one micro-batch's way through all stages and back, each transfer once:

    1F1B         fill + max over stages of (n - 1) max(F + B, R / W)    W micro-batches may be away for a round trip R
    GPipe        fill + max (n - 1) F + max (n - 1) B
    wavelet      as 1F1B, with its W
    interleaved  fill of the longest round + max over devices of n w - (its shortest chunk),  w = all its chunks' F + B

For K equal stages and M micro-batches all are (M + K - 1) (F + B), the bubble is (K - 1) / (M + K - 1), and with v
chunks per device (K - 1) / (v M + K - 1); wavelet is (K + (M - 1) ceil(K / 2)) (F + B). GPipe's form is exact for
unlike stages too, and 1F1B never takes longer than it. With replicas or slow transfers stages may wait for each other a
little longer: the simulator says how much. Stages are taken to be in a row even where they are parallel branches.

No pipeline is shorter than what its micro-batches take any wire. After it come all-reduces (iteration_reduce.py), which
share wires, and updates.

Replicas on unlike groups: `fill` takes the fastest way through each stage; a replica ends as much later as its own way
is longer. What crosses stages is the mean over the pairs of replicas that it goes between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvmhet.solve.iteration import IterationProblem, IterationStage, MicroBatch, StagePlacing, share_of, teams
from tvmhet.solve.iteration_memory import StageNeeds, held_weights, home_of, in_flight, place_memory, updated_weights
from tvmhet.solve.iteration_reduce import reduce_s
from tvmhet.solve.schedules import Schedule, passes_of_replica


@dataclass(frozen=True, slots=True)
class IterationValue:
    """Stages with all their figures, and the seconds of the iteration (see `IterationSolution`)."""

    stages: tuple[IterationStage, ...]
    pipeline_s: float
    iteration_s: float
    bubble: float


@dataclass(frozen=True, slots=True)
class _Moves:
    """Seconds one micro-batch's transfers take a stage, in each pass and direction."""

    receive_f: float = 0.0
    send_f: float = 0.0
    receive_b: float = 0.0
    send_b: float = 0.0
    host_out: float = 0.0  # part of send_f


@dataclass(frozen=True, slots=True)
class _Busy:
    """F, B and the stage's part of `fill`, in seconds of one micro-batch."""

    forward: float
    backward: float
    path: float

    @property
    def load(self) -> float:
        return self.forward + self.backward


def evaluate_iteration(
    problem: IterationProblem,
    option: int,
    placings: Sequence[StagePlacing],
    schedule: Schedule,
    known: StageNeeds | None = None,
) -> IterationValue:
    """Return the value of `placings`, which are in topological order; interleaved places in turn, round by round.

    `known` has the memory of stages that were looked at before.
    """
    micro = problem.options[option]
    count = problem.num_microbatches(option)
    stages = teams(placings, count)
    moves, times, busy = _work(micro, placings, count)
    pipeline = max(pipeline_s(placings, busy, count, schedule), count * line_s(micro, placings, count))
    weights, updated = held_weights(micro, placings, stages), updated_weights(micro, placings, stages)
    reduce = reduce_s(problem, micro, placings, stages, weights)
    needs, memory, window = place_memory(problem, option, placings, schedule, known)
    found = tuple(
        IterationStage(
            p,
            forward,
            backward,
            move.receive_f + move.receive_b,
            move.send_f + move.send_b,
            busy[i].load,
            reduce[i],
            max(0.0, reduce[i] - problem.reduce_overlap * backward),
            problem.update_s_per_byte[p.group] * updated[i],
            window[i],
            math.ceil(weights[i]),
            math.ceil(needs[i].stash),
            math.ceil(memory[p.place]),
        )
        for i, (p, (forward, backward), move) in enumerate(zip(placings, times, moves, strict=True))
    )
    after: dict[int, float] = {}  # the update of a place's stages comes after all its backward passes
    for s in found:
        after[s.placing.place] = after.get(s.placing.place, 0.0) + s.exposed_s + s.update_s
    steady = _steady_s(placings, busy, count)
    bubble = max(0.0, 1.0 - steady / pipeline) if 0 < pipeline < math.inf else 0.0
    return IterationValue(found, pipeline, pipeline + max(after.values(), default=0.0), bubble)


def passes_s(problem: IterationProblem, option: int, placings: Sequence[StagePlacing], schedule: Schedule) -> float:
    """Return the seconds of the passes alone, without the exchange of gradients and the update: a lower bound."""
    count = problem.num_microbatches(option)
    micro = problem.options[option]
    _, _, busy = _work(micro, placings, count)
    return max(pipeline_s(placings, busy, count, schedule), count * line_s(micro, placings, count))


def _work(
    micro: MicroBatch, placings: Sequence[StagePlacing], count: int
) -> tuple[list[_Moves], list[tuple[float, float]], list[_Busy]]:
    """Transfers, seconds of the passes, and loads of each stage."""
    moves = stage_moves(micro, placings, count)
    times = [pass_s(micro, p) for p in placings]
    return moves, times, [_busy(micro, p, t, m) for p, t, m in zip(placings, times, moves, strict=True)]


def path_s(micro: MicroBatch, stage: IterationStage) -> float:
    """One micro-batch's way through a stage that has no other before or after it."""
    idle = micro.forward.groups[stage.placing.group].stage_overhead_s
    return stage.forward_s + stage.backward_s + 2 * idle + stage.receive_s + stage.send_s


def paths_and_loads_s(micro: MicroBatch, placings: Sequence[StagePlacing], count: int) -> list[tuple[float, float]]:
    """Return `path_s` of each stage and the load of each, without the rest of `evaluate_iteration`."""
    found = []
    moves, times, loads = _work(micro, placings, count)
    for p, (forward, backward), move, busy in zip(placings, times, moves, loads, strict=True):
        idle = micro.forward.groups[p.group].stage_overhead_s
        receive, send = move.receive_f + move.receive_b, move.send_f + move.send_b
        found.append((forward + backward + 2 * idle + receive + send, busy.load))
    return found


def pipeline_s(placings: Sequence[StagePlacing], busy: Sequence[_Busy], count: int, schedule: Schedule) -> float:
    """Return the seconds from the first forward to the last backward pass of `count` micro-batches."""
    if not placings:
        return 0.0
    if schedule is Schedule.INTERLEAVED:
        return _interleaved_s(placings, busy, count)
    most = [_most(p, count) for p in placings]
    stages = teams(placings, count)
    way = [min(busy[i].path for i in parts) for parts in stages]
    fill = math.fsum(way)
    late = [busy[i].path - through for parts, through in zip(stages, way, strict=True) for i in parts]
    if schedule is Schedule.GPIPE:
        forward = max((n - 1) * b.forward for n, b in zip(most, busy, strict=True))
        return fill + forward + max((n - 1) * b.backward + x for n, b, x in zip(most, busy, late, strict=True))
    window = in_flight(placings, schedule, count)
    later, slowest = 0.0, 0.0
    for parts, through in reversed(list(zip(stages, way, strict=True))):
        for i in parts:
            n, w, own = most[i], window[i], busy[i]
            pace = max(own.load, (later + own.path) / w) if w < n else own.load
            slowest = max(slowest, (n - 1) * pace + late[i])
        later += through
    return fill + slowest


def _most(placing: StagePlacing, count: int) -> int:
    """Micro-batches of the busiest replica."""
    return passes_of_replica(share_of(placing, count), placing.num_replicas)


def _interleaved_s(placings: Sequence[StagePlacing], busy: Sequence[_Busy], count: int) -> float:
    rounds: dict[int, float] = {}
    chunks: dict[int, list[float]] = {}
    replicas: dict[int, int] = {}
    for p, b in zip(placings, busy, strict=True):
        chunk = len(chunks.setdefault(p.place, []))
        rounds[chunk] = rounds.get(chunk, 0.0) + b.path
        chunks[p.place].append(b.load)
        replicas[p.place] = p.num_replicas
    steady = max(passes_of_replica(count, replicas[d]) * math.fsum(ws) - min(ws) for d, ws in chunks.items())
    return max(rounds.values()) + steady


def _steady_s(placings: Sequence[StagePlacing], busy: Sequence[_Busy], count: int) -> float:
    """Seconds in which the busiest replica of all works."""
    work: dict[int, float] = {}
    for p, b in zip(placings, busy, strict=True):
        work[p.place] = work.get(p.place, 0.0) + _most(p, count) * b.load
    return max(work.values(), default=0.0)


def pass_s(micro: MicroBatch, placing: StagePlacing) -> tuple[float, float]:
    """Return compute seconds of (forward, backward) of one micro-batch, the repeated forward pass with the backward."""
    key = placing.kernels, placing.group, placing.degree
    if key not in micro.known_s:
        micro.known_s[key] = _kernels_s(micro, *key)
    forward, backward = micro.known_s[key]
    return forward, backward + (micro.repeat_of(placing.group) * forward if placing.recompute else 0.0)


def _kernels_s(micro: MicroBatch, kernels: Sequence[int], g: int, degree: int) -> tuple[float, float]:
    if degree == 1:
        forward = math.fsum(micro.forward.kernels[k].time_s[g] for k in kernels)
        return forward, math.fsum(micro.backward_s[k][g] for k in kernels)
    split = next(s for s in micro.splits if (s.group, s.degree) == (g, degree))
    return math.fsum(split.forward_s[k] for k in kernels), math.fsum(split.backward_s[k] for k in kernels)


def _busy(micro: MicroBatch, placing: StagePlacing, times: tuple[float, float], m: _Moves) -> _Busy:
    idle = micro.forward.groups[placing.group].stage_overhead_s
    path = times[0] + times[1] + 2 * idle + m.receive_f + m.receive_b + m.host_out
    if micro.forward.overlap_transfers:
        forward = max(times[0] + idle, m.receive_f, m.send_f)
        return _Busy(forward, max(times[1] + idle, m.receive_b, m.send_b), path)
    return _Busy(times[0] + idle + m.receive_f + m.send_f, times[1] + idle + m.receive_b + m.send_b, path)


def stage_moves(micro: MicroBatch, placings: Sequence[StagePlacing], count: int) -> list[_Moves]:
    """Return each placing's transfers: a tensor crosses once per (maker, reading stage) pair, its gradient comes back.

    Between unlike replicas, the mean over the pairs that a micro-batch may go between.
    """
    problem = micro.forward
    stages = teams(placings, count)
    group = [p.group for p in placings]
    part = [share_of(p, count) / count for p in placings]
    total = [[0.0] * 5 for _ in placings]
    if len(stages) == 1:  # all else stays inside
        home, edges = dict.fromkeys(range(problem.num_nodes), 0), micro.host_edges
    else:
        home, edges = home_of(micro, placings, stages), tuple(enumerate(problem.edges))
    for index, e in edges:
        readers = sorted({home[d] for d in e.dsts})
        if e.src < 0:
            for b in (b for t in readers for b in stages[t]):
                total[b][0] += problem.host_links[group[b]].transfer_s(e.size_bytes)
            continue
        away = [t for t in readers if placings[stages[t][0]].place != placings[stages[home[e.src]][0]].place]
        for a, b in ((a, b) for t in away for a in stages[home[e.src]] for b in stages[t]):
            there = problem.links[group[a]][group[b]].transfer_s(e.size_bytes)
            total[a][1] += there * part[b]
            total[b][0] += there * part[a]
            if index not in micro.no_gradient:
                back = problem.links[group[b]][group[a]].transfer_s(e.size_bytes)
                total[b][3] += back * part[a]
                total[a][2] += back * part[b]
        for a in stages[home[e.src]] if e.is_output else ():
            out = problem.host_links[group[a]].transfer_s(e.size_bytes)
            total[a][1] += out
            total[a][4] += out
    return [_Moves(*t) for t in total]


def line_s(micro: MicroBatch, placings: Sequence[StagePlacing], count: int) -> float:
    """Return the most seconds that one micro-batch, there and back, takes any wire; the mean over unlike parts."""
    problem = micro.forward
    if not problem.wires:
        return 0.0
    stages = teams(placings, count)
    home = home_of(micro, placings, stages)
    part = [share_of(p, count) / count for p in placings]
    moved: dict[tuple[int, int], float] = {}

    def moves(src: int, dst: int, size_bytes: float) -> None:
        way = placings[src].group if src >= 0 else -1, placings[dst].group if dst >= 0 else -1
        moved[way] = moved.get(way, 0.0) + size_bytes

    for index, e in enumerate(problem.edges):
        readers = sorted({home[d] for d in e.dsts})
        if e.src < 0:
            for b in (b for t in readers for b in stages[t]):
                moves(-1, b, e.size_bytes * part[b])
            continue
        away = [t for t in readers if placings[stages[t][0]].place != placings[stages[home[e.src]][0]].place]
        for a, b in ((a, b) for t in away for a in stages[home[e.src]] for b in stages[t]):
            size = e.size_bytes * part[a] * part[b]
            moves(a, b, size)
            moves(b, a, 0.0 if index in micro.no_gradient else size)
        for a in stages[home[e.src]] if e.is_output else ():
            moves(a, -1, e.size_bytes * part[a])
    return max(math.fsum(size for way, size in moved.items() if way in w.ways) / w.byte_per_s for w in problem.wires)
