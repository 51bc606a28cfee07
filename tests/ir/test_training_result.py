"""A loss by name needs a model that returns one tensor."""

import pytest
import torch

import tvmhet
from tvmhet.errors import BadInput


class Named(torch.nn.Module):
    """Returns its result in a dictionary, as many published models do."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 3)

    def forward(self, x):
        return {"logits": self.line(x)}


def test_a_result_that_is_no_tensor_is_named():
    with pytest.raises(BadInput, match="the model returns a dict, and loss 'cross_entropy' is of one tensor"):
        tvmhet.from_torch(Named(), (torch.randn(2, 4),), loss="cross_entropy", mode="training")
