"""Groups of parameters with options of their own, given as an optimiser of torch; rates by functions and schedulers."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau

import tvmhet
from tests import test_training_teams
from tests.runtime import test_training as pipelines
from tests.runtime.test_training import MICRO, Net, batches, torch_step
from tvmhet.errors import BadInput, PlanMismatch
from tvmhet.ir.optimizers import AdamW, Lion, ParameterGroups, Sgd
from tvmhet.training import load_trainer


def decay_of_matrices(model, make, **other):
    """As transformers are trained: decay for matrices alone, and another rate for what comes last."""
    last = [p for n, p in model.named_parameters() if n.startswith(("second", "head"))]
    rest = [p for p in model.parameters() if not any(p is q for q in last)]
    return make(
        [
            {"params": [p for p in rest if p.ndim > 1], "weight_decay": 0.2},
            {"params": [p for p in rest if p.ndim < 2]},
            {"params": last, "lr": 0.02},
        ],
        lr=0.005,
        weight_decay=0.0,
        **other,
    )


OPTIMIZERS = {
    "adamw": lambda m: decay_of_matrices(m, torch.optim.AdamW, betas=(0.8, 0.9), eps=1e-3),
    "sgd": lambda m: decay_of_matrices(m, torch.optim.SGD, momentum=0.9),
    "rmsprop": lambda m: decay_of_matrices(m, torch.optim.RMSprop, centered=True, eps=1e-2),
    "adagrad": lambda m: decay_of_matrices(m, torch.optim.Adagrad, lr_decay=0.1, eps=1e-3),
}


def first_or_slow(case, first):
    return pytest.param(case, marks=[] if case == first else pytest.mark.slow)


def imported(model, make):
    inputs = (torch.zeros(MICRO, 5, dtype=torch.int64),)
    return tvmhet.from_torch(model, inputs, loss="cross_entropy", optimizer=make(model), mode="training")


def assert_same(trainer, double):
    state = trainer.state_dict()
    for name, value in double.named_parameters():
        np.testing.assert_allclose(state[name], value.detach().numpy(), rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("optimizer", [first_or_slow(o, "adamw") for o in OPTIMIZERS])
def test_each_group_is_updated_by_its_options(optimizer):
    model = Net()
    data = batches(4)
    with pipelines.build(imported(model, OPTIMIZERS[optimizer])) as trainer:
        assert trainer.lr == (0.005, 0.005, 0.02)
        trainer.fit(data)
        assert_same(trainer, trained(model, OPTIMIZERS[optimizer], data))


def trained(model, make, data):
    """The model in double precision after these steps of torch."""
    double = copy.deepcopy(model).double().train()
    reference = make(double)
    for batch in data:
        torch_step(double, reference, batch)
    return double


@pytest.mark.slow
@pytest.mark.parametrize("how", ["three, replicas, recomputed", "interleaved"])
def test_groups_with_replicas_and_chunks(how):
    model = Net()
    data = batches(4)
    with pipelines.build(imported(model, OPTIMIZERS["adamw"]), **pipelines.HOW[how]) as trainer:
        trainer.fit(data)
        assert_same(trainer, trained(model, OPTIMIZERS["adamw"], data))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["two", "inside the products"])
def test_groups_whose_parameters_are_dealt_out(how):
    model = test_training_teams.Net()
    data = batches(4)
    with test_training_teams.build(imported(model, OPTIMIZERS["adamw"]), **test_training_teams.HOW[how]) as trainer:
        trainer.fit(data)
        assert_same(trainer, trained(model, OPTIMIZERS["adamw"], data))


def test_what_is_in_no_group_is_not_trained():
    model = Net()
    step = imported(model, lambda m: torch.optim.SGD(m.second.parameters(), lr=0.1))
    assert sorted(step.torch_names[p] for p in step.trained) == ["second.bias", "second.weight"]
    assert all(p.requires_grad for p in model.parameters())
    data = batches(2)
    with pipelines.build(step) as trainer:
        trainer.fit(data)
        assert_same(trainer, trained(model, lambda m: torch.optim.SGD(m.second.parameters(), lr=0.1), data))


def test_one_group_of_all_parameters_is_none():
    step = imported(Net(), lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.25), weight_decay=0))
    assert step.optimizer == AdamW(0.25, weight_decay=0)


def with_tensors(optimizer):
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    return CosineAnnealingLR(optimizer, 5)


SCHEDULES = {
    "of tensors": with_tensors,
    "cosine": lambda o: CosineAnnealingLR(o, 5),
    "warm-up": lambda o: LambdaLR(o, lambda step: min(1.0, (step + 1) / 3)),
    "one cycle": lambda o: OneCycleLR(o, [0.01, 0.01, 0.05], total_steps=8, cycle_momentum=False),
}


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("name", [first_or_slow(n, "cosine") for n in SCHEDULES])
def test_rates_follow_a_scheduler(name):
    model, data = Net(), batches(4)
    double = copy.deepcopy(model).double().train()
    reference = OPTIMIZERS["adamw"](double)
    theirs, beside = SCHEDULES[name](reference), OPTIMIZERS["adamw"](model)
    scheduler = SCHEDULES[name](beside)
    step = imported(model, lambda m: beside)
    with pipelines.build(step) as trainer:
        trainer.fit(data, lr=scheduler)
        for batch in data:
            torch_step(double, reference, batch)
            theirs.step()
        assert scheduler.get_last_lr() == theirs.get_last_lr()
        assert_same(trainer, double)


def test_rates_by_a_function_of_the_step():
    model, data = Net(), batches(3)
    step = imported(model, lambda m: torch.optim.SGD(m.parameters(), lr=0.0))
    assert step.optimizer == Sgd(0.0)
    double = copy.deepcopy(model).double().train()
    reference = torch.optim.SGD(double.parameters(), lr=0.0)
    asked = []
    with pipelines.build(step) as trainer:
        trainer.fit(data[:1], lr=lambda number: asked.append(number) or 0.1 * number)
        trainer.fit(data[1:], lr=lambda number: asked.append(number) or 0.1 * number)
        assert asked == [1, 2, 3]
        for number, batch in enumerate(data, 1):
            reference.param_groups[0]["lr"] = 0.1 * number
            torch_step(double, reference, batch)
        assert_same(trainer, double)
        cycle = OneCycleLR(torch.optim.AdamW(model.parameters()), 0.1, total_steps=9)
        for wrong, text in (
            (0.1, "lr is 0.1"),
            (ReduceLROnPlateau(reference), "ReduceLROnPlateau is stepped with a metric"),
            (cycle, r"OneCycleLR changes momentum, too[\s\S]*cycle_momentum=False"),
        ):
            with pytest.raises(BadInput, match=text):
                trainer.fit(data, lr=wrong)
        trainer.lr = [0.1, 0.2]
        with pytest.raises(BadInput, match="2 rates and 1 groups"):
            trainer.train_step(data[0])


def test_checkpoints_and_bundles_keep_groups(tmp_path):
    data = batches(4)
    step = imported(Net(), OPTIMIZERS["adamw"])
    with pipelines.build(step) as trainer:
        trainer.fit(data[:2])
        trainer.save(tmp_path / "run.safetensors")
        trainer.export(tmp_path / "step")
        trainer.fit(data[2:])
        whole = trainer.state_dict()
    with load_trainer(tmp_path / "step") as again:
        assert again.lr == (0.005, 0.005, 0.02)
        again.restore(tmp_path / "run.safetensors")
        again.fit(data[2:])
        for name, value in again.state_dict().items():
            np.testing.assert_array_equal(value, whole[name], err_msg=name)
    others = step.optimizer.names[::-1]
    other = ParameterGroups(step.optimizer.rules, others)
    with (
        pipelines.build(
            tvmhet.from_torch(
                Net(),
                (torch.zeros(MICRO, 5, dtype=torch.int64),),
                loss="cross_entropy",
                optimizer=other,
                mode="training",
            )
        ) as trainer,
        pytest.raises(PlanMismatch, match=r"weight_decay=0.2\) of embed.weight, first.weight[\s\S]*same optimiser"),
    ):
        trainer.restore(tmp_path / "run.safetensors")


def stepped(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 5, dtype=torch.int64)).sum().backward()
    optimizer.step()
    return optimizer


REFUSED = {
    "no rule": (lambda m: torch.optim.Adadelta(m.parameters()), "no rule for the optimizer Adadelta"),
    "a class of one's own": (
        lambda m: type("Mine", (torch.optim.SGD,), {})(m.parameters()),
        "no rule for the optimizer Mine",
    ),
    "maximize": (lambda m: torch.optim.SGD(m.parameters(), maximize=True), "maximize of SGD is True"),
    "dampening": (lambda m: torch.optim.SGD(m.parameters(), momentum=0.9, dampening=0.1), "dampening of SGD is 0.1"),
    "sums": (lambda m: torch.optim.Adagrad(m.parameters(), initial_accumulator_value=0.1), "initial_accumulator_value"),
    "taken steps": (stepped, "AdamW that was given has taken steps"),
    "another model's": (lambda m: torch.optim.SGD(Net().parameters()), r"shape \(13, 8\) that is none of Net's"),
    "unlike state": (
        lambda m: torch.optim.SGD(
            [{"params": m.first.parameters(), "momentum": 0.9}, {"params": m.second.parameters()}]
        ),
        r"keeps momentum_buffer \(Sgd\), another nothing",
    ),
    "the class alone": (lambda m: torch.optim.SGD, "a SGD, not a name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_taken_is_named(case):
    make, text = REFUSED[case]
    with pytest.raises(BadInput, match=text):
        imported(Net(), make)


def test_options_beside_an_optimizer_are_refused():
    model, inputs = Net(), (torch.zeros(MICRO, 5, dtype=torch.int64),)
    for chosen in (torch.optim.SGD(model.parameters()), Lion()):
        with pytest.raises(BadInput, match=r"options \['lr'\] were given beside"):
            tvmhet.from_torch(model, inputs, loss="cross_entropy", optimizer=chosen, lr=0.1, mode="training")
