"""One maker alone: generated bundles run without torch; the library's table is named where it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tvmhet
from tvmhet.errors import UnsupportedOperator

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = tvmhet.ClusterSpec.of({"cpu-x86-64-v2": 1})
WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is not here")

sys.meta_path.insert(0, NoTorch())
import numpy as np
import tvmhet

with tvmhet.load(sys.argv[1]) as lib:
    print(lib(np.ones((8, 16), "float32")).sum() > 7.99)
assert "torch" not in sys.modules
"""


def test_a_bundle_of_generated_kernels_runs_without_torch(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4), torch.nn.Softmax(-1))
    model = tvmhet.from_torch(module.eval(), (torch.ones(8, 16),))
    with tvmhet.build(model, cluster=CLUSTER, makers=("tvm",)) as lib:
        lib.export(tmp_path / "bundle")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "bundle")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


class Sine(torch.nn.Module):
    """An operator that is no row of the library's table."""

    def forward(self, x):
        return torch.softmax(torch.sin(x), -1)


def test_an_operator_without_a_maker_is_named_with_the_maker_that_has_it():
    model = tvmhet.from_torch(Sine(), (torch.ones(4, 4),))
    with pytest.raises(UnsupportedOperator, match=r"'sin' \(sin\) has no maker among \('library',\).*'tvm' makes them"):
        tvmhet.plan(model, cluster=CLUSTER, makers=("library",))
    assert tvmhet.plan(model, cluster=CLUSTER, makers=("library", "tvm")).num_kernels in (1, 2)


class Tied(torch.nn.Module):
    """A language model in small: attention, a residual, and an embedding that is also the last product's weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.word = torch.nn.Embedding(50, 32)
        self.heads = torch.nn.Linear(32, 96)
        self.norm = torch.nn.LayerNorm(32)

    def forward(self, tokens):
        x = self.norm(self.word(tokens))
        q, k, v = (t.reshape(2, 9, 4, 8).transpose(1, 2) for t in self.heads(x).split(32, -1))
        weights = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1)
        x = x + (weights @ v).transpose(1, 2).reshape(2, 9, 32)
        return x @ self.word.weight.T


@pytest.mark.parametrize("makers", [("tvm",), ("tvm", "library")])
def test_a_tied_weight_is_never_transposed_and_results_are_torchs(makers):
    module, tokens = Tied().eval(), torch.arange(18).reshape(2, 9)
    lib = tvmhet.build(tvmhet.from_torch(module, (tokens,)), cluster=CLUSTER, makers=makers, inline=True)
    with lib, torch.no_grad():
        torch.testing.assert_close(torch.as_tensor(lib(tokens)), module(tokens), rtol=1e-4, atol=1e-5)
    kernels = [k for stage in lib.plan.stages for k in stage.kernels]
    stems = [{op.rstrip("_0123456789") for op in k.ops} for k in kernels]
    assert any({"permute_dims", "matmul"} <= found for found in stems)


def test_the_library_alone_makes_a_whole_model():
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU6(), torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(), torch.nn.Linear(8, 4), torch.nn.Softmax(-1),
    ).eval()  # fmt: skip
    x = torch.rand(2, 3, 8, 8)
    lib = tvmhet.build(tvmhet.from_torch(module, (x,)), cluster=CLUSTER, makers=("library",), inline=True)
    with lib, torch.no_grad():
        torch.testing.assert_close(torch.as_tensor(lib(x)), module(x), rtol=1e-5, atol=1e-6)
    assert {k.maker for stage in lib.plan.stages for k in stage.kernels} == {"library"}
