"""panel_weights: second operands of products that nothing else reads; their kernels have keys of their own."""

import pytest
import torch
from torch import nn

import tvmhet
from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.panels import panel_weights
from tvmhet.ir.prepare import prepare
from tvmhet.times import Candidates


class Products(nn.Module):
    def __init__(self, *, tied: bool = False, batched: bool = False) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.rand(4, 8, 16) if batched else torch.rand(8, 16))
        self.second = nn.Parameter(torch.rand(16, 8))
        self.tied = tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.first @ self.second
        return torch.cat((y, self.second)) if self.tied else y


class Steps(nn.Module):
    """The same weight at every step, of so many rows each; `turned`: once as the first operand."""

    def __init__(self, *rows: int, turned: bool = False) -> None:
        super().__init__()
        self.w, self.rows, self.turned = nn.Parameter(torch.rand(8, 8)), rows, turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for rows in self.rows:
            x = torch.cat((x, torch.tanh(x[:rows] @ self.w)))
        return self.w @ x[:8] if self.turned else x


def weights(module: nn.Module, *shape: int) -> list[str]:
    graph = prepare(tvmhet.from_torch(module, (torch.rand(*shape),))).operator_graph
    return sorted(graph.tensors[t].name.removeprefix("p_") for t in panel_weights(graph))


@pytest.mark.parametrize(
    ("module", "shape", "want"),
    [
        (Products(), (5, 8), ["first", "second"]),
        (Products(), (2, 1, 8), ["first", "second"]),  # two rows of a batch read one weight
        (Products(), (1, 8), []),  # of one row each weight is read once, as it lies
        (Products(tied=True), (5, 8), ["first"]),
        (Products(batched=True), (4, 5, 8), ["first", "second"]),
        (Steps(6, 6, 6), (6, 8), ["w"]),
        (Steps(6, 4), (6, 8), []),  # the widest tiles of the one are not those of the other
        (Steps(8, turned=True), (8, 8), []),
        (Products(batched=True), (5, 8), ["second"]),  # the batch reads the same rows again: not stored so
    ],
)
def test_what_may_be_in_panels(module, shape, want):
    assert weights(module, *shape) == want


def test_nothing_is_where_operands_are_activations_or_not_float32():
    class Pair(nn.Module):
        def forward(self, x, y):
            return x @ y

    graph = prepare(tvmhet.from_torch(Pair(), (torch.rand(5, 8), torch.rand(8, 16)))).operator_graph
    assert panel_weights(graph) == frozenset()
    double = prepare(tvmhet.from_torch(Products().double(), (torch.rand(5, 8).double(),))).operator_graph
    assert panel_weights(double) == frozenset()


def test_a_kernel_of_panels_has_a_key_and_a_description_of_its_own():
    graph = prepare(tvmhet.from_torch(Products(), (torch.rand(5, 8),))).operator_graph
    kernels = [LegalKernel((0,)), LegalKernel((0,), maker="library")]
    infers, trains = Candidates.of(graph, kernels), Candidates.of(graph, kernels, trains=True)
    assert infers.keys[0] != trains.keys[0] and infers.keys[1] == trains.keys[1]
    assert [d.panels for d in infers.descs] == [True, False] and not any(d.panels for d in trains.descs)
    assert infers.panels == panel_weights(graph) and infers.only([0]).panels == infers.panels and not trains.panels
