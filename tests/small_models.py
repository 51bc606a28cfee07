"""Small torch models of many shapes: branches, tuples, several inputs and outputs, unlike dtypes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class Conv(nn.Module):
    """Two convolutions with a residual, a pool, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8 * 16, 10)

    def forward(self, x):
        h = torch.relu(self.c1(x))
        h = F.max_pool2d(torch.relu(self.c2(h) + h), 2)
        return torch.softmax(self.fc(h.flatten(1)), -1)


class Branches(nn.Module):
    """A split whose parts go separate ways, two inputs, nested and repeated outputs, one of them an input."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, x, y):
        a, b = torch.split(x, 4, dim=1)
        left, right = torch.tanh(self.left(a)), F.gelu(self.right(b))
        joined = torch.cat([left, right], 1) * y
        return joined, (left.sum(0), joined), y


class Attention(nn.Module):
    """One head of attention with a mask, a layer norm and an embedding by token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, tokens, mask):
        h = self.norm(self.embed(tokens))
        scores = self.q(h) @ self.k(h).transpose(1, 2) / 4.0
        weights = torch.softmax(scores.masked_fill(~mask, -1e4), -1)
        return weights @ self.v(h), tokens + 1, mask.any(-1)


class Half(nn.Module):
    """float16 throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8).half()

    def forward(self, x):
        return torch.relu(self.fc(x)) + x


class Double(nn.Module):
    """float64 throughout, with an integer input that selects."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8).double()

    def forward(self, x, i):
        return torch.where(i > 1, self.fc(x), x * i)


def conv():
    torch.manual_seed(0)
    return Conv().eval(), (torch.randn(1, 3, 8, 8),)


def branches():
    torch.manual_seed(0)
    return Branches().eval(), (torch.randn(3, 8), torch.randn(3, 12))


def attention():
    torch.manual_seed(0)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None]
    return Attention().eval(), (torch.randint(0, 20, (1, 5)), mask)


def half():
    torch.manual_seed(0)
    return Half().eval(), (torch.randn(4, 8).half(),)


def double():
    torch.manual_seed(0)
    return Double().eval(), (torch.randn(4, 8).double(), torch.arange(8))


SMALL_MODELS: dict[str, Callable] = {f.__name__: f for f in (conv, branches, attention, half, double)}
