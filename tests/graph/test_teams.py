"""What a team does for a stage: every kernel once on each device, in steps, and only what is needed to join parts."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch import nn

from tests.graph.test_cutting import Block, Experts, Flattened, Gated, Rotary, Sliced, graph_of
from tvmhet.graph.cutting import Cut, part_of
from tvmhet.graph.teams import Task, team_tasks


def said(graph, kernels, tasks):
    """The tasks in words, each device's of one step together."""
    lines = {}
    for t in tasks:
        what = "+".join(graph.operators[i].name for i in kernels[t.subject]) if t.task is Task.RUN else ""
        text = what or f"{t.task.value} {graph.tensors[t.subject].name}"
        lines.setdefault((t.step, t.rank), []).append(text)
    return {place: ", ".join(texts) for place, texts in lines.items()}


def test_a_layer_in_three_steps():
    graph = graph_of(Block(32, 4), torch.randn(1, 6, 32))
    part, at = part_of(graph, 2), graph.index
    kernels = [tuple(range(at("o"))), (at("o"),), tuple(range(at("o") + 1, at("fc2"))), (at("fc2"),), (at("fc2") + 1,)]
    kernels += [(i,) for i in range(at("fc2") + 2, len(graph.operators))]
    assert sorted(i for k in kernels for i in k) == list(range(len(graph.operators)))
    words = said(graph, kernels, team_tasks(graph, part, kernels))
    assert sorted(words) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]  # what follows the last sum one device does
    assert words[0, 0] == words[0, 1] and words[0, 0].endswith(", o")
    assert words[1, 0].startswith("add o, o_add") and words[1, 1] == words[1, 0] and words[1, 0].endswith(", fc2")
    assert words[2, 0] == "add fc2, fc2_add, add_1"


def test_a_stage_that_ends_in_a_sum_has_it_added_once():
    graph = graph_of(Block(32, 4), torch.randn(1, 6, 32))
    at = graph.index
    words = said(graph, kernels := [(at("fc2"),)], team_tasks(graph, part_of(graph, 2), kernels))
    assert words == {(0, 0): "take gelu, fc2", (0, 1): "take gelu, fc2", (1, 0): "add fc2"}


def test_a_stage_that_ends_in_parts_has_them_joined_once():
    graph = graph_of(Block(32, 4), torch.randn(1, 6, 32))
    at = graph.index
    kernels = [(at("fc1"),), (at("fc1_add"), at("gelu"))]
    words = said(graph, kernels, team_tasks(graph, part_of(graph, 2), kernels))
    assert words == {(0, 0): "fc1, fc1_add+gelu", (0, 1): "fc1, fc1_add+gelu", (1, 0): "join gelu"}


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: Block(32, 4), (2, 6, 32)),
        (Gated, (3, 8)),
        (lambda: Rotary(32, 8, 4, True), (2, 6, 32)),
        (lambda: Experts(8, 3, 8), (5, 8)),
    ],
)
@pytest.mark.parametrize("degree", [2, 4])
def test_tasks_read_what_is_there(make, shape, degree):
    """Of random stages: each device reads its own results and, of other devices, those of earlier steps."""
    graph = graph_of(make(), torch.randn(shape))
    part, rng = part_of(graph, degree), random.Random(0)
    for _ in range(20):
        begin, end = sorted(rng.sample(range(len(graph.operators) + 1), 2))
        kernels = [(i,) for i in range(begin, end)]
        tasks = team_tasks(graph, part, kernels)
        runs = Counter((t.rank, t.subject) for t in tasks if t.task is Task.RUN)
        assert set(runs.values()) == {1} and {s for r, s in runs if r == 0} == set(range(len(kernels)))
        own, there, partial = set(), set(), {}
        outside = {t for i in range(begin) for t in graph.operators[i].outputs}
        outside |= {i for i, t in enumerate(graph.tensors) if t.producer < 0}
        order = [(t.step, t.rank) for t in tasks]
        assert order == sorted(order)
        for t in tasks:
            if t.task is Task.RUN:
                (op,) = kernels[t.subject]
                for read in graph.operators[op].inputs:
                    is_share = read in part.cuts and not graph.tensors[read].is_param
                    assert (t.rank, read) in own or (read in outside and not is_share), graph.tensors[read].name
                made = graph.operators[op].outputs
                if op in part.summed:
                    partial |= {(x, t.rank): t.step for x in made}
                else:
                    own |= {(t.rank, x) for x in made}
                    there |= {(x, t.rank, t.step) for x in made}
            elif t.task is Task.TAKE:
                assert t.subject in outside and t.subject in part.cuts
                own.add((t.rank, t.subject))
            elif t.task is Task.ADD:
                assert all(partial[t.subject, r] < t.step for r in range(degree))
                own.add((t.rank, t.subject))
            else:
                assert t.rank == 0 and all(
                    any((t.subject, r, s) in there for s in range(t.step)) for r in range(degree)
                )
        leaves = {x for i in range(begin, end) for x in graph.operators[i].outputs}
        leaves = {
            x for x in leaves if graph.tensors[x].is_output or set(graph.tensors[x].consumers) - set(range(begin, end))
        }
        joined = {t.subject for t in tasks if t.task is Task.JOIN}
        assert joined == leaves & part.cut and all((0, x) in own for x in leaves)


@pytest.mark.parametrize("kind", [Sliced, Flattened])
def test_pieces_of_a_product_are_dealt_out_one_by_one(kind):
    graph = graph_of(kind(32, 8, 4, True), torch.randn(2, 6, 32))
    part = part_of(graph, 2)
    cuts = {graph.tensors[t].name: cut for t, cut in part.cuts.items()}
    assert cuts["p_qkv_weight"] == cuts["p_qkv_bias"] == Cut(-1, (32, 16, 16)) == cuts["qkv_add"]
    assert cuts["p_qkv_weight"].share(1, 2) == ((16, 32), (40, 48), (56, 64))
    assert cuts["p_o_weight"] == Cut(-2, (32,))


def test_columns_that_nothing_reads_are_dealt_out_too():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x):
            y = self.one(x)
            return self.two(torch.relu(y[..., :8] * y[..., 16:]))

    graph = graph_of(Half(), torch.randn(3, 8))
    cuts = {graph.tensors[t].name: cut.runs for t, cut in part_of(graph, 2).cuts.items()}
    assert cuts["p_one_weight"] == cuts["p_one_bias"] == (8, 8, 8) and cuts["p_two_weight"] == (8,)


def test_a_weight_of_two_products_is_not_dealt_out():
    """One would have it dealt out in two pieces, the other in one."""

    class Pieces(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.one, self.two, self.three = (nn.Linear(*n, bias=False) for n in ((8, 16), (8, 8), (16, 8)))
            self.four = self.one if shared else nn.Linear(8, 16, bias=False)

        def forward(self, x):
            y = self.one(x)
            return self.two(y[..., :8] * y[..., 8:]) + self.three(torch.relu(self.four(x + 1)))

    assert part_of(graph_of(Pieces(True), torch.randn(3, 8)), 2) is None
    part = part_of(graph_of(Pieces(False), torch.randn(3, 8)), 2)
    cuts = {part.graph.tensors[t].name: cut.runs for t, cut in part.cuts.items()}
    assert cuts["p_one_weight"] == (8, 8) and cuts["p_four_weight"] == (16,) and len(part.summed) == 2
