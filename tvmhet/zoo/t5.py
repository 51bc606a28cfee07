"""T5-small, encoder and decoder at once on given target tokens (Raffel et al., JMLR 2020).

Root-mean-square norms, no biases, scores that are not scaled, and a learned bias by relative distance.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2)) * weight."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class RelativeBias(nn.Module):
    """A bias per head and bucket of distance; near distances have a bucket each, far ones share by logarithm."""

    def __init__(self, heads: int, *, bidirectional: bool, buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__()
        self.table = nn.Embedding(buckets, heads)
        self.bidirectional, self.buckets, self.max_distance = bidirectional, buckets, max_distance

    def _bucket(self, distance: torch.Tensor) -> torch.Tensor:
        buckets, offset = self.buckets, torch.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            offset, distance = (distance > 0).long() * buckets, distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = buckets // 2
        far = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far_bucket = (exact + (far * (buckets - exact)).long()).clamp(max=buckets - 1)
        return offset + torch.where(distance < exact, distance, far_bucket)

    def forward(self, queries: int, keys: int) -> torch.Tensor:
        place = self.table.weight.device
        distance = torch.arange(keys, device=place)[None, :] - torch.arange(queries, device=place)[:, None]
        return self.table(self._bucket(distance)).permute(2, 0, 1).unsqueeze(0)


class T5Attention(nn.Module):
    """softmax(q k^T + bias) v over `memory`, or over the past and itself."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, inner = heads, heads * head_dim
        self.q, self.k, self.v = (nn.Linear(dim, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, dim, bias=False)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        q, k, v = self._split(self.q(x)), self._split(self.k(memory)), self._split(self.v(memory))
        scores = q @ k.transpose(-1, -2)
        scores = scores if bias is None else scores + bias
        y = torch.softmax(scores, -1) @ v
        return self.o(y.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))


class T5Layer(nn.Module):
    """Self-attention, in the decoder attention over the encoder, and a ReLU perceptron, each normalised before."""

    def __init__(self, dim: int, heads: int, head_dim: int, hidden: int, *, cross: bool) -> None:
        super().__init__()
        self.self_norm, self.self_attention = RMSNorm(dim), T5Attention(dim, heads, head_dim)
        self.cross = T5Attention(dim, heads, head_dim) if cross else None
        self.cross_norm = RMSNorm(dim) if cross else None
        self.norm = RMSNorm(dim)
        self.up, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor, bias: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
        h = self.self_norm(x)
        x = x + self.self_attention(h, h, bias)
        if self.cross is not None and self.cross_norm is not None and memory is not None:
            x = x + self.cross(self.cross_norm(x), memory, None)
        return x + self.down(torch.relu(self.up(self.norm(x))))


class T5(nn.Module):
    """A shared embedding, encoder, decoder, and logits over the vocabulary."""

    def __init__(self, layers: int, dim: int, heads: int, head_dim: int, hidden: int, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        sizes = (dim, heads, head_dim, hidden)
        self.encoder = nn.ModuleList(T5Layer(*sizes, cross=False) for _ in range(layers))
        self.decoder = nn.ModuleList(T5Layer(*sizes, cross=True) for _ in range(layers))
        self.encoder_bias = RelativeBias(heads, bidirectional=True)
        self.decoder_bias = RelativeBias(heads, bidirectional=False)
        self.encoder_norm, self.decoder_norm = RMSNorm(dim), RMSNorm(dim)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x, y = self.embedding(source), self.embedding(target)
        bias = self.encoder_bias(source.shape[1], source.shape[1])
        for layer in self.encoder:
            x = layer(x, bias, None)
        memory, length = self.encoder_norm(x), target.shape[1]
        future = torch.full((length, length), -math.inf, device=y.device).triu(1)
        bias = self.decoder_bias(length, length) + future
        for layer in self.decoder:
            y = layer(y, bias, memory)
        y = self.decoder_norm(y) * self.embedding.embedding_dim**-0.5
        return F.linear(y, self.embedding.weight)


def t5_small(
    *,
    batch: int = 1,
    source_length: int = 128,
    target_length: int = 64,
    layers: int = 6,
    dim: int = 512,
    heads: int = 8,
    head_dim: int = 64,
    hidden: int = 2048,
    vocab: int = 32128,
    seed: int = 0,
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """T5-small; the inputs are source and target token ids, (batch, length) int64."""
    torch.manual_seed(seed)
    model = T5(layers, dim, heads, head_dim, hidden, vocab)
    for layer in model.modules():
        if isinstance(layer, T5Attention):
            nn.init.normal_(layer.q.weight, std=(dim * head_dim) ** -0.5)
    source = torch.randint(0, vocab, (batch, source_length))
    return model.eval(), (source, torch.randint(0, vocab, (batch, target_length)))
