"""Latency with a host that calls accelerators, against exhaustive search."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import networkx as nx
import pytest

from tvmhet.errors import BadGraph, NotSupported
from tvmhet.solve.loads import LoadProblem, LoadType
from tvmhet.solve.offload import offload


def random_offload(seed: int) -> LoadProblem:
    """Draw up to 6 nodes on one or two accelerators and the host."""
    rng = random.Random(seed)
    n = rng.randint(1, 6)
    edges = tuple((u, v) for v in range(n) for u in range(v) if rng.random() < 0.4)
    times = tuple((rng.choice([1.0, 2.0, 3.0, math.inf]), rng.randint(2, 12) * 1.0) for _ in range(n))
    sends = tuple(rng.choice([0.0, 0.5, 2.0]) for _ in range(n))
    types = (LoadType("acc", rng.randint(1, 2), rng.choice([3.0, 50.0])), LoadType("host", 1, math.inf, 0.0))
    return LoadProblem(times, (1.0,) * n, sends, edges, types)


def makespan(problem: LoadProblem, home) -> float:
    """inf where a rule is broken."""
    n = problem.num_nodes
    task = [("host", v) if home[v] == 0 else ("acc", home[v]) for v in range(n)]
    graph = nx.DiGraph()
    graph.add_nodes_from(task)
    graph.add_edges_from((task[u], task[v]) for u, v in problem.edges if task[u] != task[v])
    if not nx.is_directed_acyclic_graph(graph):
        return math.inf
    finish = {}
    for t in nx.topological_sort(graph):
        start = max((finish[p] for p in graph.predecessors(t)), default=0.0)
        if t[0] == "host":
            finish[t] = start + problem.time_s[t[1]][1]
            continue
        mine = {v for v in range(n) if home[v] == t[1]}
        if sum(problem.memory_bytes[v] for v in mine) > problem.types[0].memory_bytes:
            return math.inf
        crossing = {u for u, v in problem.edges if (u in mine) != (v in mine)}
        call = sum(problem.time_s[v][0] for v in mine) + sum(problem.send_s[u] for u in crossing)
        finish[t] = start + call
    return max(finish.values())


@pytest.mark.parametrize("seed", range(40))
def test_plans_equal_exhaustive_search(seed):
    problem = random_offload(seed)
    count = problem.types[0].num_devices
    best = min(makespan(problem, h) for h in itertools.product(range(count + 1), repeat=problem.num_nodes))
    plan = offload(problem, moves=4000, rounds=2, seeds=2, bound_s=0.2)
    assert plan.objective == pytest.approx(best)
    assert plan.lower_bound <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_without_a_host_every_node_is_on_an_accelerator(seed):
    problem = random_offload(seed)
    problem = replace(problem, types=(problem.types[0], replace(problem.types[1], num_devices=0)))
    count = problem.types[0].num_devices
    runs = all(math.isfinite(t[0]) for t in problem.time_s)
    homes = itertools.product(range(1, count + 1), repeat=problem.num_nodes) if runs else []
    best = min((makespan(problem, h) for h in homes), default=math.inf)
    plan = offload(problem, moves=4000, rounds=2, seeds=2, bound_s=0.2)
    assert plan.objective == pytest.approx(best)
    assert plan.reason or plan.device_type == (0,) * len(plan.devices)


def test_three_types_are_not_supported():
    problem = LoadProblem(((1.0, 1.0, 1.0),), (1.0,), (0.0,), (), tuple(LoadType(x, 1) for x in "abc"))
    with pytest.raises(NotSupported):
        offload(problem)


def packed(edges: tuple[tuple[int, int], ...]) -> LoadProblem:
    """Eight nodes that fill four accelerators to the byte, if each gets the right ones; nothing runs on the host."""
    sizes = (6.0, 6.0, 4.0, 4.0, 5.0, 5.0, 3.0, 7.0)
    types = (LoadType("acc", 4, 10.0), LoadType("host", 0, math.inf, 0.0))
    return LoadProblem(((3.0, 9.0),) * 8, sizes, (0.5,) * 8, edges, types)


def test_calls_are_packed_where_the_starts_do_not_fit():
    plan = offload(packed(()))
    assert plan.objective == pytest.approx(6.0) and plan.optimal
    assert all(sum(packed(()).memory_bytes[v] for v in nodes) == 10.0 for nodes in plan.devices)


def test_calls_that_cannot_be_packed_are_said_to_be_so():
    plan = offload(packed(tuple((v, v + 1) for v in range(7))))
    assert math.isinf(plan.objective) and math.isinf(plan.lower_bound)
    assert "there is no placement" in plan.reason


@pytest.mark.parametrize("seed", range(770000, 770020))
def test_placements_that_only_a_search_finds(seed):
    test_plans_equal_exhaustive_search(seed)


def test_a_cycle_has_no_latency():
    with pytest.raises(BadGraph, match="cycle"):
        offload(packed(((0, 1), (1, 2), (2, 0))))
