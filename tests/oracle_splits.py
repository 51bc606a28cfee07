"""Exhaustive search where kernels may be split over several devices of a group. Knows nothing of teams as groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace

from tests.oracle import least_memory, partitions, staged_covers, value, virtual_value


def trades(problem, splits, latency: bool = False) -> Iterator[tuple[float, float]]:
    """Every plan's (seconds, USD per hour); seconds of one input, or between two results."""
    modes = [(g, 1, None) for g in range(len(problem.groups))] + [(s.group, s.degree, s.forward_s) for s in splits]
    view = _by_mode(problem, modes)
    for stages, nodes in staged_covers(problem, sum(g.num_devices for g in problem.groups)):
        may = [
            [m for m in range(len(modes)) if _fits(problem, view, modes[m], m, s, vs)]
            for s, vs in zip(stages, nodes, strict=True)
        ]
        for chosen in itertools.product(*may):
            for replicas in _replicas(problem, [modes[m] for m in chosen], latency):
                rent = sum(
                    r * modes[m][1] * problem.groups[modes[m][0]].usd_per_h
                    for r, m in zip(replicas, chosen, strict=True)
                )
                yield value(view, stages, chosen, replicas, latency), rent


def best_split(problem, splits, latency: bool = False) -> float:
    """The least seconds of any plan; inf if there is none."""
    return min((s for s, _ in trades(problem, splits, latency)), default=math.inf)


def _by_mode(problem, modes):
    """The problem as the closed forms of oracle.py read it, with a mode where they say group."""
    return SimpleNamespace(
        edges=problem.edges,
        overlap_transfers=problem.overlap_transfers,
        kernels=[
            SimpleNamespace(nodes=k.nodes, time_s=[k.time_s[g] if times is None else times[i] for g, _, times in modes])
            for i, k in enumerate(problem.kernels)
        ],
        groups=[problem.groups[g] for g, _, _ in modes],
        links=[[problem.links[a][b] for b, _, _ in modes] for a, _, _ in modes],
        host_links=[problem.host_links[g] for g, _, _ in modes],
        wires=[
            SimpleNamespace(
                byte_per_s=w.byte_per_s,
                ways={
                    (a, b)
                    for a in range(-1, len(modes))
                    for b in range(-1, len(modes))
                    if (modes[a][0] if a >= 0 else -1, modes[b][0] if b >= 0 else -1) in w.ways
                },
            )
            for w in problem.wires
        ],
    )


def _fits(problem, view, mode, m, stage, nodes) -> bool:
    group, degree, _ = mode
    if any(math.isinf(view.kernels[k].time_s[m]) for k in stage):
        return False
    if any(v in problem.pins and group not in problem.pins[v] for v in nodes):
        return False
    weights = sum(w.size_bytes for w in problem.weights if set(w.nodes) & set(nodes) and not w.is_whole)
    return least_memory(problem, stage) - weights + weights / degree <= problem.groups[group].memory_bytes


def _replicas(problem, modes, latency: bool) -> Iterator[tuple[int, ...]]:
    """Every number of replicas of each stage for which there are devices."""
    most = [1 if latency else problem.groups[g].num_devices // d for g, d, _ in modes]
    for replicas in itertools.product(*(range(1, m + 1) for m in most)):
        used = [0] * len(problem.groups)
        for (g, d, _), r in zip(modes, replicas, strict=True):
            used[g] += d * r
        if all(u <= group.num_devices for u, group in zip(used, problem.groups, strict=True)):
            yield replicas


def best_virtual_split(problem, splits) -> float:
    """The least period where devices, or teams of one degree, may run several stages in turn; inf if there is none."""
    modes = [(g, 1, None) for g in range(len(problem.groups))] + [(s.group, s.degree, s.forward_s) for s in splits]
    view = _by_mode(problem, modes)
    best = math.inf
    for stages, nodes in staged_covers(problem):
        for rows in partitions(tuple(range(len(stages)))):
            may = [
                [m for m in range(len(modes)) if _row_fits(problem, view, modes[m], m, row, stages, nodes)]
                for row in rows
            ]
            for chosen in itertools.product(*may):
                of = {i: m for m, row in zip(chosen, rows, strict=True) for i in row}
                groups = [of[i] for i in range(len(stages))]
                for replicas in _replicas(problem, [modes[m] for m in chosen], False):
                    best = min(best, virtual_value(view, stages, groups, rows, replicas))
    return best


def _row_fits(problem, view, mode, m, row, stages, nodes) -> bool:
    """Does each stage of `row` run in the mode, and does a device hold all of them?"""
    if not all(_fits(problem, view, mode, m, stages[i], nodes[i]) for i in row):
        return False
    held = 0.0
    for i in row:
        weights = sum(w.size_bytes for w in problem.weights if set(w.nodes) & set(nodes[i]) and not w.is_whole)
        held += least_memory(problem, stages[i]) - weights + weights / mode[1]
    return held <= problem.groups[mode[0]].memory_bytes
