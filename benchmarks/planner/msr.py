"""Inputs and placements of Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators"
(NeurIPS 2020): read a graph, write a split, and value splits by the paper's definitions.

"FPGA" stands for any accelerator. `cost` of an edge is the time to move its source's result between an accelerator and
host memory; it is paid once per device and direction. CPUs work in host memory and pay nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.planner.fields import flag, json_of, number, tables, whole
from tvmhet.errors import BadGraph
from tvmhet.solve.loads import LoadPlan, LoadProblem, LoadType
from tvmhet.solve.orders import order_by


@dataclass(frozen=True)
class MsrGraph:
    """One input file, nodes renumbered 0.. in file order; `ids[v]` is the file's id."""

    ids: tuple[int, ...]
    cpu: tuple[float, ...]
    accelerator: tuple[float, ...]  # inf where not supported
    size_bytes: tuple[float, ...]
    backward: tuple[bool, ...]
    color: tuple[int, ...]  # -1: none
    edges: tuple[tuple[int, int], ...]
    cost: tuple[float, ...]  # per node: seconds (in the file's unit) to move its result
    num_accelerators: int
    num_cpus: int
    memory_bytes: float


def read(path: Path) -> MsrGraph:
    """Read a file of that format. Raises BadModel (not such a file) or BadGraph (contradictions, cycles)."""
    raw = json_of(path)
    nodes, edges = tables(raw, "nodes", path.name), tables(raw, "edges", path.name)
    if not nodes:
        raise BadGraph(f"{path.name}: the graph has no nodes", "give at least one")
    ids = tuple(whole(n, "id", f"{path.name}, node {v}", lowest=-(10**9)) for v, n in enumerate(nodes))
    index = {i: v for v, i in enumerate(ids)}
    if len(index) != len(ids):
        raise BadGraph(f"{path.name}: a node id occurs twice", "give every node its own id")
    pairs, cost = _edges(path, edges, index)
    colors = {c: i for i, c in enumerate(dict.fromkeys(str(n["colorClass"]) for n in nodes if _colored(n)))}
    where = [f"{path.name}, node {i}" for i in ids]
    able = [flag(n, "supportedOnFpga", w) for n, w in zip(nodes, where, strict=True)]
    return MsrGraph(
        ids,
        tuple(number(n, "cpuLatency", w) for n, w in zip(nodes, where, strict=True)),
        tuple(number(n, "fpgaLatency", w) if runs else math.inf for n, w, runs in zip(nodes, where, able, strict=True)),
        tuple(number(n, "size", w, default=0.0) for n, w in zip(nodes, where, strict=True)),
        tuple(flag(n, "isBackwardNode", w, default=False) for n, w in zip(nodes, where, strict=True)),
        tuple(colors[str(n["colorClass"])] if _colored(n) else -1 for n in nodes),
        pairs,
        tuple(cost.get(v, 0.0) for v in range(len(ids))),
        whole(raw, "maxFPGAs", path.name),
        whole(raw, "maxCPUs", path.name),
        number(raw, "maxSizePerFPGA", path.name),
    )


def _colored(node: Mapping[str, Any]) -> bool:
    return node.get("colorClass") is not None


def _edges(
    path: Path, edges: list[Mapping[str, Any]], index: dict[int, int]
) -> tuple[tuple[tuple[int, int], ...], dict[int, float]]:
    pairs: dict[tuple[int, int], None] = {}
    cost: dict[int, float] = {}
    for e in edges:
        where = f"{path.name}, edge {dict(e)}"
        ends = []
        for end in ("sourceId", "destId"):
            node = whole(e, end, where, lowest=-(10**9))
            if node not in index:
                raise BadGraph(f"{where} names node {node}, which does not exist", "add it")
            ends.append(index[node])
        u, v = ends
        cost[u] = max(cost.get(u, 0.0), number(e, "cost", where))
        pairs[u, v] = None
    before: list[list[int]] = [[] for _ in index]
    for u, v in pairs:
        before[v].append(u)
    if len(order_by(before, lambda v: v)) < len(index):
        raise BadGraph(f"{path.name}: the graph has a cycle", "a cycle cannot be placed; remove it")
    return tuple(pairs), cost


def load_problem(graph: MsrGraph) -> LoadProblem:
    """The throughput problem: type 0 are the accelerators, type 1 the CPU cores."""
    return LoadProblem(
        tuple(zip(graph.accelerator, graph.cpu, strict=True)),
        graph.size_bytes,
        graph.cost,
        graph.edges,
        (
            LoadType("accelerator", graph.num_accelerators, graph.memory_bytes, 1.0),
            LoadType("cpu", graph.num_cpus, math.inf, 0.0),
        ),
        graph.color,
        tuple(not b for b in graph.backward),
    )


def split_of(graph: MsrGraph, plan: LoadPlan) -> dict[str, Any]:
    """The placement in the format of the project's own solution files."""
    machines: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for nodes, kind in zip(plan.devices, plan.device_type, strict=True):
        machines[kind].append({"nodes": sorted(graph.ids[v] for v in nodes)})
    return {"fpgas": machines[0], "cpus": machines[1]}


def throughput(graph: MsrGraph, split: dict[str, Any], *, contiguous: bool) -> float:
    """Return the largest load of a split; raises BadGraph with the broken rule. Apart from the solver."""
    index = {i: v for v, i in enumerate(graph.ids)}
    machines = [("fpga", [index[i] for i in m["nodes"]]) for m in split["fpgas"]]
    machines += [("cpu", [index[i] for i in m["nodes"]]) for m in split["cpus"]]
    where = _checked_cover(graph, machines)
    loads = []
    for kind, nodes in machines:
        inside = set(nodes)
        if kind == "cpu":
            loads.append(math.fsum(graph.cpu[v] for v in nodes))
            continue
        if sum(graph.size_bytes[v] for v in nodes) > graph.memory_bytes:
            raise BadGraph("an accelerator holds more than its memory", "move nodes")
        moved = {u for u, v in graph.edges if (u in inside) ^ (v in inside)}
        loads.append(math.fsum(graph.accelerator[v] for v in nodes) + math.fsum(graph.cost[u] for u in moved))
    if contiguous:
        for m, (_, nodes) in enumerate(machines):
            if not _convex(graph, {v for v in nodes if not graph.backward[v]}):
                raise BadGraph(f"device {m} is not contiguous", "a path leaves it and comes back")
    for u, v in ((u, v) for c in _classes(graph) for u, v in pairwise(c)):
        if where[u] != where[v]:
            raise BadGraph(f"nodes {graph.ids[u]} and {graph.ids[v]} share a colour but not a device", "join them")
    return max(loads, default=0.0)


def _classes(graph: MsrGraph) -> list[list[int]]:
    out: dict[int, list[int]] = {}
    for v, c in enumerate(graph.color):
        if c >= 0:
            out.setdefault(c, []).append(v)
    return list(out.values())


def _checked_cover(graph: MsrGraph, machines: list[tuple[str, list[int]]]) -> dict[int, int]:
    where: dict[int, int] = {}
    for m, (kind, nodes) in enumerate(machines):
        for v in nodes:
            if v in where:
                raise BadGraph(f"node {graph.ids[v]} is on two devices", "a node has one device")
            if kind == "fpga" and math.isinf(graph.accelerator[v]):
                raise BadGraph(f"node {graph.ids[v]} cannot run on an accelerator", "move it to a CPU")
            where[v] = m
    if len(where) != len(graph.ids):
        raise BadGraph(f"{len(graph.ids) - len(where)} nodes have no device", "place every node")
    for kind, limit in (("fpga", graph.num_accelerators), ("cpu", graph.num_cpus)):
        if sum(k == kind for k, _ in machines) > limit:
            raise BadGraph(f"more than {limit} devices of kind {kind}", "use fewer")
    return where


def _convex(graph: MsrGraph, inside: set[int]) -> bool:
    """Does no path of forward nodes leave `inside` and come back?"""
    readers: dict[int, list[int]] = {}
    for u, v in graph.edges:
        if not graph.backward[u] and not graph.backward[v]:
            readers.setdefault(u, []).append(v)
    todo = [v for u in inside for v in readers.get(u, ()) if v not in inside]
    seen = set(todo)
    while todo:
        for v in readers.get(todo.pop(), ()):
            if v in inside:
                return False
            if v not in seen:
                seen.add(v)
                todo.append(v)
    return True


def latency(graph: MsrGraph, split: dict[str, Any]) -> float:
    """Return the makespan of one input under a split, by the paper's definition. Written apart from the solver.

    CPU cores are unlimited. Raises BadGraph with the broken rule, such as calls that wait for each other.
    """
    index = {i: v for v, i in enumerate(graph.ids)}
    machines = [("fpga", [index[i] for i in m["nodes"]]) for m in split["fpgas"]]
    on_host = [index[i] for m in split["cpus"] for i in m["nodes"]]
    where = _checked_cover(graph, [*machines, *([("cpu", on_host)] if on_host else [])])
    task = [where[v] if where[v] < len(machines) else len(machines) + v for v in range(len(graph.ids))]
    before: dict[int, set[int]] = {t: set() for t in task}
    length: dict[int, float] = {t: 0.0 for t in task}
    for t, (_, nodes) in enumerate(machines):
        inside = set(nodes)
        if sum(graph.size_bytes[v] for v in nodes) > graph.memory_bytes:
            raise BadGraph(f"accelerator {t} holds more than its memory", "move nodes")
        moved = {u for u, v in graph.edges if (u in inside) ^ (v in inside)}
        if nodes:
            length[t] = math.fsum(graph.accelerator[v] for v in nodes) + math.fsum(graph.cost[u] for u in moved)
    for v in on_host:
        length[task[v]] = graph.cpu[v]
    for u, v in graph.edges:
        if task[u] != task[v]:
            before[task[v]].add(task[u])
    for u, v in ((u, v) for c in _classes(graph) for u, v in pairwise(c)):
        if (where[u], where[v]) != (where[v], where[u]):
            raise BadGraph(f"nodes {graph.ids[u]} and {graph.ids[v]} share a colour but not a device", "join them")
    finish: dict[int, float] = {}
    while len(finish) < len(before):
        ready = [t for t, p in before.items() if t not in finish and p <= finish.keys()]
        if not ready:
            raise BadGraph("calls of accelerators wait for each other", "make every accelerator's nodes contiguous")
        for t in ready:
            finish[t] = length[t] + max((finish[p] for p in before[t]), default=0.0)
    return max(finish.values(), default=0.0)
