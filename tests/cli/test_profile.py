"""tvmhet profile: one device or a cluster, here or through a tracker."""

import json
from pathlib import Path

import pytest

MODEL = """
import torch

def tiny():
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()).eval(), (torch.randn(4, 16),)
"""


@pytest.fixture
def tiny(tvmhet, monkeypatch):
    """The name of a model in the working folder."""
    Path("tiny_for_profile.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(Path().resolve()))
    return "tiny_for_profile:tiny"


def test_one_device_type_is_measured_here_and_then_known(tvmhet, tiny):
    status, out, err = tvmhet("profile", tiny, "--device", "cpu-x86-64-v2", "--budget", 120)
    assert status == 0, err
    assert "on cpu-x86-64-v2" in out and "every kernel of the best plans is measured" in out
    status, out, _ = tvmhet("predict", "--device", "cpu-x86-64-v2", "--model", tiny, "--json")
    assert status == 0 and {k["source"] for k in json.loads(out)["kernels"]} == {"measured"}
    assert "ok" in tvmhet("database")[1]


MISTAKES = {
    "nothing": ([], "has no --cluster"),
    "both": (["--cluster", "local", "--device", "t4"], "both --cluster and --device"),
    "key alone": (["--device", "t4", "--key", "mine"], "with --device and --tracker"),
    "no address": (["--device", "t4", "--tracker", "here", "--makers", "tvm"], "HOST:PORT"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message(mistake, tvmhet, tiny):
    args, words = MISTAKES[mistake]
    status, out, err = tvmhet("profile", tiny, *args)
    assert status == 2 and out == "" and words in err and "remedy: " in err
