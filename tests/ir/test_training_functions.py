"""The gradient of a table's rows is added to its running sum row by row, where nothing else reads it.

Tables are larger than what is computed once: zeros of up to 1 MiB are constants.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn
from tvm import relax

import tvmhet
from tvmhet.ir.optimizers import Sgd
from tvmhet.ir.training_functions import backward_function
from tvmhet.ir.training_stages import split_stages
from tvmhet.ir.training_step import read_step

PLACES = torch.tensor([[1, 2, 1], [0, 2, 2]])


class Words(nn.Module):
    """A table of words and one of places, of which the second is read at the same rows each time."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(40_000, 8), nn.Embedding(36_000, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.words(x) + self.places(torch.arange(x.shape[1]))).mean(1))


class Tied(nn.Module):
    """The head is the table of words: its gradient is a product's and the rows'."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40_000, 8)

    def forward(self, x):
        return torch.tanh(self.words(x)).mean(1) @ self.words.weight.T


class Twice(nn.Module):
    """A table that is read at two sets of rows: zeros for each, of which the sums are added."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(40_000, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.words(x)).mean(1) * self.words((x + 1) % 40_000).mean(1))


def backward(module):
    torch.manual_seed(0)
    step = read_step(tvmhet.from_torch(module, PLACES, loss="cross_entropy", optimizer="sgd", mode="training"))
    (parts,) = split_stages(step, [step.forward])
    return step, parts, backward_function(step, parts, recompute=False)


def table_sized(function):
    """What makes a tensor as large as a table, by operator, and whether it reads a running sum."""
    found = []
    for binding in (b for block in function.module["main"].body.blocks for b in block.bindings):
        shape = getattr(binding.value.ty, "shape", None)
        if (
            isinstance(binding.value, relax.Call)
            and shape is not None
            and len(shape.values) == 2
            and shape[0] >= 36_000
        ):
            reads = [a.name for a in binding.value.args if isinstance(a, relax.Var)]
            found.append((str(binding.value.op.name), any(r.startswith("sum") for r in reads)))
    return sorted(found)


def test_rows_are_added_to_the_sum_and_no_zeros_are_made():
    step, parts, function = backward(Words())
    assert table_sized(function) == [("relax.scatter_nd", True), ("relax.scatter_nd", True)]
    left_out = [c for c in parts.backward if c not in function.calls]
    assert [str(step.bindings.calls[c].op.name) for c in left_out] == ["relax.full", "relax.full"]
    assert [c for c in parts.backward if c in function.calls] == list(function.calls)


@pytest.mark.parametrize("module", [Tied, Twice])
def test_a_gradient_that_is_more_than_rows_is_added_whole(module):
    _, parts, function = backward(module())
    assert ("relax.add", True) in table_sized(function) and ("relax.scatter_nd", True) not in table_sized(function)
    assert function.calls == parts.backward


def test_a_gradient_of_two_parameters_is_added_to_each_sum():
    """As of two tables that are added up: torch traces no such step, so the second parameter is put in here."""
    step, parts, _ = backward(Words())
    words, gradient = parts.gradients[0]
    assert words == "p_words_weight"
    step.bindings.types["p_other"] = step.bindings.types[words]
    both = replace(parts, gradients=(*parts.gradients, ("p_other", gradient)))
    function = backward_function(step, both, recompute=False)
    added = [("relax.add", True)] * 2 + [("relax.full", False), ("relax.scatter_nd", False), ("relax.scatter_nd", True)]
    assert table_sized(function) == added


@pytest.mark.parametrize("module", [Words, Tied, Twice])
def test_sums_are_those_of_torch(module):
    """Two steps of three micro-batches each against torch, on one device."""
    torch.manual_seed(0)
    net = module()
    step = tvmhet.from_torch(net, PLACES, loss="cross_entropy", optimizer=Sgd(lr=0.5), mode="training")
    cluster = tvmhet.ClusterSpec.of({"cpu-x86-64-v2": 1})
    batch = torch.randint(0, 5, (6, 3), generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 3, 4, 0])
    with tvmhet.build(step, cluster=cluster, global_batch=6, makers=("tvm",)) as trainer:
        losses, state = [trainer.train_step(*batch) for _ in range(2)], trainer.state_dict()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for loss in losses:
        optimizer.zero_grad()
        expected = nn.functional.cross_entropy(net(batch[0]), batch[1])
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-5)
    for name, value in net.state_dict().items():
        assert abs(state[name] - value.numpy()).max() < 4e-6
