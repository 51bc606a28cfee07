"""Lower bounds that hold for every plan, so that each answer says how far it can be from the best one.

Throughput (fractional load, by Lagrangian prices): for prices p >= 0 with sum(p[g] * num_devices[g]) = 1, a plan with
largest load T has T >= sum over groups of p[g] * (seconds of work on g), and the cheapest cover by kernels that cost
min over g of p[g] * t[k, g] is no more than that. The prices are improved by subgradient steps.

Latency: one device runs everything in turn, so its bound is the cheapest cover; otherwise the critical path, with node
weights that no kernel exceeds (a dual solution of the cover).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tvmhet._passes import passes_func
from tvmhet.solve.orders import successors
from tvmhet.solve.pack import StateGraph, as_tensor, predecessors
from tvmhet.solve.problem import Problem

_ROUNDS = 40  # of the prices


def cheapest_cover(graph: StateGraph, cost_s: NDArray[np.float64]) -> tuple[int, ...]:
    """Return the kernels of the cheapest acyclic cover, in execution order; empty if every cover costs inf."""
    edges = as_tensor(graph.edges)
    found = passes_func("tvmhet.CheapestCover")(graph.num_states, edges, as_tensor(cost_s))
    return tuple(np.frombuffer(bytes(found), np.int32).tolist())


def throughput_bound_s(problem: Problem, graph: StateGraph, time_s: NDArray[np.float64]) -> float:
    """Return a lower bound on the largest load, in seconds; inf if no cover exists. `graph` must hold every cover."""
    counts, pool, degree = pools_of(problem)
    usable = counts > 0
    price = np.where(usable, 1.0 / np.maximum(counts, 1.0), 0.0) / usable.sum()
    best = 0.0
    for step in range(_ROUNDS if usable.sum() > 1 else 1):
        price_s = price[pool] * degree
        scaled = np.where(np.isfinite(time_s), time_s, np.inf) * np.where(usable[pool], price_s, np.inf)
        scaled = np.where(np.isfinite(time_s), scaled, np.inf)
        cover = list(cheapest_cover(graph, scaled.min(axis=1)))
        if not cover and problem.num_nodes:
            return math.inf
        best = max(best, float(scaled[cover].min(axis=1).sum()) + fixed_s(problem, price_s))
        load = np.zeros(len(counts))
        group = scaled[cover].argmin(axis=1)
        np.add.at(load, pool[group], degree[group] * time_s[cover, group])
        busy = np.where(usable, load / np.maximum(counts, 1.0), 0.0)
        share = np.where(usable, price * counts, 0.0)
        share = share * np.exp((busy - busy[usable].mean()) / max(busy.max(), 1e-300) * (0.7 / (1 + 0.15 * step)))
        price = np.where(usable, share / share.sum() / np.maximum(counts, 1.0), 0.0)
    return best * (1 - 1e-12)


def pools_of(problem: Problem) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
    """Return, per group: devices (0 for teams, who have none of their own), whose devices it takes, how many at once.

    A second of a team is a second of each of its devices: what loads them, and what their prices add up to.
    """
    groups = problem.groups
    return (
        np.array([max(0, g.num_devices) if g.team_of < 0 else 0 for g in groups], np.float64),
        np.array([problem.pool(g) for g in range(len(groups))]),
        np.array([g.degree for g in groups], np.float64),
    )


def filling_bound_s(graph: StateGraph, time_s: NDArray[np.float64], most: NDArray[np.float64], part: float) -> float:
    """Return the least of `part` X + D over all covers, X the seconds of all groups g and each of theirs <= most[g] D.

    By Lagrangian prices q with sum(q[g] * most[g]) = 1: the cheapest cover where a second of group g costs part + q[g].
    Groups without a limit have most[g] = inf.
    """
    limited = np.isfinite(most) & (most > 0)
    share = np.where(limited, 1.0, 0.0) / max(1, limited.sum())
    best = 0.0
    for step in range(_ROUNDS if limited.sum() > 1 else 1):
        price = part + np.where(limited, share / np.where(limited, most, 1.0), 0.0)
        scaled = np.where(np.isfinite(time_s), np.where(np.isfinite(time_s), time_s, 0.0) * price, np.inf)
        cover = list(cheapest_cover(graph, scaled.min(axis=1)))
        if not cover:
            return 0.0
        best = max(best, float(scaled[cover].min(axis=1).sum()))
        load = np.zeros(len(most))
        np.add.at(load, scaled[cover].argmin(axis=1), time_s[cover, scaled[cover].argmin(axis=1)])
        busy = np.where(limited, load / np.where(limited, most, 1.0), 0.0)
        if busy.max() <= 0:
            break
        share = share * np.exp((busy - busy[limited].mean()) / busy.max() * (0.7 / (1 + 0.15 * step)))
        share = np.where(limited, share / share.sum(), 0.0)
    return best * (1 - 1e-12)


def fixed_s(problem: Problem, price: NDArray[np.float64]) -> float:
    """Priced seconds that every plan pays: one stage's overhead, and each model input and output once."""
    groups = [g for g, group in enumerate(problem.groups) if group.num_devices > 0]
    total = min(price[g] * problem.groups[g].stage_overhead_s for g in groups)
    if problem.overlap_transfers:
        return float(total)
    for e in problem.edges:
        if (e.src < 0 and e.dsts) or (e.src >= 0 and e.is_output):
            total += min(price[g] * problem.host_links[g].transfer_s(e.size_bytes) for g in groups)
    return float(total)


def latency_bound_s(problem: Problem, graph: StateGraph, time_s: NDArray[np.float64]) -> float:
    """Return a lower bound on the makespan of one input, in seconds. `graph` must hold every cover."""
    groups = [g for g, group in enumerate(problem.groups) if group.num_devices > 0]
    overhead = min(problem.groups[g].stage_overhead_s for g in groups)
    receive = max((_host_s(problem, e.size_bytes) for e in problem.edges if e.src < 0 and e.dsts), default=0.0)
    send = max((_host_s(problem, e.size_bytes) for e in problem.edges if e.src >= 0 and e.is_output), default=0.0)
    fastest = time_s.min(axis=1)
    if sum(g.num_devices for g in problem.groups) == 1:
        cover = list(cheapest_cover(graph, fastest))
        link = problem.host_links[groups[0]]
        receive = sum(link.transfer_s(e.size_bytes) for e in problem.edges if e.src < 0 and e.dsts)
        send = sum(link.transfer_s(e.size_bytes) for e in problem.edges if e.src >= 0 and e.is_output)
        work = float(fastest[cover].sum())
    else:
        work = _critical_path_s(problem, fastest)
        # An input may feed only a short branch: charge it just where it must come first or last.
        inputs = [e for e in problem.edges if e.src < 0 and e.dsts]
        receive = receive if len(inputs) == 1 and _reads_all_sources(problem, inputs[0].dsts) else 0.0
        send = min((_host_s(problem, e.size_bytes) for e in problem.edges if e.src >= 0 and e.is_output), default=0.0)
        read = {e.src for e in problem.edges if e.dsts}
        outputs = {e.src for e in problem.edges if e.src >= 0 and e.is_output}
        send = send if all(v in outputs for v in range(problem.num_nodes) if v not in read) else 0.0
    return (overhead + receive + work + send) * (1 - 1e-12)


def _host_s(problem: Problem, size_bytes: float) -> float:
    return min(
        link.transfer_s(size_bytes)
        for link, g in zip(problem.host_links, problem.groups, strict=True)
        if g.num_devices > 0
    )


def _reads_all_sources(problem: Problem, dsts: tuple[int, ...]) -> bool:
    preds = predecessors(problem)
    return all(v in dsts for v in range(problem.num_nodes) if not preds[v])


def _critical_path_s(problem: Problem, fastest_s: NDArray[np.float64]) -> float:
    return float(tails_s(problem, fastest_s).max(initial=0.0))


def tails_s(problem: Problem, fastest_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, per node, a lower bound on the seconds from its start to the end of the model.

    It is the longest path when each node weighs so much that no kernel's nodes together weigh more than its time.
    """
    weight = np.full(problem.num_nodes, math.inf)
    kernels_of: list[list[int]] = [[] for _ in range(problem.num_nodes)]
    for i, k in enumerate(problem.kernels):
        for v in k.nodes:
            weight[v] = min(weight[v], fastest_s[i] / len(k.nodes))
            kernels_of[v].append(i)
    if not np.isfinite(weight).all():
        return np.full(problem.num_nodes, math.inf)
    slack = np.array([t - sum(weight[v] for v in k.nodes) for t, k in zip(fastest_s, problem.kernels, strict=True)])
    for v in range(problem.num_nodes):
        raise_by = max(0.0, float(min(slack[kernels_of[v]])))
        if math.isfinite(raise_by):
            weight[v] += raise_by
            slack[kernels_of[v]] -= raise_by
    tail = np.zeros(problem.num_nodes)
    readers = successors(predecessors(problem))
    for v in reversed(range(problem.num_nodes)):
        tail[v] = weight[v] + max((tail[u] for u in readers[v]), default=0.0)
    return tail
