"""The micro-batch of a training step as a decision: by times scaled to other sizes, then by the step traced again.

    step at its own size ──► numbers at other sizes ──► solve ──► the step traced at the size that won ──► plan of both

Of a kernel's seconds a part does not grow with the batch: its launch, and reading its weights (in the backward pass
also writing their gradients). The rest grows with the number of samples, as do activations and stashes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tvmhet.cluster.groups import Group
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.errors import Infeasible
from tvmhet.planning import named_reason
from tvmhet.planning_problem import resolve_pins
from tvmhet.planning_training import MAX_STEPS, TrainingGoal, TrainingGraph, make_training_problem
from tvmhet.solve import MicroBatch, Split, Status, solve_iteration
from tvmhet.solve.cheapest_iteration import cheapest_iteration

_MOST_RATIO = 16  # between the sizes tried and the step's own
_MOST_SIZES = 6


def microbatch_by_scaling(
    graph: TrainingGraph, cluster: ClusterSpec, goal: TrainingGoal, pin: Mapping[str, str]
) -> int:
    """Return how many samples a micro-batch is best to have, by the times of `graph` scaled to sizes near its own.

    The best is the fastest or, with `goal.price`, the cheapest within its limits. Raises Infeasible where no size fits.
    """
    groups = cluster.groups()
    own = replace(goal, global_batch=graph.size)  # its size need not divide the global batch
    problem = make_training_problem([graph], cluster, groups, resolve_pins(graph.graph, groups, pin), own)
    sizes = sizes_near(graph.size, goal.global_batch)
    options = tuple(scaled(problem.options[0], size, groups) for size in sizes)
    search = solve_iteration if goal.price is None else partial(cheapest_iteration, limits=goal.price)
    solution = search(
        replace(problem, options=options, global_batch=goal.global_batch), max_steps=MAX_STEPS, time_limit_s=math.inf
    )
    if solution.status is Status.INFEASIBLE:
        raise Infeasible(*named_reason(solution.reason, graph.graph, groups))
    return sizes[solution.option]


def sizes_near(size: int, global_batch: int) -> list[int]:
    """Return divisors of the global batch near `size`, at most six, ascending: the nearest by ratio."""
    divisors = [d for d in range(1, global_batch + 1) if global_batch % d == 0]
    apart = {d: max(d, size) / min(d, size) for d in divisors}
    near = [d for d in divisors if apart[d] <= _MOST_RATIO] or [min(divisors, key=lambda d: apart[d])]
    return sorted(sorted(near, key=lambda d: (apart[d], d))[:_MOST_SIZES])


def scaled(micro: MicroBatch, size: int, groups: Sequence[Group]) -> MicroBatch:
    """Return the numbers of a micro-batch of `size` samples, from those of another size."""
    ratio, forward = size / micro.size, micro.forward
    ahead = np.array([k.time_s for k in forward.kernels], np.float64)
    back = np.array(micro.backward_s, np.float64)
    launch = np.array([g.device.launch_s for g in groups])
    moved = _weight_bytes(micro)[:, None] / np.array([g.device.dram_byte_per_s for g in groups])
    times = _scaled_s(ahead, launch + moved, ratio)
    kernels = tuple(
        replace(k, time_s=tuple(map(float, row)), workspace_bytes=_bytes(k.workspace_bytes, ratio))
        for k, row in zip(forward.kernels, times, strict=True)
    )
    edges = tuple(replace(e, size_bytes=_bytes(e.size_bytes, ratio)) for e in forward.edges)
    return replace(
        micro,
        size=size,
        forward=replace(forward, kernels=kernels, edges=edges),
        backward_s=tuple(tuple(map(float, row)) for row in _scaled_s(back, launch + 2 * moved, ratio)),
        stashes=tuple(replace(w, size_bytes=_bytes(w.size_bytes, ratio)) for w in micro.stashes),
        splits=tuple(_scaled_split(s, launch[s.group], moved[:, s.group], ratio) for s in micro.splits),
    )


def _scaled_split(split: Split, launch_s: float, moved_s: NDArray[np.float64], ratio: float) -> Split:
    """Each device reads its part of the weights; sums over the devices grow as activations do."""
    ahead = _scaled_s(np.array(split.forward_s), launch_s + moved_s / split.degree, ratio)
    back = _scaled_s(np.array(split.backward_s), launch_s + 2 * moved_s / split.degree, ratio)
    return replace(split, forward_s=tuple(map(float, ahead)), backward_s=tuple(map(float, back)))


def _scaled_s(seconds: NDArray[np.float64], fixed_s: NDArray[np.float64], ratio: float) -> NDArray[np.float64]:
    fixed = np.minimum(fixed_s, seconds)
    grows = np.where(np.isfinite(seconds), seconds - fixed, np.inf)
    return np.asarray(np.where(np.isfinite(seconds), fixed, 0.0) + grows * ratio)


def _weight_bytes(micro: MicroBatch) -> NDArray[np.float64]:
    """Bytes of weights that each kernel reads."""
    by_node: dict[int, int] = {}
    for w in micro.forward.weights:
        for v in set(w.nodes):
            by_node[v] = by_node.get(v, 0) + w.size_bytes
    return np.array([sum(by_node.get(v, 0) for v in k.nodes) for k in micro.forward.kernels], np.float64)


def _bytes(size: float, ratio: float) -> int:
    return round(size * ratio)
