"""Small random planning problems, drawn by hypothesis or by a seed."""

from __future__ import annotations

import itertools
import math
import random

from tvmhet.solve import DeviceGroup, Edge, Kernel, Link, Problem, Weight
from tvmhet.solve.problem import Wire


def convex(nodes: set[int], above: list[set[int]]) -> bool:
    """Does no path leave `nodes` and come back? `above[v]` are v's ancestors."""
    return not any(
        u in above[v] and any(u in above[w] and w in above[v] for w in range(len(above)) if w not in nodes)
        for u in nodes
        for v in nodes
    )


def random_problem(
    seed: int,
    *,
    most_nodes: int = 6,
    most_groups: int = 2,
    most_devices: int = 4,
    tight: bool = False,
    one_link: bool = True,
    regions: bool = False,
) -> Problem:
    """Draw a problem: a random DAG, single-node kernels and some convex larger ones, a few device groups."""
    rng = random.Random(seed)
    n, num_groups = rng.randint(1, most_nodes), rng.randint(1, most_groups)
    preds = [set(rng.sample(range(v), min(v, rng.randint(0, 2)))) for v in range(n)]
    above: list[set[int]] = []
    for v in range(n):
        above.append(set().union(*({u} | above[u] for u in preds[v])))
    readers = [tuple(v for v in range(n) if u in preds[v]) for u in range(n)]
    edges = [Edge(-1, tuple(v for v in range(n) if not preds[v]), rng.randint(0, 9))]
    edges += [Edge(u, readers[u], rng.randint(0, 9), not readers[u] or rng.random() < 0.1) for u in range(n)]

    def times() -> tuple[float, ...]:
        return tuple(math.inf if rng.random() < 0.1 else float(rng.randint(1, 20)) for _ in range(num_groups))

    kernels = [Kernel((v,), times(), rng.randint(0, 3)) for v in range(n)]
    for size in (2, 3):
        for nodes in itertools.combinations(range(n), size):
            if convex(set(nodes), above) and rng.random() < 0.3:
                kernels.append(Kernel(nodes, times(), rng.randint(0, 3)))
    weights = tuple(
        Weight(tuple(sorted(rng.sample(range(n), min(n, rng.randint(1, 2))))), rng.randint(0, 20)) for _ in preds
    )
    counts = [1] + [0] * (num_groups - 1)
    for _ in range(rng.randint(0, most_devices - 1)):
        counts[rng.randrange(num_groups)] += 1
    groups = tuple(
        DeviceGroup(f"g{g}", c, rng.randint(20, 60) if tight else 1000, stage_overhead_s=rng.choice([0.0, 0.5]))
        for g, c in enumerate(counts)
    )

    def link() -> Link:
        return Link(rng.choice([0.0, 0.5]), rng.choice([1.0, 4.0, 20.0]))

    shared = link()
    links = tuple(tuple(shared if one_link else link() for _ in groups) for _ in groups)
    pins = {rng.randrange(n): frozenset([rng.randrange(num_groups)])} if rng.random() < 0.2 else {}
    host = tuple(link() for _ in groups)
    overlap = rng.random() < 0.3
    wires = _lines(rng, num_groups) if regions else ()
    return Problem(n, tuple(kernels), tuple(edges), weights, groups, links, host, pins, overlap, wires)


def _lines(rng: random.Random, num_groups: int) -> tuple[Wire, ...]:
    """Two regions, the host in one of them, and a line each way; now and then a switch that all transfers cross."""
    east = {-1} | {g for g in range(num_groups) if rng.random() < 0.4}
    everywhere = range(-1, num_groups)
    ways = {
        "east -> west": frozenset((a, b) for a in everywhere for b in everywhere if a in east and b not in east),
        "west -> east": frozenset((a, b) for a in everywhere for b in everywhere if a not in east and b in east),
    }
    if rng.random() < 0.3:
        ways["switch"] = frozenset((a, b) for a in everywhere for b in everywhere)
    return tuple(Wire(name, rng.choice([0.2, 0.5, 2.0]), w) for name, w in ways.items() if w)
