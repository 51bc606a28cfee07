"""Which products may be merged: alike, of one tensor, by parameters of their own."""

import pytest
import torch
from torch import nn

import tvmhet
from tvmhet.graph.merges import find_merges
from tvmhet.ir.prepare import prepare


class Heads(nn.Module):
    """Linear layers of one tensor, each followed by what is given for it."""

    def __init__(self, sizes, after, bias):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, n, bias=b) for n, b in zip(sizes, bias, strict=True)])
        self.after = after

    def forward(self, x):
        return tuple(f(layer(x)) for f, layer in zip(self.after, self.layers, strict=True))


def members(module, x, without=()):
    graph = prepare(tvmhet.from_torch(module.eval(), (x,))).graph
    return [[[[graph.operators[graph.index(n)].family for n in m] for m in merge.members] for merge in level]
            for level in find_merges(graph, without)]  # fmt: skip


X = torch.zeros(2, 6)
RELU, NONE, GELU = torch.relu, (lambda x: x * 2.0), nn.functional.gelu


@pytest.mark.parametrize(
    ("after", "bias", "want"),
    [
        ([NONE, NONE], [True, True], ["matmul", "add"]),
        ([NONE, NONE], [False, False], ["matmul"]),
        ([RELU, RELU], [True, True], ["matmul", "add", "nn.relu"]),
        ([RELU, NONE], [True, True], ["matmul", "add"]),  # what they have in common
        ([RELU, GELU], [True, True], ["matmul", "add"]),
        ([RELU, RELU], [False, True], ["matmul"]),
    ],
)
def test_members_have_in_common_what_follows(after, bias, want):
    assert members(Heads([4, 5], after, bias), X) == [[[want, want]]]


def test_all_together_and_in_pairs():
    levels = members(Heads([4, 5, 4], [NONE] * 3, [False] * 3), X)
    assert [[len(merge) for merge in level] for level in levels] == [[3], [2]]
    levels = members(Heads([4] * 4, [NONE] * 4, [False] * 4), X)
    assert [[len(merge) for merge in level] for level in levels] == [[4], [2, 2]]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.v = nn.Parameter(torch.ones(6, 6)), nn.Parameter(torch.ones(6, 6))

    def forward(self, x):
        return x @ self.w, x @ self.v, (x + 1.0) @ self.v


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Conv2d(4, 4, 1, groups=2) for _ in range(2))
        self.c, self.d = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.a(x), self.b(x), self.c(x), self.d(x)


def test_what_is_not_alike_stays_apart():
    assert members(Tied(), X) == []  # one weight is read again
    assert members(Grouped(), torch.zeros(1, 4, 5, 5)) == []  # groups; other windows


def test_named_operators_are_left_alone():
    module = Heads([4, 5, 4], [NONE] * 3, [False] * 3)
    assert [len(m) for m in members(module, X, without={"layers_1"})[0]] == [2]
