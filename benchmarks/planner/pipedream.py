"""Layer profiles of Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP 2019).

A line is `node7 -- description -- forward_compute_time=ms, backward_compute_time=ms, activation_size=bytes,
parameter_size=bytes`, perhaps with ` -- stage_id=0` behind it; an indented line is an edge `\tnode7 -- node8`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.planner.fields import LARGEST, text_of
from tvmhet.errors import BadGraph, BadModel
from tvmhet.solve.replicated import ReplicatedPlan, ReplicatedProblem

_FIELD = re.compile(r"(\w+)=(\[[^\]]*\]|[^,]+)")


@dataclass(frozen=True)
class Profile:
    """Nodes by name in file order: (forward ms, backward ms, activation bytes, parameter bytes); edges by name."""

    nodes: dict[str, tuple[float, float, float, float]]
    edges: tuple[tuple[str, str], ...]


def read(path: Path) -> Profile:
    """Read a graph.txt. Raises BadModel with the line that cannot be read."""
    nodes: dict[str, tuple[float, float, float, float]] = {}
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(text_of(path).splitlines(), 1):
        parts = [part.strip() for part in line.split(" -- ")]
        try:
            if not line.strip():
                continue
            if line[0].isspace():
                source, reader = parts
                edges.append((source, reader))
                continue
            f = dict(_FIELD.findall(next((x for x in parts if "forward_compute_time=" in x), "")))
            figures = (
                float(f["forward_compute_time"]),
                float(f["backward_compute_time"]),
                _total(f["activation_size"]),
                _total(f["parameter_size"]),
            )
        except (KeyError, IndexError, ValueError) as e:
            raise BadModel(f"{path.name}:{number}: cannot read {line.strip()[:60]!r} ({e!r})", "see the format") from e
        if not all(0 <= x <= LARGEST for x in figures):
            raise BadModel(f"{path.name}:{number}: {parts[0]} has {figures}", f"give numbers from 0 to {LARGEST:g}")
        if parts[0] in nodes:
            raise BadModel(f"{path.name}:{number}: {parts[0]} has a line already", "give every node its own name")
        nodes[parts[0]] = figures
    for a, b in edges:
        if a not in nodes or b not in nodes:
            raise BadModel(f"{path.name}: edge {a} -- {b} names a node without a line", "add the node")
    if not nodes:
        raise BadGraph(f"{path.name}: the graph has no nodes", "give at least one")
    return Profile(nodes, tuple(edges))


def _total(text: str) -> float:
    """A number, or the sum of a list such as `[8.0; 16.0]` or `[8.0, 16.0]`."""
    return math.fsum(float(x) for x in re.split("[;,]", text.strip("[] ")) if x.strip())


def replicated_problem(profile: Profile, devices: int, byte_per_s: float) -> ReplicatedProblem:
    """The planning problem in seconds; nodes numbered in file order."""
    index = {name: v for v, name in enumerate(profile.nodes)}
    rows = list(profile.nodes.values())
    return ReplicatedProblem(
        tuple((f + b) / 1e3 for f, b, _, _ in rows),
        tuple(p for _, _, _, p in rows),
        tuple(a for _, _, a, _ in rows),
        tuple((index[a], index[b]) for a, b in profile.edges),
        devices,
        byte_per_s,
    )


def plan_of(profile: Profile, plan: ReplicatedPlan) -> dict[str, Any]:
    """The plan as stages of node names and replicas."""
    names = list(profile.nodes)
    return {"stages": [{"nodes": [names[v] for v in nodes], "replicas": r} for nodes, r in plan.stages]}


def stage_time_s(profile: Profile, plan: dict[str, Any], devices: int, byte_per_s: float) -> float:
    """Return the slowest stage or border of a plan in seconds; raises BadGraph. Written apart from the solver."""
    stages = plan["stages"]
    where = {name: i for i, s in enumerate(stages) for name in s["nodes"]}
    if where.keys() != profile.nodes.keys() or sum(len(s["nodes"]) for s in stages) != len(where):
        raise BadGraph("the stages do not hold each node once", "place every node")
    if any(where[a] > where[b] for a, b in profile.edges):
        raise BadGraph("a tensor flows to an earlier stage", "order the stages")
    if sum(s["replicas"] for s in stages) > devices or any(s["replicas"] < 1 for s in stages):
        raise BadGraph(f"more than {devices} devices, or a stage without one", "use fewer")
    times = [0.0]
    for i, s in enumerate(stages):
        m = s["replicas"]
        work = math.fsum(sum(profile.nodes[n][:2]) for n in s["nodes"]) / 1e3
        sync = 2 * (m - 1) * math.fsum(profile.nodes[n][3] for n in s["nodes"]) / byte_per_s
        crossing = {a for a, b in profile.edges if where[a] < i <= where[b]}
        times += [max(work, sync) / m, 2 * math.fsum(profile.nodes[a][2] for a in crossing) / byte_per_s]
    return max(times)
