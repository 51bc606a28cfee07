"""Inputs and plans of Tarnawski et al., "Piper: Multidimensional Planner for DNN Parallelization" (NeurIPS 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.planner.fields import json_of, number, table, tables, whole
from tvmhet.errors import BadGraph, BadModel
from tvmhet.solve.orders import order_by
from tvmhet.solve.training import Config, TrainingPlan, TrainingProblem

_MAX_DEVICES = 1_000_000  # the search keeps a table of them


@dataclass(frozen=True)
class PiperModel:
    """The file's nodes by id, in file order, and its edges (source id, reader id, bytes)."""

    nodes: dict[int, dict[int, list[dict[str, Any]]]]  # id -> tensor degree -> configurations
    edges: list[tuple[int, int, float]]


def read(path: Path) -> PiperModel:
    """Read a file of that format. Raises BadModel."""
    raw = json_of(path)
    nodes: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for n in tables(raw, "nodes", path.name):
        i = whole(n, "id", path.name)
        if i in nodes:
            raise BadGraph(f"{path.name}: node id {i} occurs twice", "give every node its own id")
        nodes[i] = _configs(n, f"{path.name}, node {i}")
    for i, by_degree in nodes.items():
        for c in (c for cs in by_degree.values() for c in cs):
            for sync in ("syncTimeFw", "syncTimeBw"):
                if unknown := sorted(u for u in c[sync] if not u.isascii() or not u.isdigit() or int(u) not in nodes):
                    raise BadModel(f"{path.name}, node {i}: {sync} names node {unknown[0]}", "add it")
    edges: dict[tuple[int, int], float] = {}
    for e in tables(raw, "edges", path.name):
        where = f"{path.name}, edge {dict(e)}"
        u, v = (whole(e, end, where) for end in ("sourceId", "destId"))
        if u not in nodes or v not in nodes:
            raise BadModel(f"{where} names a node that does not exist", "add it")
        edges[u, v] = edges.get((u, v), 0.0) + number(e, "communicationCost", where)
    before: dict[int, list[int]] = {i: [] for i in nodes}
    for u, v in edges:
        before[v].append(u)
    index = {i: k for k, i in enumerate(nodes)}
    if len(order_by([[index[u] for u in before[i]] for i in nodes], lambda v: v)) < len(nodes):
        raise BadGraph(f"{path.name}: the graph has a cycle", "a cycle cannot be placed; remove it")
    return PiperModel(nodes, [(u, v, size) for (u, v), size in edges.items()])


def _configs(node: Mapping[str, Any], where: str) -> dict[int, list[dict[str, Any]]]:
    """The node's configurations by tensor degree, every field checked."""
    out: dict[int, list[dict[str, Any]]] = {}
    by_degree = table(node, "TMPCs", where)
    for degree in by_degree:
        if not degree.isascii() or not degree.isdigit() or int(degree) < 1:
            raise BadModel(f"{where}: tensor degree {degree!r}", "degrees are whole numbers from 1")
        for c in tables(by_degree, degree, where):
            fields: dict[str, Any] = {
                key: number(c, key, where) for key in ("timePerSample", "parameterSize", "memoryUsageA", "memoryUsageB")
            }
            for sync in ("syncTimeFw", "syncTimeBw"):
                fields[sync] = {u: number(table(c, sync, where), u, where) for u in table(c, sync, where)}
            if "id" not in c or c["id"] in [other["id"] for other in out.get(int(degree), ())]:
                raise BadModel(f"{where}: a configuration has no id of its own: {c.get('id')!r}", "name it")
            out.setdefault(int(degree), []).append({**c, **fields})
    if not out:
        raise BadModel(f"{where}: TMPCs has no configuration", "give at least one for one tensor degree")
    return out


def training_problem(
    model: PiperModel, devices: int, memory_bytes: float, minibatch: int, byte_per_s: float
) -> TrainingProblem:
    """The planning problem with nodes renumbered 0.. in file order."""
    if devices > _MAX_DEVICES:
        raise BadModel(f"{devices} devices", f"give at most {_MAX_DEVICES}")
    index = {i: v for v, i in enumerate(model.nodes)}
    pairs = {(u, v) for u, v, _ in model.edges}

    def config(node: int, c: dict[str, Any]) -> Config:  # what is said of a pair that no tensor joins is never sent
        into = tuple((index[int(u)], x) for u, x in sorted(c["syncTimeFw"].items()) if (int(u), node) in pairs)
        out = tuple((index[int(w)], x) for w, x in sorted(c["syncTimeBw"].items()) if (node, int(w)) in pairs)
        time_s, parameters = float(c["timePerSample"]), float(c["parameterSize"])
        return Config(c["id"], time_s, parameters, float(c["memoryUsageA"]), float(c["memoryUsageB"]), into, out)

    return TrainingProblem(
        tuple({t: tuple(config(i, c) for c in cs) for t, cs in by.items()} for i, by in model.nodes.items()),
        tuple((index[u], index[v], size) for u, v, size in model.edges),
        devices,
        memory_bytes,
        byte_per_s,
        minibatch,
    )


def plan_of(model: PiperModel, problem: TrainingProblem, plan: TrainingPlan) -> dict[str, Any]:
    """The plan in the format of the project's own output."""
    ids = list(model.nodes)
    stages = [
        {
            "nodes": [ids[v] for v in s.nodes],
            "dataParallelDegree": s.data_parallel,
            "tensorParallelDegree": s.tensor_parallel,
            "TMPCids": {
                str(ids[v]): problem.configs[v][s.tensor_parallel][i].name
                for v, i in zip(s.nodes, s.config, strict=True)
            },
        }
        for s in plan.stages
    ]
    return {"stages": stages}


def time_per_sample(
    model: PiperModel, plan: dict[str, Any], devices: int, memory_bytes: float, minibatch: int, byte_per_s: float
) -> float:
    """Return the slowest stage's seconds per micro-batch. Written from the paper, apart from the solver.

    Raises BadGraph with the rule that the plan breaks: cover, order of stages, devices, degrees, memory.
    """
    stages = plan["stages"]
    where = {v: i for i, s in enumerate(stages) for v in s["nodes"]}
    if sum(len(s["nodes"]) for s in stages) != len(model.nodes) or where.keys() != model.nodes.keys():
        raise BadGraph("the stages do not hold each node once", "place every node")
    if any(where[u] > where[v] for u, v, _ in model.edges):
        raise BadGraph("a tensor flows to an earlier stage", "order the stages")
    if sum(s["dataParallelDegree"] * s["tensorParallelDegree"] for s in stages) > devices:
        raise BadGraph(f"more than {devices} devices", "use fewer")
    slowest, degrees = 0.0, 0
    for s in reversed(stages):
        d, t = s["dataParallelDegree"], s["tensorParallelDegree"]
        degrees += d
        if minibatch % d:
            raise BadGraph(f"{d} does not divide {minibatch}", "choose another degree")
        in_flight = math.ceil(degrees / d)
        seconds = memory = 0.0
        inside = set(s["nodes"])
        for v in s["nodes"]:
            c = next(c for c in model.nodes[v][t] if c["id"] == s["TMPCids"][str(v)])
            crossing = sum(
                x + c["syncTimeFw"].get(str(u), 0.0) for u, w, x in model.edges if w == v and u not in inside
            )
            crossing += sum(
                x + c["syncTimeBw"].get(str(w), 0.0) for u, w, x in model.edges if u == v and w not in inside
            )
            reduce = 4 * (d - 1) * c["parameterSize"] / d / minibatch
            seconds += c["timePerSample"] / d + (2 * crossing / d + reduce) / byte_per_s
            memory += c["memoryUsageA"] * in_flight + c["memoryUsageB"]
        if memory > memory_bytes * (1 + 1e-9):
            raise BadGraph(f"a stage needs {memory:.0f} of {memory_bytes:.0f} bytes", "split it or recompute")
        slowest = max(slowest, seconds)
    return slowest
