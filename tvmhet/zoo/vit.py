"""ViT-B/16 (Dosovitskiy et al., ICLR 2021)."""

from __future__ import annotations

import torch
from torch import nn

from tvmhet.zoo.layers import MLP, Attention


class EncoderLayer(nn.Module):
    """Normalise, attend, add; normalise, perceptron, add."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim, eps=1e-6), Attention(dim, heads)
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=1e-6), MLP(dim, 4 * dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches by a strided convolution, a class token, positions, encoder layers, classifier on the class token."""

    def __init__(self, layers: int, dim: int, heads: int, image: int, patch: int, num_classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.position = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, dim) * 0.02)
        self.layers = nn.Sequential(*(EncoderLayer(dim, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.head(self.norm(self.layers(x)[:, 0]))


def vit_b16(
    *,
    batch: int = 1,
    image: int = 224,
    patch: int = 16,
    layers: int = 12,
    dim: int = 768,
    heads: int = 12,
    num_classes: int = 1000,
    seed: int = 0,
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """ViT-B/16; the input is (batch, 3, image, image) float32."""
    torch.manual_seed(seed)
    return ViT(layers, dim, heads, image, patch, num_classes).eval(), (torch.randn(batch, 3, image, image),)
