"""Kernels without a search cover the graph once, in an execution order, and take the library's where it has one."""

import pytest
import torch
from torch import nn

import tvmhet
from tests.placed import cpus
from tvmhet.graph.fusion import fuse_ops_groups, legal_kernels
from tvmhet.graph.greedy import greedy_kernels
from tvmhet.ir.prepare import prepare
from tvmhet.ir.training_step import read_step
from tvmhet.solve.schedules import Schedule
from tvmhet.training_memory import memory_of_placement
from tvmhet.training_placement import TrainingPlacement


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


def test_gradients_of_a_weight_by_many_steps_are_added_as_they_come(monkeypatch):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.Linear(512, 512, bias=False)

        def forward(self, x):
            for _ in range(8):
                x = torch.tanh(self.cell(x))
            return x

    x = torch.randn(2, 512)
    step = tvmhet.from_torch(Recurrent(), (x,), loss="mse", optimizer="sgd", lr=0.1, mode="training")
    cluster = cpus(v3=1)
    (device,) = cluster.groups()[0].device_ids
    whole = TrainingPlacement((read_step(step).forward,), ((device,),), (False,), Schedule.ONE_F_ONE_B, 1)

    def private_bytes():
        found = memory_of_placement(read_step(step), whole, cluster=cluster, makers=("tvm", "library"))
        return found[device].private_bytes

    in_turn = private_bytes()
    monkeypatch.setattr("tvmhet.graph.greedy._MANY_TERMS", 1000)
    assert private_bytes() - in_turn >= 5 * x.shape[1] ** 2 * 4  # of eight gradients two or three are kept
