"""Pipelined data parallelism on equal devices (Narayanan et al., "PipeDream", SOSP 2019), its flat objective:

    time of a stage on m devices = max(compute, 2 (m - 1) * parameter bytes / bandwidth) / m
    time of a border             = 2 * bytes that cross it / bandwidth
    minimise the largest stage or border

Stages are intervals of a chain of node sets: all downsets while they are few, else linear orders. Then a tensor that
alone takes as long as the best plan found crosses no border of a better one: its maker and readers are joined, and the
downsets of what is left are often few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from tvmhet.errors import BadGraph, BadTime
from tvmhet.solve.orders import closed_sets, linear_orders, order_by


@dataclass(frozen=True, slots=True)
class ReplicatedProblem:
    """Per node: seconds of one minibatch (forward and backward), parameter bytes and bytes of its result."""

    time_s: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    edges: tuple[tuple[int, int], ...]
    num_devices: int
    byte_per_s: float

    def __post_init__(self) -> None:
        n = len(self.time_s)
        if not n or self.num_devices < 1 or not self.byte_per_s > 0:
            raise BadGraph(f"{n} nodes, {self.num_devices} devices, {self.byte_per_s} byte/s", "all must be > 0")
        if any(not 0 <= t < math.inf for t in self.time_s):
            raise BadTime("a node's time is negative, infinite or NaN", "times are finite and >= 0")
        if len(order_by(self.preds(), lambda v: v)) != n:
            raise BadGraph("the graph has a cycle", "a cycle cannot be placed; remove it")

    def preds(self) -> list[list[int]]:
        """Return, for each node, the nodes it reads."""
        out: list[set[int]] = [set() for _ in self.time_s]
        for u, v in self.edges:
            out[v].add(u)
        return [sorted(p) for p in out]


@dataclass(frozen=True, slots=True)
class ReplicatedPlan:
    """Stages in order as (nodes, replicas), the slowest stage or border in seconds, and a lower bound on it."""

    stages: tuple[tuple[tuple[int, ...], int], ...]
    time_s: float
    lower_bound_s: float
    solver: str


def plan_replicated(problem: ReplicatedProblem, *, max_states: int = 500) -> ReplicatedPlan:
    """Return the best plan; its bound is exact over all downsets while they are few, else perfect balance."""
    preds = problem.preds()
    if states := closed_sets(preds, max_states):
        best = _solve(problem, states)
        return ReplicatedPlan(best.stages, best.time_s, best.time_s, "exact over all downsets")
    best = min((_solve(problem, _prefixes(o)) for o in linear_orders(preds)), key=lambda p: p.time_s)
    if states := _joined_sets(problem, best.time_s, max_states):
        better = min(best, _solve(problem, states), key=lambda p: p.time_s)
        return ReplicatedPlan(better.stages, better.time_s, better.time_s, "exact over joined downsets")
    bound = min(best.time_s, sum(problem.time_s) / problem.num_devices)
    return ReplicatedPlan(best.stages, best.time_s, bound, "exact on linear orders")


def _joined_sets(problem: ReplicatedProblem, upper_s: float, max_states: int) -> list[frozenset[int]]:
    """Return the downsets whose borders no tensor of `upper_s` or more crosses; none where they are too many."""
    graph = nx.DiGraph(problem.edges)
    graph.add_nodes_from(range(len(problem.time_s)))
    heavy = [(v, u) for u, v in problem.edges if 2 * problem.activation_bytes[u] / problem.byte_per_s >= upper_s]
    graph.add_edges_from(heavy)  # who must not be parted, or would wait for each other, is on a common cycle
    parts = [tuple(sorted(c)) for c in nx.strongly_connected_components(graph)]
    parts.sort()
    home = {v: i for i, part in enumerate(parts) for v in part}
    preds = [sorted({home[u] for v in part for u in graph.predecessors(v)} - {i}) for i, part in enumerate(parts)]
    return [frozenset(v for i in s for v in parts[i]) for s in closed_sets(preds, max_states) or ()]


def _prefixes(order: Sequence[int]) -> list[frozenset[int]]:
    return [frozenset(order[:i]) for i in range(len(order) + 1)]


def _solve(problem: ReplicatedProblem, states: Sequence[frozenset[int]]) -> ReplicatedPlan:
    m = problem.num_devices
    compute, weights, border = _sums(problem, states)
    replicas = np.arange(1, m + 1)
    best = np.full((len(states), m + 1), math.inf)
    best[0] = 0.0
    via: dict[tuple[int, int], tuple[int, int]] = {}
    for e in range(1, len(states)):
        for b in range(e):
            if not states[b] < states[e] or (compute[e] - compute[b]) / m >= best[e, m]:
                continue
            sync = 2 * (replicas - 1) * (weights[e] - weights[b]) / problem.byte_per_s
            stage = np.maximum(compute[e] - compute[b], sync) / replicas
            for used in range(1, m + 1):
                value = np.maximum(np.maximum(best[b, used - 1 :: -1][:used], stage[:used]), border[b])
                r = int(value.argmin())
                if value[r] < best[e, used]:
                    best[e, used] = value[r]
                    via[e, used] = (b, r + 1)
    stages, e, used = [], len(states) - 1, m
    while e:
        b, r = via[e, used]
        stages.append((tuple(sorted(states[e] - states[b])), r))
        e, used = b, used - r
    return ReplicatedPlan(tuple(reversed(stages)), float(best[-1, m]), 0.0, "")


def _sums(
    problem: ReplicatedProblem, states: Sequence[frozenset[int]]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Per state: seconds and parameter bytes inside it, and seconds of the border behind it."""
    readers: dict[int, set[int]] = {}
    for u, v in problem.edges:
        readers.setdefault(u, set()).add(v)
    compute = np.array([math.fsum(problem.time_s[v] for v in s) for s in states])
    weights = np.array([math.fsum(problem.parameter_bytes[v] for v in s) for s in states])
    crossing = [
        math.fsum(problem.activation_bytes[u] for u in s if not readers.get(u, set()) <= s) if s else 0.0
        for s in states
    ]
    return compute, weights, 2 * np.array(crossing) / problem.byte_per_s
