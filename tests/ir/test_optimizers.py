"""Updates against torch's optimisers in double precision, three steps each, every tensor that they keep."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch
import tvm
from torch import nn

import tvmhet
from tvmhet.emit.lower import lower_stage
from tvmhet.errors import BadInput
from tvmhet.ir.optimizers import (
    KEPT,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    ParameterGroups,
    RmsProp,
    Sgd,
    optimizer_of,
    optimizer_tree,
    plan_name,
    read_optimizer,
    scalars_of,
)
from tvmhet.ir.training_step import read_step
from tvmhet.ir.training_update import update_function
from tvmhet.runtime.program import numpy_dtype


class TorchLion(torch.optim.Optimizer):
    """The three lines of algorithm 2 of the paper, with its decoupled decay."""

    def __init__(self, params, lr, betas, weight_decay):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (first, second), lr = group["betas"], group["lr"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = torch.sign(first * m + (1 - first) * p.grad) + group["weight_decay"] * p
                m.copy_(second * m + (1 - second) * p.grad)
                p.sub_(lr * update)


TARGET = {"kind": "llvm", "mcpu": "x86-64-v3"}
SCALE = 0.25  # of the gradients' sums
CASES = {
    "sgd": (Sgd(0.1), torch.optim.SGD),
    "decayed": (Sgd(0.1, weight_decay=0.2), torch.optim.SGD),
    "momentum": (Sgd(0.1, momentum=0.9, weight_decay=0.2), torch.optim.SGD),
    "nesterov": (Sgd(0.1, momentum=0.9, nesterov=True), torch.optim.SGD),
    "adam": (Adam(0.1), torch.optim.Adam),
    "adam, decayed": (Adam(0.1, (0.8, 0.99), 1e-6, 0.3), torch.optim.Adam),
    "adamw": (AdamW(0.1, (0.8, 0.99), 1e-6, 0.3), torch.optim.AdamW),
    "adamw, amsgrad": (AdamW(0.1, (0.8, 0.9), 1e-6, 0.3, amsgrad=True), torch.optim.AdamW),
    "decay is a whole number": (Sgd(0.1, weight_decay=1), torch.optim.SGD),
    "rmsprop": (RmsProp(0.1, alpha=0.9, weight_decay=0.2), torch.optim.RMSprop),
    "rmsprop, momentum": (RmsProp(0.1, alpha=0.9, eps=1e-3, momentum=0.8), torch.optim.RMSprop),
    "rmsprop, centered": (RmsProp(0.1, alpha=0.9, eps=1e-2, momentum=0.8, centered=True), torch.optim.RMSprop),
    "adagrad": (Adagrad(0.1, lr_decay=0.5, weight_decay=0.2, eps=1e-6), torch.optim.Adagrad),
    "lion": (Lion(0.1, (0.8, 0.9), 0.3), TorchLion),
}


#: Of parameters and what is kept beside them: three roundings of their own precision.
TOLERANCES = {"float32": 2e-6, "float64": 2e-7, "float16": 3e-3, "bfloat16": 2e-2}


@pytest.fixture(scope="module", params=TOLERANCES)
def step(request):
    torch.manual_seed(0)
    dtype = getattr(torch, request.param)
    model, zeros = nn.Linear(4, 3).to(dtype), torch.zeros(2, 4, dtype=dtype)
    return request.param, model, read_step(tvmhet.from_torch(model, (zeros,), loss="mse", mode="training"))


@pytest.mark.parametrize("case", CASES)
def test_three_updates_are_torchs(step, case):
    """Scalars come in float32, which is what a rate of 0.1 differs by in float64."""
    (dtype, model, read), (chosen, reference) = step, CASES[case]
    kind, rtol = numpy_dtype(dtype), TOLERANCES[dtype]
    function = update_function(read, list(read.gradients), chosen)
    executable, _ = lower_stage(function.module, TARGET)
    run = tvm.relax.VirtualMachine(executable, tvm.cpu())["main"]
    double = copy.deepcopy(model).double()
    options = {name: getattr(chosen, name) for name in chosen.__dataclass_fields__ if name != "lr"}
    optimizer = reference(double.parameters(), lr=0.0, **options)
    own = {p: dict(double.named_parameters())[read.model.torch_names[p]] for p in read.gradients}
    state = {p: own[p].detach().numpy().astype(kind) for p in own}
    state |= {f"{p}.{s}": np.zeros_like(state[p]) for p in own for s in chosen.state}
    random = np.random.default_rng(0)
    for number, rate in enumerate((0.1, 0.05, 0.2), 1):
        sums = {f"sum.{p}": random.standard_normal(own[p].shape).astype(kind) for p in own}
        scalars = (SCALE, *chosen.scalars(number, rate))
        numbers = zip(function.inputs[-len(scalars) :], scalars, strict=True)
        given = state | sums | {n: np.array(v, np.float32) for n, v in numbers}
        results = run(*(tvm.runtime.tensor(given[n]) for n in function.inputs))
        state |= {n: r.numpy() for n, r in zip(function.outputs, results, strict=True)}
        assert all(value.dtype == kind for value in state.values())
        optimizer.param_groups[0]["lr"] = rate
        for p, parameter in own.items():
            parameter.grad = SCALE * torch.from_numpy(sums[f"sum.{p}"].astype("float64"))
        optimizer.step()
    for p, parameter in own.items():
        assert_close(state[p], parameter.detach(), rtol)
        for s in chosen.state:
            assert_close(state[f"{p}.{s}"], optimizer.state[parameter][s], rtol)


def assert_close(got, want, rtol):
    np.testing.assert_allclose(got.astype("float64"), want.numpy(), rtol=rtol, atol=rtol * float(want.abs().max()))


@pytest.mark.parametrize(
    ("chosen", "options", "text"),
    [
        ("adafactor", {}, r"'adafactor' is unknown[\s\S]*sgd, adam, adamw, rmsprop, adagrad, lion"),
        ("rmsprop", {"centered": 1}, "centered is 1"),
        ("lion", {"eps": 1e-8}, r"does not take 'eps'[\s\S]*lr, betas, weight_decay"),
        (torch.optim.SGD, {}, r"is a SGD, not a name[\s\S]*optimizer=\"adamw\""),
        ("sgd", {"dampening": 0.1}, r"does not take 'dampening'[\s\S]*lr, momentum, weight_decay, nesterov"),
        ("adamw", {"betas": 0.9}, "betas is 0.9"),
        ("adam", {"betas": (0.9, 1.0)}, "beta is 1.0"),
        ("sgd", {"lr": "fast"}, "lr is 'fast'"),
        ("sgd", {"lr": float("nan")}, "lr is nan"),
        ("sgd", {"nesterov": True}, "momentum is 0"),
        (Sgd(), {"lr": 0.1}, "beside Sgd"),
    ],
)
def test_what_is_no_optimizer_is_refused(chosen, options, text):
    with pytest.raises(BadInput, match=text):
        optimizer_of(chosen, options)


@pytest.mark.parametrize("case", CASES)
def test_plans_know_what_is_kept(case):
    chosen, _ = CASES[case]
    assert KEPT[plan_name(chosen)] == len(chosen.state)


@pytest.mark.parametrize("case", CASES)
def test_what_a_bundle_says_is_read_again(case):
    chosen, _ = CASES[case]
    groups = ParameterGroups((chosen, dataclasses.replace(chosen, lr=0.3)), (("a", "b"), ("c",)))
    for optimizer in (chosen, groups):
        assert read_optimizer(json.loads(json.dumps(optimizer_tree(optimizer)))) == optimizer
    ((name, options, _),) = optimizer_tree(chosen)
    assert read_optimizer([name, options]) == chosen  # as bundles had it before there were groups


def test_rates_are_one_or_one_for_each_group():
    groups = ParameterGroups((Sgd(0.1), Sgd(0.2)), (("a",), ("b",)))
    assert groups.lr == (0.1, 0.2)
    assert scalars_of(groups, 1, 0.5) == (0.5, 0.5)
    assert scalars_of(groups, 1, [0.5, 0.25]) == (0.5, 0.25)
    assert scalars_of(Sgd(0.1), 1, [0.5]) == (0.5,)
    for wrong, text in (([0.1] * 3, "3 rates and 2 groups"), ([0.1, "a"], "lr is 'a'"), ([], "0 rates")):
        with pytest.raises(BadInput, match=text):
            scalars_of(groups, 1, wrong)


def test_groups_that_keep_unlike_tensors_are_refused():
    for other in (Sgd(0.1, momentum=0.9), AdamW()):
        with pytest.raises(BadInput, match=r"one group of parameters keeps nothing \(Sgd\), another"):
            ParameterGroups((Sgd(0.1), other), (("a",), ("b",)))
