"""The memory of a training plan's devices, as a closed form.

Memory of one device: weights, gradients and optimiser state; the stashes of the micro-batches in flight, or their
live-ins where the stage recomputes, then with one rebuilt stash; and the working peak of one pass: live tensors of the
forward pass and workspace, or their gradients in the backward pass, which mirrors it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tvmhet.solve.evaluate import Uses, stage_memory_bytes
from tvmhet.solve.iteration import IterationProblem, MicroBatch, StagePlacing, share_of, teams
from tvmhet.solve.problem import Weight
from tvmhet.solve.schedules import (
    Schedule,
    deal,
    held,
    interleaved_order,
    interleaved_window,
    lags,
    passes_of_replica,
    peak_bytes,
    span,
)


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Memory of one stage on one device: `state` (weights, gradients, optimiser), `working` peak of one pass, and the
    `stash` of each micro-batch in flight."""

    state: float
    working: float
    stash: float


@dataclass(frozen=True, slots=True)
class MicroUses:
    """By node of a micro-batch: the edges and weights it uses, and the stashes it keeps."""

    forward: Uses
    stashes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, micro: MicroBatch) -> MicroUses:
        """Return them; worth keeping where many stages are looked at."""
        kept: list[list[int]] = [[] for _ in range(micro.forward.num_nodes)]
        for i, w in enumerate(micro.stashes):
            for v in dict.fromkeys(w.nodes):
                kept[v].append(i)
        return cls(Uses.of(micro.forward), tuple(map(tuple, kept)))


def stage_bytes(
    problem: IterationProblem, option: int, placing: StagePlacing, uses: MicroUses | None = None
) -> StageBytes:
    """Return the memory of a stage that shares its device with no other."""
    micro = problem.options[option]
    forward, uses = micro.forward, uses or MicroUses.of(micro)
    mine = {v for k in placing.kernels for v in forward.kernels[k].nodes}

    def used(by_node: Sequence[Sequence[int]]) -> set[int]:
        return {i for v in mine for i in by_node[v]}

    read_of = [forward.weights[i] for i in used(uses.forward.weights)]
    weights = float(sum(w.size_bytes for w in read_of))
    held = sum(w.share(placing.degree) * w.size_bytes for w in read_of)
    kept_of = (micro.stashes[i] for i in used(uses.stashes))
    kept = sum(w.share(placing.degree) * w.size_bytes for w in kept_of)
    read = (forward.edges[i] for i in used(uses.forward.read))
    live_in = sum(e.size_bytes for e in read if e.src not in mine)
    working = stage_memory_bytes(forward, placing.kernels, uses.forward) - weights
    state = held * (1 + problem.gradient_ratio + problem.state_ratio)
    if placing.recompute:
        return StageBytes(state, working + kept, float(live_in))
    return StageBytes(state, working, kept)


@dataclass(frozen=True)
class StageNeeds:
    """The memory of stages of one micro-batch size, each looked at once: many plans share stages."""

    problem: IterationProblem
    option: int
    _known: dict[tuple[tuple[int, ...], int, bool], StageBytes] = field(default_factory=dict)

    @cached_property
    def _uses(self) -> MicroUses:
        return MicroUses.of(self.problem.options[self.option])

    def of(self, placing: StagePlacing) -> StageBytes:
        """Return the memory of a stage that shares its device with no other."""
        key = placing.kernels, placing.degree, placing.recompute
        if key not in self._known:
            self._known[key] = stage_bytes(self.problem, self.option, placing, self._uses)
        return self._known[key]


def own_weights(micro: MicroBatch, placings: Sequence[StagePlacing], stages: Sequence[Sequence[int]]) -> list[int]:
    """Bytes of weights per placing; one that several stages of a place read counts for the first of them."""
    if len(stages) == 1:
        return [micro.all_weight_bytes] * len(placings)
    out = [0] * len(placings)
    for i, w in _owned(micro, placings, stages):
        out[i] += w.size_bytes
    return out


def held_weights(micro: MicroBatch, placings: Sequence[StagePlacing], stages: Sequence[Sequence[int]]) -> list[float]:
    """Bytes of `own_weights` that each device of a placing's teams holds."""
    if len(stages) == 1:
        return [micro.all_held[p.degree][0] for p in placings]
    out = [0.0] * len(placings)
    for i, w in _owned(micro, placings, stages):
        out[i] += w.share(placings[i].degree) * w.size_bytes
    return out


def _owned(
    micro: MicroBatch, placings: Sequence[StagePlacing], stages: Sequence[Sequence[int]]
) -> Iterator[tuple[int, Weight]]:
    """Yield each placing with each weight that it is the first of its place to read."""
    home = home_of(micro, placings, stages)
    for w in micro.forward.weights:
        first: dict[int, int] = {}
        for i in (i for t in sorted({home[v] for v in w.nodes}) for i in stages[t]):
            first.setdefault(placings[i].place, i)
        for i in first.values():
            yield i, w


def updated_weights(
    micro: MicroBatch, placings: Sequence[StagePlacing], stages: Sequence[Sequence[int]]
) -> list[float]:
    """`updated_bytes` of what a device of each placing updates: its part of what no earlier stage reads.

    Later stages get the new values.
    """
    if len(stages) == 1:
        return [micro.all_held[p.degree][1] for p in placings]
    out = [0.0] * len(placings)
    home = home_of(micro, placings, stages)
    for w in micro.forward.weights:
        for i in stages[min(home[v] for v in w.nodes)] if w.nodes else ():
            out[i] += w.share(placings[i].degree) * w.updated_bytes
    return out


def home_of(micro: MicroBatch, placings: Sequence[StagePlacing], stages: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return the stage of each node; the placings of a stage all run its nodes."""
    kernels = micro.forward.kernels
    return {v: t for t, parts in enumerate(stages) for k in placings[parts[0]].kernels for v in kernels[k].nodes}


def spans(placings: Sequence[StagePlacing], stages: Sequence[Sequence[int]], count: int) -> list[int]:
    """Return, per stage, among how many micro-batches in a row each of its replicas has one."""
    return [
        placings[parts[0]].num_replicas
        if len(parts) == 1
        else span([n for i in parts for n in replica_shares(placings[i], count)])
        for parts in stages
    ]


def in_flight(placings: Sequence[StagePlacing], schedule: Schedule, count: int) -> list[int]:
    """Return, per placing of a pipeline that is not interleaved, the micro-batches that a replica holds at most."""
    stages = teams(placings, count)
    out: list[int] = []
    for parts, lag in zip(stages, lags(schedule, spans(placings, stages, count), count), strict=True):
        mine = [placings[i] for i in parts]
        if len(mine) == 1:
            out.append(min(passes_of_replica(count, mine[0].num_replicas), lag // mine[0].num_replicas + 1))
            continue
        own = iter(deal([n for p in mine for n in replica_shares(p, count)]))
        out += [max(held(next(own), lag) for _ in range(p.num_replicas)) for p in mine]
    return out


def replica_shares(placing: StagePlacing, count: int) -> list[int]:
    """Return how many micro-batches each replica of a placing runs."""
    return [passes_of_replica(share_of(placing, count), placing.num_replicas, r) for r in range(placing.num_replicas)]


def place_memory(
    problem: IterationProblem,
    option: int,
    placings: Sequence[StagePlacing],
    schedule: Schedule,
    known: StageNeeds | None = None,
) -> tuple[list[StageBytes], dict[int, float], list[int]]:
    """Return the needs of each placing, the peak bytes of one device of each place, and micro-batches in flight."""
    micro = problem.options[option]
    count = problem.num_microbatches(option)
    known = known or StageNeeds(problem, option)
    needs = [known.of(p) for p in placings]
    weights = held_weights(micro, placings, teams(placings, count))
    members: dict[int, list[int]] = {}
    for i, p in enumerate(placings):
        members.setdefault(p.place, []).append(i)
    if schedule is Schedule.INTERLEAVED:
        window = [interleaved_window(p.place, len(members), len(members[p.place])) for p in placings]
    else:
        window = in_flight(placings, schedule, count)
    peak: dict[int, float] = {}
    for place, own in members.items():
        # a weight that several stages of a place read is there once
        state = sum(weights[i] for i in own) * (1 + problem.gradient_ratio + problem.state_ratio)
        working = max(needs[i].working for i in own)
        stash = [needs[i].stash for i in own]
        if schedule is Schedule.INTERLEAVED:
            mine = range(passes_of_replica(count, placings[own[0]].num_replicas))
            kept = peak_bytes(interleaved_order(mine, place, len(members), len(own)), stash)
        else:
            kept = window[own[0]] * stash[0]
        peak[place] = state + working + kept
    return needs, peak, window
