"""Balancing loads: which device runs each node when one input follows another and only the busiest device counts.

This is the planning model of accelerators that exchange tensors through host memory (Tarnawski et al., NeurIPS 2020):

    load of a device = seconds of its nodes + each tensor it sends, once + each tensor it receives, once

Devices of one type are alike. A placement is contiguous when the devices can be put in an order in which no tensor
flows backwards (over the nodes of `forward`); otherwise any node may run on any device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tvmhet.errors import BadGraph, BadTime, EmptyCluster


@dataclass(frozen=True, slots=True)
class LoadType:
    """A type of device: how many, their memory, and the factor on transfer seconds (0: shares the host's memory)."""

    name: str
    num_devices: int
    memory_bytes: float = math.inf
    transfer_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class LoadProblem:
    """`time_s[v][t]`: seconds of node v on type t (inf: cannot run). `send_s[v]`: seconds to move v's result once.

    `edges` join nodes and form a DAG. Nodes with the same `group` (>= 0) share a device. `forward[v]` says whether
    contiguity asks anything of v.
    """

    time_s: tuple[tuple[float, ...], ...]
    memory_bytes: tuple[float, ...]
    send_s: tuple[float, ...]
    edges: tuple[tuple[int, int], ...]
    types: tuple[LoadType, ...]
    group: tuple[int, ...] = ()
    forward: tuple[bool, ...] = field(default=())

    def __post_init__(self) -> None:
        n = self.num_nodes
        if not any(t.num_devices > 0 for t in self.types):
            raise EmptyCluster("no type has a device", "give at least one device")
        if len(self.memory_bytes) != n or len(self.send_s) != n or (self.group and len(self.group) != n):
            raise BadGraph(
                f"{n} nodes have {len(self.memory_bytes)} sizes and {len(self.send_s)} transfers", "match them"
            )
        for v, times in enumerate(self.time_s):
            if len(times) != len(self.types) or any(math.isnan(t) or t < 0 for t in times):
                raise BadTime(
                    f"node {v} has times {times} for {len(self.types)} types", "one per type, each >= 0 or inf"
                )
            if not min(self.memory_bytes[v], self.send_s[v]) >= 0 or math.isinf(self.send_s[v]):
                raise BadGraph(
                    f"node {v} has {self.memory_bytes[v]} bytes and {self.send_s[v]} s to send",
                    "both are finite and >= 0",
                )
        for u, v in self.edges:
            if not (0 <= u < n and 0 <= v < n):
                raise BadGraph(f"edge {u} -> {v} names a node outside 0..{n - 1}", "remove the edge or add the node")

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return len(self.time_s)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """`devices[d]` holds the nodes of device d, of type `device_type[d]`. Times in the problem's unit.

    `reason` is set when there is no plan: the binding constraint.
    """

    devices: tuple[tuple[int, ...], ...]
    device_type: tuple[int, ...]
    objective: float
    lower_bound: float
    optimal: bool
    solver: str
    reason: str = ""


def device_load(problem: LoadProblem, nodes: Sequence[int], device_type: int) -> float:
    """Return the load of one device that runs `nodes`."""
    mine = set(nodes)
    sent = {u for u, v in problem.edges if (u in mine) != (v in mine)}
    transfer = math.fsum(problem.send_s[u] for u in sent) * problem.types[device_type].transfer_scale
    return math.fsum(problem.time_s[v][device_type] for v in nodes) + transfer


def device_slots(problem: LoadProblem) -> tuple[int, ...]:
    """Return the type of each device, type after type."""
    return tuple(t for t, kind in enumerate(problem.types) for _ in range(max(0, kind.num_devices)))


def fractional_bound(problem: LoadProblem) -> float:
    """Return a lower bound: every device always busy, nodes divisible, transfers free.

    In T seconds, n devices of type t do at most n * T * (the largest ratio of fastest to own time) of the fastest-time
    work; with two types the bound is the exact fractional optimum, else a relaxation of it.
    """
    fastest = [min(times) for times in problem.time_s]
    if any(math.isinf(f) for f in fastest):
        return math.inf
    largest = max(fastest, default=0.0)
    if len(problem.types) == 2 and all(t.num_devices > 0 for t in problem.types):
        return max(largest, _two_types(problem))
    rate = 0.0
    for t, kind in enumerate(problem.types):
        ratios = [f / times[t] for f, times in zip(fastest, problem.time_s, strict=True) if f > 0]
        rate += max(0, kind.num_devices) * max(ratios, default=0.0)
    return max(largest, math.fsum(fastest) / rate if rate else 0.0)


def _two_types(problem: LoadProblem) -> float:
    """The fractional optimum for two types, by their Lagrangian price: max over p of the priced work."""
    na, nb = (t.num_devices for t in problem.types)
    best = 0.0
    ratios = {times[1] / times[0] for times in problem.time_s if times[0] > 0 and math.isfinite(times[1])}
    # The dual is piecewise linear in the share p of type 0; its corners are where a node costs the same on both.
    corners = {1.0, 0.0} | {na * r / (na * r + nb) for r in ratios if math.isfinite(r)}
    for p in sorted(corners):
        a, b = p / na, (1 - p) / nb
        total = math.fsum(
            min(a * t[0] if math.isfinite(t[0]) else math.inf, b * t[1] if math.isfinite(t[1]) else math.inf)
            for t in problem.time_s
        )
        best = max(best, total)
    return best
