"""What several transformers of the zoo share: attention and the two-layer perceptron."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Multi-head attention of `x` over `memory` (itself unless given), with optional bias added to the scores."""

    def __init__(
        self, dim: int, heads: int, *, causal: bool = False, bias: bool = True, inner: int | None = None
    ) -> None:
        super().__init__()
        inner = dim if inner is None else inner
        self.heads, self.causal, self.inner = heads, causal, inner
        self.query = nn.Linear(dim, inner, bias=bias)
        self.key = nn.Linear(dim, inner, bias=bias)
        self.value = nn.Linear(dim, inner, bias=bias)
        self.out = nn.Linear(inner, dim, bias=bias)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, self.inner // self.heads).transpose(1, 2)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        source = x if memory is None else memory
        q, k, v = self._split(self.query(x)), self._split(self.key(source)), self._split(self.value(source))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(x.shape[0], x.shape[1], self.inner))


class MLP(nn.Module):
    """Linear, GELU, linear."""

    def __init__(self, dim: int, hidden: int, approximate: str = "none") -> None:
        super().__init__()
        self.up, self.down, self.approximate = nn.Linear(dim, hidden), nn.Linear(hidden, dim), approximate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))
