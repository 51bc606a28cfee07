"""Models whose calls hand tensors on to each other."""

from __future__ import annotations

import torch
from torch import nn


class CachedAttention(nn.Module):
    """Attention of one token over all before it, whose keys and values are buffers."""

    def __init__(self, dim: int, heads: int, length: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, heads, length, dim // heads), persistent=False)

    def forward(self, x, at):
        tokens, dim = x.shape[1:]
        q, k, v = (z.view(1, tokens, self.heads, dim // self.heads).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        seen = torch.arange(self.keys.shape[2]) <= at[:, None]
        y = nn.functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Decoder(nn.Module):
    """A small GPT that is given one token and its place at a time."""

    def __init__(self, layers: int = 2, vocabulary: int = 50, dim: int = 32, heads: int = 2, length: int = 16):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.attentions = nn.ModuleList(CachedAttention(dim, heads, length) for _ in range(layers))
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.requires_grad_(False)

    def forward(self, token, at):
        x = self.words(token) + self.places(at)
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            x = x + attention(norm(x), at)
        return self.head(x)


class Recurrent(nn.Module):
    """A cell whose memory is an input and a result."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.own, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, memory, x):
        now = torch.tanh(self.own(x) + self.other(memory))
        return {"memory": now, "y": now.sum(-1)}


def step(token: int, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs of one call of a Decoder."""
    return torch.tensor([[token]]), torch.tensor([at])
