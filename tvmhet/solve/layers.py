"""Layers on the nodes of an uneven cluster, for the most tokens per second: each node holds an interval of layers.

The value of a layout is a maximum flow (Mei et al., "Helix", ASPLOS 2025): through node i at most `rate[i][k]` when it
holds k layers, over links with capacities, from nodes that hold the first layer to nodes that hold the last.

    coverage, regions ──► aligned stages at the best reachable target ──► annealing on the real links ──► cover bound
    (bounds)                                                                 └─◄── again, longer, where it is open
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmhet._passes import passes_func
from tvmhet.solve.layer_cover import flow_bound
from tvmhet.solve.layer_problem import LayerProblem
from tvmhet.solve.layer_regions import linked, part, region_bound
from tvmhet.solve.pack import as_tensor

_PROVED = 1e-6  # a gap up to this is called optimal


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """`intervals[i]` is (first layer, number of layers) of node i, or None if it is not used."""

    intervals: tuple[tuple[int, int] | None, ...]
    tokens_per_s: float
    upper_bound: float
    solver: str

    @property
    def optimal(self) -> bool:
        """Does the bound prove that no layout is better?"""
        return self.tokens_per_s >= self.upper_bound * (1 - _PROVED)


def coverage_bound(problem: LayerProblem) -> float:
    """Return an upper bound on the flow F, from: every layer is passed by F, and no node passes more than F.

    A node that holds k layers carries at most k * min(rate(k), F) layer-tokens/s, and num_layers * F are needed.
    """
    high = min(sum(problem.from_source), sum(problem.to_sink), sum(max(r, default=0.0) for r in problem.rate))
    low = 0.0
    for _ in range(100):
        middle = (low + high) / 2
        carried = sum(max((k * min(r, middle) for k, r in enumerate(rates, 1)), default=0.0) for rates in problem.rate)
        low, high = (middle, high) if carried >= problem.num_layers * middle else (low, middle)
    return high


def place_layers(problem: LayerProblem, *, steps: int = 20_000, rounds: int = 4) -> LayerPlan:
    """Return the best layout found with an upper bound.

    `steps` moves of annealing in each of `rounds`, for 3 seeds; where the bound stays open, eight times as many moves
    for 4 more.
    """
    arrays = _arrays(problem)
    start = _aligned(problem, coverage_bound(problem))
    served = linked(problem)
    by_regions, regions = region_bound(served, coverage_bound)
    bound = min(coverage_bound(served), by_regions)
    if bound == by_regions:
        bound = min(bound, region_bound(served, _covered)[0])
    best, value, name = start, _value(problem, arrays, start, 0, 0, 0), "aligned stages"
    if regions and bound < coverage_bound(problem):
        apart = _apart(problem, regions)
        if (found := _value(problem, arrays, apart, 0, 0, 0)) > value:
            best, value, name, start = apart, found, "regions", apart
    for moves, seeds in ((steps, range(3)), (8 * steps, range(3, 7))):
        for s in seeds:
            if value >= bound * (1 - _PROVED):
                break
            layout = [a.copy() for a in (start if s % 2 else best)]
            found = _value(problem, arrays, layout, moves, rounds, s)
            if found > value * (1 + 1e-9):
                best, value, name = layout, found, "annealing"
        bound = max(value, flow_bound(served.rate, problem.num_layers, value, max(bound, value)))
    intervals = tuple((int(a), int(k)) if k else None for a, k in zip(*best, strict=True))
    return LayerPlan(intervals, value, bound, name)


def _covered(problem: LayerProblem) -> float:
    """`coverage_bound`, and where it is open the bound by shares."""
    most = coverage_bound(problem)
    return flow_bound(problem.rate, problem.num_layers, most / 2, most) if most > 0 else 0.0


def _apart(problem: LayerProblem, regions: Sequence[Sequence[int]]) -> list[NDArray[np.int32]]:
    """Return the layout in which every region that can holds all layers by itself."""
    start, size = np.zeros(len(problem.rate), np.int32), np.zeros(len(problem.rate), np.int32)
    for r in regions:
        alone = part(problem, r)
        start[list(r)], size[list(r)] = _aligned(alone, coverage_bound(alone))
    return [start, size]


def _arrays(problem: LayerProblem) -> list[NDArray[np.float64]]:
    most = max(len(r) for r in problem.rate)
    rate = np.zeros((len(problem.rate), most + 1))
    for i, row in enumerate(problem.rate):
        rate[i, 1 : len(row) + 1] = row
    links = (problem.from_source, problem.to_sink, problem.link)
    return [rate, *(np.array(x, np.float64) for x in links)]


def _value(
    problem: LayerProblem,
    arrays: Sequence[NDArray[np.float64]],
    layout: Sequence[NDArray[np.int32]],
    steps: int,
    rounds: int,
    seed: int,
) -> float:
    """Anneal `layout` in place (not at all with 0 rounds) and return its flow."""
    tensors = [as_tensor(a) for a in arrays]
    start, size = (as_tensor(a) for a in layout)
    flow = passes_func("tvmhet.LayerFlow")(
        tensors, problem.num_layers, problem.partial, start, size, steps, rounds, seed
    )
    return float(flow)


def _aligned(problem: LayerProblem, bound: float) -> list[NDArray[np.int32]]:
    """Return the aligned layout of the largest target that stages can reach when links are ample."""
    kinds: dict[tuple[float, ...], list[int]] = {}
    for i, row in enumerate(problem.rate):
        kinds.setdefault(row, []).append(i)
    most = max(len(r) for r in problem.rate)
    rate = np.zeros((len(kinds), most + 1))
    for t, row in enumerate(kinds):
        rate[t, 1 : len(row) + 1] = row
    count = np.array([len(v) for v in kinds.values()], np.int64)
    targets = _targets(rate, count, bound)
    best: list[int] = []
    low, high = 0, len(targets)  # targets[low - 1] is reachable, targets[high] is not
    while low < high:
        middle = (low + high) // 2
        flat = passes_func("tvmhet.LayerStages")(
            as_tensor(rate), as_tensor(count), problem.num_layers, float(targets[middle]), 96
        )
        if len(flat):
            best, low = [int(x) for x in flat], middle + 1
        else:
            high = middle
    start, size = np.zeros(len(problem.rate), np.int32), np.zeros(len(problem.rate), np.int32)
    free = [list(v) for v in kinds.values()]
    at = 0
    for s in range(0, len(best), len(kinds) + 1):
        for t, n in enumerate(best[s + 1 : s + 1 + len(kinds)]):
            for _ in range(n):
                node = free[t].pop(0)
                start[node], size[node] = at, best[s]
        at += best[s]
    _use_spare(problem, start, size)
    return [start, size]


def _use_spare(problem: LayerProblem, start: NDArray[np.int32], size: NDArray[np.int32]) -> None:
    """Let every idle node hold an interval that others hold too, where they are slowest: no flow gets smaller."""
    held = sorted({(int(a), int(k)) for a, k in zip(start, size, strict=True) if k})
    for i in np.flatnonzero(size == 0).tolist():
        able = [k for k, r in enumerate(problem.rate[i], 1) if r > 0 and k <= problem.num_layers]
        total = {
            (a, k): sum(problem.rate[j][k - 1] for j in range(len(size)) if (start[j], size[j]) == (a, k))
            for a, k in held
            if k in able
        }
        if able:
            start[i], size[i] = min(total, key=lambda x: (total[x], x)) if total else (0, able[0])


def _targets(rate: NDArray[np.float64], count: NDArray[np.int64], bound: float) -> NDArray[np.float64]:
    """Return, ascending, the rates that a stage can have: sums over its nodes; thinned to a few thousand."""
    sums = {0.0}
    for k in range(1, rate.shape[1]):
        here = {0.0}
        for r, n in zip(rate[:, k], count, strict=True):
            if r > 0:
                here |= {x + m * r for x in here for m in range(1, int(n) + 1) if x + m * r <= bound * (1 + 1e-9)}
            if len(here) > 20_000:
                here = set(sorted(here)[:: len(here) // 10_000])
        sums |= here
    out = np.unique(np.array(sorted(sums)))[1:]
    return out[:: max(1, len(out) // 50_000)]
