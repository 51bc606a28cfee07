"""BERT-base with a classifier on the first token (Devlin et al., NAACL 2019)."""

from __future__ import annotations

import torch
from torch import nn

from tvmhet.zoo.layers import MLP, Attention


class EncoderLayer(nn.Module):
    """Attention and perceptron, each added and then normalised."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention, self.norm1 = Attention(dim, heads), nn.LayerNorm(dim, eps=1e-12)
        self.mlp, self.norm2 = MLP(dim, hidden), nn.LayerNorm(dim, eps=1e-12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class Bert(nn.Module):
    """Word, position and segment embeddings, encoder layers, pooler, classifier."""

    def __init__(self, layers: int, dim: int, heads: int, vocab: int, max_len: int, num_classes: int) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.segment, self.norm = nn.Embedding(2, dim), nn.LayerNorm(dim, eps=1e-12)
        self.layers = nn.Sequential(*(EncoderLayer(dim, heads, 4 * dim) for _ in range(layers)))
        self.pooler, self.classifier = nn.Linear(dim, dim), nn.Linear(dim, num_classes)

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.word(tokens) + self.position(places) + self.segment(segments))
        return self.classifier(torch.tanh(self.pooler(self.layers(x)[:, 0])))


def bert_base(
    *,
    batch: int = 1,
    length: int = 128,
    layers: int = 12,
    dim: int = 768,
    heads: int = 12,
    vocab: int = 30522,
    max_len: int = 512,
    num_classes: int = 2,
    seed: int = 0,
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """BERT-base; the inputs are token ids and segment ids, both (batch, length) int64."""
    torch.manual_seed(seed)
    model = Bert(layers, dim, heads, vocab, max_len, num_classes)
    return model.eval(), (torch.randint(0, vocab, (batch, length)), torch.randint(0, 2, (batch, length)))
