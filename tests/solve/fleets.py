"""Small chains on a small market, and every fleet of them by brute force. Shares nothing with the solvers."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tvmhet.solve import DeviceGroup, Edge, Kernel, Link, Problem, Weight
from tvmhet.solve.fleet import Bundle

DEVICES = 6


@dataclass(frozen=True)
class Case:
    """A chain on a market of three types, in instances of 1 to 3 devices."""

    problem: Problem
    bundles: tuple[Bundle, ...]


def random_case(seed: int, blocks: int = 8) -> Case:
    """Draw a chain with unlike links; memory is scarce in every other case."""
    rng = random.Random(seed)
    scarce = seed % 2 == 1
    edges = [Edge(i - 1, (i,) if i < blocks else (), rng.randint(1, 9), i == blocks) for i in range(blocks + 1)]
    speed = [rng.choice([1.0, 2.0, 5.0]) for _ in range(3)]
    kernels = [Kernel((v,), tuple(rng.uniform(1, 10) / s for s in speed)) for v in range(blocks)]
    weights = tuple(Weight((v,), rng.randint(1, 20)) for v in range(blocks))
    total = sum(w.size_bytes for w in weights) + 40
    sizes = [rng.choice([1, 1, 2, 3]) for _ in range(3)]
    limits = [rng.randint(0, DEVICES // s) for s in sizes]
    limits = limits if any(limits) else [1, 1, 1]
    while sum(n * s for n, s in zip(limits, sizes, strict=True)) > DEVICES:
        limits[max(range(3), key=lambda o: limits[o] * sizes[o])] -= 1
    groups = tuple(
        DeviceGroup(f"g{o}", n * s, total * rng.uniform(0.3, 1.2) if scarce else 1e9, 1.0, rng.choice([0.0, 0.2]))
        for o, (n, s) in enumerate(zip(limits, sizes, strict=True))
    )

    def link() -> Link:
        return Link(rng.choice([0.0, 0.1]), rng.choice([2.0, 10.0, 1000.0]))

    links = tuple(tuple(link() for _ in range(3)) for _ in range(3))
    problem = Problem(blocks, tuple(kernels), tuple(edges), weights, groups, links, tuple(link() for _ in range(3)))
    price = [s * rng.uniform(0.5, 3.0) * n for s, n in zip(speed, sizes, strict=True)]
    return Case(problem, tuple(Bundle(s, n, p) for s, n, p in zip(sizes, limits, price, strict=True)))


@lru_cache(maxsize=4)
def shapes(blocks: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Every (cuts, groups, replicas) of up to DEVICES devices, by number of stages."""
    out = []
    for k in range(1, min(DEVICES, blocks) + 1):
        cuts = np.array([(0, *c, blocks) for c in itertools.combinations(range(1, blocks), k - 1)])
        kinds = np.array(list(itertools.product(range(3), repeat=k)))
        parts = [r for r in itertools.product(range(1, DEVICES + 1), repeat=k) if sum(r) <= DEVICES]
        a, b, c = (x.ravel() for x in np.meshgrid(*(np.arange(len(x)) for x in (cuts, kinds, parts)), indexing="ij"))
        out.append((cuts[a], kinds[b], np.array(parts)[c]))
    return out


def fastest(case: Case, latency_limit: float = math.inf) -> dict[tuple[int, ...], float]:
    """The least period of one pipeline on exactly these devices, for each set of devices that holds the chain."""
    p = case.problem
    n, groups = p.num_nodes, len(p.groups)
    size = np.array([e.size_bytes for e in p.edges], float)  # size[i]: what node i reads
    busy = np.full((n + 1, n + 1, groups), math.inf)
    for b in range(n):
        for c in range(b + 1, n + 1):
            weights = sum(w.size_bytes for w in p.weights if b <= w.nodes[0] < c)
            peak = max((size[v] if v > b else 0.0) + size[v + 1] for v in range(b, c))
            for g, group in enumerate(p.groups):
                if math.ceil(weights + size[b] + peak) <= group.memory_bytes:
                    busy[b, c, g] = sum(p.kernels[v].time_s[g] for v in range(b, c)) + group.stage_overhead_s
    hop = np.array([[[x.transfer_s(s) for x in row] for row in p.links] for s in size])
    host = np.array([[x.transfer_s(s) for x in p.host_links] for s in size])
    best: dict[tuple[int, ...], float] = {}
    for cuts, kinds, replicas in shapes(n):
        k = kinds.shape[1]
        compute = busy[cuts[:, :-1], cuts[:, 1:], kinds]
        receive, send = np.zeros(kinds.shape), np.zeros(kinds.shape)
        receive[:, 0], send[:, -1] = host[0, kinds[:, 0]], host[n, kinds[:, -1]]
        for i in range(1, k):
            receive[:, i] = send[:, i - 1] = hop[cuts[:, i], kinds[:, i - 1], kinds[:, i]]
        period = ((compute + receive + send) / replicas).max(axis=1)
        latency = compute.sum(axis=1) + receive.sum(axis=1) + send[:, -1]
        period[latency > latency_limit] = math.inf
        used = np.stack([(replicas * (kinds == g)).sum(axis=1) for g in range(groups)], axis=1)
        code = used @ np.array([49, 7, 1])
        order = np.argsort(period, kind="stable")
        for first in order[np.unique(code[order], return_index=True)[1]]:
            devices = tuple(int(x) for x in used[first])
            allowed = all(d <= g.num_devices for d, g in zip(devices, p.groups, strict=True))
            if allowed and period[first] < best.get(devices, math.inf):
                best[devices] = float(period[first])
    return best


def rates(case: Case, latency_limit: float = math.inf) -> dict[tuple[int, ...], float]:
    """The most results per second of every set of devices, split into pipelines in the best way."""
    alone = {d: 1 / t for d, t in fastest(case, latency_limit).items()}
    best: dict[tuple[int, ...], float] = {}
    for devices in itertools.product(*(range(g.num_devices + 1) for g in case.problem.groups)):
        inside = [
            (rate, tuple(x - y for x, y in zip(devices, part, strict=True)))
            for part, rate in alone.items()
            if all(y <= x for x, y in zip(devices, part, strict=True))
        ]
        best[devices] = max([0.0, *(rate + best[rest] for rate, rest in inside)])
    return best


def every_fleet(case: Case, latency_limit: float = math.inf) -> dict[tuple[int, ...], float]:
    """Instances of each offer -> results per second."""
    rate = rates(case, latency_limit)
    counts = itertools.product(*(range(b.limit + 1) for b in case.bundles))
    return {c: rate[tuple(n * b.size for n, b in zip(c, case.bundles, strict=True))] for c in counts}
