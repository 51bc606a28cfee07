"""Chains of accelerator calls: bounds that hold on random graphs, and are exact on residual networks."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from benchmarks.planner import msr
from tests.solve.test_offload import makespan, random_offload
from tvmhet.solve.call_chain import call_chains
from tvmhet.solve.loads import LoadProblem, LoadType
from tvmhet.solve.offload import offload
from tvmhet.solve.segment_chain import segment_chain


def residual(seed: int, blocks: int = 2) -> LoadProblem:
    """Draw blocks of two nodes with a shortcut, every other one through a node of its own, as in ResNet."""
    rng = random.Random(seed)
    edges: list[tuple[int, int]] = []
    head, n = 0, 1
    for b in range(blocks):
        body, tail = n, n + 1
        edges += [(head, body), (body, tail)]
        n += 2
        if b % 2 == 0:
            edges += [(head, n), (n, tail)]
            n += 1
        else:
            edges.append((head, tail))
        head = tail
    times = tuple((float(t), 10.0 * t) for t in (rng.randint(1, 9) for _ in range(n)))
    sends = tuple(float(rng.randint(0, 9)) for _ in range(n))
    sizes = tuple(float(rng.randint(1, 9)) for _ in range(n))
    types = (LoadType("acc", rng.randint(1, 3), rng.choice([9.0, 20.0])), LoadType("host", 1, math.inf, 0.0))
    return LoadProblem(times, sizes, sends, tuple(edges), types)


def exhaustive(problem: LoadProblem) -> float:
    """The optimum over every placement."""
    count = problem.types[0].num_devices
    return min(makespan(problem, h) for h in itertools.product(range(count + 1), repeat=problem.num_nodes))


@pytest.mark.parametrize("seed", range(150))
def test_no_placement_is_below_the_bound(seed):
    problem = random_offload(seed)
    best = exhaustive(problem)
    for chain in call_chains(problem):
        assert chain.lower <= best * (1 + 1e-9)


def test_most_residual_networks_are_proved():
    proved = 0
    for seed in range(18):
        problem = residual(seed)
        plan = offload(problem, moves=4000, rounds=2, seeds=2, bound_s=0)
        assert plan.objective == pytest.approx(exhaustive(problem))
        proved += plan.optimal
    print(f"{proved} of 18 proved")
    assert proved >= 14


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "best", "gap"),
    [
        ("LayerGraphs/bert24_inference", 100.2185, 1e-6),
        ("LayerGraphs/resnet50_inference", 1156.8813, 1e-6),
        ("OperatorGraphs/bert_l-3_inference", 408.4744, 0.01),
    ],
)
def test_published_latencies_are_within_their_gaps(shared_data, name, best, gap):
    graph = msr.read(shared_data / "placement" / "msr" / "latency-inputs" / f"{name}.json")
    lower = max(c.lower for c in call_chains(msr.load_problem(graph)))
    assert best * (1 - gap) <= lower <= best * (1 + 1e-6)


@pytest.mark.parametrize("max_states", [2, 1000])
@pytest.mark.parametrize("seed", range(100))
def test_no_placement_is_below_the_chain_of_segments(seed, max_states):
    for problem in (random_offload(seed), residual(seed, 1)):
        best = exhaustive(problem)
        for most in (math.inf, best):
            assert segment_chain(problem, most, max_states=max_states).lower <= best * (1 + 1e-9)


def branches(rng: random.Random, blocks: int) -> LoadProblem:
    """Draw blocks of three branches of two nodes between gates; four accelerators for 2.5 of memory."""
    edges: list[tuple[int, int]] = []
    gate, n = 0, 1
    for _ in range(blocks):
        tails = []
        for _ in range(3):
            edges += [(gate, n), (n, n + 1)]
            tails.append(n + 1)
            n += 2
        edges += [(v, n) for v in tails]
        gate, n = n, n + 1
    times = tuple((float(t), 10.0 * t) for t in (rng.randint(2, 9) for _ in range(n)))
    sizes = tuple(float(rng.randint(1, 9)) for _ in range(n))
    sends = tuple(rng.random() for _ in range(n))
    types = (LoadType("acc", 4, sum(sizes) / 2.5), LoadType("host", 1, math.inf, 0.0))
    return LoadProblem(times, sizes, sends, tuple(edges), types)


def test_wide_models_are_bounded_by_their_segments():
    gaps = []
    for seed in range(4):
        problem = branches(random.Random(seed), 8)
        plan = offload(problem, moves=20_000, rounds=3, seeds=2, bound_s=0)
        first = max(c.lower for c in call_chains(problem))
        gaps.append((1 - plan.lower_bound / plan.objective, 1 - first / plan.objective))
    print(", ".join(f"{gap:.1%} (calls alone {before:.1%})" for gap, before in gaps))
    assert max(gap for gap, _ in gaps) < 0.1


@pytest.mark.shared
def test_wide_latencies_of_published_graphs_are_near_their_bounds(shared_data):
    """The throughput input, for latency: four times an accelerator's memory on six."""
    graph = msr.read(shared_data / "placement" / "msr" / "throughput-inputs" / "OperatorGraphs/resnet50_inference.json")
    problem = msr.load_problem(graph)
    tight = LoadType("acc", 6, sum(problem.memory_bytes) / 4)
    plan = offload(replace(problem, types=(tight, LoadType("host", 1, math.inf, 0.0))), seeds=0, bound_s=0)
    assert plan.objective - plan.lower_bound <= 1e-6 * plan.objective


@pytest.mark.shared
@pytest.mark.parametrize("room", [1.03, 1.2])
def test_what_is_read_last_is_counted_where_memory_is_short(shared_data, room):
    """Nodes behind the last matrix hold a third of an accelerator: left out, the bound was a third lower."""
    graph = msr.read(shared_data / "placement" / "msr" / "latency-inputs" / "LayerGraphs/bert24_inference.json")
    problem = msr.load_problem(graph)
    tight = replace(problem.types[0], memory_bytes=room * sum(problem.memory_bytes) / problem.types[0].num_devices)
    plan = offload(replace(problem, types=(tight, problem.types[1])), bound_s=0)
    assert plan.optimal
