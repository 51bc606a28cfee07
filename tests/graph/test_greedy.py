"""Kernels without a search cover the graph once, in an execution order, and take the library's where it has one."""

import pytest
import torch
from torch import nn

import tvmhet
from tvmhet.graph.fusion import fuse_ops_groups, legal_kernels
from tvmhet.graph.greedy import greedy_kernels
from tvmhet.ir.prepare import prepare


@pytest.fixture(scope="module")
def graph():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 4), nn.Softmax(-1))
    return prepare(tvmhet.from_torch(model, (torch.randn(2, 8),))).graph


@pytest.mark.parametrize("makers", [("tvm",), ("tvm", "library")])
def test_kernels_cover_the_graph_in_order(graph, makers):
    made = set()
    for kernel in greedy_kernels(graph, makers):
        for i in kernel.ops:
            assert all(p in made or p in kernel.ops for p in graph.predecessors(i))
        assert made.isdisjoint(kernel.ops)
        made.update(kernel.ops)
    assert made == set(range(len(graph.operators)))


def test_without_the_library_they_are_tvms(graph):
    assert sorted(k.ops for k in greedy_kernels(graph, ("tvm",))) == sorted(k.ops for k in fuse_ops_groups(graph))


def test_products_go_to_the_library_and_the_rest_is_legal(graph):
    kernels = greedy_kernels(graph)
    products = [k for k in kernels if any(graph.operators[i].family == "matmul" for i in k.ops)]
    assert len(products) == 2 and all(k.maker == "library" for k in products)
    legal = {k.ops for k in legal_kernels(graph)}
    assert all(k.ops in legal for k in kernels if k.maker == "tvm")
    alone = [graph.operators[k.ops[0]].family for k in kernels if k.maker == "library" and len(k.ops) == 1]
    assert "add" not in alone and "nn.relu" not in alone  # those are better fused


def test_the_library_alone_takes_all_that_it_can(graph):
    assert all(k.maker == "library" for k in greedy_kernels(graph, ("library",)))
