"""Attributes that are no tensors: one that changes in every call is refused in training, others stay as they were."""

import pytest
import torch
from torch import nn

import tvmhet
from tests.placed import cpus
from tvmhet.errors import BadModel

X = torch.zeros(2, 4)


class WarmUp(nn.Module):
    """Counts its calls, in Python or in a buffer."""

    def __init__(self, start):
        super().__init__()
        torch.manual_seed(0)
        self.product = nn.Linear(4, 4)
        if isinstance(start, torch.Tensor):
            self.register_buffer("step", start)
        else:
            self.step = start

    def forward(self, x):
        self.step += 1
        return self.product(x) * self.step / 4


class Notes(nn.Module):
    """Keeps the size of its input, as many backbones do, and something that is no number."""

    def __init__(self):
        super().__init__()
        self.product, self.size, self.last = nn.Linear(4, 4), None, float("nan")

    def forward(self, x):
        self.size, self.name = x.shape[1], "seen"
        return self.product(x)


def test_a_count_in_python_is_refused_and_stays():
    model = nn.Sequential(WarmUp(3), nn.ReLU())
    with pytest.raises(BadModel, match=r"attribute 'step' of Sequential\.0 changes in every call[\s\S]*a buffer"):
        tvmhet.from_torch(model, X, loss="mse", mode="training")
    assert model[0].step == 3
    with pytest.raises(BadModel, match="attribute 'step' of WarmUp changes"):
        tvmhet.from_torch(WarmUp(0.5), X, loss="mse", mode="training")


def test_a_count_in_a_buffer_is_counted():
    model = WarmUp(torch.zeros(()))
    step = tvmhet.from_torch(model, X, loss=lambda y: y.square().mean(), lr=0.0, mode="training")
    with tvmhet.build(step, cluster=cpus(v2=1), global_batch=2, mode="training", makers=("tvm",)) as trainer:
        first, second, third = trainer.fit([(torch.ones(2, 4),)] * 3)
    assert second == pytest.approx(4 * first) and third == pytest.approx(9 * first)


def test_what_is_noted_once_is_no_reason_and_is_taken_back():
    model = Notes()
    before = {k: v for k, v in vars(model).items() if not k.startswith("_")}
    tvmhet.from_torch(model, X, loss="mse", mode="training")
    assert model.size is None and not hasattr(model, "name")
    assert repr({k: v for k, v in vars(model).items() if not k.startswith("_")}) == repr(before)
