"""Tasks of teams in training: levels by hand, and the law that every task reads only what is there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tvmhet
from tvmhet import zoo
from tvmhet.graph.cutting import part_of
from tvmhet.graph.teams import Task
from tvmhet.graph.training_teams import Halves, owners, training_tasks, with_sums_late
from tvmhet.ir.training_step import read_step
from tvmhet.training_teams import _alike, training_part


def imported(module, *inputs, loss="cross_entropy"):
    return read_step(tvmhet.from_torch(module.train(), inputs, loss=loss, optimizer="sgd", mode="training"))


def halves_of(step):
    """All operators of a step."""
    index = step.prepared.operator_graph.index
    return Halves(*(tuple(index(name) for name in names) for names in (step.forward, step.backward)))


class Block(nn.Module):
    """A norm before, a residual around, two products: the two exchanges of a layer, one in each direction."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def test_forward_passes_part_where_gradients_are_added_and_backward_ones_where_results_are():
    step = imported(nn.Sequential(nn.Linear(8, 8), Block()), torch.randn(4, 8), loss="mse")
    graph, halves = step.prepared.operator_graph, halves_of(step)
    part = with_sums_late(graph, training_part(step, 2), halves.ops)
    tasks = training_tasks(graph, part, halves, _alike(step))
    ops = halves.ops
    products = {
        (graph.operators[ops[t.subject]].name.split("_")[0], t.behind): t.step
        for t in tasks
        if t.task is Task.RUN and t.rank == 0 and graph.operators[ops[t.subject]].family == "matmul"
    }
    assert products["matmul", False] == 1  # norm and what is before it: level 0; the two products: 1; the loss: 2
    added = [(t.step, t.behind, t.rank) for t in tasks if t.task is Task.ADD]
    assert added == [(2, False, 0), (2, False, 1), (0, True, 0), (0, True, 1)]
    assert {t.step for t in tasks} == {0, 1, 2}


def makers(graph, halves, tasks):
    """What each task makes and reads, as (tensor, rank); partial sums are there for all."""
    for task in tasks:
        if task.task is Task.RUN:
            operator = graph.operators[halves.ops[task.subject]]
            yield task, list(operator.outputs), list(operator.inputs)
        else:
            yield task, [task.subject], []


MODELS = {
    "bert_base": {"batch": 2, "length": 16, "layers": 2, "dim": 32, "heads": 4, "vocab": 50},
    "gpt2_small": {"batch": 2, "length": 16, "layers": 2, "dim": 32, "heads": 4, "vocab": 50},
    "moe": {"batch": 2, "length": 8, "layers": 2, "dim": 16, "heads": 4, "hidden": 32, "experts": 4},
}


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_tasks_read_only_what_is_there(name, degree):
    module, inputs = zoo.get(name, **MODELS[name])
    # one exchange forward and one back of each layer at least
    assert sums_of(imported(module, *inputs), degree) >= 2 * MODELS[name]["layers"]


class Scaled(torch.autograd.Function):
    """Only the gradient reads the scale."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(scale)
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        (scale,) = ctx.saved_tensors
        return gradient * scale, None


class LateScale(Block):
    """A scale that the forward pass reads before all exchanges and the backward pass before them, too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x):
        return Scaled.apply(super().forward(x * self.scale), self.scale)


def test_gradients_wait_for_no_level_that_only_holds_a_weight():
    """The scale lies in the first level; what follows it in the backward pass needs what the second kept."""
    assert sums_of(imported(nn.Sequential(nn.Linear(8, 8), LateScale()), torch.randn(4, 8), loss="mse"), 2) == 2


def sums_of(step, degree):
    """Play the tasks level by level: a device has what it made, and of others what an earlier level left in parts.

    Returns how many sums the first device adds up.
    """
    graph, halves, ends = step.prepared.operator_graph, halves_of(step), _alike(step)
    part = with_sums_late(graph, training_part(step, degree), halves.ops)
    tasks = training_tasks(graph, part, halves, ends)
    inside = {t for op in halves.ops for t in graph.operators[op].outputs}
    partial = {t for op in part.summed for t in graph.operators[op].outputs}
    made = [dict() for _ in range(degree)]  # by tensor: (behind, level)
    parts = [dict() for _ in range(degree)]
    sums = 0
    for task, outputs, reads in makers(graph, halves, tasks):
        now = task.behind, task.step
        for t in reads:
            if t in inside:
                assert t in made[task.rank], (graph.tensors[t].name, task)
                behind, level = made[task.rank][t]
                assert (behind == task.behind and (level >= task.step if behind else level <= task.step)) or (
                    task.behind and not behind and level <= task.step
                ), "a backward pass waits for forward passes of its own level and those before it"
        if task.task in (Task.ADD, Task.JOIN):
            sums += task.rank == 0
            for other in range(degree):
                behind, level = parts[other][task.subject]
                assert behind == task.behind and (level > task.step if behind else level < task.step)
        for t in outputs:
            (parts if task.task is Task.RUN and t in partial | part.cut else made)[task.rank][t] = now
            if t in part.cut:
                made[task.rank][t] = now
    owner = owners(graph, part, halves, ends)
    for t in ends:
        ranks = [owner[t]] if t in owner else range(degree)
        assert all(t in made[rank] for rank in ranks), graph.tensors[t].name
    return sums


def test_gradients_that_meet_are_one_sum():
    """q, k and v read one norm: its gradient is the sum of three products, which a team adds up once."""
    module, inputs = zoo.get("gpt2_small", **MODELS["gpt2_small"])
    step = imported(module, *inputs)
    graph, halves = step.prepared.operator_graph, halves_of(step)
    part = training_part(step, 2)
    late = with_sums_late(graph, part, halves.ops)
    behind = set(halves.behind)
    assert len(part.summed & behind) - len(late.summed & behind) == 2 * MODELS["gpt2_small"]["layers"]
    assert part.summed - behind == late.summed - behind


class Parallel(nn.Module):
    """Two perceptrons whose results meet; one is read by another operator, too, if asked for."""

    def __init__(self, is_read):
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(8, 16, bias=False) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(16, 8, bias=False) for _ in range(2))
        self.is_read = is_read

    def forward(self, x):
        one, two = (down(torch.relu(up(x))) for up, down in zip(self.ups, self.downs, strict=True))
        return one + two, torch.exp(one) if self.is_read else x


@pytest.mark.parametrize("is_read", [False, True])
def test_sums_are_added_late_where_nothing_else_reads_them(is_read):
    graph = tvmhet.extract_graph(tvmhet.from_torch(Parallel(is_read).eval(), (torch.randn(4, 8),)))
    late = with_sums_late(graph, part_of(graph, 2, joins=True), range(len(graph.operators)))
    families = sorted(graph.operators[i].family for i in late.summed)
    assert families == (["matmul", "matmul"] if is_read else ["add"])


def test_whole_gradients_are_dealt_by_bytes():
    step = imported(nn.Sequential(nn.Linear(8, 8), Block()), torch.randn(4, 8), loss="mse")
    graph, halves = step.prepared.operator_graph, halves_of(step)
    part = training_part(step, 2)
    owner = owners(graph, part, halves, _alike(step))
    held = [sum(graph.tensors[t].size_bytes for t, r in owner.items() if r == rank) for rank in range(2)]
    largest = max(graph.tensors[t].size_bytes for t in owner)
    assert set(owner.values()) == {0, 1} and abs(held[0] - held[1]) <= largest
