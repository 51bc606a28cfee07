"""ConvNeXt-T (Liu et al., CVPR 2022)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F


class ChannelNorm(nn.Module):
    """Layer norm over the channels of (batch, channels, height, width)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """7 x 7 per channel, norm, wide perceptron, layer scale, residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.filter = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.rand(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.filter(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Patches, four groups of blocks with a strided convolution between them, classifier."""

    def __init__(self, blocks: Sequence[int], widths: Sequence[int], num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelNorm(widths[0])]
        for group, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            if group > 0:
                layers += [ChannelNorm(widths[group - 1]), nn.Conv2d(widths[group - 1], width, 2, 2)]
            layers += [Block(width) for _ in range(count)]
        self.features = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(widths[-1], eps=1e-6), nn.Linear(widths[-1], num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.features(x).mean((2, 3))))


def convnext_t(
    *,
    batch: int = 1,
    image: int = 224,
    blocks: Sequence[int] = (3, 3, 9, 3),
    widths: Sequence[int] = (96, 192, 384, 768),
    num_classes: int = 1000,
    seed: int = 0,
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """ConvNeXt-T; the input is (batch, 3, image, image) float32."""
    torch.manual_seed(seed)
    return ConvNeXt(blocks, widths, num_classes).eval(), (torch.randn(batch, 3, image, image),)
