"""Inputs and plans of Tarnawski et al., "Piper: Multidimensional Planner for DNN Parallelization" (NeurIPS 2021)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmhet.errors import BadGraph, BadModel
from tvmhet.solve.training import Config, TrainingPlan, TrainingProblem


@dataclass(frozen=True)
class PiperModel:
    """The file's nodes by id, in file order, and its edges (source id, reader id, bytes)."""

    nodes: dict[int, dict[int, list[dict[str, Any]]]]  # id -> tensor degree -> configurations
    edges: list[tuple[int, int, float]]


def read(path: Path) -> PiperModel:
    """Read a file of that format. Raises BadModel."""
    try:
        raw = json.loads(path.read_text())
        nodes = {int(n["id"]): {int(t): cs for t, cs in n["TMPCs"].items() if cs} for n in raw["nodes"]}
        edges = [(int(e["sourceId"]), int(e["destId"]), float(e["communicationCost"])) for e in raw["edges"]]
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise BadModel(f"{path.name} is not a model of this format: {e!r}", "see the format's README") from e
    for u, v, size in edges:
        if u not in nodes or v not in nodes or size < 0:
            raise BadModel(f"{path.name}: edge {u} -> {v} of {size} bytes", "ends must exist, bytes be >= 0")
    return PiperModel(nodes, edges)


def training_problem(
    model: PiperModel, devices: int, memory_bytes: float, minibatch: int, byte_per_s: float
) -> TrainingProblem:
    """The planning problem with nodes renumbered 0.. in file order."""
    index = {i: v for v, i in enumerate(model.nodes)}

    def config(c: dict[str, Any]) -> Config:
        into = tuple((index[int(u)], float(x)) for u, x in sorted(c["syncTimeFw"].items()))
        out = tuple((index[int(w)], float(x)) for w, x in sorted(c["syncTimeBw"].items()))
        time_s, parameters = float(c["timePerSample"]), float(c["parameterSize"])
        return Config(c["id"], time_s, parameters, float(c["memoryUsageA"]), float(c["memoryUsageB"]), into, out)

    return TrainingProblem(
        tuple({t: tuple(config(c) for c in cs) for t, cs in by.items()} for by in model.nodes.values()),
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
            crossing = sum(x + c["syncTimeFw"][str(u)] for u, w, x in model.edges if w == v and u not in inside)
            crossing += sum(x + c["syncTimeBw"][str(w)] for u, w, x in model.edges if u == v and w not in inside)
            reduce = 4 * (d - 1) * c["parameterSize"] / d / minibatch
            seconds += c["timePerSample"] / d + (2 * crossing / d + reduce) / byte_per_s
            memory += c["memoryUsageA"] * in_flight + c["memoryUsageB"]
        if memory > memory_bytes * (1 + 1e-9):
            raise BadGraph(f"a stage needs {memory:.0f} of {memory_bytes:.0f} bytes", "split it or recompute")
        slowest = max(slowest, seconds)
    return slowest
