"""A transformer layer stack whose perceptrons are mixtures of experts with top-k routing (Shazeer et al., ICLR 2017).

Every expert sees every token and the gate keeps k of them: shapes are fixed, so that the model can be cut.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tvmhet.zoo.layers import Attention


class Experts(nn.Module):
    """sum over the k chosen experts of gate * down(silu(up(x)))."""

    def __init__(self, dim: int, hidden: int, experts: int, k: int) -> None:
        super().__init__()
        self.gate, self.k = nn.Linear(dim, experts, bias=False), k
        self.up = nn.Parameter(torch.randn(experts, dim, hidden) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, dim) * hidden**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        probability = torch.softmax(self.gate(tokens), -1)
        best, index = torch.topk(probability, self.k, -1)
        weight = torch.zeros_like(probability).scatter(1, index, best / best.sum(-1, keepdim=True))
        y = torch.matmul(F.silu(torch.matmul(tokens.unsqueeze(0), self.up)), self.down)
        return (y * weight.t().unsqueeze(-1)).sum(0).reshape(x.shape)


class MoELayer(nn.Module):
    """Normalise, attend to the past, add; normalise, experts, add."""

    def __init__(self, dim: int, heads: int, hidden: int, experts: int, k: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, heads, causal=True)
        self.norm2, self.experts = nn.LayerNorm(dim), Experts(dim, hidden, experts, k)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.experts(self.norm2(x))


def moe(
    *,
    batch: int = 1,
    length: int = 128,
    layers: int = 4,
    dim: int = 512,
    heads: int = 8,
    hidden: int = 1024,
    experts: int = 8,
    k: int = 2,
    seed: int = 0,
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A small mixture of experts; the input is (batch, length, dim) float32."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(MoELayer(dim, heads, hidden, experts, k) for _ in range(layers)))
    return model.eval(), (torch.randn(batch, length, dim),)
