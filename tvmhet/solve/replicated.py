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
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from tvmhet.errors import BadGraph, BadTime
from tvmhet.solve.orders import closed_sets, linear_orders, order_by

_CLOSE = 1e-9  # bisected to this share of the bottleneck; then plans are tried one after another


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
        if any(not 0 <= b < math.inf for b in (*self.parameter_bytes, *self.activation_bytes)):
            raise BadGraph("a node's bytes are negative, infinite or NaN", "bytes are finite and >= 0")
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
    best: ReplicatedPlan | None = None
    if states := closed_sets(preds, max_states):
        best = _best_chain(problem, states)
        assert best is not None  # one stage on one device is a plan
        return replace(best, solver="exact over all downsets")
    for order in linear_orders(preds):
        best = _best_chain(problem, _prefixes(order), best.time_s if best else math.inf, nested=True) or best
    assert best is not None
    if states := _joined_sets(problem, best.time_s, max_states):
        best = _best_chain(problem, states, best.time_s) or best
        return replace(best, lower_bound_s=best.time_s, solver="exact over joined downsets")
    bound = min(best.time_s, sum(problem.time_s) / problem.num_devices)
    return replace(best, lower_bound_s=bound, solver="exact on linear orders")


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


def _best_chain(
    problem: ReplicatedProblem, states: Sequence[frozenset[int]], upper_s: float = math.inf, *, nested: bool = False
) -> ReplicatedPlan | None:
    """Return the best plan below `upper_s` whose borders are `states`, or None; its bound is its own time.

    With `nested`, each state is known to hold the one before it. For one bottleneck the least number of devices is
    a shortest path; the bottleneck is bisected, and ends when nothing is better than the plan by a last digit.
    """
    graph = _StateGraph.of(problem, states, nested)
    best: list[tuple[int, int, int]] = []
    low, goal = 0.0, upper_s
    while goal > low:
        below = math.nextafter(goal, 0.0)
        aim = below if not best or goal - low <= _CLOSE * goal else (low + goal) / 2
        stages = graph.fewest_devices(aim)
        if sum(r for _, _, r in stages) > problem.num_devices or not stages:
            if aim == below:
                break
            low = aim
            continue
        best, goal = stages, graph.time_s(stages)
    if not best:
        return None
    parts = tuple((tuple(sorted(states[e] - states[b])), r) for b, e, r in best)
    return ReplicatedPlan(parts, goal, goal, "")


@dataclass(frozen=True, slots=True)
class _StateGraph:
    """Per state: seconds and synchronising seconds of all its nodes, and seconds of the border behind it.

    `inside[b, e]`: does state e hold state b? None where each holds all before it.
    """

    compute_s: NDArray[np.float64]
    sync_s: NDArray[np.float64]
    border_s: NDArray[np.float64]
    inside: NDArray[np.bool_] | None

    @staticmethod
    def of(problem: ReplicatedProblem, states: Sequence[frozenset[int]], nested: bool) -> _StateGraph:
        member = np.zeros((len(states), len(problem.time_s)), bool)
        for s, nodes in enumerate(states):
            member[s, list(nodes)] = True
        readers: dict[int, set[int]] = {}
        for u, v in problem.edges:
            readers.setdefault(u, set()).add(v)
        crossing = np.zeros(len(states))
        for u, vs in sorted(readers.items()):
            crossing[member[:, u] & ~member[:, sorted(vs)].all(axis=1)] += problem.activation_bytes[u]
        inside = None
        if not nested:
            held = member.astype(np.float32)
            inside = held @ held.T == held.sum(axis=1)[:, None]
        return _StateGraph(
            (member * np.array(problem.time_s)).sum(axis=1),
            (member * np.array(problem.parameter_bytes)).sum(axis=1) * 2 / problem.byte_per_s,
            2 * crossing / problem.byte_per_s,
            inside,
        )

    def fewest_devices(self, most_s: float) -> list[tuple[int, int, int]]:
        """Return the stages (first state, last state, replicas) of the plan within `most_s`; empty if there is none."""
        count = np.full(len(self.compute_s), math.inf)
        count[0] = 0
        via = [(0, 0)] * len(count)
        open_border = self.border_s <= most_s
        for e in range(1, len(count)):
            use = open_border[:e] if self.inside is None else open_border[:e] & self.inside[:e, e]
            begins = np.flatnonzero(use & np.isfinite(count[:e]))
            compute = np.maximum(self.compute_s[e] - self.compute_s[begins], 0.0)
            replicas = np.maximum(np.ceil(compute / most_s), 1)
            replicas += compute / replicas > most_s  # rounding
            fits = self._stage_s(begins, e, replicas) <= most_s
            total = np.where(fits, count[begins] + replicas, math.inf)
            if len(total) and math.isfinite(total.min()):
                b = int(total.argmin())
                count[e], via[e] = total[b], (int(begins[b]), int(replicas[b]))
        stages: list[tuple[int, int, int]] = []
        e = len(count) - 1
        while e and math.isfinite(count[e]):
            b, r = via[e]
            stages.append((b, e, r))
            e = b
        return stages[::-1]

    def _stage_s(self, begin: Any, end: Any, replicas: Any) -> Any:
        sync = (replicas - 1) * (self.sync_s[end] - self.sync_s[begin])
        return np.maximum(np.maximum(self.compute_s[end] - self.compute_s[begin], 0.0), sync) / replicas

    def time_s(self, stages: Sequence[tuple[int, int, int]]) -> float:
        """Return the slowest stage or border."""
        return max(max(float(self._stage_s(b, e, r)), float(self.border_s[b])) for b, e, r in stages)
