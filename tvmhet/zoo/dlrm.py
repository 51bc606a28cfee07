"""DLRM: embedding bags beside a perceptron, joined by pairwise dot products (Naumov et al., 2019)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn


def _mlp(sizes: Sequence[int], *, last: nn.Module) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Linear(a, b), last if i == len(sizes) - 2 else nn.ReLU()]
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """Click probability from dense features and, per table, a bag of indices whose rows are summed."""

    def __init__(self, tables: int, rows: int, dim: int, dense: int, bottom: Sequence[int], top: Sequence[int]) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(tables))
        self.bottom = _mlp((dense, *bottom, dim), last=nn.ReLU())
        pairs = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("left", pairs[0])
        self.register_buffer("right", pairs[1])
        self.top = _mlp((pairs.shape[1] + dim, *top, 1), last=nn.Sigmoid())

    def forward(self, dense: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *(bag(indices[:, i]) for i, bag in enumerate(self.bags))], 1)
        dots = torch.bmm(features, features.transpose(1, 2))[:, self.left, self.right]
        return self.top(torch.cat([x, dots], 1))


def dlrm(
    *,
    batch: int = 128,
    tables: int = 26,
    rows: int = 100_000,
    hot: int = 4,
    dim: int = 64,
    dense: int = 13,
    bottom: Sequence[int] = (512, 256),
    top: Sequence[int] = (512, 256),
    seed: int = 0,
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A DLRM of Criteo's shape; the inputs are (batch, dense) float32 and (batch, tables, hot) int64.

    Tables have 100,000 rows unless asked otherwise; the published click data would need tens of millions.
    """
    torch.manual_seed(seed)
    model = DLRM(tables, rows, dim, dense, bottom, top)
    return model.eval(), (torch.randn(batch, dense), torch.randint(0, rows, (batch, tables, hot)))
