"""Forward graphs, times and a cluster -> the numbers of a training iteration.

The graph is that of the forward pass of one micro-batch; the same model at several batch sizes makes the micro-batch
size a decision. Where no time of a backward kernel is known it is

    backward seconds = forward seconds x (the cost model's gradient kernel / its forward kernel)

so that measured forward times count. The cost models take a gradient as twice the arithmetic, and as reading the
inputs, the results and their gradients. Optimisers are bound by memory bandwidth: bytes moved per byte of weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.groups import Group
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.cost.model import KernelDesc
from tvmhet.cost.table import TimeTable
from tvmhet.errors import BadBatch, BadInput
from tvmhet.graph.opgraph import OpGraph
from tvmhet.ir.optimizers import KEPT
from tvmhet.planning_problem import make_problem
from tvmhet.solve import (
    AllReduce,
    IterationProblem,
    Link,
    MicroBatch,
    Problem,
    Schedule,
    Split,
    Weight,
)
from tvmhet.solve.price_limits import PriceLimits
from tvmhet.solve.schedules import PREFERRED
from tvmhet.splitting import PricedSplit, splits_of_groups, whole_of, with_whole_weights
from tvmhet.times import Candidates, time_table


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """What an optimiser holds and moves per byte of weights: its state, and the bytes moved by one update."""

    state_ratio: float
    moved_ratio: float


MAX_STEPS = 60_000_000  # of the search, where the caller does not say

#: Weights and gradients in float32. Moved: weights and state are read and written, gradients read. With "-bf16"
#: weights and gradients are bfloat16, masters and state float32: all per byte of the bfloat16 weights.
OPTIMIZERS: Mapping[str, OptimizerCost] = MappingProxyType(
    {name: OptimizerCost(kept, 3 + 2 * kept) for name, kept in KEPT.items()}
    | {f"{name}-bf16": OptimizerCost(2 + 2 * kept, 6 + 4 * kept) for name, kept in KEPT.items()}
)


@dataclass(frozen=True, slots=True)
class TrainingGraph:
    """The forward pass at one micro-batch size: its graph, candidate kernels, and the known times of those."""

    size: int
    graph: OpGraph
    candidates: Candidates
    forward: TimeTable
    backward: NDArray[np.float64]  # seconds, shape (kernels, device types of `forward`)
    backward_source: str
    kept: Mapping[str, tuple[int, ...]] | None = None  # tensor -> operators whose backward passes read it; None: all
    update_s_per_byte: Mapping[str, float] = field(default_factory=dict)  # by device type, where it was measured
    repeat_ratio: Mapping[str, float] = field(default_factory=dict)  # as `MicroBatch` has it, the same
    update_bytes: Mapping[str, int] = field(default_factory=dict)  # by weight, as `Weight` has it
    module_key: str = ""  # of this size's module, where there are several
    splits: tuple[PricedSplit, ...] = ()  # with their backward seconds


BY_RATIO = "assumed: forward x the cost model's ratio of gradient to forward (twice the arithmetic)"


def training_graph(
    size: int, graph: OpGraph, candidates: Candidates, forward: TimeTable, devices: Sequence[DeviceType]
) -> TrainingGraph:
    """Return the graph with backward times by the rule above."""
    ahead = time_table(candidates, devices, None)
    back = time_table(gradients_of(candidates), devices, None)
    runs = np.isfinite(ahead.seconds) & np.isfinite(back.seconds)
    ratio = np.where(runs, np.where(runs, back.seconds, 1.0) / np.where(runs, ahead.seconds, 1.0), np.inf)
    return TrainingGraph(size, graph, candidates, forward, forward.seconds * ratio, BY_RATIO)


def gradients_of(candidates: Candidates) -> Candidates:
    """Return the kernels that compute the gradients of the candidates."""
    return replace(
        candidates,
        keys=tuple(f"{key} backward" for key in candidates.keys),
        descs=tuple(gradient_of(d) for d in candidates.descs),
    )


def gradient_of(desc: KernelDesc) -> KernelDesc:
    """Return the kernel that computes the gradients of `desc`: see `tvmhet.cost.workload.counts`."""
    return replace(
        desc,
        ops=tuple(replace(op, backward=True) for op in desc.ops),
        flop=2 * desc.flop,
        read_bytes=desc.read_bytes + 2 * desc.write_bytes,
        write_bytes=desc.read_bytes,
    )


@dataclass(frozen=True, slots=True)
class TrainingGoal:
    """What a training plan is asked for. `schedules` are names of `Schedule`; the best of them is taken.

    `unlike_replicas` allows replicas of a stage on unlike device types, each with its own share of the micro-batches.
    `microbatch` is the samples of one, "auto" to choose it, or None for those of the model's example. With `price` the
    cheapest plan within these limits is asked for, else the fastest.
    """

    global_batch: int
    optimizer: str = "adamw"
    schedules: tuple[str, ...] = tuple(s.value for s in Schedule)
    recompute: bool = True
    unlike_replicas: bool = False
    reduce_overlap: float = 0.0
    microbatch: int | str | None = None
    price: PriceLimits | None = None

    def __post_init__(self) -> None:
        if type(self.global_batch) is not int or self.global_batch < 1:
            raise BadBatch(f"the global batch is {self.global_batch!r}", "give a whole number of samples, at least 1")
        if self.microbatch not in (None, "auto") and type(self.microbatch) is not int:
            raise BadInput(f"microbatch is {self.microbatch!r}", 'give a number of samples, "auto" or None')
        if self.optimizer not in OPTIMIZERS:
            raise BadInput(f"optimizer {self.optimizer!r} is unknown", f"use one of {', '.join(OPTIMIZERS)}")
        for name in ("recompute", "unlike_replicas"):
            if type(getattr(self, name)) is not bool:
                raise BadInput(f"{name} is {getattr(self, name)!r}", "give True or False")
        known = [s.value for s in Schedule]
        if isinstance(self.schedules, str):
            raise BadInput(f"schedules is {self.schedules!r}", f"give a list of some of {', '.join(known)}")
        if unknown := sorted(set(self.schedules) - set(known)):
            raise BadInput(f"schedule {unknown[0]!r} is unknown", f"use one of {', '.join(known)}")
        if not self.schedules:
            raise BadInput("no schedule is allowed", f"use one or more of {', '.join(known)}")


def make_training_problem(
    graphs: Sequence[TrainingGraph],
    cluster: ClusterSpec,
    groups: Sequence[Group],
    pins: Mapping[int, frozenset[int]],
    goal: TrainingGoal,
) -> IterationProblem:
    """Return the numbers of one iteration."""
    cost = OPTIMIZERS[goal.optimizer]
    return IterationProblem(
        options=tuple(_micro_batch(g, cluster, groups, pins) for g in graphs),
        global_batch=goal.global_batch,
        all_reduce=tuple(_all_reduce(g, cluster) for g in groups),
        update_s_per_byte=tuple(
            graphs[0].update_s_per_byte.get(g.device.name, cost.moved_ratio / g.device.dram_byte_per_s) for g in groups
        ),
        state_ratio=_state_ratio(cost, groups),
        reduce_overlap=goal.reduce_overlap,
        schedules=tuple(s for s in PREFERRED if s.value in goal.schedules),
        may_recompute=goal.recompute,
        may_mix=goal.unlike_replicas,
        replicate_interleaved=False,  # the runtime runs one ring
        posted=all(g.device.is_cpu for g in groups) and len({m for g in groups for m in g.machines}) == 1,
    )


def _state_ratio(cost: OptimizerCost, groups: Sequence[Group]) -> float:
    """What is held beside weights and gradients, per byte of weights, as the runtime has it.

    A backward pass reads the sums of gradients so far and makes new ones. On CPU types the state is there twice: a step
    writes the other generation.
    """
    twice = 2 if all(g.device.is_cpu for g in groups) else 1
    return twice * (1 + cost.state_ratio)


def _micro_batch(
    made: TrainingGraph, cluster: ClusterSpec, groups: Sequence[Group], pins: Mapping[int, frozenset[int]]
) -> MicroBatch:
    columns = [made.forward.column(g.device.name) for g in groups]
    seconds = made.forward.seconds[:, columns]
    forward = make_problem(made.graph, made.candidates.kernels, seconds, cluster, groups, pins)
    forward = _for_training(forward, made.graph, made.update_bytes)
    names = [t for t in made.graph.tensors if not t.is_param and (t.consumers or t.is_output)]
    no_gradient = frozenset(i for i, t in enumerate(names) if not t.dtype.startswith(("float", "bfloat")))
    backward = tuple(tuple(map(float, row)) for row in made.backward[:, columns])
    again = tuple(made.repeat_ratio.get(g.device.name, 1.0) for g in groups)
    if made.splits:
        forward = with_whole_weights(forward, made.splits, made.graph)
    splits = tuple(
        Split(g, s.degree, tuple(e.seconds for e in s.entries), s.backward_s)
        for g, s in splits_of_groups(groups, made.splits)
    )
    return MicroBatch(made.size, forward, backward, _stashes(made), no_gradient, splits, again)


def _stashes(made: TrainingGraph) -> tuple[Weight, ...]:
    """What is kept for the backward pass: by default, what an operator reads."""
    whole = whole_of(made.splits)
    return tuple(
        Weight(readers, t.size_bytes, i in whole)
        for i, t in enumerate(made.graph.tensors)
        if not t.is_param and t.size_bytes
        if (readers := tuple(t.consumers) if made.kept is None else made.kept.get(t.name, ()))
    )


def _for_training(problem: Problem, graph: OpGraph, update_bytes: Mapping[str, int]) -> Problem:
    """The forward pass of training returns nothing to the host: its results go into the loss."""
    edges = tuple(replace(e, is_output=False) for e in problem.edges)
    names = [t.name for t in graph.tensors if t.is_param and t.consumers]
    extra = [update_bytes.get(name, 0) for name in names]
    weights = tuple(replace(w, update_bytes=x) for w, x in zip(problem.weights, extra, strict=True))
    return replace(problem, edges=edges, weights=weights)


def _all_reduce(group: Group, cluster: ClusterSpec) -> AllReduce:
    inside = Link(group.link.latency_s, group.link.byte_per_s)
    if len(group.machines) == 1:
        return AllReduce(inside, max(1, group.num_devices), inside)
    between = cluster.link(group, group)
    return AllReduce(inside, group.num_devices // len(group.machines), Link(between.latency_s, between.byte_per_s))


def dividing(graphs: Sequence[TrainingGraph], global_batch: int) -> list[TrainingGraph]:
    """Return the graphs whose micro-batches divide the global batch. Raises BadBatch if there is none."""
    fitting = [g for g in graphs if global_batch % g.size == 0]
    if not fitting:
        sizes = ", ".join(str(g.size) for g in graphs)
        raise BadBatch(
            f"the global batch {global_batch} is no multiple of the micro-batch of {sizes} samples",
            "choose a multiple, or import the model with a batch that divides it",
        )
    return fitting
