"""Updates against torch's optimisers in double precision, three steps each, every tensor that they keep."""

import copy

import numpy as np
import pytest
import torch
import tvm
from torch import nn

import tvmhet
from tvmhet.emit.lower import lower_stage
from tvmhet.errors import BadInput
from tvmhet.ir.optimizers import Adam, AdamW, Sgd, optimizer_of
from tvmhet.ir.training_functions import update_function
from tvmhet.ir.training_step import read_step

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
}


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, read_step(tvmhet.from_torch(model, (torch.zeros(2, 4),), loss="mse", mode="training"))


@pytest.mark.parametrize("case", CASES)
def test_three_updates_are_torchs(step, case):
    (model, read), (chosen, reference) = step, CASES[case]
    function = update_function(read, list(read.gradients), chosen)
    executable, _ = lower_stage(function.module, TARGET)
    run = tvm.relax.VirtualMachine(executable, tvm.cpu())["main"]
    double = copy.deepcopy(model).double()
    options = {name: getattr(chosen, name) for name in chosen.__dataclass_fields__ if name != "lr"}
    optimizer = reference(double.parameters(), lr=0.0, **options)
    own = {p: dict(double.named_parameters())[read.model.torch_names[p]] for p in read.gradients}
    state = {p: np.array(own[p].detach(), np.float32) for p in own}
    state |= {f"{p}.{s}": np.zeros_like(state[p]) for p in own for s in chosen.state}
    random = np.random.default_rng(0)
    for number, rate in enumerate((0.1, 0.05, 0.2), 1):
        sums = {f"sum.{p}": random.standard_normal(own[p].shape).astype(np.float32) for p in own}
        scalars = (SCALE, *chosen.scalars(number, rate))
        given = (
            state | sums | {n: np.float32(v) for n, v in zip(function.inputs[-len(scalars) :], scalars, strict=True)}
        )
        results = run(*(tvm.runtime.tensor(np.asarray(given[n], np.float32)) for n in function.inputs))
        state |= {n: r.numpy() for n, r in zip(function.outputs, results, strict=True)}
        optimizer.param_groups[0]["lr"] = rate
        for p, parameter in own.items():
            parameter.grad = SCALE * torch.from_numpy(sums[f"sum.{p}"]).double()
        optimizer.step()
    for p, parameter in own.items():
        np.testing.assert_allclose(state[p], parameter.detach().numpy(), rtol=2e-6, atol=1e-7)
        for s in chosen.state:
            np.testing.assert_allclose(state[f"{p}.{s}"], optimizer.state[parameter][s].numpy(), rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("chosen", "options", "text"),
    [
        ("adagrad", {}, r"'adagrad' is unknown[\s\S]*sgd, adam, adamw"),
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
