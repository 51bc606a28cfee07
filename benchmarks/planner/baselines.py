"""Other planners, written from their descriptions, on load problems: what a value is worth.

- one device: everything on the best single device.
- equal split: a topological order cut into pieces of equal work, one per accelerator.
- greedy by memory: fill one accelerator after the other to its fair share of the bytes.
- PipeDream's DP: intervals of one topological order (Narayanan et al., SOSP 2019), loads with transfers.
- METIS-style: recursive bisection by Kernighan-Lin on the transfer graph, balanced by time (Karypis & Kumar, 1998);
  it knows no order, so often its parts are not contiguous and have no value.
- local search: random restarts, best single moves (Tarnawski et al. use it as a baseline too).
- best homogeneous: the best of PipeDream's DP on the devices of one type.

For the latency of one input see baselines_latency.py, for general problems baselines_general.py.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from tvmhet.solve.contract import Blocks, contract
from tvmhet.solve.load_start import interval_plan
from tvmhet.solve.loads import LoadProblem, device_load
from tvmhet.solve.orders import order_by


def load_baselines(problem: LoadProblem) -> dict[str, float]:
    """Return each baseline's largest load; inf where it finds no placement that fits."""
    blocks = contract(problem, contiguous=True)
    order = order_by(blocks.preds, lambda v: v)
    kind = next(t for t, k in enumerate(problem.types) if k.num_devices > 0)  # the accelerators, where there are any
    slots = (kind,) * problem.types[kind].num_devices
    count = len(slots)
    seconds = np.where(np.isfinite(blocks.time_s[:, kind]), blocks.time_s[:, kind], 0.0)  # what cannot run: no share
    work = [float(seconds[b]) for b in order]
    memory = [float(blocks.memory_bytes[b]) for b in order]
    return {
        "one device": min(
            _value(problem, blocks, {b: 0 for b in order}, (t,)) for t, k in enumerate(problem.types) if k.num_devices
        ),
        "equal split": _value(problem, blocks, _shares(order, work, count), slots),
        "greedy by memory": _value(problem, blocks, _shares(order, memory, count), slots),
        "PipeDream's DP": interval_plan(problem, blocks, order),
        "METIS-style": _in_order(problem, blocks, _bisect(blocks, list(order), count, seconds), slots),
        "local search": _local_search(problem, blocks, order, slots, seconds),
        "best homogeneous": min(interval_plan(_only(problem, t), blocks, order) for t in range(len(problem.types))),
    }


def _only(problem: LoadProblem, kind: int) -> LoadProblem:
    types = tuple(x if t == kind else replace(x, num_devices=0) for t, x in enumerate(problem.types))
    return problem if problem.types[kind].num_devices <= 0 else replace(problem, types=types)


def _value(problem: LoadProblem, blocks: Blocks, home: dict[int, int], slots: tuple[int, ...]) -> float:
    worst = 0.0
    for d, t in enumerate(slots):
        nodes = [v for b, where in home.items() if where == d for v in blocks.nodes[b]]
        if sum(problem.memory_bytes[v] for v in nodes) > problem.types[t].memory_bytes:
            return math.inf
        worst = max(worst, device_load(problem, nodes, t))
    return worst


def _in_order(problem: LoadProblem, blocks: Blocks, home: dict[int, int], slots: tuple[int, ...]) -> float:
    """The value where the devices can be put in an order; inf where a path leaves one and comes back."""
    links = nx.DiGraph(
        (home[u], home[v]) for v, before in enumerate(blocks.preds) for u in before if home[u] != home[v]
    )
    return _value(problem, blocks, home, slots) if nx.is_directed_acyclic_graph(links) else math.inf


def _shares(order: tuple[int, ...], amount: list[float], count: int) -> dict[int, int]:
    total, before, home = max(math.fsum(amount), 1e-300), 0.0, {}
    for b, a in zip(order, amount, strict=True):
        home[b] = min(count - 1, int((before + a / 2) / total * count))
        before += a
    return home


def _bisect(
    blocks: Blocks, members: list[int], parts: int, seconds: NDArray[np.float64], first: int = 0
) -> dict[int, int]:
    """Split `members` into `parts` by recursive Kernighan-Lin bisection."""
    if parts == 1 or len(members) < 2:
        return dict.fromkeys(members, first)
    inside = set(members)
    graph = nx.Graph()
    graph.add_nodes_from(members)
    for src, readers, cost in zip(blocks.net_src, blocks.net_readers, blocks.net_cost_s, strict=True):
        for r in readers:
            if src in inside and r in inside:
                known = graph.get_edge_data(src, r, {"weight": 0.0})["weight"]
                graph.add_edge(src, r, weight=known + float(cost) / len(readers))
    half = parts // 2
    start = _shares(tuple(members), [float(seconds[b]) for b in members], parts)
    left = {b for b in members if start[b] < half}
    if left and left != inside:
        left, _ = nx.algorithms.community.kernighan_lin_bisection(
            graph, (left, inside - left), max_iter=5, seed=0, weight="weight"
        )
    one = _bisect(blocks, [b for b in members if b in left], half, seconds, first)
    return one | _bisect(blocks, [b for b in members if b not in left], parts - half, seconds, first + half)


def _local_search(
    problem: LoadProblem,
    blocks: Blocks,
    order: tuple[int, ...],
    slots: tuple[int, ...],
    seconds: NDArray[np.float64],
    restarts: int = 5,
) -> float:
    """Random cuts of the order; then move cut points while that helps. Keeps stages contiguous."""
    rng = random.Random(0)
    work = np.concatenate([[0.0], np.cumsum([seconds[b] for b in order])])

    def value(cuts: list[int]) -> float:
        home = {b: d for d, (i, j) in enumerate(pairwise([0, *cuts, len(order)])) for b in order[i:j]}
        return _value(problem, blocks, home, slots)

    best = math.inf
    for _ in range(restarts):
        shares = sorted(rng.random() for _ in range(len(slots) - 1))
        cuts = [int(np.searchsorted(work, s * work[-1])) for s in shares]
        now, better = value(cuts), True
        while better:
            better = False
            for c in range(len(cuts)):
                for step in (-16, -4, -1, 1, 4, 16):
                    tried = sorted([*cuts[:c], min(len(order), max(0, cuts[c] + step)), *cuts[c + 1 :]])
                    if (new := value(tried)) < now:
                        cuts, now, better = tried, new, True
        best = min(best, now)
    return best
