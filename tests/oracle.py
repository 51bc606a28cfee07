"""Exhaustive search over tiny planning problems. Shares nothing with the package: own closed forms, own legality.

It tries every exact cover by kernels, every partition of the kernels into stages, every group and replica count, and
every kernel order where memory depends on it. Slow on purpose.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import networkx as nx


def covers(problem) -> Iterator[tuple[int, ...]]:
    """Every way to run each node in exactly one kernel."""

    def extend(done: frozenset[int], chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(done) == problem.num_nodes:
            yield chosen
            return
        first = min(set(range(problem.num_nodes)) - done)
        for i, k in enumerate(problem.kernels):
            if first in k.nodes and not done & set(k.nodes):
                yield from extend(done | set(k.nodes), (*chosen, i))

    yield from extend(frozenset(), ())


def partitions(items: tuple[int, ...], most: float = math.inf) -> Iterator[list[list[int]]]:
    """Every partition of `items` into at most `most` blocks."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:], most):
        if len(rest) < most:
            yield [[items[0]], *rest]
        for i in range(len(rest)):
            yield [*rest[:i], [items[0], *rest[i]], *rest[i + 1 :]]


def quotient(problem, blocks) -> nx.DiGraph:
    """The graph between blocks of nodes."""
    home = {v: i for i, b in enumerate(blocks) for v in b}
    g = nx.DiGraph()
    g.add_nodes_from(range(len(blocks)))
    g.add_edges_from((home[e.src], home[d]) for e in problem.edges if e.src >= 0 for d in e.dsts)
    g.remove_edges_from(nx.selfloop_edges(g))
    return g


def least_memory(problem, kernels: list[int]) -> float:
    """The smallest peak over all orders in which one device can run `kernels`."""
    mine = {v for k in kernels for v in problem.kernels[k].nodes}
    base = sum(w.size_bytes for w in problem.weights if mine & set(w.nodes))
    base += sum(e.size_bytes for e in problem.edges if e.src not in mine and mine & set(e.dsts))
    dag = quotient(
        problem,
        [list(problem.kernels[k].nodes) for k in kernels] + [[v] for v in range(problem.num_nodes) if v not in mine],
    )
    order_graph = dag.subgraph(range(len(kernels)))
    best = math.inf
    if not nx.is_directed_acyclic_graph(order_graph):
        return best  # kernels that wait for each other have no order
    for order in nx.all_topological_sorts(order_graph):
        peak, done = 0, set()
        for i in order:
            k = problem.kernels[kernels[i]]
            after = done | set(k.nodes)
            held = 0
            for e in problem.edges:
                if e.src not in after:
                    continue
                needed_before = e.is_output or bool(set(e.dsts) - done)
                made_here = e.src in k.nodes and (e.is_output or bool(set(e.dsts) - set(k.nodes)))
                if (e.src in done and needed_before) or made_here:
                    held += e.size_bytes
            peak = max(peak, held + k.workspace_bytes)
            done = after
        best = min(best, base + peak)
    return best


def wires_s(problem, stages: list[list[int]], groups, rows) -> float:
    """The most seconds that one input takes any wire; stages of one entry of `rows` share devices."""
    home = {v: i for i, s in enumerate(stages) for k in s for v in problem.kernels[k].nodes}
    most = 0.0
    for wire in problem.wires:
        taken = 0.0
        for e in problem.edges:
            for b in {home[d] for d in e.dsts}:
                if e.src >= 0 and (home[e.src] == b or any(home[e.src] in r and b in r for r in rows)):
                    continue
                taken += e.size_bytes * ((groups[home[e.src]] if e.src >= 0 else -1, groups[b]) in wire.ways)
            taken += e.size_bytes * (e.is_output and e.src >= 0 and (groups[home[e.src]], -1) in wire.ways)
        most = max(most, taken / wire.byte_per_s)
    return most


def value(problem, stages: list[list[int]], groups, replicas, latency: bool) -> float:
    """The objective of stages in any order, each on devices of its own."""
    return max(devices_s(problem, stages, groups, replicas, latency), wires_s(problem, stages, groups, ()))


def devices_s(problem, stages: list[list[int]], groups, replicas, latency: bool) -> float:
    """The objective as if all wires were infinitely fast."""
    home = {v: i for i, s in enumerate(stages) for k in s for v in problem.kernels[k].nodes}
    work = [
        sum(problem.kernels[k].time_s[g] for k in s) + problem.groups[g].stage_overhead_s
        for s, g in zip(stages, groups, strict=True)
    ]
    receive, send = [0.0] * len(stages), [0.0] * len(stages)
    from_host, to_host = [0.0] * len(stages), [0.0] * len(stages)
    hop: dict[tuple[int, int], float] = {}
    for e in problem.edges:
        for b in {home[d] for d in e.dsts}:
            if e.src < 0:
                from_host[b] += problem.host_links[groups[b]].transfer_s(e.size_bytes)
            elif home[e.src] != b:
                s = problem.links[groups[home[e.src]]][groups[b]].transfer_s(e.size_bytes)
                hop[home[e.src], b] = hop.get((home[e.src], b), 0.0) + s
                receive[b] += s
                send[home[e.src]] += s
        if e.is_output and e.src >= 0:
            to_host[home[e.src]] += problem.host_links[groups[home[e.src]]].transfer_s(e.size_bytes)
    if not latency:
        loads = []
        for i in range(len(stages)):
            r, s = receive[i] + from_host[i], send[i] + to_host[i]
            loads.append((max(work[i], r, s) if problem.overlap_transfers else work[i] + r + s) / replicas[i])
        return max(loads)
    finish = {}
    for i in nx.topological_sort(quotient(problem, [[v for k in s for v in problem.kernels[k].nodes] for s in stages])):
        arrivals = [from_host[i], *(finish[a] + s for (a, b), s in hop.items() if b == i)]
        finish[i] = max(arrivals) + work[i]
    return max(finish[i] + to_host[i] for i in finish)


def staged_covers(problem, most: float = math.inf):
    """Every (stages, nodes of each) of every cover, of at most `most` stages, in which nothing waits for itself."""
    for cover in covers(problem):
        if not nx.is_directed_acyclic_graph(quotient(problem, [problem.kernels[k].nodes for k in cover])):
            continue
        for stages in partitions(cover, most):
            nodes = [[v for k in s for v in problem.kernels[k].nodes] for s in stages]
            if nx.is_directed_acyclic_graph(quotient(problem, nodes)):
                yield stages, nodes


def brute_force(problem, latency: bool = False) -> float:
    """The optimal objective; inf if no plan exists."""
    best = math.inf
    num_devices = sum(g.num_devices for g in problem.groups)
    memory: dict[tuple[int, ...], float] = {}
    for stages, nodes in staged_covers(problem, num_devices):
        for s in stages:
            if tuple(s) not in memory:
                memory[tuple(s)] = least_memory(problem, s)
        for groups in itertools.product(range(len(problem.groups)), repeat=len(stages)):
            if not allowed(problem, stages, nodes, groups, memory):
                continue
            for replicas in replica_counts(problem, groups, latency):
                best = min(best, value(problem, stages, groups, replicas, latency))
    return best


def brute_force_virtual(problem) -> float:
    """The least period of plans in which devices may run several stages; inf if no plan exists."""
    best = math.inf
    for stages, _ in staged_covers(problem):
        need = [least_memory(problem, s) for s in stages]
        for groups in itertools.product(range(len(problem.groups)), repeat=len(stages)):
            if not all(
                math.isfinite(problem.kernels[k].time_s[g]) and g in problem.pins.get(v, {g})
                for s, g in zip(stages, groups, strict=True)
                for k in s
                for v in problem.kernels[k].nodes
            ):
                continue
            for rows in partitions(tuple(range(len(stages)))):
                of = [groups[r[0]] for r in rows]
                if any(groups[i] != g for r, g in zip(rows, of, strict=True) for i in r):
                    continue
                if any(sum(need[i] for i in r) > problem.groups[g].memory_bytes for r, g in zip(rows, of, strict=True)):
                    continue
                for replicas in replica_counts(problem, of, False):
                    best = min(best, virtual_value(problem, stages, groups, rows, replicas))
    return best


def virtual_value(problem, stages, groups, rows, replicas) -> float:
    """The largest load where the stages of a row share `replicas` of it devices."""
    home = {v: i for i, s in enumerate(stages) for k in s for v in problem.kernels[k].nodes}
    row_of = {i: n for n, r in enumerate(rows) for i in r}
    loads = [[0.0, 0.0, 0.0] for _ in rows]
    for i, (s, g) in enumerate(zip(stages, groups, strict=True)):
        loads[row_of[i]][0] += sum(problem.kernels[k].time_s[g] for k in s) + problem.groups[g].stage_overhead_s
    for e in problem.edges:
        for b in {home[d] for d in e.dsts}:
            if e.src < 0:
                loads[row_of[b]][1] += problem.host_links[groups[b]].transfer_s(e.size_bytes)
            elif row_of[home[e.src]] != row_of[b]:
                s = problem.links[groups[home[e.src]]][groups[b]].transfer_s(e.size_bytes)
                loads[row_of[b]][1] += s
                loads[row_of[home[e.src]]][2] += s
        if e.is_output and e.src >= 0:
            loads[row_of[home[e.src]]][2] += problem.host_links[groups[home[e.src]]].transfer_s(e.size_bytes)
    join = max if problem.overlap_transfers else sum
    return max(*(join(x) / r for x, r in zip(loads, replicas, strict=True)), wires_s(problem, stages, groups, rows))


def allowed(problem, stages, nodes, groups, memory) -> bool:
    for s, vs, g in zip(stages, nodes, groups, strict=True):
        if memory[tuple(s)] > problem.groups[g].memory_bytes:
            return False
        if any(not math.isfinite(problem.kernels[k].time_s[g]) for k in s):
            return False
        if any(v in problem.pins and g not in problem.pins[v] for v in vs):
            return False
    return all(groups.count(g) <= group.num_devices for g, group in enumerate(problem.groups))


def replica_counts(problem, groups, latency) -> Iterator[tuple[int, ...]]:
    if latency:
        yield (1,) * len(groups)
        return
    for replicas in itertools.product(*(range(1, problem.groups[g].num_devices + 1) for g in groups)):
        used = [0] * len(problem.groups)
        for g, r in zip(groups, replicas, strict=True):
            used[g] += r
        if all(u <= group.num_devices for u, group in zip(used, problem.groups, strict=True)):
            yield replicas
