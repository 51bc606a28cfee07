"""Inputs and layouts of Mei et al., "Helix: Serving Large Language Models over Heterogeneous GPUs and Network via
Max-Flow" (ASPLOS 2025): read the MILP (LP text as Gurobi writes it), write a layout .ini, value layouts by max-flow.

The MILP names its parts: `hold_i_k` (node i holds k layers), `start_i`, `flow_a_b`, `switch_a_b` (the hop a -> b may be
used), with a or b also `source` and `sink`. Its objective is the flow out of the source, in tokens/s.
"""

from __future__ import annotations

import ast
import configparser
import math
import re
from dataclasses import dataclass
from pathlib import Path

import networkx as nx

from benchmarks.planner.fields import LARGEST, text_of
from tvmhet.errors import BadGraph, BadModel, HetError
from tvmhet.solve.layer_problem import LayerProblem
from tvmhet.solve.layers import LayerPlan

_MAX_LAYERS = 10_000  # of a model, and of a node

_AT_MOST = ("end_constraint_", "node_throughput_", "edge_flow_", "edge_disable_")

Row = tuple[dict[str, float], str, float]  # sum of coefficient * variable, sense, right-hand side

_TERM = re.compile(r"([+-])?\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)?\s*([A-Za-z_][A-Za-z_0-9]*)")
_ROW = re.compile(r"^ ([A-Za-z_0-9]+):(.*?)(<=|>=|=)\s*(-?[0-9.eE+-]+)\s*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class HelixModel:
    """The rows of the MILP by name, and what was read off them."""

    rows: dict[str, Row]
    num_layers: int
    rate: dict[int, dict[int, float]]  # node -> layers held -> tokens/s
    capacity: dict[tuple[str, str], float]  # hop -> tokens/s


def read(path: Path) -> HelixModel:
    """Read the LP text. Raises BadModel if it lacks the named rows."""
    text = text_of(path)
    try:
        return _model(path.name, text)
    except HetError:
        raise
    except (ValueError, KeyError, IndexError, StopIteration) as e:
        raise BadModel(
            f"{path.name}: a row cannot be read: {e!r}", "give the MILP as its authors' tool writes it"
        ) from e


def _model(name_of_file: str, text: str) -> HelixModel:
    body = text.split("Subject To", 1)[-1].split("\nBounds", 1)[0].split("\nBinaries", 1)[0]
    rows: dict[str, Row] = {}
    for name, left, sense, right in _ROW.findall(body):
        rows[name] = (_terms(left), sense, float(right))
    if not re.search(r"^End\s*$", text, re.MULTILINE):
        raise BadModel(f"{name_of_file} has no line End", "give the whole MILP; this file may be cut off")
    for name, (_, sense, _) in rows.items():
        if name.startswith(_AT_MOST) and sense != "<=":
            raise BadModel(f"{name_of_file}: row {name} has {sense}", "it needs <=, as its authors' tool writes it")
    rate: dict[int, dict[int, float]] = {}
    capacity: dict[tuple[str, str], float] = {}
    for name, (terms, _, _) in rows.items():
        if name.startswith("node_throughput_constraint_"):
            held = {v.split("_")[2]: -c for v, c in terms.items() if v.startswith("hold_")}
            rate[int(name.rsplit("_", 1)[1])] = {int(k): c for k, c in held.items()}
        elif name.startswith("edge_flow_constr"):
            flow = next(v for v in terms if v.startswith("flow_"))
            bound = next(-c for v, c in terms.items() if v.startswith("switch_"))
            _, a, b = flow.split("_")
            capacity[a, b] = bound
    ends = [right for name, (_, _, right) in rows.items() if name.startswith("end_constraint_")]
    if not rate or not capacity or not ends:
        raise BadModel(f"{name_of_file} is not a layout MILP", "it needs end_, node_throughput_ and edge_flow_ rows")
    unknown = sorted({x for hop in capacity for x in hop if x not in ("source", "sink") and int(x) not in rate})
    if unknown or not all(rate.values()):
        raise BadModel(f"{name_of_file}: node {unknown[:1] or 'rows'} has no rates", "give node_throughput_ rows")
    if (ends[0] != int(ends[0]) and math.isfinite(ends[0])) or max(ends) != min(ends):
        raise BadModel(
            f"{name_of_file}: the end_constraint_ rows give {sorted(set(ends))} layers", "give one whole number"
        )
    if (most := max(ends[0], *(k for held in rate.values() for k in held))) > _MAX_LAYERS:
        raise BadModel(f"{name_of_file}: a node or the model has {most:.0f} layers", f"give at most {_MAX_LAYERS}")
    figures = [*capacity.values(), *(c for held in rate.values() for c in held.values()), *ends]
    if not all(0 <= x <= LARGEST for x in figures) or ends[0] < 1:
        raise BadModel(f"{name_of_file}: a rate or link is negative, or not finite", "mend the row")
    model = HelixModel(rows, int(ends[0]), rate, capacity)
    if free := sorted(hop for hop in capacity if not _rows_of(model, f"switch_{hop[0]}_{hop[1]}")):
        raise BadModel(
            f"{name_of_file}: no edge_disable_ row says when the hop {' -> '.join(free[0])} may be used",
            "give the whole MILP; this file may be cut off",
        )
    return model


def _terms(text: str) -> dict[str, float]:
    out: dict[str, float] = {}
    for sign, number, name in _TERM.findall(text):
        out[name] = out.get(name, 0.0) + (-1.0 if sign == "-" else 1.0) * float(number or 1.0)
    return out


def layer_problem(model: HelixModel) -> LayerProblem:
    """The numbers of the MILP. Nodes are 0.. in the order of the file's numbers."""
    nodes = sorted(model.rate)
    most = max(max(r) for r in model.rate.values())
    name = [str(i) for i in nodes]
    return LayerProblem(
        model.num_layers,
        tuple(tuple(model.rate[i].get(k, 0.0) for k in range(1, most + 1)) for i in nodes),
        tuple(model.capacity.get(("source", a), 0.0) for a in name),
        tuple(model.capacity.get((a, "sink"), 0.0) for a in name),
        tuple(tuple(model.capacity.get((a, b), 0.0) for b in name) for a in name),
        partial=_allows_partial(model),
    )


def _allows_partial(model: HelixModel) -> bool:
    """Does the MILP let a token enter a node in the middle of its layers? Asked of its rows, not of its name."""
    for a, b in model.capacity:
        if "source" in (a, b) or "sink" in (a, b) or 2 not in model.rate[int(b)]:
            continue
        k = min(model.rate[int(a)])
        values = {f"start_{a}": 0.0, f"hold_{a}_{k}": 1.0, f"start_{b}": k - 1.0, f"hold_{b}_2": 1.0}
        return _switch_ok(model, a, b, values)
    return False


def _switch_ok(model: HelixModel, a: str, b: str, values: dict[str, float]) -> bool:
    switch = f"switch_{a}_{b}"
    for terms, sense, right in _rows_of(model, switch):
        left = sum(c * (1.0 if v == switch else values.get(v, 0.0)) for v, c in terms.items())
        if (sense == "<=" and left > right + 1e-6) or (sense == ">=" and left < right - 1e-6):
            return False
    return True


def _rows_of(model: HelixModel, switch: str) -> list[Row]:
    suffix = switch.removeprefix("switch")
    names = (f"edge_disable_constr{suffix}", f"edge_disable_constr1{suffix}", f"edge_disable_constr2{suffix}")
    return [model.rows[n] for n in names if n in model.rows]


def tokens_per_s(model: HelixModel, intervals: dict[int, tuple[int, int]]) -> float:
    """Return the maximum flow of a layout: node -> (first layer, number of layers). Written apart from the solver.

    Raises BadGraph if a node holds a number of layers that the MILP has no rate for, or layers that do not exist.
    """
    values: dict[str, float] = {}
    graph = nx.DiGraph()
    graph.add_nodes_from(["source", "sink"])
    for i, (first, count) in intervals.items():
        if count not in model.rate.get(i, {}) or first < 0 or first + count > model.num_layers:
            raise BadGraph(f"node {i} cannot hold layers {first}..{first + count - 1}", "see its rates")
        values |= {f"start_{i}": float(first), f"hold_{i}_{count}": 1.0}
        graph.add_edge(f"in {i}", f"out {i}", capacity=model.rate[i][count])
    for (a, b), capacity in model.capacity.items():
        used = all(x in ("source", "sink") or int(x) in intervals for x in (a, b))
        if used and _switch_ok(model, a, b, values):
            tail = a if a == "source" else f"out {a}"
            graph.add_edge(tail, b if b == "sink" else f"in {b}", capacity=capacity)
    return float(nx.maximum_flow_value(graph, "source", "sink"))


def layout_text(plan: LayerPlan, model: HelixModel) -> str:
    """The layout in the format of the project's own .ini files (node i is `compute_node_(i + 2)`)."""
    lines = ["[Settings]", "offset=2", "", "[Solution]"]
    for i, interval in zip(sorted(model.rate), plan.intervals, strict=True):
        layers = list(range(interval[0], interval[0] + interval[1])) if interval else []
        lines.append(f"compute_node_{i + 2}={layers}")
    return "\n".join(lines) + "\n"


def read_layout(path: Path) -> dict[int, tuple[int, int]]:
    """Read a layout .ini: node -> (first layer, number of layers); nodes without layers are left out."""
    config = configparser.ConfigParser()
    config.read_string(path.read_text())
    offset = int(config["Settings"]["offset"])
    out: dict[int, tuple[int, int]] = {}
    for key, text in config["Solution"].items():
        layers = ast.literal_eval(text)
        if layers and layers != list(range(layers[0], layers[0] + len(layers))):
            raise BadGraph(f"{key} holds {layers}, which is not an interval", "give consecutive layers")
        if layers:
            out[int(key.rsplit("_", 1)[1]) - offset] = (layers[0], len(layers))
    return out
