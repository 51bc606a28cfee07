"""The command line for training: steps are imported with their loss, planned, measured and written as bundles."""

import re
import sys
from pathlib import Path

import pytest

from tvmhet.plans import Plan
from tvmhet.training import load_trainer

CLUSTER = "nodes: [{name: here, devices: {cpu-x86-64-v2: 1}}]\n"
MODELS = """
import torch
from torch import nn

def toy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)), (torch.randn(4, 32),)

def bare():
    return toy()[0]

def step():
    import tvmhet
    model, inputs = toy()
    return tvmhet.from_torch(model, inputs, loss="cross_entropy", optimizer="sgd", mode="training")
"""
STEP = ("--cluster", "cluster.yaml", "--mode", "training")


@pytest.fixture
def folder(tvmhet, tmp_path, monkeypatch):
    """The working folder with a cluster file and a module of models."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "toy_steps.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "toy_steps", raising=False)
    return tmp_path


@pytest.mark.parametrize(("given", "size"), [("auto", None), ("8", 8)])
def test_a_step_is_planned_and_its_micro_batch_chosen(folder, tvmhet, given, size):
    options = ("--global-batch", "32", "--loss", "cross_entropy", "--microbatch", given, "--out", "p.json")
    status, out, err = tvmhet("plan", "toy_steps:toy", *STEP, *options)
    assert status == 0, err
    assert "was given by the model's batch" not in out and "assumed" not in out
    training = Plan.load("p.json").training
    assert training.microbatch_size == size or (size is None and 32 % training.microbatch_size == 0)


@pytest.mark.slow
def test_a_plan_is_built_and_its_bundle_trains(folder, tvmhet):
    import torch

    asked = (*STEP, "--loss", "mse", "--optimizer", "momentum", "--global-batch", "8", "--makers", "tvm")
    status, out, err = tvmhet("plan", "toy_steps:bare", *asked, "--inputs", "2x32", "--out", "p.json")
    assert status == 0, err
    more = ("--plan", "p.json", "--out", "bundle", "--max-norm", "1", "--seed", "3")
    status, built, err = tvmhet("build", "toy_steps:bare", *asked, "--inputs", "2x32", *more)
    assert status == 0, err
    assert built == out + "training bundle written to bundle\n"
    with load_trainer("bundle") as trainer:
        assert trainer.seed == 3 and trainer.program.max_norm == 1 and trainer.program.num_microbatches == 4
        assert trainer.plan == Plan.load("p.json") and trainer.plan.model == "toy_steps:bare"
        assert {name for _, name in trainer.optimizer_state()} == {"momentum_buffer"}
        batch = torch.ones(8, 32), torch.zeros(8, 8)
        assert trainer.train_step(*batch) > trainer.train_step(*batch)
    status, out, err = tvmhet("run", "bundle", "--steps", "3")
    assert status == 0, err
    first, last = re.search(
        r"toy_steps:bare: 3 steps of training\n.*loss +(\d\.\d+) to (\d\.\d+)\n", out, re.S
    ).groups()
    assert float(last) < float(first) and "predicted, ratio" in out and "load_trainer" in out
    for option, value in (("--num-inputs", "3"), ("--inputs", "2x32"), ("--trace", "t.json")):
        status, out, err = tvmhet("run", "bundle", option, value)
        assert status == 2 and out == "" and f"{option} is given and the bundle is one for training" in err


def test_a_function_may_return_the_step(folder, tvmhet):
    status, out, err = tvmhet("plan", "toy_steps:step", *STEP, "--global-batch", "8")
    assert status == 0, err
    assert out.startswith("training plan of toy_steps:step\n") and "optimizer       sgd" in out


def test_profile_takes_a_step(folder, tvmhet):
    status, out, err = tvmhet("profile", "toy_steps:toy", *STEP, "--loss", "cross_entropy", "--budget", "0")
    assert status == 0, err
    assert "measured none; " in out and "a larger budget" in out


MISTAKES = {
    "no loss": (("build", "toy_steps:toy", *STEP, "--global-batch", "8", "--out", "b"), "give --loss"),
    "no loss to choose by": (
        ("plan", "toy_steps:toy", *STEP, "--global-batch", "8", "--microbatch", "auto"),
        "give --loss",
    ),
    "no loss to measure": (("profile", "toy_steps:toy", *STEP), "give --loss"),
    "no batch": (("build", "toy_steps:toy", *STEP, "--loss", "mse", "--out", "b"), "--global-batch"),
    "no division": (
        ("build", "toy_steps:toy", *STEP, "--loss", "mse", "--global-batch", "6", "--out", "b"),
        "TVMHET-E021",
    ),
    "micro-batch": (("plan", "toy_steps:step", *STEP, "--global-batch", "8", "--microbatch", "0"), "--microbatch"),
    "loss for inference": (("plan", "toy_steps:toy", "--cluster", "cluster.yaml", "--loss", "mse"), "--mode training"),
    "loss of a file": (("plan", "m.onnx", *STEP, "--loss", "mse", "--global-batch", "8"), "package.module:function"),
    "loss of a step": (("plan", "toy_steps:step", *STEP, "--loss", "mse", "--global-batch", "8"), "TrainingModel"),
    "unknown loss": (("plan", "toy_steps:toy", *STEP, "--loss", "hinge", "--global-batch", "8"), "cross_entropy"),
    "optimizer": (
        ("plan", "toy_steps:toy", *STEP, "--loss", "mse", "--optimizer", "lamb", "--global-batch", "8"),
        "'lamb'",
    ),
    "mode": (("plan", "toy_steps:toy", "--cluster", "cluster.yaml", "--mode", "train"), "inference or training"),
    "tuning": (
        ("build", "toy_steps:toy", *STEP, "--loss", "mse", "--global-batch", "8", "--tune", "1", "--out", "b"),
        "not tuned",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_message(folder, tvmhet, mistake):
    arguments, text = MISTAKES[mistake]
    status, out, err = tvmhet(*arguments)
    assert status == 2 and text in err and out == ""
    assert not Path("b").exists()
