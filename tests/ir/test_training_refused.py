"""Training steps that cannot be imported: the error names the operator, the parameter or the place, and what helps."""

import pytest
import torch
from torch import nn

import tvmhet
from tvmhet.errors import BadInput, BadLoss, BadModel, NoGradient, UnsupportedOperator


class Rounded(nn.Module):
    """An operator without a gradient between the parameters and the loss."""

    def __init__(self):
        super().__init__()
        self.first, self.pick = nn.Linear(4, 4), Pick()

    def forward(self, x):
        return self.pick(self.first(x))


class Pick(nn.Module):
    def forward(self, x):
        return x.argmax(-1).float()


class Binned(nn.Linear):
    """A result whose shape depends on values."""

    def forward(self, x):
        return super().forward(x) + torch.bincount(x.long().flatten())


class Summed(nn.Linear):
    """Of two parameters only the sum is used."""

    def __init__(self):
        super().__init__(4, 4, bias=False)
        self.other = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x):
        return nn.functional.linear(x, self.weight + self.other)


@pytest.mark.parametrize(
    ("make", "loss", "error", "text"),
    [
        (lambda: nn.Linear(4, 4), "output", BadLoss, r"shape \(3, 4\)"),
        (lambda: nn.Linear(4, 4), lambda y: float("nan"), BadLoss, "is a float"),
        (Rounded, lambda y: y.sum(), NoGradient, "'argmax' in module 'pick'"),
        (lambda: nn.Linear(4, 4), lambda y: y.argmax(-1).float().mean(), NoGradient, "'argmax' outside any submodule"),
        (lambda: nn.Linear(4, 4), "hinge", BadInput, "'hinge' is unknown"),
        (
            lambda: nn.Linear(4, 4),
            nn.functional.mse_loss,
            BadLoss,
            r"of \(3, 4\) float32 and 0 targets[\s\S]*example_t",
        ),
        (lambda: nn.Linear(4, 4), lambda y: y.detach().sum(), NoGradient, "depends on no parameter"),
        (lambda: Binned(4, 4), "cross_entropy", BadModel, r"cannot be traced at test_training_refused.py:\d+ in .*bin"),
        (nn.ReLU, "mse", NoGradient, "none of the 0 parameters of ReLU"),
        (lambda: nn.Linear(4, 4).requires_grad_(False), "mse", NoGradient, "none of the 2 parameters of Linear"),
        (lambda: nn.Linear(4, 4, device="meta"), "mse", BadModel, "'weight' of Linear is on torch's meta device"),
        (
            lambda: nn.Sequential(nn.ReLU(), Summed()),
            "mse",
            BadModel,
            r"'1\.weight' and '1\.other' have one[\s\S]*1\.0 \* 1",
        ),
    ],
)
def test_bad_losses_and_missing_gradients_are_named(make, loss, error, text):
    with pytest.raises(error, match=text):
        tvmhet.from_torch(make(), (torch.randn(3, 4),), loss=loss, mode="training")


class Nudged(nn.Linear):
    """Of an operator that neither TVM nor a definition has: in place too."""

    def forward(self, x):
        y = x.detach().clone()
        return super().forward(x) * (y.nextafter_(y + 1) if self.in_place else torch.nextafter(y, y + 1))


@pytest.mark.parametrize("in_place", [False, True])
def test_an_operator_without_conversion_is_named_with_its_module(in_place):
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Nudged(4, 4)), Nudged(4, 4))
    Nudged.in_place = in_place
    with pytest.raises(UnsupportedOperator, match=r"TVMHET-E005.*nextafter.* \(node 'nextafter' in module '1.1'\)"):
        tvmhet.from_torch(net, (torch.randn(3, 4),), loss="mse", mode="training")


def test_random_operators_without_an_input_form_are_refused():
    class Sampled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * torch.randperm(4)

    with pytest.raises(UnsupportedOperator, match="randperm"):
        tvmhet.from_torch(Sampled(4, 4), (torch.randn(3, 4),), loss="mse", mode="training")


def test_a_loss_needs_training_mode():
    with pytest.raises(BadInput, match="mode is 'inference' and loss"):
        tvmhet.from_torch(nn.Linear(4, 4), (torch.randn(3, 4),), loss="mse")
