"""Stages of a training step: each call once, gradients flow back, sums end where their weights live."""

import random

import pytest
import torch
from torch import nn

import tvmhet
from tvmhet.errors import BadGraph
from tvmhet.ir.training_functions import backward_function, forward_function, sum_name
from tvmhet.ir.training_stages import split_stages, with_buffers_whole
from tvmhet.ir.training_step import read_step


class Net(nn.Module):
    """A skip over the middle, and a weight that the first and the last product share."""

    def __init__(self):
        super().__init__()
        self.tied, self.middle = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        a = torch.tanh(self.tied(x))
        return self.tied(torch.sigmoid(self.middle(a)) + a)


@pytest.fixture(scope="module")
def step():
    return read_step(tvmhet.from_torch(Net(), (torch.randn(2, 6),), loss="mse", mode="training"))


def cuts(step, seed):
    """Stages by dice, in the order of the calls."""
    dice = random.Random(seed)
    n = len(step.forward)
    at = sorted(dice.sample(range(1, n), dice.randint(0, min(4, n - 1))))
    return [step.forward[a:b] for a, b in zip([0, *at], [*at, n], strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_any_cut_gives_stages_that_hold_together(step, seed):
    parts = split_stages(step, cuts(step, seed))
    assert sorted(c for p in parts for c in (*p.forward, *p.backward)) == sorted(step.bindings.calls)
    assert sorted(p for part in parts for p, _ in part.gradients) == sorted(step.gradients)
    made = {t: p.index for p in parts for t in p.outputs}
    sent = {t: p.index for p in parts for t in p.sent}
    for p in parts:
        assert all(t in step.batch or made[t] < p.index for t in p.reads)  # activations go forwards
        assert all(sent[t] > p.index for t in p.received)  # gradients go backwards
        for recompute in (False, True):
            forward = forward_function(step, p, recompute=recompute)
            backward = backward_function(step, p, recompute=recompute)
            known = {*p.reads, *p.received, *step.weights, *(sum_name(w) for w, _ in p.gradients)}
            assert set(forward.inputs) <= known
            kept = set() if recompute else set(forward.outputs)
            assert set(backward.inputs) <= known | kept
            assert set(p.outputs) <= set(forward.outputs) and set(p.sent) <= set(backward.outputs)


def test_a_shared_weight_is_added_up_where_it_is_read_first(step):
    n = len(step.forward)
    parts = split_stages(step, [step.forward[: n // 2], step.forward[n // 2 :]])
    tied = {p for p in step.gradients if step.model.torch_names[p].startswith("tied")}
    assert tied <= {p for p, _ in parts[0].gradients}


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda f: [f, ()], "stage 1 is empty"),
        (lambda f: [f[:-1]], "is in no stage"),
        (lambda f: [f, f[:1]], "is in two stages"),
        (lambda f: [f[1:], f[:1]], "which a later stage makes"),
        (lambda f: [(*f, "nonsense")], "'nonsense' is no forward operator"),
    ],
)
def test_stages_that_cannot_be_run_are_refused(step, spoil, text):
    with pytest.raises(BadGraph, match=text):
        split_stages(step, spoil(step.forward))


def test_a_buffer_is_read_where_it_is_renewed():
    """At every cut between two stages, statistics of a batch norm stay whole; other operators stay where they were."""
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)).train()
    step = read_step(tvmhet.from_torch(net, (torch.randn(4, 6),), loss="mse", mode="training"))
    moves = 0
    for at in range(1, len(step.forward)):
        stages = [step.forward[:at], step.forward[at:]]
        whole = with_buffers_whole(step, stages)
        moves += whole[0] != stages[0]
        for part in split_stages(step, whole):
            renewed = {b for b, _ in part.buffers}
            read = {w for c in part.forward for w in step.bindings.reads(c) if w in step.buffers}
            assert read <= renewed
        assert set(whole[0]) <= set(stages[0]) and len(stages[0]) - len(whole[0]) <= 3
    assert moves
