"""The closed forms of one training iteration: what a list of placed stages costs, exactly as `IterationProblem` says.

With F and B the seconds that one micro-batch keeps a replica busy (compute, overhead, sends and receives), n the micro-
batches of its busiest replica and `fill` one micro-batch's way through all stages and back, each transfer once:

    1F1B         fill + max over stages of (n - 1) max(F + B, R / W)    W micro-batches may be away for a round trip R
    GPipe        fill + max (n - 1) F + max (n - 1) B
    interleaved  fill of the longest round + max over devices of n w - (its shortest chunk),  w = all its chunks' F + B

For K equal stages and M micro-batches all are (M + K - 1) (F + B), the bubble is (K - 1) / (M + K - 1), and with v
chunks per device (K - 1) / (v M + K - 1). GPipe's form is exact for unlike stages too, and 1F1B never takes longer than
it. With replicas or slow transfers stages may wait for each other a little longer: the simulator says how much. Stages
are taken to be in a row even where they are parallel branches.

Memory of one device: weights, gradients and optimiser state; the stashes of the micro-batches in flight, or their
live-ins where the stage recomputes, then with one rebuilt stash; and the working peak of one pass: live tensors of the
forward pass and workspace, or their gradients in the backward pass, which mirrors it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvmhet.solve.collectives import ring_s
from tvmhet.solve.evaluate import Uses, stage_memory_bytes
from tvmhet.solve.iteration import IterationProblem, IterationStage, MicroBatch, StagePlacing
from tvmhet.solve.problem import Link
from tvmhet.solve.schedules import (
    Schedule,
    interleaved_order,
    interleaved_window,
    linear_order,
    passes_of_replica,
    peak_bytes,
    windows,
)


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
    problem: IterationProblem, option: int, placings: Sequence[StagePlacing], schedule: Schedule
) -> IterationValue:
    """Return the value of `placings`, which are in topological order; interleaved places in turn, round by round."""
    micro = problem.options[option]
    if len(placings) > 1 and placings[0].share:
        return _mixed(problem, option, placings)
    moves, times, busy = _work(micro, placings)
    count = problem.num_microbatches(option)
    pipeline = pipeline_s(placings, busy, count, schedule)
    weights = _own_weights(micro, placings)
    tied = _tied_s(problem, micro, placings)
    uses = Uses.of(micro.forward)
    needs = [stage_bytes(problem, option, p, uses) for p in placings]
    memory, in_flight = place_memory(problem, option, placings, needs, schedule)
    stages: list[IterationStage] = []
    for i, (p, (forward, backward), move) in enumerate(zip(placings, times, moves, strict=True)):
        devices = p.num_replicas
        reduce = problem.all_reduce[p.group].seconds(weights[i] * problem.gradient_ratio / p.degree, devices) + tied[i]
        stages.append(
            IterationStage(
                p,
                forward,
                backward,
                move.receive_f + move.receive_b,
                move.send_f + move.send_b,
                busy[i].load,
                reduce,
                max(0.0, reduce - problem.reduce_overlap * backward),
                problem.update_s_per_byte[p.group] * weights[i] / p.degree,
                in_flight[i],
                weights[i],
                math.ceil(needs[i].stash),
                math.ceil(memory[p.place]),
            )
        )
    after: dict[int, float] = {}  # the update of a place's stages comes after all its backward passes
    for s in stages:
        after[s.placing.place] = after.get(s.placing.place, 0.0) + s.exposed_s + s.update_s
    steady = _steady_s(placings, busy, count)
    bubble = max(0.0, 1.0 - steady / pipeline) if 0 < pipeline < math.inf else 0.0
    return IterationValue(tuple(stages), pipeline, pipeline + max(after.values(), default=0.0), bubble)


def passes_s(problem: IterationProblem, option: int, placings: Sequence[StagePlacing], schedule: Schedule) -> float:
    """Return the seconds of the passes alone, without the exchange of gradients and the update: a lower bound.

    Not for replicas on unlike groups.
    """
    _, _, busy = _work(problem.options[option], placings)
    return pipeline_s(placings, busy, problem.num_microbatches(option), schedule)


def _work(
    micro: MicroBatch, placings: Sequence[StagePlacing]
) -> tuple[list[_Moves], list[tuple[float, float]], list[_Busy]]:
    """Transfers, seconds of the passes, and loads of each stage."""
    moves = stage_moves(micro, placings)
    times = [_pass_s(micro, p) for p in placings]
    return moves, times, [_busy(micro, p, t, m) for p, t, m in zip(placings, times, moves, strict=True)]


def _mixed(problem: IterationProblem, option: int, placings: Sequence[StagePlacing]) -> IterationValue:
    """Replicas of the whole model on unlike groups: each runs its share, then all add up their gradients in one ring.

    The ring over all devices goes at the pace of the slowest link among their groups.
    """
    micro = problem.options[option]
    alone = [
        evaluate_iteration(replace(problem, may_mix=False), option, [replace(p, share=0)], Schedule.ONE_F_ONE_B).stages[
            0
        ]
        for p in placings
    ]
    links = [micro.forward.links[a.group][b.group] for a in placings for b in placings]
    links += [x for p in placings for x in (problem.all_reduce[p.group].inner, problem.all_reduce[p.group].outer)]
    devices = sum(p.num_replicas for p in placings)
    size = alone[0].weight_bytes * problem.gradient_ratio / min(p.degree for p in placings)
    reduce = max(ring_s(x, size, devices) for x in links)
    stages = tuple(
        replace(s, placing=p, all_reduce_s=reduce, exposed_s=max(0.0, reduce - problem.reduce_overlap * s.backward_s))
        for s, p in zip(alone, placings, strict=True)
    )
    ends = [
        path_s(micro, s) + (passes_of_replica(s.placing.share, s.placing.num_replicas) - 1) * s.load_s for s in stages
    ]
    pipeline = max(ends)
    steady = max(passes_of_replica(s.placing.share, s.placing.num_replicas) * s.load_s for s in stages)
    bubble = max(0.0, 1.0 - steady / pipeline) if 0 < pipeline < math.inf else 0.0
    return IterationValue(stages, pipeline, pipeline + max(s.exposed_s + s.update_s for s in stages), bubble)


def path_s(micro: MicroBatch, stage: IterationStage) -> float:
    """One micro-batch's way through a stage that has no other before or after it."""
    idle = micro.forward.groups[stage.placing.group].stage_overhead_s
    return stage.forward_s + stage.backward_s + 2 * idle + stage.receive_s + stage.send_s


def pipeline_s(placings: Sequence[StagePlacing], busy: Sequence[_Busy], count: int, schedule: Schedule) -> float:
    """Return the seconds from the first forward to the last backward pass of `count` micro-batches."""
    if not placings:
        return 0.0
    most = [passes_of_replica(count, p.num_replicas) for p in placings]
    if schedule is Schedule.INTERLEAVED:
        return _interleaved_s(placings, busy, count)
    fill = math.fsum(b.path for b in busy)
    if schedule is Schedule.GPIPE:
        forward = max((n - 1) * b.forward for n, b in zip(most, busy, strict=True))
        return fill + forward + max((n - 1) * b.backward for n, b in zip(most, busy, strict=True))
    window = windows(schedule, [p.num_replicas for p in placings], count)
    round_trip, slowest = 0.0, 0.0
    for n, w, b in reversed(list(zip(most, window, busy, strict=True))):
        round_trip += b.path
        slowest = max(slowest, (n - 1) * (max(b.load, round_trip / w) if w < n else b.load))
    return fill + slowest


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
        work[p.place] = work.get(p.place, 0.0) + passes_of_replica(count, p.num_replicas) * b.load
    return max(work.values(), default=0.0)


def _pass_s(micro: MicroBatch, placing: StagePlacing) -> tuple[float, float]:
    """Compute seconds of (forward, backward) of one micro-batch, the repeated forward pass with the backward."""
    g = placing.group
    if placing.degree == 1:
        forward = math.fsum(micro.forward.kernels[k].time_s[g] for k in placing.kernels)
        backward = math.fsum(micro.backward_s[k][g] for k in placing.kernels)
    else:
        split = next(s for s in micro.splits if (s.group, s.degree) == (g, placing.degree))
        forward = math.fsum(split.forward_s[k] for k in placing.kernels)
        backward = math.fsum(split.backward_s[k] for k in placing.kernels)
    return forward, backward + (forward if placing.recompute else 0.0)


def _busy(micro: MicroBatch, placing: StagePlacing, times: tuple[float, float], m: _Moves) -> _Busy:
    idle = micro.forward.groups[placing.group].stage_overhead_s
    path = times[0] + times[1] + 2 * idle + m.receive_f + m.receive_b + m.host_out
    if micro.forward.overlap_transfers:
        forward = max(times[0] + idle, m.receive_f, m.send_f)
        return _Busy(forward, max(times[1] + idle, m.receive_b, m.send_b), path)
    return _Busy(times[0] + idle + m.receive_f + m.send_f, times[1] + idle + m.receive_b + m.send_b, path)


def stage_moves(micro: MicroBatch, placings: Sequence[StagePlacing]) -> list[_Moves]:
    """Return each stage's transfers: a tensor crosses once per (maker, reading stage) pair, its gradient comes back."""
    problem = micro.forward
    home = {v: i for i, p in enumerate(placings) for k in p.kernels for v in problem.kernels[k].nodes}
    total = [[0.0] * 5 for _ in placings]
    for index, e in enumerate(problem.edges):
        readers = sorted({home[d] for d in e.dsts})
        if e.src < 0:
            for b in readers:
                total[b][0] += problem.host_links[placings[b].group].transfer_s(e.size_bytes)
            continue
        a = home[e.src]
        for b in readers:
            if placings[a].place == placings[b].place:
                continue
            there = problem.links[placings[a].group][placings[b].group].transfer_s(e.size_bytes)
            total[a][1] += there
            total[b][0] += there
            if index not in micro.no_gradient:
                back = problem.links[placings[b].group][placings[a].group].transfer_s(e.size_bytes)
                total[b][3] += back
                total[a][2] += back
        if e.is_output:
            out = problem.host_links[placings[a].group].transfer_s(e.size_bytes)
            total[a][1] += out
            total[a][4] += out
    return [_Moves(*t) for t in total]


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Memory of one stage on one device: `state` (weights, gradients, optimiser), `working` peak of one pass, and the
    `stash` of each micro-batch in flight."""

    state: float
    working: float
    stash: float


def stage_bytes(problem: IterationProblem, option: int, placing: StagePlacing, uses: Uses | None = None) -> StageBytes:
    """Return the memory of a stage that shares its device with no other."""
    micro = problem.options[option]
    forward = micro.forward
    mine = {v for k in placing.kernels for v in forward.kernels[k].nodes}
    weights = float(sum(w.size_bytes for w in forward.weights if not mine.isdisjoint(w.nodes)))
    kept = sum(w.size_bytes for w in micro.stashes if not mine.isdisjoint(w.nodes)) / placing.degree
    live_in = sum(e.size_bytes for e in forward.edges if e.src not in mine and not mine.isdisjoint(e.dsts))
    working = stage_memory_bytes(forward, placing.kernels, uses) - weights
    state = weights * (1 + problem.gradient_ratio + problem.state_ratio) / placing.degree
    if placing.recompute:
        return StageBytes(state, working + kept, float(live_in))
    return StageBytes(state, working, kept)


def _own_weights(micro: MicroBatch, placings: Sequence[StagePlacing]) -> list[int]:
    """Bytes of weights per stage; one that several stages of a place read counts for the first of them."""
    problem = micro.forward
    out = [0] * len(placings)
    home = {v: i for i, p in enumerate(placings) for k in p.kernels for v in problem.kernels[k].nodes}
    for w in problem.weights:
        first: dict[int, int] = {}
        for i in sorted({home[v] for v in w.nodes}):
            first.setdefault(placings[i].place, i)
        for i in first.values():
            out[i] += w.size_bytes
    return out


def _tied_s(problem: IterationProblem, micro: MicroBatch, placings: Sequence[StagePlacing]) -> list[float]:
    """Seconds per stage to add up the gradients of weights that stages of several places read."""
    forward = micro.forward
    out = [0.0] * len(placings)
    home = {v: i for i, p in enumerate(placings) for k in p.kernels for v in forward.kernels[k].nodes}
    for w in forward.weights:
        by_place = {placings[i].place: i for i in sorted({home[v] for v in w.nodes}, reverse=True)}
        owners = sorted(by_place.values())
        if len(owners) < 2:
            continue
        pairs = [(placings[a].group, placings[b].group) for a in owners for b in owners if a != b]
        slow: Link = max((forward.links[a][b] for a, b in pairs), key=lambda x: x.transfer_s(w.size_bytes))
        for i in owners:
            out[i] += ring_s(slow, w.size_bytes * problem.gradient_ratio, len(owners))
    return out


def place_memory(
    problem: IterationProblem,
    option: int,
    placings: Sequence[StagePlacing],
    needs: Sequence[StageBytes],
    schedule: Schedule,
) -> tuple[dict[int, float], list[int]]:
    """Return the peak bytes of one device of each place, and each stage's micro-batches in flight."""
    micro = problem.options[option]
    count = problem.num_microbatches(option)
    weights = _own_weights(micro, placings)
    members: dict[int, list[int]] = {}
    for i, p in enumerate(placings):
        members.setdefault(p.place, []).append(i)
    if schedule is Schedule.INTERLEAVED:
        window = [interleaved_window(p.place, len(members), len(members[p.place])) for p in placings]
    else:
        window = list(windows(schedule, [p.num_replicas for p in placings], count))
    peak: dict[int, float] = {}
    for place, stages in members.items():
        # a weight that several stages of a place read is there once
        state = sum(weights[i] / placings[i].degree for i in stages) * (
            1 + problem.gradient_ratio + problem.state_ratio
        )
        working = max(needs[i].working for i in stages)
        stash = [needs[i].stash for i in stages]
        mine = range(passes_of_replica(count, placings[stages[0]].num_replicas))
        order = (
            interleaved_order(mine, place, len(members), len(stages))
            if schedule is Schedule.INTERLEAVED
            else linear_order(mine, window[stages[0]])
        )
        peak[place] = state + working + peak_bytes(order, stash)
    return peak, window
