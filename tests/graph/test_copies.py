"""Copies of cheap producers: the graph with them, and what a cover of it means."""

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tvmhet.graph.copies import cheap_producers, chosen_copies, once, reader_groups, with_copies
from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.opgraph import OpGraph, PatternKind


@pytest.fixture
def fork(make_graph):
    """0 is read by 1 and 2, both by 3."""
    return make_graph([(), (0,), (0,), (1, 2)])


def test_a_copy_for_each_reader(fork):
    assert cheap_producers(fork) == (0,)
    copies = with_copies(fork, (0,))
    assert [op.name for op in copies.graph.operators] == ["op0", "op0_again", "op1", "op2", "op3"]
    assert copies.of == ((0, 1), (2,), (3,), (4,))
    assert [copies.graph.successors(i) for i in range(5)] == [(2,), (3,), (4,), (4,), ()]
    assert copies.graph.tensors[copies.graph.inputs[0]].consumers == (0, 1)


def test_kernels_that_run_a_producer_once_take_all_its_copies(fork):
    copies = with_copies(fork, (0,))
    kernels = [LegalKernel((0,)), LegalKernel((1,)), LegalKernel((0, 1, 2, 3), "library")]
    assert once(copies, kernels) == ((0, LegalKernel((0, 1))), (2, LegalKernel((0, 1, 2, 3, 4), "library")))


def test_copies_in_one_kernel_are_one(fork):
    copies = with_copies(fork, (0,))
    assert chosen_copies(fork, copies, [(0, 1), (2,), (3,), (4,)]) == ()
    (again,) = chosen_copies(fork, copies, [(0, 2), (1, 3), (4,)])
    assert (again.op, again.readers) == ("op0", (("op1",), ("op2",)))


def test_readers_that_take_no_producer_share_a_copy_unless_it_grows(make_graph):
    def with_products(graph, products):
        ops = tuple(
            replace(op, pattern=PatternKind.OUT_EWISE_FUSABLE) if i in products else op
            for i, op in enumerate(graph.operators)
        )
        return OpGraph(ops, graph.tensors, graph.inputs, graph.outputs)

    reads = [(), (0,), (0,), (0,), (1, 2, 3)]
    small = with_products(make_graph(reads, [50, 1, 1, 1, 1]), {1, 2})  # 50 bytes from the input's 100
    assert reader_groups(small, 0) == ((1, 2), (3,))
    large = with_products(make_graph(reads, [200, 1, 1, 1, 1]), {1, 2})
    assert reader_groups(large, 0) == ((1,), (2,), (3,))


def test_what_is_left_out(make_graph):
    fork = [(), (0,), (0,), (1, 2)]
    assert cheap_producers(make_graph(fork), without={"op0"}) == ()
    assert cheap_producers(make_graph(fork, outputs=[0])) == ()
    assert cheap_producers(make_graph([(), *[(0,)] * 17])) == ()  # too many readers
    wide = [(), *[(0,)] * 16]
    many = [tuple(17 * b + r for r in reads) for b in range(20) for reads in wide]
    assert len(cheap_producers(make_graph(many))) == 16  # 256 copies in all


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000), st.integers(1, 14))
def test_every_reader_reads_one_copy_and_all_else_stays(random_graph, seed, n):
    graph = random_graph(seed, n)
    copies = with_copies(graph, cheap_producers(graph))
    back = {i: o for o, mine in enumerate(copies.of) for i in mine}
    assert sorted(back) == list(range(len(copies.graph.operators)))
    for i, op in enumerate(copies.graph.operators):
        old = graph.operators[back[i]]
        assert (op.family, len(op.inputs), op.signature) == (old.family, len(old.inputs), old.signature)
        assert {back[p] for p in copies.graph.predecessors(i)} == set(graph.predecessors(back[i]))
    groups = random.Random(seed)
    kernels = [LegalKernel((o,)) for o in range(n)]
    images = [k.ops for _, k in once(copies, kernels)]
    assert all(len(ops) > 1 for ops in images)
    apart = chosen_copies(graph, copies, [(i,) for i in groups.sample(sorted(back), len(back))])
    assert {r.op for r in apart} == {graph.operators[o].name for o, mine in enumerate(copies.of) if len(mine) > 1}
