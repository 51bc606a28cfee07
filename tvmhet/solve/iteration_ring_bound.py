"""A lower bound on interleaved iterations, by what the places of a ring compute and what passes between them.

With X the seconds of one micro-batch over all stages, n micro-batches a replica, c chunks and w a place's load,

    iteration >= X / c + (n - 1 / c) w + update

for every place, so also for their mean with weights v[g] that sum to at most 1 over any ring: a second on group g then
costs at least 1 / c + v[g] (n - 1 / c). A ring's places divide the micro-batches, so there may be fewer than devices.
The weights are the duals of a linear program that deals the nodes to the groups.

Every stage has its overhead, so many chunks cost what they spare of X. And no place can hold the whole model within the
time of a known plan: what large tensors join is on several places, and at least one of them passes, there and back, for
each place after the first, by the best link that it has:

    place 0: v0 v1 | place 3: v2 | place 1: v3 v4 | place 0: v5     3 places: at least 2 tensors pass
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from tvmhet.solve.iteration import IterationProblem, MicroBatch

Floats = NDArray[np.float64]
_SAME = 1e-9
_LEAST_SIZES = 8  # of the tensors that join nodes, tried one after another


@dataclass(frozen=True, slots=True)
class _Rings:
    """Rings of so many replicas and chunks: the most places of each group and in all, and n."""

    places: NDArray[np.int64]
    most: int
    chunks: int
    runs: float

    @property
    def part(self) -> float:
        """1 / c."""
        return 1.0 / self.chunks

    @property
    def later(self) -> float:
        """n - 1 / c."""
        return self.runs - self.part


def ring_bound_s(problem: IterationProblem, option: int, floor_s: Floats, upper_s: float) -> float:
    """Return a lower bound in seconds on every interleaved iteration below `upper_s`; inf if there is none.

    `floor_s` (nodes, groups): no kernel takes less than its nodes together, both passes of one micro-batch. Tensors are
    not split.
    """
    bounds = (_bound_s(problem, option, floor_s, rings, upper_s) for rings in _rings(problem, option))
    return min(bounds, default=math.inf)


def _rings(problem: IterationProblem, option: int) -> list[_Rings]:
    count = problem.num_microbatches(option)
    devices = np.array([max(0, g.num_devices) for g in problem.groups])
    out = []
    for replicas in range(1, int(devices.sum()) // 2 + 1 if problem.replicate_interleaved else 2):
        places = devices // replicas
        fitting = [p for p in range(2, int(places.sum()) + 1) if count % (p * replicas) == 0]
        if fitting:
            chunks = range(2, problem.most_chunks + 1)
            out += [_Rings(places, fitting[-1], c, count / replicas) for c in chunks]
    return out


def _bound_s(problem: IterationProblem, option: int, floor_s: Floats, rings: _Rings, upper_s: float) -> float:
    micro = problem.options[option]
    floor_s = np.where(rings.places > 0, floor_s, np.inf)
    if np.isinf(floor_s).all(axis=1).any():
        return math.inf
    weight = _weights(floor_s, rings)
    work_s = float(_priced(floor_s, rings.part + weight * rings.later).min(axis=1).sum())
    size = sum(w.size_bytes for w in micro.forward.weights if w.nodes)
    rate = min(s for s, places in zip(problem.update_s_per_byte, rings.places, strict=True) if places)
    update_s = rate * size / rings.most
    idle = min(2 * g.stage_overhead_s for g, places in zip(problem.groups, rings.places, strict=True) if places)
    least_s = 2 * idle + idle * rings.chunks * rings.later + update_s  # two places at least, on each so many stages
    load_s = (upper_s - least_s - rings.part * float(floor_s.min(axis=1).sum())) / rings.later  # of a place at most
    passing_s = _passing_s(micro, floor_s, rings, weight, load_s)
    return (work_s + passing_s + least_s) * (1 - _SAME)


def _priced(floor_s: Floats, price: Floats) -> Floats:
    """Priced seconds, inf where a node cannot run."""
    return np.where(np.isfinite(floor_s), np.where(np.isfinite(floor_s), floor_s, 0.0) * price, np.inf)


def _weights(floor_s: Floats, rings: _Rings) -> Floats:
    """Weights of a place of each group, together at most 1 on any ring, for which the nodes' work costs most."""
    rows, times = np.unique(floor_s, axis=0, return_counts=True)
    unit = float((np.where(np.isfinite(rows), rows, np.inf).min(axis=1) * times).sum()) or 1.0
    solver = pywraplp.Solver.CreateSolver("GLOP")
    rest = solver.NumVar(0.0, solver.infinity(), "")
    solver.Objective().SetCoefficient(rest, 1.0)
    limits = [solver.RowConstraint(-solver.infinity(), 0.0, "") for _ in range(len(rings.places) + 1)]
    for row, places in zip(limits, [*rings.places.tolist(), rings.most], strict=True):
        row.SetCoefficient(rest, -float(places))
    for row, num in zip(rows, times, strict=True):
        whole = solver.RowConstraint(1.0, 1.0, "")
        for g in np.flatnonzero(np.isfinite(row)).tolist():
            seconds = float(row[g]) * int(num) / unit
            x = solver.NumVar(0.0, 1.0, "")
            whole.SetCoefficient(x, 1.0)
            solver.Objective().SetCoefficient(x, rings.part * seconds)
            limits[g].SetCoefficient(x, rings.later * seconds)
            limits[-1].SetCoefficient(x, rings.later * seconds)
    solver.Objective().SetMinimization()
    dual = np.zeros(len(limits))
    if solver.Solve() == pywraplp.Solver.OPTIMAL:
        dual = np.array([max(0.0, -row.dual_value()) for row in limits])
    weight = dual[:-1] + dual[-1]
    together = float(_largest(weight, rings, rings.most).sum())
    return weight / together if together > 0 else np.full(len(weight), 1.0 / rings.most)


def _largest(of_group: Floats, rings: _Rings, num: int) -> Floats:
    """The largest values of `num` places, largest first."""
    return np.sort(np.repeat(of_group, rings.places))[::-1][:num]


def _passing_s(micro: MicroBatch, floor_s: Floats, rings: _Rings, weight: Floats, load_s: float) -> float:
    """Seconds of `iteration` that what passes between places costs, where none is loaded for longer than `load_s`."""
    alone = np.where(np.isfinite(floor_s), floor_s, 0.0).sum(axis=0)
    speed = np.where(rings.places > 0, 1.0 / np.maximum(alone, 1e-300), 0.0)
    work = _priced(floor_s, speed).min(axis=1)
    holds = np.cumsum(_largest(speed, rings, rings.most)) * max(0.0, load_s)
    joins = np.sort(np.repeat(_join_s_per_byte(micro, rings, weight), rings.places))
    sizes = _sizes(micro)
    best = 0.0
    for least in np.unique(np.quantile(sizes, np.linspace(0.0, 1.0, _LEAST_SIZES))).tolist() if len(sizes) else ():
        held, moved, all_nodes = _joined(micro, work, sizes, least)
        places = max(int(np.searchsorted(holds, held * (1 - _SAME))) + 1, 2 if all_nodes else 1)
        if places > rings.most:
            return math.inf  # no such plan
        num = min(places - 1, len(moved))
        best = max(best, float(joins[:num][::-1] @ moved[:num]))
    return best


def _sizes(micro: MicroBatch) -> Floats:
    """Bytes of each tensor and of its gradient, which goes back the same way."""
    edges = micro.forward.edges
    return np.array([e.size_bytes * (1.0 if i in micro.no_gradient else 2.0) for i, e in enumerate(edges)])


def _joined(micro: MicroBatch, work: Floats, sizes: Floats, least: float) -> tuple[float, Floats, bool]:
    """The most work of nodes that tensors of `least` bytes or more join; these tensors' bytes, ascending, once for each
    reader; and whether those are all nodes."""
    import networkx as nx  # 0.2 s, only where interleaved plans hold a bound down

    edges = micro.forward.edges
    joined = nx.Graph()
    joined.add_nodes_from(range(len(work)))
    mine = [i for i, e in enumerate(edges) if e.src >= 0 and sizes[i] >= least]
    joined.add_edges_from((edges[i].src, v) for i in mine for v in edges[i].dsts)
    parts = ((float(work[sorted(part)].sum()), part) for part in nx.connected_components(joined))
    held, nodes = max(parts, key=lambda x: x[0])
    moved = np.sort([sizes[i] for i in mine if edges[i].src in nodes for _ in set(edges[i].dsts)])
    return held, moved, len(nodes) == len(work)


def _join_s_per_byte(micro: MicroBatch, rings: _Rings, weight: Floats) -> Floats:
    """The least seconds of `iteration` that a byte costs which passes to or from a place of each group."""
    groups = range(len(rings.places))
    out = np.full(len(rings.places), np.inf)
    for g in groups:
        for h in (h for h in groups if rings.places[g] and rings.places[h] > (g == h)):
            links = (micro.forward.links[g][h], micro.forward.links[h][g])
            per_byte = min(1.0 / x.byte_per_s if x.byte_per_s > 0 else math.inf for x in links)
            loads = 0.0 if micro.forward.overlap_transfers else float(weight[g] + weight[h]) * rings.later
            out[g] = min(out[g], (rings.part + loads) * per_byte)
    return np.where(np.isfinite(out), out, 0.0)
