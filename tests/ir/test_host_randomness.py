"""A model that draws numbers outside torch is refused: what it drew while it was traced would be drawn for good."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from tvmhet.errors import BadModel
from tvmhet.ir.importers import from_torch

X = torch.zeros(2, 4)


class Skips(nn.Module):
    """Leaves its product out in some calls, as layers are dropped in training."""

    def __init__(self, draw, rate):
        super().__init__()
        self.product, self.draw, self.rate = nn.Linear(4, 4), draw, rate

    def forward(self, x):
        return self.product(x) if self.rate == 0 or self.draw() >= self.rate else self.product(2 * x)


DRAWS = {
    "Python's random": random.random,
    "numpy.random": np.random.rand,
    "Python's random and numpy.random": lambda: random.random() + np.random.standard_normal(),
}


@pytest.mark.parametrize("which", DRAWS)
@pytest.mark.parametrize("options", [{}, {"loss": "mse", "mode": "training"}], ids=["inference", "training"])
def test_draws_outside_torch_are_refused(which, options):
    with pytest.raises(BadModel, match=f"Skips draws numbers by {which} when it is called"):
        from_torch(Skips(DRAWS[which], 0.5), X, **options)


@pytest.mark.parametrize("options", [{}, {"loss": "mse", "mode": "training"}], ids=["inference", "training"])
def test_a_model_that_draws_none_moves_no_generator(options):
    before = random.getstate(), np.random.get_state()[1].tolist()
    from_torch(Skips(random.random, 0), X, **options)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_a_loss_that_draws_is_refused_too():
    with pytest.raises(BadModel, match=r"Linear draws numbers by numpy\.random"):
        from_torch(nn.Linear(4, 4), X, loss=lambda y: y.square().mean() * np.random.rand(), mode="training")
