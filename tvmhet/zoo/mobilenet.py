"""MobileNetV3-Large (Howard et al., ICCV 2019)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tvmhet.zoo.resnet import randomize_statistics

#: kernel, expansion, output, squeeze-excite, hard-swish, stride: table 1 of the paper.
_LARGE = (
    (3, 16, 16, False, False, 1), (3, 64, 24, False, False, 2), (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2), (5, 120, 40, True, False, 1), (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2), (3, 200, 80, False, True, 1), (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1), (3, 480, 112, True, True, 1), (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2), (5, 960, 160, True, True, 1), (5, 960, 160, True, True, 1),
)  # fmt: skip


def _round8(value: float) -> int:
    """The nearest multiple of 8, but not below 90 % of the value."""
    rounded = max(8, int(value + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * value else rounded + 8


def _conv_norm(in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels, eps=1e-3))


class SqueezeExcite(nn.Module):
    """Scale each channel by a gate computed from its mean."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = _round8(channels / 4)
        self.down, self.up = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.up(torch.relu(self.down(F.adaptive_avg_pool2d(x, 1))))
        return x * F.hardsigmoid(gate)


class InvertedResidual(nn.Module):
    """Widen, filter per channel, gate, narrow; added to the input where the shapes allow."""

    def __init__(self, c: int, kernel: int, wide: int, out: int, excite: bool, swish: bool, stride: int) -> None:
        super().__init__()
        act = nn.Hardswish if swish else nn.ReLU
        layers: list[nn.Module] = [] if wide == c else [_conv_norm(c, wide, 1), act()]
        layers += [_conv_norm(wide, wide, kernel, stride, groups=wide), act()]
        layers += [SqueezeExcite(wide)] if excite else []
        self.body, self.residual = nn.Sequential(*layers, _conv_norm(wide, out, 1)), stride == 1 and c == out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.residual else self.body(x)


class MobileNetV3(nn.Module):
    """Stem, inverted residuals, two-layer head. `width` multiplies the channels."""

    def __init__(self, width: float, num_classes: int) -> None:
        super().__init__()
        channels = _round8(16 * width)
        layers: list[nn.Module] = [_conv_norm(3, channels, 3, 2), nn.Hardswish()]
        for kernel, wide, out, excite, swish, stride in _LARGE:
            sizes = (_round8(wide * width), _round8(out * width))
            layers.append(InvertedResidual(channels, kernel, *sizes, excite, swish, stride))
            channels = sizes[1]
        wide = _round8(960 * width)
        self.features = nn.Sequential(*layers, _conv_norm(channels, wide, 1), nn.Hardswish())
        self.head = nn.Sequential(nn.Linear(wide, 1280), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(1280, num_classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


def mobilenet_v3(
    *, batch: int = 1, image: int = 224, width: float = 1.0, num_classes: int = 1000, seed: int = 0
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """MobileNetV3-Large; the input is (batch, 3, image, image) float32."""
    torch.manual_seed(seed)
    model = MobileNetV3(width, num_classes)
    randomize_statistics(model)
    return model.eval(), (torch.randn(batch, 3, image, image),)
