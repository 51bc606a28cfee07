"""tvmhet tune: what it says when there is nothing to do, and when it cannot."""

from pathlib import Path

import pytest

MODEL = """
import torch

def tiny():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU()).eval(), (torch.randn(32, 64),)
"""
CLUSTER = "nodes: [{name: here, devices: {cpu-x86-64-v2: 1}}]\n"


@pytest.fixture
def tiny(tvmhet, monkeypatch):
    """The name of a model in the working folder, and a cluster file beside it."""
    Path("tiny_for_tune.py").write_text(MODEL)
    Path("cluster.yaml").write_text(CLUSTER)
    monkeypatch.syspath_prepend(str(Path().resolve()))
    return "tiny_for_tune:tiny"


def test_a_budget_of_nothing_is_said(tvmhet, tiny):
    for nothing in (("--budget-s", 0), ("--trials", 0)):
        status, out, err = tvmhet("tune", tiny, "--cluster", "cluster.yaml", *nothing)
        assert status == 0, err
        assert "0 trials" in out and "the budget is 0, so nothing was tuned" in out


MISTAKES = {
    "library alone": (["--makers", "library"], "library kernels have no schedule"),
    "library behind a tracker": (["--tracker", "127.0.0.1:9"], "--makers tvm"),
    "no address": (["--tracker", "here", "--makers", "tvm"], "HOST:PORT"),
    "no database": (["--db", "cluster.yaml"], "cluster.yaml"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message(mistake, tvmhet, tiny):
    args, words = MISTAKES[mistake]
    status, out, err = tvmhet("tune", tiny, "--cluster", "cluster.yaml", *args)
    assert status == 2 and out == "" and words in err and "remedy: " in err


@pytest.mark.slow
def test_real_trials_are_counted_and_the_next_run_goes_on(tvmhet, tiny):
    args = ("tune", tiny, "--cluster", "cluster.yaml", "--makers", "tvm", "--budget-s", 240, "--db", "mine/measured.db")
    status, out, err = tvmhet(*args, "--trials", 4)
    assert status == 0, err
    assert "4 trials in" in out and "the trials are spent" in out and Path("mine/measured.tuning").is_dir()
    status, out, err = tvmhet(*args, "--trials", 2)
    assert status == 0 and "continues 4 trials of earlier runs" in out
