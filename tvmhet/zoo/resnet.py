"""ResNet-50 v1.5: bottleneck blocks with the stride in the 3 x 3 convolution (He et al., CVPR 2016)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

_EXPANSION = 4


def _conv_norm(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(out_channels)
    )


class Bottleneck(nn.Module):
    """1 x 1 down, 3 x 3, 1 x 1 up, beside a shortcut."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = width * _EXPANSION
        self.conv1 = _conv_norm(in_channels, width, 1)
        self.conv2 = _conv_norm(width, width, 3, stride)
        self.conv3 = _conv_norm(width, out_channels, 1)
        same = stride == 1 and in_channels == out_channels
        self.shortcut = nn.Identity() if same else _conv_norm(in_channels, out_channels, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.conv1(x))
        y = torch.relu(self.conv2(y))
        return torch.relu(self.conv3(y) + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, four groups of bottlenecks, global average pool, classifier."""

    def __init__(self, blocks: Sequence[int], base_width: int, num_classes: int) -> None:
        super().__init__()
        self.stem = _conv_norm(3, base_width, 7, 2)
        self.pool = nn.MaxPool2d(3, 2, 1)
        channels, groups = base_width, []
        for group, count in enumerate(blocks):
            width = base_width * 2**group
            for i in range(count):
                groups.append(Bottleneck(channels, width, 2 if group > 0 and i == 0 else 1))
                channels = width * _EXPANSION
        self.blocks = nn.Sequential(*groups)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.pool(torch.relu(self.stem(x))))
        return self.fc(x.mean((2, 3)))


def resnet50(
    *,
    batch: int = 1,
    image: int = 224,
    blocks: Sequence[int] = (3, 4, 6, 3),
    base_width: int = 64,
    num_classes: int = 1000,
    seed: int = 0,
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """ResNet-50; the input is (batch, 3, image, image) float32. Batch-norm statistics are random, not 0 and 1."""
    torch.manual_seed(seed)
    model = ResNet(blocks, base_width, num_classes)
    randomize_statistics(model)
    return model.eval(), (torch.randn(batch, 3, image, image),)


def randomize_statistics(model: nn.Module) -> None:
    """Give every batch norm means and variances as training would leave them, so that folding them is tested."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
