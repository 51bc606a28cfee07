"""Weights of a few elements that stand in the code, as filters of an image do: planned and built by each maker."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tvmhet
from tests.placed import cpus


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


class Held(nn.Module):
    """A function of the input and of tensors that the module holds."""

    def __init__(self, function, *held):
        super().__init__()
        self.function, self.count = function, len(held)
        for i, tensor in enumerate(held):
            self.register_buffer(f"held{i}", tensor)

    def forward(self, x):
        return self.function(x, *(getattr(self, f"held{i}") for i in range(self.count)))


CASES = {
    "a blur": (lambda x, w: F.conv2d(x, w, padding=1), drawn(2, 1, 9, 9), drawn(1, 1, 3, 3)),
    "by channel, with a bias": (
        lambda x, w, b: F.conv2d(x, w, b, groups=3), drawn(2, 3, 9, 9), drawn(3, 1, 2, 2), drawn(3)
    ),
    "along one axis": (F.conv1d, drawn(2, 2, 9), drawn(2, 2, 3)),
    "of a volume": (F.conv3d, drawn(2, 1, 5, 5, 5), drawn(1, 1, 2, 2, 2)),
    "grown": (lambda x, w: F.conv_transpose2d(x, w, stride=2), drawn(2, 1, 9, 9), drawn(1, 1, 4, 4)),
    "grown along one axis": (lambda x, w: F.conv_transpose1d(x, w, stride=2), drawn(2, 2, 9), drawn(2, 2, 3)),
    "a product": (lambda x, w: x @ w, drawn(5, 4), drawn(4, 3)),
    "a product from the left": (lambda x, w: w @ x, drawn(4, 4), drawn(3, 4)),
    "keys": (lambda x, k: F.scaled_dot_product_attention(x, k, k), drawn(1, 1, 4, 4), drawn(1, 1, 3, 4)),
}  # fmt: skip


@pytest.mark.parametrize("makers", [("tvm",), ("tvm", "library")], ids="+".join)
@pytest.mark.parametrize("name", CASES)
def test_small_weights_are_weights(name, makers, tmp_path, monkeypatch):
    monkeypatch.setenv("TVMHET_CACHE_DIR", str(tmp_path))
    function, x, *held = CASES[name]
    module = Held(function, *held).eval()
    model = tvmhet.from_torch(module, (x,))
    with tvmhet.build(model, cluster=cpus(v2=1), makers=makers, inline=True) as lib:
        torch.testing.assert_close(lib(x), module(x), rtol=1e-5, atol=1e-5)
    assert tvmhet.plan(model, cluster=tvmhet.ClusterSpec.of({"t4": 1}), makers=makers).num_kernels >= 1
