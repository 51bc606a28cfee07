"""Layers on uneven clusters against exhaustive search with another maximum flow."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import networkx as nx
import pytest

from tvmhet.errors import BadGraph
from tvmhet.solve.layer_problem import LayerProblem
from tvmhet.solve.layer_regions import linked, region_bound
from tvmhet.solve.layers import coverage_bound, place_layers


def random_cluster(seed: int) -> LayerProblem:
    """Draw 1 to 4 nodes for 2 to 4 layers; rates need not fall with the number of layers."""
    rng = random.Random(seed)
    n, layers = rng.randint(1, 4), rng.randint(2, 4)
    rate = tuple(tuple(rng.choice([0.0, 2.0, 3.0, 5.0, 9.0]) for _ in range(rng.randint(1, 4))) for _ in range(n))
    link = tuple(tuple(0.0 if a == b else rng.choice([0.0, 1.5, 20.0, 20.0]) for b in range(n)) for a in range(n))
    ends = tuple(rng.choice([4.0, 50.0]) for _ in range(n))
    return LayerProblem(layers, rate, ends, ends, link, partial=rng.random() < 0.4)


def flow(problem: LayerProblem, layout) -> float:
    """The maximum flow of a layout by networkx."""
    graph = nx.DiGraph()
    graph.add_nodes_from("st")
    for i, held in enumerate(layout):
        if held is None:
            continue
        start, size = held
        graph.add_edge((i, 0), (i, 1), capacity=problem.rate[i][size - 1])
        if start == 0:
            graph.add_edge("s", (i, 0), capacity=problem.from_source[i])
        if start + size == problem.num_layers:
            graph.add_edge((i, 1), "t", capacity=problem.to_sink[i])
        for j, other in enumerate(layout):
            if other and i != j:
                end = start + size
                enters = other[0] <= end < sum(other) if problem.partial else other[0] == end
                if enters and problem.link[i][j] > 0:
                    graph.add_edge((i, 1), (j, 0), capacity=problem.link[i][j])
    return nx.maximum_flow_value(graph, "s", "t")


def exhaustive(problem: LayerProblem) -> float:
    """Try every layout."""
    choices = [
        [None] + [(a, k) for k, r in enumerate(row, 1) if r > 0 for a in range(problem.num_layers - k + 1)]
        for row in problem.rate
    ]
    return max(flow(problem, layout) for layout in itertools.product(*choices))


@pytest.mark.parametrize("seed", range(40))
def test_plans_equal_exhaustive_search(seed):
    problem = random_cluster(seed)
    plan = place_layers(problem, steps=3000, rounds=3)
    best = exhaustive(problem)
    assert plan.tokens_per_s == pytest.approx(best)
    assert plan.tokens_per_s == pytest.approx(flow(problem, plan.intervals))
    assert coverage_bound(problem) >= best * (1 - 1e-9)
    assert plan.upper_bound >= best * (1 - 1e-9)


def regions(seed: int, size: int, thin: float) -> LayerProblem:
    """Draw three regions with wide links inside and thin ones between; the source and sink are in the first."""
    rng = random.Random(seed)
    of = [i // size for i in range(3 * size)]
    kinds = [
        tuple(fast * 12 / (k * (1 + 0.05 * k)) for k in range(1, most + 1)) for fast, most in ((9, 8), (4, 5), (2, 3))
    ]
    link = tuple(
        tuple((500.0 if of[a] == of[b] else thin) * (a != b) for b in range(3 * size)) for a in range(3 * size)
    )
    ends = tuple(500.0 if r == 0 else thin for r in of)
    return LayerProblem(20, tuple(rng.choice(kinds) for _ in of), ends, ends, link)


@pytest.mark.parametrize("seed", range(60))
def test_no_layout_is_above_the_bound_of_regions(seed):
    rng = random.Random(seed)
    problem = random_cluster(seed)
    thin = tuple(tuple(x and rng.choice([0.25, 1.0, 20.0]) for x in row) for row in problem.link)
    problem = replace(problem, link=thin, from_source=tuple(rng.choice([0.5, 1.0, 50.0]) for _ in problem.rate))
    best, served = exhaustive(problem), linked(problem)
    assert min(coverage_bound(served), region_bound(served, coverage_bound)[0]) >= best * (1 - 1e-9)
    assert place_layers(problem, steps=500, rounds=2).upper_bound >= best * (1 - 1e-9)


def test_thin_links_between_regions_bound_the_flow():
    problem = regions(1, 5, 0.01)
    plan = place_layers(problem, steps=4000)
    print(f"{plan.tokens_per_s:.2f} of {plan.upper_bound:.2f}, {coverage_bound(problem):.2f} by layers alone")
    assert plan.tokens_per_s >= 0.9 * plan.upper_bound
    assert plan.upper_bound < 0.6 * coverage_bound(problem)


def test_a_rate_that_is_better_with_more_layers_is_used():
    fast = (10.0, 4.0, 3.0, 6.0)  # 4 layers at once are faster than 3
    ample = ((0.0, 99.0), (99.0, 0.0))
    plan = place_layers(LayerProblem(8, (fast, fast), (99.0,) * 2, (99.0,) * 2, ample))
    assert plan.tokens_per_s == pytest.approx(6.0)
    assert plan.optimal


@pytest.mark.parametrize(
    "change",
    [{"num_layers": 0}, {"rate": ()}, {"from_source": (1.0,)}, {"rate": ((-1.0,), (1.0,))}, {"link": ((0.0,),)}],
)
def test_bad_numbers_are_refused(change):
    good = {
        "num_layers": 2,
        "rate": ((1.0,), (1.0,)),
        "from_source": (1.0, 1.0),
        "to_sink": (1.0, 1.0),
        "link": ((0.0, 1.0), (1.0, 0.0)),
    }
    with pytest.raises(BadGraph):
        LayerProblem(**(good | change))
