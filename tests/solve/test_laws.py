"""Laws that hold for every problem, whatever the search: what cannot hurt, and what cannot matter."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.solve.problems import random_problem
from tvmhet.solve import IN_SECONDS, DeviceGroup, Problem, solve
from tvmhet.solve.orders import order_by
from tvmhet.solve.pack import predecessors
from tvmhet.solve.price import price_front

seeds = st.integers(0, 1_000_000)
objectives = st.sampled_from(IN_SECONDS)
_SHAPE = {"most_nodes": 6, "most_groups": 3, "most_devices": 5, "one_link": False}


def renumbered(problem: Problem, seed: int) -> Problem:
    """The same problem with its nodes in another topological order, and kernels, edges and weights shuffled."""
    rng = random.Random(seed)
    mark = [rng.random() for _ in range(problem.num_nodes)]
    new = {v: i for i, v in enumerate(order_by(predecessors(problem), lambda v: mark[v]))}

    def moved(nodes) -> tuple[int, ...]:
        return tuple(sorted(new[v] for v in nodes))

    kernels = [replace(k, nodes=moved(k.nodes)) for k in problem.kernels]
    edges = [replace(e, src=new.get(e.src, -1), dsts=moved(e.dsts)) for e in problem.edges]
    weights = [replace(w, nodes=moved(w.nodes)) for w in problem.weights]
    for items in (kernels, edges, weights):
        rng.shuffle(items)
    return replace(
        problem,
        kernels=tuple(kernels),
        edges=tuple(edges),
        weights=tuple(weights),
        pins={new[v]: groups for v, groups in problem.pins.items()},
    )


@settings(max_examples=40, deadline=None)
@given(seeds, seeds, objectives)
def test_the_numbering_of_nodes_does_not_matter(seed, shuffle, objective):
    problem = random_problem(seed, **_SHAPE)
    again = renumbered(problem, shuffle)
    assert solve(again, objective).objective == pytest.approx(solve(problem, objective).objective, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(seeds, objectives)
def test_no_homogeneous_plan_is_better(seed, objective):
    problem = random_problem(seed, **_SHAPE)
    ours = solve(problem, objective).objective
    for g, group in enumerate(problem.groups):
        if group.num_devices:
            alone = tuple(d if i == g else replace(d, num_devices=0) for i, d in enumerate(problem.groups))
            assert ours <= solve(replace(problem, groups=alone), objective).objective * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(seeds, objectives)
def test_another_type_of_device_never_hurts(seed, objective):
    problem = random_problem(seed, **_SHAPE)
    links = tuple((*row, row[0]) for row in problem.links)
    more = replace(
        problem,
        kernels=tuple(replace(k, time_s=(*k.time_s, 7.0)) for k in problem.kernels),
        groups=(*problem.groups, DeviceGroup("new", 1, 1000)),
        links=(*links, links[0]),
        host_links=(*problem.host_links, problem.host_links[0]),
    )
    assert solve(more, objective).objective <= solve(problem, objective).objective * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.1, 1.0))
def test_a_lower_price_never_hurts(seed, share):
    problem = random_problem(seed, most_nodes=4)
    problem = replace(problem, groups=tuple(replace(g, usd_per_h=2.0 + i) for i, g in enumerate(problem.groups)))
    first = replace(problem.groups[0], usd_per_h=problem.groups[0].usd_per_h * share)
    cheaper = replace(problem, groups=(first, *problem.groups[1:]))
    before, after = price_front(problem).cheapest_input(), price_front(cheaper).cheapest_input()
    if before:
        assert after is not None
        assert after.usd_per_input <= before.usd_per_input * (1 + 2e-3)  # the front's step
