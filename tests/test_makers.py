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
