"""Parameters with several names, as transformers' language models have them: one gradient, the whole of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tvmhet.ir.training_tied import OneNameEach, with_one_name_each
from tvmhet.ir.training_trace import trace_joint


class Tied(nn.Module):
    """An embedding that is also the classifier's weight, a bias with two names, a layer that is run twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.decode = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.decode.weight = self.embed.weight
        self.bias = self.decode.bias
        layer = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.layers = nn.ModuleList([layer, layer])

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.decode(x)


def test_a_tied_parameter_has_one_gradient():
    model, tokens, targets = Tied().double(), torch.arange(6), torch.arange(6) + 2
    joint = trace_joint(model, (tokens,), (targets,), nn.functional.cross_entropy)
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    assert sorted(joint.trained) == sorted(joint.parameters) == sorted(n for n, _ in model.named_parameters())
    values = [state[n].detach().clone() for n in (*joint.parameters, *joint.buffers)]
    loss, *results = joint.graph(tokens, targets, *values, *joint.constants)
    want = nn.functional.cross_entropy(model(tokens), targets)
    want.backward()
    torch.testing.assert_close(loss, want.detach())
    for name, gradient in zip(joint.trained, results, strict=False):
        torch.testing.assert_close(gradient, state[name].grad)
    for name, value in zip(joint.updated, results[len(joint.trained) :], strict=True):
        torch.testing.assert_close(value, state[name])  # the model's own step has renewed it


def test_a_module_without_tied_tensors_stays():
    plain = nn.Linear(2, 2)
    assert with_one_name_each(plain) is plain
    tied = Tied()
    assert isinstance(with_one_name_each(tied), OneNameEach)
    assert [id(p) for p in with_one_name_each(tied).parameters()] == [id(p) for p in tied.parameters()]


@pytest.mark.parametrize("training", [True, False])
def test_what_stands_for_a_module_computes_the_same(training):
    tied = Tied().train(training)
    with torch.no_grad():
        torch.testing.assert_close(with_one_name_each(tied)(torch.arange(6)), tied(torch.arange(6)))
