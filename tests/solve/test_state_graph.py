"""States of the execution, against every legal step; and that a first plan does not wait for all of them."""

from __future__ import annotations

import pytest

from benchmarks.planner.scale import random_cluster_problem
from tests.solve.problems import random_problem
from tvmhet.solve import Objective, phases, state_graphs
from tvmhet.solve.orders import first_order
from tvmhet.solve.pack import predecessors, state_graph


@pytest.mark.parametrize("seed", range(30))
def test_edges_are_all_legal_steps_between_downsets(seed):
    problem = random_problem(seed)
    preds = predecessors(problem)
    order = first_order(preds)
    graph = state_graph(problem, order, full=True, max_states=5000)
    rank = {v: i for i, v in enumerate(order)}
    kernels = [frozenset(rank[v] for v in k.nodes) for k in problem.kernels]
    needs = [{rank[u] for u in preds[v]} for v in order]
    states = [frozenset(i for i in range(problem.num_nodes) if int(w[i // 64]) >> (i % 64) & 1) for w in graph.words]
    index = {s: i for i, s in enumerate(states)}
    steps = [
        (a, index[s | k], i)
        for a, s in enumerate(states)
        for i, k in enumerate(kernels)
        if not k & s and all(needs[v] - k <= s for v in k) and s | k in index
    ]
    assert [tuple(e) for e in graph.edges.tolist()] == steps


def test_a_large_model_has_a_plan_before_all_downsets_are_listed(monkeypatch):
    problem = random_cluster_problem(1600, 2, 4, 1)
    asked: list[bool] = []
    real = state_graphs.state_graph

    def noted(*args, full, **kwargs):
        asked.append(full)
        return real(*args, full=full, **kwargs)

    monkeypatch.setattr(state_graphs, "state_graph", noted)
    record = phases.Record()
    search = phases.phases(problem, Objective.THROUGHPUT, record, 1_000_000)
    next(search)
    first = record.value_s
    assert record.best is not None and asked == []
    next(search)
    assert record.value_s <= first and asked == [False]
