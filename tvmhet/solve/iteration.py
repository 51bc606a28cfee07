"""One iteration of training at a global batch, as numbers: what a planner may know and what it answers.

    global batch = micro-batch size x number of micro-batches; the size is chosen among the `MicroBatch` options

A stage runs the forward and the backward pass of its kernels on its own devices. Micro-batches go to the replicas of a
stage in turn. Between its forward and its backward pass a micro-batch leaves its *stash* on the device, or, where the
stage recomputes, only its live-ins, and the forward pass is run again. After the last backward pass the replicas of a
stage add up their gradients (all-reduce) and each updates its weights. A weight that several stages read (tied) is
updated by the first of them, and the others get its new values.

    iteration = pipeline (fill, steady, drain)  +  the all-reduce that is not hidden  +  update

The closed forms are in iteration_value.py, the schedules in schedules.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tvmhet.errors import BadGraph, BadInput, BadTime
from tvmhet.solve.collectives import AllReduce
from tvmhet.solve.problem import DeviceGroup, Edge, Problem, Weight
from tvmhet.solve.schedules import PREFERRED, Schedule
from tvmhet.solve.solution import Status
from tvmhet.solve.splits import Split


@dataclass(frozen=True)
class MicroBatch:
    """What one micro-batch of `size` samples takes. `forward` holds its kernels, tensors and links.

    `backward_s[kernel][group]` are seconds of a kernel's backward pass. A `Weight` in `stashes` is what the forward
    pass keeps for the backward pass of `nodes`: once per micro-batch on every device that runs any of them. The tensors
    `no_gradient` (indices of edges) send nothing back; model inputs never do. `repeat_ratio[group]` is what recomputing
    adds to both passes of a stage, as a part of its forward pass: below 1 where the repeated pass leaves out what the
    backward pass does not read; () is 1 for all.
    """

    size: int
    forward: Problem
    backward_s: tuple[tuple[float, ...], ...]
    stashes: tuple[Weight, ...]
    no_gradient: frozenset[int] = frozenset()
    splits: tuple[Split, ...] = ()
    repeat_ratio: tuple[float, ...] = ()

    @cached_property
    def known_s(self) -> dict[tuple[tuple[int, ...], int, int], tuple[float, float]]:
        """Seconds of the passes of stages that were looked at: kernels, group and degree -> forward, backward."""
        return {}

    @cached_property
    def host_edges(self) -> tuple[tuple[int, Edge], ...]:
        """The tensors that come from the host or return to it, with their indices."""
        return tuple((i, e) for i, e in enumerate(self.forward.edges) if e.src < 0 or e.is_output)

    @cached_property
    def all_weight_bytes(self) -> int:
        """Bytes of the weights that any node reads."""
        return sum(w.size_bytes for w in self.forward.weights if w.nodes)

    @cached_property
    def all_held(self) -> dict[int, tuple[float, float]]:
        """By degree: bytes of those that one device of a team holds, and what their update is priced by."""
        read = [w for w in self.forward.weights if w.nodes]
        degrees = {1, *(s.degree for s in self.splits)}
        return {
            d: (sum(w.share(d) * w.size_bytes for w in read), sum(w.share(d) * w.updated_bytes for w in read))
            for d in degrees
        }

    def __post_init__(self) -> None:
        kernels, groups = len(self.forward.kernels), len(self.forward.groups)
        if self.size < 1:
            raise BadInput(f"a micro-batch of {self.size} samples", "give at least 1")
        if [len(row) for row in self.backward_s] != [groups] * kernels:
            raise BadTime(f"backward times do not match {kernels} kernels and {groups} groups", "give one per pair")
        if self.repeat_ratio and (len(self.repeat_ratio) != groups or not min(self.repeat_ratio) >= 0):
            raise BadTime(f"what recomputing adds: {self.repeat_ratio}", f"give {groups} numbers >= 0, one per group")
        if any(g.team_of >= 0 for g in self.forward.groups):
            raise BadInput("a training problem with groups of teams", "give its splits as MicroBatch.splits")
        rows = [*self.backward_s, *(t for s in self.splits for t in (s.forward_s, s.backward_s))]
        if any(math.isnan(t) or t < 0 for row in rows for t in row):
            raise BadTime("a backward or split time is NaN or negative", "times are >= 0 s, or inf where impossible")
        if any(w.size_bytes < 0 or not w.nodes for w in self.stashes):
            raise BadGraph("a stash has negative bytes or belongs to no node", "sizes are >= 0")
        for s in self.splits:
            if s.degree < 2 or not 0 <= s.group < groups or {len(s.forward_s), len(s.backward_s)} != {kernels}:
                raise BadTime(f"a split of degree {s.degree} on group {s.group} is malformed", "one time per kernel")

    def repeat_of(self, group: int) -> float:
        """Return the `repeat_ratio` of a group."""
        return self.repeat_ratio[group] if self.repeat_ratio else 1.0


def stashes_of_edges(problem: Problem) -> tuple[Weight, ...]:
    """Return the default stash: every tensor is kept wherever an operator that reads it runs."""
    return tuple(Weight(e.dsts, e.size_bytes) for e in problem.edges if e.dsts and e.size_bytes)


@dataclass(frozen=True, slots=True)
class IterationProblem:
    """Training at `global_batch` samples. Ratios are bytes per byte of weights; tuples have one entry per group.

    `gradient_ratio`: gradients (1 where they have the weights' dtype). `state_ratio`: the optimiser's state (plain SGD
    0, momentum 1, Adam 2 in float32; bfloat16 weights with float32 masters and Adam 6). `update_s_per_byte`: seconds to
    update one byte of weights. `reduce_overlap`: the share of a stage's last backward pass behind which its all-reduce
    can hide (0: it starts when the pass has ended).
    """

    options: tuple[MicroBatch, ...]
    global_batch: int
    all_reduce: tuple[AllReduce, ...]
    update_s_per_byte: tuple[float, ...]
    gradient_ratio: float = 1.0
    state_ratio: float = 2.0
    reduce_overlap: float = 0.0
    schedules: tuple[Schedule, ...] = PREFERRED
    may_recompute: bool = True
    may_mix: bool = True  # replicas of a stage on unlike groups, with unlike shares of the micro-batches
    most_chunks: int = 4  # of an interleaved device
    replicate_interleaved: bool = True  # replicas of a whole ring of interleaved devices
    posted: bool = False  # in a simulated run: what is sent lies in memory that both reach, its reader need not wait

    def __post_init__(self) -> None:
        if not self.options or not self.schedules:
            raise BadInput("training without a micro-batch size or without a schedule", "give at least one of each")
        for o in self.options:
            if self.global_batch < 1 or self.global_batch % o.size:
                raise BadInput(
                    f"micro-batches of {o.size} samples do not divide the global batch of {self.global_batch}",
                    "choose a divisor of the global batch",
                )
            if o.forward.groups != self.groups or o.forward.num_nodes != self.options[0].forward.num_nodes:
                raise BadGraph("the micro-batch options differ in device groups or nodes", "describe one model")
        if {len(self.all_reduce), len(self.update_s_per_byte)} != {len(self.groups)}:
            raise BadGraph(f"collectives or update times do not match {len(self.groups)} groups", "one per group")
        if min(self.gradient_ratio, self.state_ratio, *self.update_s_per_byte) < 0 or not 0 <= self.reduce_overlap <= 1:
            raise BadInput("a ratio or an update time is negative, or the overlap is outside 0..1", "mend it")

    @property
    def groups(self) -> tuple[DeviceGroup, ...]:
        """The device groups."""
        return self.options[0].forward.groups

    def num_microbatches(self, option: int) -> int:
        """Return how many micro-batches of that size make the global batch."""
        return self.global_batch // self.options[option].size


@dataclass(frozen=True, slots=True)
class StagePlacing:
    """One stage as a search decides it: `degree` devices run each replica; stages of one `place` share devices.

    Replicas on unlike groups are several placings in a row that run the same nodes; `share` is then how many of the
    micro-batches the replicas of this one run together. 0: all of them.
    """

    kernels: tuple[int, ...]
    group: int
    num_replicas: int
    place: int
    recompute: bool = False
    degree: int = 1
    share: int = 0


def teams(placings: Sequence[StagePlacing], num_microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each stage, which of `placings` run it: those in a row whose shares add up to all micro-batches."""
    out: list[list[int]] = []
    missing = 0
    for i, p in enumerate(placings):
        if missing <= 0:
            out.append([])
            missing = num_microbatches
        out[-1].append(i)
        missing -= p.share or num_microbatches
    return tuple(map(tuple, out))


def share_of(placing: StagePlacing, num_microbatches: int) -> int:
    """Return how many of the micro-batches the replicas of `placing` run together."""
    return placing.share or num_microbatches


@dataclass(frozen=True, slots=True)
class IterationStage:
    """A placed stage with its figures. Seconds of passes and transfers are of one micro-batch on one replica.

    `backward_s` includes the repeated forward pass where the stage recomputes. `exposed_s` is what the all-reduce adds
    after the backward pass. `in_flight` counts the micro-batches whose stash one replica holds at its peak;
    `memory_bytes` is the peak on one device of the stage's place, over all its stages. Bytes are of one device.
    """

    placing: StagePlacing
    forward_s: float
    backward_s: float
    receive_s: float  # activations and gradients, both passes
    send_s: float
    load_s: float  # one micro-batch keeps the replica busy for so long
    all_reduce_s: float
    exposed_s: float
    update_s: float
    in_flight: int
    weight_bytes: int
    stash_bytes: int  # kept for one micro-batch
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class IterationSolution:
    """How to train: stages in topological order, micro-batches, schedule; seconds of one iteration and their bound.

    `iteration_s` = `pipeline_s` + the slowest stage's exposed all-reduce and update. `bubble` is the share of
    `pipeline_s` in which the busiest device waits.
    """

    stages: tuple[IterationStage, ...]
    option: int
    num_microbatches: int
    schedule: Schedule
    pipeline_s: float
    iteration_s: float
    bubble: float
    lower_bound_s: float
    status: Status
    steps: int
    solver: str
    reason: str = ""

    @property
    def gap(self) -> float:
        """Relative distance of `iteration_s` above its lower bound; 0 when proved optimal."""
        return 0.0 if self.iteration_s <= 0 else max(0.0, 1.0 - self.lower_bound_s / self.iteration_s)

    def devices(self, group: int) -> int:
        """Return how many devices of a group are used; stages of one place count once."""
        places = {s.placing.place: s.placing for s in self.stages}
        return sum(p.num_replicas * p.degree for p in places.values() if p.group == group)
