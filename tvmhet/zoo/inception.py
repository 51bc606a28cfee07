"""Inception-v3 (Szegedy et al., CVPR 2016). The auxiliary classifier is an option, and there in training only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tvmhet.zoo.resnet import randomize_statistics

_BLOCKS_TO_17 = 8  # three A, the reduction, four C


def _unit(in_channels: int, out_channels: int, kernel: Any, **conv: Any) -> nn.Sequential:
    """Convolution, batch norm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel, bias=False, **conv),
        nn.BatchNorm2d(out_channels, eps=1e-3),
        nn.ReLU(),
    )


class Branches(nn.Module):
    """Concatenate branches that read the same input."""

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _average(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), _unit(in_channels, out_channels, 1))


def _block_a(c: int, w: Any, pool: int) -> Branches:
    b5 = nn.Sequential(_unit(c, w(48), 1), _unit(w(48), w(64), 5, padding=2))
    b3 = nn.Sequential(_unit(c, w(64), 1), _unit(w(64), w(96), 3, padding=1), _unit(w(96), w(96), 3, padding=1))
    return Branches([_unit(c, w(64), 1), b5, b3, _average(c, w(pool))])


def _reduce_b(c: int, w: Any) -> Branches:
    b3 = nn.Sequential(_unit(c, w(64), 1), _unit(w(64), w(96), 3, padding=1), _unit(w(96), w(96), 3, stride=2))
    return Branches([_unit(c, w(384), 3, stride=2), b3, nn.MaxPool2d(3, 2)])


def _across(c: int, out: int) -> nn.Sequential:
    return _unit(c, out, (1, 7), padding=(0, 3))


def _down(c: int, out: int) -> nn.Sequential:
    return _unit(c, out, (7, 1), padding=(3, 0))


def _block_c(c: int, w: Any, mid: int) -> Branches:
    m, out = w(mid), w(192)
    b7 = nn.Sequential(_unit(c, m, 1), _across(m, m), _down(m, out))
    b77 = nn.Sequential(_unit(c, m, 1), _down(m, m), _across(m, m), _down(m, m), _across(m, out))
    return Branches([_unit(c, out, 1), b7, b77, _average(c, out)])


def _reduce_d(c: int, w: Any) -> Branches:
    m = w(192)
    b3 = nn.Sequential(_unit(c, m, 1), _unit(m, w(320), 3, stride=2))
    b7 = nn.Sequential(_unit(c, m, 1), _across(m, m), _down(m, m), _unit(m, m, 3, stride=2))
    return Branches([b3, b7, nn.MaxPool2d(3, 2)])


def _block_e(c: int, w: Any) -> Branches:
    m = w(384)

    def fork() -> Branches:
        return Branches([_unit(m, m, (1, 3), padding=(0, 1)), _unit(m, m, (3, 1), padding=(1, 0))])

    b3 = nn.Sequential(_unit(c, m, 1), fork())
    b33 = nn.Sequential(_unit(c, w(448), 1), _unit(w(448), m, 3, padding=1), fork())
    return Branches([_unit(c, w(320), 1), b3, b33, _average(c, w(192))])


class Auxiliary(nn.Module):
    """Average pool, two convolutions, global average pool, classifier."""

    def __init__(self, in_channels: int, shrink: int, num_classes: int) -> None:
        super().__init__()
        mid, out = 128 // shrink, 768 // shrink
        self.body = nn.Sequential(nn.AvgPool2d(5, 3), _unit(in_channels, mid, 1), _unit(mid, out, 5))
        self.fc = nn.Linear(out, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x).mean((2, 3)))


class InceptionV3(nn.Module):
    """Stem, blocks A to E, global average pool, classifier. `shrink` divides every width.

    With `aux` it returns in training (logits, logits of a classifier behind the last block of 17 x 17).
    """

    def __init__(self, shrink: int, num_classes: int, aux: bool = False) -> None:
        super().__init__()

        def w(channels: int) -> int:
            return channels // shrink

        self.stem = nn.Sequential(
            _unit(3, w(32), 3, stride=2), _unit(w(32), w(32), 3), _unit(w(32), w(64), 3, padding=1), nn.MaxPool2d(3, 2),
            _unit(w(64), w(80), 1), _unit(w(80), w(192), 3), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.blocks = nn.Sequential(
            _block_a(w(192), w, 32), _block_a(w(256), w, 64), _block_a(w(288), w, 64), _reduce_b(w(288), w),
            *(_block_c(w(768), w, mid) for mid in (128, 160, 160, 192)), _reduce_d(w(768), w),
            _block_e(w(1280), w), _block_e(w(2048), w),
        )  # fmt: skip
        self.dropout, self.fc = nn.Dropout(0.5), nn.Linear(w(2048), num_classes)
        self.aux = Auxiliary(w(768), shrink, num_classes) if aux else None

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        middle = self.blocks[:_BLOCKS_TO_17](self.stem(x))
        logits = self.fc(self.dropout(self.blocks[_BLOCKS_TO_17:](middle).mean((2, 3))))
        return logits if self.aux is None or not self.training else (logits, self.aux(middle))


def inception_v3(
    *, batch: int = 1, image: int = 299, shrink: int = 1, num_classes: int = 1000, aux: bool = False, seed: int = 0
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Inception-v3; the input is (batch, 3, image, image) float32, image at least 75, with `aux` 299."""
    torch.manual_seed(seed)
    model = InceptionV3(shrink, num_classes, aux)
    randomize_statistics(model)
    return model.eval(), (torch.randn(batch, 3, image, image),)
