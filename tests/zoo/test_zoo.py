import pytest
import torch

from tvmhet import zoo
from tvmhet.errors import BadInput


def test_the_same_seed_gives_the_same_weights():
    sizes = {"blocks": (1, 1, 1, 1), "base_width": 8, "image": 32}
    (one, x), (two, _) = zoo.get("resnet50", **sizes), zoo.get("resnet50", **sizes)
    other, _ = zoo.get("resnet50", seed=1, **sizes)
    assert torch.equal(one(*x), two(*x))
    assert not torch.equal(one(*x), other(*x))


def test_unknown_name_lists_the_models():
    with pytest.raises(BadInput, match=r"no model 'resnet51'[\s\S]*resnet50"):
        zoo.get("resnet51")
