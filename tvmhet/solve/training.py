"""Pipelined training at a global batch: stages with data-parallel and tensor-parallel degrees, and recomputation.

The model is that of Tarnawski et al., "Piper" (NeurIPS 2021), for 1F1B schedules:

    time of a stage per micro-batch = (compute + 2 * bytes across its borders / bandwidth) / d
                                      + 4 (d - 1) / d * parameter bytes / micro-batches / bandwidth
    memory of a device              = sum over nodes of A * y + B,  y = ceil(degrees of this and all later stages / d)

A stage uses t * d devices; d divides the number of micro-batches. The bottleneck T is found by bisection; for one T the
least number of devices for every suffix of the model and every sum of degrees is a dynamic program, because memory only
bounds that sum. Per node one of several configurations is chosen (such as with or without recomputation).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmhet._passes import passes_func
from tvmhet.errors import BadGraph
from tvmhet.solve.orders import closed_sets, linear_orders, successors
from tvmhet.solve.pack import as_tensor, pack_lists
from tvmhet.solve.recompute import Choice, cheapest_choice


@dataclass(frozen=True, slots=True)
class Config:
    """One way to run a node on a tensor-parallel group. Bytes; `in_bytes` and `out_bytes` by neighbour node."""

    name: str
    time_s: float
    parameter_bytes: float
    memory_per_sample: float  # A
    memory_fixed: float  # B
    in_bytes: tuple[tuple[int, float], ...] = ()
    out_bytes: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingProblem:
    """`configs[v][t]` are node v's configurations for tensor degree t. `edges` are (source, reader, bytes)."""

    configs: tuple[dict[int, tuple[Config, ...]], ...]
    edges: tuple[tuple[int, int, float], ...]
    num_devices: int
    memory_bytes: float
    byte_per_s: float
    num_microbatches: int

    def __post_init__(self) -> None:
        n = len(self.configs)
        if not n or self.num_devices < 1 or self.num_microbatches < 1:
            raise BadGraph(
                f"{n} nodes on {self.num_devices} devices with {self.num_microbatches} micro-batches",
                "give at least one of each",
            )
        if not (self.byte_per_s > 0 and self.memory_bytes > 0):
            raise BadGraph(f"{self.byte_per_s} byte/s and {self.memory_bytes} bytes per device", "both must be > 0")
        if any(not (0 <= u < n and 0 <= v < n and size >= 0) for u, v, size in self.edges):
            raise BadGraph("an edge names a node that does not exist or has negative bytes", "mend the edge")


@dataclass(frozen=True, slots=True)
class TrainingStage:
    """Nodes of one stage, its degrees, and the index of each node's configuration."""

    nodes: tuple[int, ...]
    data_parallel: int
    tensor_parallel: int
    config: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Stages in order, seconds per micro-batch of the slowest, and a lower bound on it. `reason`: why there is none."""

    stages: tuple[TrainingStage, ...]
    time_s: float
    lower_bound_s: float
    solver: str
    reason: str = ""


def plan_training(problem: TrainingProblem, *, max_states: int = 400, tolerance: float = 1e-6) -> TrainingPlan:
    """Return the best plan over all contiguous stages while suffixes are few, else over several linear orders.

    Few: `max_states`, or twice the nodes.
    """
    readers = successors(_preds(problem))
    states = closed_sets(readers, max(max_states, 2 * len(readers)))  # a long chain has few for each node
    lower = _lower_bound(problem)
    best: TrainingPlan | None = None
    for suffixes in [states] if states else [_order_states(o) for o in linear_orders(_preds(problem))]:
        found, proved, guessed = _solve(problem, suffixes, lower, best.time_s if best else math.inf, tolerance)
        if found and (best is None or found.time_s < best.time_s):
            if guessed and states:
                proved = _proved_in_part(problem, suffixes, lower, found.time_s, tolerance)
            bound = min(proved if states else lower, found.time_s)
            name = "all suffixes" if states else "linear orders"
            name = f"{name}, recomputation chosen greedily" if guessed else f"exact {'over' if states else 'on'} {name}"
            best = TrainingPlan(found.stages, found.time_s, bound, name)
    if best:
        return best
    reason = f"memory: no stages fit {problem.num_devices} devices of {problem.memory_bytes:.0f} bytes; add either"
    return TrainingPlan((), math.inf, lower, "none", reason)


def _preds(problem: TrainingProblem) -> list[list[int]]:
    preds: list[set[int]] = [set() for _ in problem.configs]
    for u, v, _ in problem.edges:
        preds[v].add(u)
    return [sorted(p) for p in preds]


def _order_states(order: Sequence[int]) -> list[frozenset[int]]:
    return [frozenset(order[i:]) for i in range(len(order), -1, -1)]


def _lower_bound(problem: TrainingProblem) -> float:
    """All devices always busy with the configuration of least device-seconds."""
    work = sum(min(t * c.time_s for t, cs in by.items() for c in cs) for by in problem.configs)
    return work / problem.num_devices


def _solve(
    problem: TrainingProblem, states: Sequence[frozenset[int]], lower: float, upper: float, tolerance: float
) -> tuple[TrainingPlan | None, float, bool]:
    """Return the best plan over chains of `states` below `upper`, the bottleneck it proves, and whether it guessed."""
    rows, proved, guessed = _chains(problem, states, lower, upper, tolerance)
    if not len(rows):
        return None, proved, guessed
    stages, slowest = [], 0.0
    for begin, end, tensor, data, samples in rows.tolist():
        nodes = sorted(states[end] - states[begin])
        time_s, picked = cheapest_choice(stage_choices(problem, nodes, tensor, data), samples, problem.memory_bytes)
        stages.append(TrainingStage(tuple(nodes), data, tensor, picked))
        slowest = max(slowest, time_s)
    return TrainingPlan(tuple(stages), slowest, 0.0, ""), proved, guessed


def _proved_in_part(
    problem: TrainingProblem, states: Sequence[frozenset[int]], lower: float, upper: float, tolerance: float
) -> float:
    """Return a bound on all plans below `upper`, nodes recomputed in part; first it is tried just below it."""
    near = max(lower, upper * (1 - 4 * tolerance))
    rows, proved, _ = _chains(problem, states, near, upper, tolerance, relaxed=True)
    return _chains(problem, states, lower, upper, tolerance, relaxed=True)[1] if len(rows) else proved


def _chains(
    problem: TrainingProblem,
    states: Sequence[frozenset[int]],
    lower: float,
    upper: float,
    tolerance: float,
    relaxed: bool = False,
) -> tuple[NDArray[np.int64], float, bool]:
    """Return (stages as rows, the bottleneck that is proved, whether recomputation was chosen greedily).

    With `relaxed`, nodes may be recomputed in part where they are too many: the rows are no plan, the proof holds.
    """
    most = sum(max(_alone_s(problem, v, c) for cs in by.values() for c in cs) for v, by in enumerate(problem.configs))
    flat, proved, guessed = passes_func("tvmhet.TrainingSearch")(
        len(problem.configs),
        [as_tensor(a) for a in _arrays(problem, states)],
        problem.num_devices,
        problem.num_microbatches,
        problem.memory_bytes,
        problem.byte_per_s,
        lower,
        upper,
        most,
        tolerance,
        relaxed,
    )
    return np.array(list(flat), np.int64).reshape(-1, 5), float(proved), bool(guessed)


def _alone_s(problem: TrainingProblem, node: int, config: Config) -> float:
    """An upper bound on what one node adds to a stage."""
    cut = sum(size for u, v, size in problem.edges if node in (u, v))
    sync = sum(x for _, x in (*config.in_bytes, *config.out_bytes))
    return config.time_s + (2 * (cut + sync) + 4 * config.parameter_bytes) / problem.byte_per_s


def stage_choices(problem: TrainingProblem, nodes: Sequence[int], tensor: int, data: int) -> list[list[Choice]]:
    """Return, for each node of a stage, the seconds and memory of each of its configurations in that stage."""
    inside = set(nodes)
    cut: dict[int, float] = dict.fromkeys(nodes, 0.0)
    for u, v, size in problem.edges:
        if (u in inside) != (v in inside):
            cut[v if v in inside else u] += size
    out: list[list[Choice]] = []
    for v in nodes:
        row = []
        for c in problem.configs[v][tensor]:
            sync = sum(x for w, x in (*c.in_bytes, *c.out_bytes) if w not in inside)
            reduce = 4 * (data - 1) * c.parameter_bytes / data / problem.num_microbatches
            moved = 2 * (cut[v] + sync) / data + reduce
            row.append(Choice(c.time_s / data + moved / problem.byte_per_s, c.memory_per_sample, c.memory_fixed))
        out.append(row)
    return out


def _arrays(problem: TrainingProblem, states: Sequence[frozenset[int]]) -> list[NDArray[Any]]:
    n = len(problem.configs)
    words = np.zeros((len(states), (n + 63) // 64), np.uint64)
    for s, nodes in enumerate(states):
        for v in nodes:
            words[s, v // 64] |= np.uint64(1 << (v % 64))
    tensors = sorted({t for by in problem.configs for t in by})
    rows = [by.get(t, ()) for by in problem.configs for t in tensors]
    configs = [c for row in rows for c in row]
    syncs = [(*c.in_bytes, *c.out_bytes) for c in configs]
    near: list[list[tuple[int, float]]] = [[] for _ in range(n)]
    for u, v, size in problem.edges:
        near[u].append((v, size))
        near[v].append((u, size))
    return [
        words,
        np.array(tensors, np.int32),
        np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32),
        np.array(
            [(c.time_s, c.parameter_bytes, c.memory_per_sample, c.memory_fixed) for c in configs], np.float64
        ).reshape(-1, 4),
        *pack_lists([[w for w, _ in row] for row in syncs]),
        np.array([x for row in syncs for _, x in row], np.float64),
        *pack_lists([[w for w, _ in row] for row in near]),
        np.array([x for row in near for _, x in row], np.float64),
    ]
