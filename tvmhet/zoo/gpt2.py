"""GPT-2 small (Radford et al., 2019): the prompt at once, or token by token. The output layer shares the embedding."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F

from tvmhet.zoo.layers import MLP, Attention


class CachedAttention(Attention):
    """Attention of tokens at the places `at` over all that were there before, whose keys and values it keeps."""

    def __init__(self, dim: int, heads: int, batch: int, max_len: int) -> None:
        super().__init__(dim, heads)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, heads, max_len, dim // heads), persistent=False)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        q, k, v = self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        seen = torch.arange(self.keys.shape[2], device=x.device) <= at[:, None]
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen)
        return self.out(y.transpose(1, 2).reshape(x.shape[0], x.shape[1], self.inner))


class DecoderLayer(nn.Module):
    """Normalise, attend to the past, add; normalise, perceptron, add."""

    def __init__(self, dim: int, attention: Attention) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), attention
        self.norm2, self.mlp = nn.LayerNorm(dim), MLP(dim, 4 * dim, approximate="tanh")

    def forward(self, x: torch.Tensor, *at: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), *at)
        return x + self.mlp(self.norm2(x))


class GPT2(nn.Module):
    """Token and position embeddings, decoder layers with these attentions, logits over the vocabulary."""

    def __init__(self, attentions: Iterable[Attention], dim: int, vocab: int, max_len: int) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.layers = nn.Sequential(*(DecoderLayer(dim, attention) for attention in attentions))
        self.norm = nn.LayerNorm(dim)
        nn.init.normal_(self.word.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.word(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return F.linear(self.norm(self.layers(x)), self.word.weight)


class GPT2Decoder(GPT2):
    """The same for tokens at the places `at`, after all that were given before."""

    def forward(self, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.word(tokens) + self.position(at)
        for layer in self.layers:
            x = layer(x, at)
        return F.linear(self.norm(x), self.word.weight)


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
    attentions = (Attention(dim, heads, causal=True) for _ in range(layers))
    return GPT2(attentions, dim, vocab, max_len).eval(), (torch.randint(0, vocab, (batch, length)),)


def gpt2_decoder(
    *,
    batch: int = 1,
    length: int = 1,
    layers: int = 12,
    dim: int = 768,
    heads: int = 12,
    vocab: int = 50257,
    max_len: int = 1024,
    seed: int = 0,
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """GPT-2 small for `length` tokens of a text at a time, whose keys and values are states.

    Inputs are token ids, (batch, length) int64, and their places, (length,) int64, the same in all texts of the batch.
    """
    torch.manual_seed(seed)
    attentions = (CachedAttention(dim, heads, batch, max_len) for _ in range(layers))
    model = GPT2Decoder(attentions, dim, vocab, max_len).eval()
    return model, (torch.randint(0, vocab, (batch, length)), torch.arange(length))
