"""graph/convex: convex sets and acyclic quotients, against paths and cycles found by networkx."""

import itertools
import random

import networkx as nx
import pytest

from tvmhet.errors import BadGraph
from tvmhet.graph.convex import convex_closure, is_acyclic_quotient, is_convex, quotient_order


def digraph(graph):
    g = nx.DiGraph()
    g.add_nodes_from(range(len(graph.operators)))
    g.add_edges_from((u, v) for u in g.nodes for v in graph.successors(u))
    return g


@pytest.mark.parametrize("seed", range(15))
def test_closure_is_every_operator_on_a_path(random_graph, seed):
    graph = random_graph(seed, 9)
    net = digraph(graph)
    descendants = {u: nx.descendants(net, u) | {u} for u in net}
    for size in range(4):
        for ops in itertools.combinations(range(9), size):
            on_path = {w for w in net for u in ops for v in ops if w in descendants[u] and v in descendants[w]}
            assert convex_closure(graph, ops) == on_path
            assert is_convex(graph, ops) == (set(ops) == on_path)


@pytest.mark.parametrize("seed", range(40))
def test_quotient_order_exists_unless_the_quotient_has_a_cycle(random_graph, seed):
    graph, rng = random_graph(seed, 9), random.Random(seed)
    label = [rng.randint(-1, 3) for _ in range(9)]
    parts = [[u for u in range(9) if label[u] == p] for p in range(4)]
    quotient = nx.quotient_graph(
        digraph(graph), [set(p) for p in parts if p] + [{u} for u in range(9) if label[u] < 0], relabel=True
    )
    quotient.remove_edges_from(list(nx.selfloop_edges(quotient)))
    acyclic = nx.is_directed_acyclic_graph(quotient)
    assert is_acyclic_quotient(graph, parts) == acyclic
    if not acyclic:
        with pytest.raises(BadGraph, match="waits for a part that waits for it"):
            quotient_order(graph, parts)
        return
    order = quotient_order(graph, parts)
    assert sorted(order) == [0, 1, 2, 3]
    rank = {u: order.index(p) for p in range(4) for u in parts[p]}
    for u, v in nx.transitive_closure(digraph(graph)).edges:
        if u in rank and v in rank:
            assert rank[u] <= rank[v]


def test_order_prefers_low_indices(make_graph):
    graph = make_graph([(), (), (), (0, 1, 2)])
    assert quotient_order(graph, [[3], [2], [1], [0]]) == (1, 2, 3, 0)


def test_parts_must_be_disjoint(make_graph):
    with pytest.raises(BadGraph, match="'op0' is in parts 0 and 1"):
        is_acyclic_quotient(make_graph([(), (0,)]), [[0], [0, 1]])


def test_nothing_is_convex(make_graph):
    assert is_convex(make_graph([()]), []) and quotient_order(make_graph([()]), []) == ()
