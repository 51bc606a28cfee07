"""GPT-2 small, prompt at once, without a cache (Radford et al., 2019). The output layer shares the embedding."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tvmhet.zoo.layers import MLP, Attention


class DecoderLayer(nn.Module):
    """Normalise, attend to the past, add; normalise, perceptron, add."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, heads, causal=True)
        self.norm2, self.mlp = nn.LayerNorm(dim), MLP(dim, 4 * dim, approximate="tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT2(nn.Module):
    """Token and position embeddings, decoder layers, logits over the vocabulary."""

    def __init__(self, layers: int, dim: int, heads: int, vocab: int, max_len: int) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.layers = nn.Sequential(*(DecoderLayer(dim, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        nn.init.normal_(self.word.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.word(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return F.linear(self.norm(self.layers(x)), self.word.weight)


def gpt2_small(
    *,
    batch: int = 1,
    length: int = 128,
    layers: int = 12,
    dim: int = 768,
    heads: int = 12,
    vocab: int = 50257,
    max_len: int = 1024,
    seed: int = 0,
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """GPT-2 small; the input is token ids, (batch, length) int64."""
    torch.manual_seed(seed)
    return GPT2(layers, dim, heads, vocab, max_len).eval(), (torch.randint(0, vocab, (batch, length)),)
