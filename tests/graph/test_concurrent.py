"""Branches at the same time: which regions they are found in, how cores share them, and what lies in memory."""

import dataclasses
import itertools
import json
import random

import networkx as nx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tvmhet.graph.concurrent import (
    CONCURRENT,
    between_kernels,
    concurrent_kernels,
    concurrent_spec,
    shares,
)
from tvmhet.graph.fusion import LegalKernel, legal_kernels
from tvmhet.graph.kernel_key import kernel_key
from tvmhet.graph.opgraph import OpGraph, PatternKind
from tvmhet.graph.storage import ALIGNMENT_BYTES, storage_bytes

HEAVY = 1e6


def changed(graph, ops, **fields):
    """`graph` with some fields of some operators replaced."""
    operators = tuple(dataclasses.replace(op, **fields) if i in ops else op for i, op in enumerate(graph.operators))
    return OpGraph(operators, graph.tensors, graph.inputs, graph.outputs)


def heavy(graph, ops=None):
    """`graph` with much work in some operators, all unless given."""
    return changed(graph, range(len(graph.operators)) if ops is None else ops, flop=HEAVY)


@pytest.fixture
def block(make_graph):
    """0 is read by 1, 2 and 4; 2 by 3; 3, 1 and 4 by 5, which the model returns."""
    graph = heavy(make_graph([(), (0,), (0,), (2,), (0,), (1, 3, 4)], sizes=[8, 1, 16, 1, 1, 3]))
    return changed(graph, (2, 3), pattern=PatternKind.OUT_EWISE_FUSABLE)


def test_the_branches_of_a_block(block):
    (found,) = concurrent_kernels(block, legal_kernels(block))
    assert (found.ops, found.maker) == ((1, 2, 3, 4), CONCURRENT)
    assert [b.kernels for b in found.branches] == [((1,),), ((2,), (3,)), ((4,),)]
    assert json.loads(concurrent_spec(block, found))[1]["kernels"] == [["op2"], ["op3"]]
    assert [b.work for b in found.branches] == [HEAVY + 8, 2 * HEAVY + 16, HEAVY + 8]


def test_branches_take_the_largest_kernels_that_end_in_them(make_graph):
    graph = heavy(make_graph([(), (0,), (1,), (0,), (2, 3)]))
    (found,) = concurrent_kernels(graph, legal_kernels(graph))
    assert [b.kernels for b in found.branches] == [((1, 2),), ((3,),)]


@pytest.mark.parametrize(
    "fields", [{"pattern": PatternKind.OPAQUE}, {"pattern": PatternKind.TUPLE}, {"outputs": (5, 6)}]
)
def test_what_is_no_loop_nest_is_in_no_branch(block, fields):
    one = changed(block, (4,), **fields)
    assert concurrent_kernels(one, [LegalKernel((i,)) for i in range(6)]) == ()


@pytest.mark.parametrize("pattern", [p for p in PatternKind if p <= PatternKind.OUT_EWISE_FUSABLE])
def test_every_loop_nest_may_be_in_a_branch(block, pattern):
    assert concurrent_kernels(changed(block, (4,), pattern=pattern), [LegalKernel((i,)) for i in range(6)])


def test_small_branches_and_large_regions_are_left_out(block, make_graph):
    singles = [LegalKernel((i,)) for i in range(70)]
    assert concurrent_kernels(changed(block, (1, 2, 3), flop=1.0), singles) == ()
    for length, found in ((63, 1), (64, 0)):
        reads = [(), *((i,) for i in range(length)), (0,), (length, length + 1)]
        assert len(concurrent_kernels(heavy(make_graph(reads)), singles)) == found


def test_a_skip_connection_has_one_branch(make_graph):
    assert concurrent_kernels(heavy(make_graph([(), (0,), (1,), (0, 2)])), [LegalKernel((i,)) for i in range(4)]) == ()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000))
def test_laws_of_regions(random_graph, seed):
    graph = heavy(random_graph(seed, 14))
    generated = legal_kernels(graph)
    legal = {k.ops for k in generated}
    plain = nx.DiGraph([(u, v) for v in range(14) for u in graph.predecessors(v)])
    plain.add_nodes_from(range(14))
    plain.add_edges_from((-1, v) for v in range(14) if not graph.predecessors(v))
    dominators = nx.immediate_dominators(plain, -1)
    found = concurrent_kernels(graph, generated)
    regions = set()
    for join in range(14):
        between = nx.descendants(plain, dominators[join]) & nx.ancestors(plain, join)
        parts = list(nx.weakly_connected_components(plain.subgraph(between)))
        if len(graph.predecessors(join)) > 1 and len(parts) > 1:
            regions.add((tuple(sorted(between)), tuple(sorted(tuple(sorted(p)) for p in parts))))
    assert {
        (k.ops, tuple(sorted(tuple(sorted(i for ops in b.kernels for i in ops)) for b in k.branches))) for k in found
    } == regions
    for kernel in found:
        for branch in kernel.branches:
            made = set()
            for ops in branch.kernels:
                assert ops in legal
                inside = {i for k in branch.kernels for i in k}
                assert all(p in made or p in ops for i in ops for p in graph.predecessors(i) if p in inside)
                made.update(ops)


@given(st.lists(st.floats(1.0, 10.0), min_size=1, max_size=6), st.integers(1, 4))
def test_shares_hold_every_branch_and_are_near_the_best(works, cores):
    found = shares(works, cores)
    assert sorted(b for share in found for b in share) == list(range(len(works)))
    assert len(found) == min(cores, len(works)) and all(found)

    def longest(parts):
        return max(sum(works[b] for b in part) for part in parts)

    every = itertools.product(range(cores), repeat=len(works))
    best = min(longest([[b for b, c in enumerate(choice) if c == core] for core in range(cores)]) for choice in every)
    assert longest(found) <= best * (4 / 3) + 1e-9  # Graham's bound


def test_what_lies_between_kernels_of_a_branch_takes_memory(block):
    (found,) = concurrent_kernels(block, legal_kernels(block))
    between = between_kernels(block, found)
    assert between == {3}  # what operator 2 makes, of 16 bytes
    kernels = [(0,), found.ops, (5,)]
    assert storage_bytes(block, kernels, between) - storage_bytes(block, kernels) == ALIGNMENT_BYTES


def test_keys_tell_branches_apart(block):
    block = changed(block, range(6), signature="s")
    (found,) = concurrent_kernels(block, legal_kernels(block))
    other = dataclasses.replace(found, branches=tuple(reversed(found.branches)))
    keys = [kernel_key(block, k.ops, k.maker, k.branches) for k in (found, other)]
    assert len({*keys, kernel_key(block, found.ops, "tvm")}) == 3


def test_deterministic(random_graph):
    rng = random.Random(0)
    for _ in range(5):
        graph = heavy(random_graph(rng.randrange(1000), 14))
        assert concurrent_kernels(graph, legal_kernels(graph)) == concurrent_kernels(graph, legal_kernels(graph))
