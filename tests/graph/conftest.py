"""Invented operator graphs for the tests of graph/."""

import random

import pytest

from tvmhet.graph.opgraph import Operator, OpGraph, PatternKind, Tensor


@pytest.fixture
def make_graph():
    """A function from (reads, sizes, outputs) to a graph of one-result operators; see `_make_graph`."""
    return _make_graph


@pytest.fixture
def random_graph():
    """A function from (seed, number of operators) to a random graph with parameters."""

    def make(seed, n):
        rng = random.Random(seed)
        reads = [tuple(sorted(rng.sample(range(u), min(u, rng.choice((0, 1, 1, 2, 3)))))) for u in range(n)]
        sizes = [rng.randint(1, 50) for _ in range(n)]
        outputs = [u for u in range(n) if rng.random() < 0.1]
        params = [tuple(sorted(rng.sample(range(n), min(n, rng.choice((1, 1, 2)))))) for _ in range(n // 2)]
        return _make_graph(reads, sizes, outputs, params)

    return make


def _make_graph(reads, sizes=None, outputs=(), params=()):
    """Operator i reads the results of reads[i], or the model input x (100 bytes) if there are none.

    Result i has sizes[i] bytes (1 unless given); params[j] are the readers of parameter j, of 1000 bytes.
    """
    n = len(reads)
    readers = [tuple(v for v in range(n) if u in reads[v]) for u in range(n)]
    tensors = [Tensor("x", (100,), "int8", 100, -1, tuple(v for v in range(n) if not reads[v]))]
    for u in range(n):
        size = sizes[u] if sizes else 1
        tensors.append(Tensor(f"t{u}", (size,), "int8", size, u, readers[u], is_output=not readers[u] or u in outputs))
    tensors += [Tensor(f"p{j}", (1000,), "int8", 1000, -1, tuple(r), is_param=True) for j, r in enumerate(params)]
    operators = tuple(
        Operator(
            f"op{u}",
            "add",
            {},
            (*(tuple(1 + r for r in reads[u]) or (0,)), *(n + 1 + j for j, r in enumerate(params) if u in r)),
            (1 + u,),
            1.0,
            1,
            1,
            PatternKind.ELEM_WISE,
        )
        for u in range(n)
    )
    returned = tuple(i for i, t in enumerate(tensors) if t.is_output)
    return OpGraph(operators, tuple(tensors), (0,), returned)
