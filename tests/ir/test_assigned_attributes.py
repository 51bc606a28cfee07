"""Buffers that a training step assigns, in place of changing them: steps are torch's, and so is what they leave."""

import copy

import pytest
import torch
from torch import nn

import tvmhet
from tests.placed import cpus
from tvmhet.errors import BadModel
from tvmhet.training_checkpoint import torch_state_dict


class Running(nn.Module):
    """A running mean; read before it is assigned, after it, or both, its new value with or without a gradient."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.product = how, nn.Linear(4, 4)
        self.register_buffer("mean", torch.full((4,), 2.0))

    def forward(self, x):
        y = self.product(x)
        z = y * self.mean if "before" in self.how else torch.zeros(())
        seen = y.mean(0)
        self.mean = self.mean * 0.9 + 0.1 * (seen if "gradient" in self.how else seen.detach())
        return z + y * self.mean if "after" in self.how else z


class Codebook(nn.Module):
    """Vectors that follow what is nearest to them, as those of a VQ-VAE."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.product = nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(5, 4))

    def forward(self, x):
        y = self.product(x)
        nearest = torch.cdist(y.detach(), self.codes).argmin(1)
        chosen = nn.functional.one_hot(nearest, 5).to(y.dtype)
        quantised = chosen @ self.codes
        self.codes = self.codes * 0.9 + 0.1 * (chosen.t() @ y.detach())
        return y + (quantised - y).detach() + ((y - quantised) ** 2).mean(1, keepdim=True)


def nested(model):
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), model)


KINDS = {
    **{how: lambda how=how: Running(how) for how in ("before", "after", "before after", "after gradient")},
    "before after gradient": lambda: Running("before after gradient"),
    "inside": lambda: nested(nn.Sequential(Running("before after"), Running("after"))),
    "codebook": lambda: nested(Codebook()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_follow_torch(kind, tmp_path):
    model = KINDS[kind]().train()
    double = copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(double.parameters(), lr=0.02)
    batches = [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(4)]
    step = tvmhet.from_torch(model, batches[0][:1], mode="training", loss="mse", optimizer="sgd", lr=0.02)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), KINDS[kind]().buffers(), strict=True))
    with tvmhet.build(step, cluster=cpus(v2=1), mode="training", global_batch=6, makers=("tvm",)) as trainer:
        for x, target in batches:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(double(x.double()), target.double())
            loss.backward()
            optimizer.step()
            for module in double.modules():
                for name, buffer in list(module._buffers.items()):
                    setattr(module, name, buffer.detach())
            assert trainer.train_step(x, target) == pytest.approx(loss.item(), rel=1e-5)
        trainer.save(tmp_path / "run.safetensors")
    left = torch_state_dict(tmp_path / "run.safetensors")
    for name, want in double.state_dict().items():
        torch.testing.assert_close(left[name].double(), want, rtol=1e-4, atol=1e-5)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.product, self.mean = nn.Linear(4, 4), torch.zeros(4)

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.mean(0)
        return self.product(x) + self.mean


class Grows(Running):
    def forward(self, x):
        self.mean = torch.cat([self.mean, x.mean(0)])
        return self.product(x) + self.mean.sum()


def test_what_a_step_cannot_hold_is_refused_and_put_back():
    model, before = nested(Plain()), torch.zeros(4)
    held = model[2].mean
    with pytest.raises(BadModel, match=r"a call assigns '2\.mean', which the next call reads(.|\n)*register_buffer"):
        tvmhet.from_torch(model, torch.zeros(2, 4), mode="training", loss="mse")
    assert model[2].mean is held and torch.equal(held, before)
    with pytest.raises(BadModel, match=r"a call of Grows returns depends on .*'mean'[\s\S]*a buffer"):
        tvmhet.from_torch(Grows(""), torch.zeros(2, 4), mode="training", loss="mse")
