"""Models whose weights were never made: torch's meta device. They are planned like any other, and not built."""

import resource

import pytest
import torch
from torch import nn

import tvmhet
from tvmhet.cluster import ClusterSpec
from tvmhet.errors import BadModel
from tvmhet.ir.importers import from_torch
from tvmhet.ir.prepare import prepare


class Tied(nn.Module):
    """Embedding and output share a weight; a buffer of zeros, linear layers, a position table."""

    def __init__(self, vocab: int = 50, dim: int = 16, layers: int = 1) -> None:
        super().__init__()
        self.word = nn.Embedding(vocab, dim)
        self.layers = nn.Sequential(*(nn.Linear(dim, dim) for _ in range(layers)))
        self.register_buffer("scale", torch.zeros(dim))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.word(ids) * self.scale + torch.arange(ids.shape[1])[None, :, None]
        return self.layers(x) @ self.word.weight.T


def absent(**sizes):
    with torch.device("meta"):
        return Tied(**sizes)


IDS = torch.zeros(1, 8, dtype=torch.int64)
CLUSTER = ClusterSpec.of({"t4": 1, "a100-40gb": 1})


def test_it_is_the_model_with_values_in_every_other_respect():
    real, planned = from_torch(Tied(), (IDS,)), from_torch(absent(), (IDS,))
    assert real.has_values and not planned.has_values
    assert prepare(real).key == prepare(planned).key
    assert real.param_bytes == planned.param_bytes
    first, second = (tvmhet.plan(m, cluster=CLUSTER) for m in (real, planned))
    assert first.to_json() == second.to_json()


def test_forty_gigabytes_take_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = from_torch(absent(dim=16384, layers=40), (IDS,))
    assert model.param_bytes > 40 * 2**30
    assert prepare(model).graph is not None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 2**10  # KiB


def test_it_is_not_built():
    with pytest.raises(BadModel, match="have no values") as caught:
        tvmhet.build(from_torch(absent(), (IDS,)), cluster=ClusterSpec.of({"cpu-x86-64-v3": 1}))
    assert "weights loaded" in caught.value.remedy
