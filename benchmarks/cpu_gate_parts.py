"""More models made of dice for `cpu_gate.py`: what image classifiers and plain transformers have no kernels of.

`mobile(seed)`: steps of two by grouped and depthwise convolutions. `pyramid(seed)`: images made larger again.
`recurrent(seed)`: unrolled cells, each kernel tiny. `mixer(seed)`: products along tokens, windows of an image.
`decoder(seed)`: rotated, shared and masked heads. None of them is a published model.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]
ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (nn.ReLU, nn.SiLU, nn.Hardswish, nn.GELU, nn.ReLU6)


def image(size: int) -> tuple[torch.Tensor]:
    """An image of so many pixels a side."""
    return (torch.rand(1, 3, size, size),)


def _unit(a: int, b: int, kernel: int, act: nn.Module, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(a, b, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(b), act
    )


class _Gate(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, inner, 1), nn.ReLU(), nn.Conv2d(inner, width, 1), nn.Sigmoid()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x * self.net(x)
        return out


class _Step(nn.Module):
    """A wide middle of one channel or a few a group; beside it a convolution or nothing."""

    def __init__(self, dice: random.Random, a: int, b: int, stride: int, act: Callable[[], nn.Module]) -> None:
        super().__init__()
        inner = max(a, b) if dice.random() < 0.5 else a * dice.choice((2, 3, 4, 6))
        groups = inner if dice.random() < 0.6 else dice.choice([g for g in (2, 4, 8, inner // 8) if inner % g == 0])
        kernel = dice.choice((3, 3, 5, 7)) if groups == inner else 3
        gate = [_Gate(inner, max(8, inner // dice.choice((4, 8, 16))))] if dice.random() < 0.4 else []
        body = [_unit(a, inner, 1, act()), _unit(inner, inner, kernel, act(), stride, groups), *gate]
        self.body = nn.Sequential(*body, _unit(inner, b, 1, nn.Identity()))
        keep = a == b and stride == 1
        self.beside = nn.Identity() if keep else _unit(a, b, 1, nn.Identity(), stride) if dice.random() < 0.5 else None
        self.after = act() if dice.random() < 0.5 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        out: torch.Tensor = self.after(y if self.beside is None else y + self.beside(x))
        return out


def mobile(seed: int) -> Made:
    """An image classifier whose steps of two are grouped or depthwise."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    return _mobile(dice, dice.choice((96, 128, 160, 192, 224, 256)), dice.choice((16, 24, 32, 40, 48)), 512)


def thin(seed: int) -> Made:
    """As `mobile`, of few channels: one to three milliseconds on one core."""
    dice = random.Random(f"thin {seed}")
    torch.manual_seed(seed)
    return _mobile(dice, dice.choice((160, 192, 224)), dice.choice((8, 8, 16, 16, 24)), 256)


def _mobile(dice: random.Random, size: int, width: int, widest: int) -> Made:
    act = dice.choice(ACTIVATIONS)
    layers: list[nn.Module] = [_unit(3, width, 3, act(), 2)]
    for _ in range(4):
        wider = min(int(width * dice.choice((1.5, 1.5, 2, 2.5))) // 8 * 8, widest)
        layers += [_Step(dice, width, wider, 2, act)]
        layers += [_Step(dice, wider, wider, 1, act) for _ in range(dice.choice((1, 2, 2)))]
        width = wider
    hidden = dice.choice((576, 960, 1280))
    layers += [_unit(width, hidden, 1, act()), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(hidden, 1000)]
    return nn.Sequential(*layers).eval(), image(size)


class _Pyramid(nn.Module):
    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        width, act = dice.choice((16, 24, 32, 40)), dice.choice(ACTIVATIONS)
        widths = [int(width * dice.choice((1, 1.5, 2)) ** i) // 8 * 8 for i in range(4)]
        self.stem = _unit(3, widths[0], dice.choice((3, 5)), act(), dice.choice((1, 2)))
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), *self._units(dice, a, b, act)) if dice.random() < 0.5
            else nn.Sequential(_unit(a, b, 3, act(), 2), *self._units(dice, b, b, act))
            for a, b in itertools.pairwise(widths)
        )  # fmt: skip
        self.up = nn.ModuleList(self._up(dice, b, a) for a, b in itertools.pairwise(widths))
        self.sums = dice.random() < 0.4
        self.join = nn.ModuleList(
            nn.Sequential(*self._units(dice, a if self.sums else 2 * a, a, act)) for a in widths[:-1]
        )
        self.head = nn.Conv2d(widths[0], dice.choice((1, 2, 21)), 1)

    @staticmethod
    def _units(dice: random.Random, a: int, b: int, act: Callable[[], nn.Module]) -> list[nn.Module]:
        return [_unit(a, b, 3, act())] + [_unit(b, b, 3, act()) for _ in range(dice.choice((0, 1)))]

    @staticmethod
    def _up(dice: random.Random, b: int, a: int) -> nn.Module:
        kind = dice.choice(("transposed", "wide", "nearest", "bilinear"))
        if kind == "transposed":
            return nn.ConvTranspose2d(b, a, 2, stride=2)
        if kind == "wide":
            return nn.ConvTranspose2d(b, a, 4, stride=2, padding=1)
        smooth = {"align_corners": False} if kind == "bilinear" else {}
        return nn.Sequential(nn.Conv2d(b, a, 1), nn.Upsample(scale_factor=2, mode=kind, **smooth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        kept = []
        for down in self.down:
            kept.append(x)
            x = down(x)
        for up, join, skip in list(zip(self.up, self.join, kept, strict=True))[::-1]:
            x = join(up(x) + skip if self.sums else torch.cat([up(x), skip], dim=1))
        out: torch.Tensor = self.head(x)
        return out


def pyramid(seed: int) -> Made:
    """An image to an image: four resolutions down, and up again by transposed convolutions or resizing."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    return _Pyramid(dice).eval(), image(dice.choice((64, 96, 128, 160)))


class Recurrent(nn.Module):
    """Recurrent cells over embedded tokens, and a product with the last one's state."""

    def __init__(
        self, kind: type[nn.RNNBase], words: int, width: int, inner: int, layers: int, both: bool, out: int
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.cell = kind(width, inner, layers, batch_first=True, bidirectional=both)
        self.head = nn.Linear(inner * (1 + both), out)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.cell(self.embed(tokens))
        out: torch.Tensor = self.head(states[:, -1])
        return out


def recurrent(seed: int) -> Made:
    """A few steps of recurrent cells over embedded tokens."""
    torch.manual_seed(seed)
    dice = random.Random(seed)
    length, width, inner = dice.choice((4, 6, 8)), dice.choice((64, 96, 192, 256)), dice.choice((64, 160, 256))
    kind, both = dice.choice((nn.LSTM, nn.GRU, nn.RNN)), dice.random() < 0.3
    model = Recurrent(kind, 500, width, inner, dice.choice((1, 2)), both, dice.choice((10, 100))).eval()
    return model, (torch.randint(0, 500, (dice.choice((1, 1, 2)), length)),)


class _Block(nn.Module):
    """x + scale * mix(norm(x)), then the same over channels; x is (n, tokens, width)."""

    def __init__(self, dice: random.Random, tokens: int, dim: int) -> None:
        super().__init__()
        self.scaled = dice.random() < 0.5
        self.norms = nn.ModuleList((nn.LayerNorm(dim), nn.LayerNorm(dim)))
        self.scales = nn.ParameterList([torch.rand(dim), torch.rand(dim)])
        self.kind = dice.choice(("tokens", "linear", "pool", "windows"))
        hidden = dice.choice((tokens // 2, 2 * tokens, dim // 2))
        self.one = nn.Linear(tokens, tokens if self.kind == "linear" else hidden)
        self.two = nn.Linear(hidden, tokens)
        self.heads, self.window = dim // 32, 7
        self.inner, self.outer = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.bias = nn.Parameter(torch.rand(self.heads, 49, 49))
        self.shift = dice.choice((0, 3))
        ratio = dice.choice((2, 3, 4))
        self.net = nn.Sequential(nn.Linear(dim, ratio * dim), nn.GELU(), nn.Linear(ratio * dim, dim))

    def _windows(self, x: torch.Tensor) -> torch.Tensor:
        n, length, dim = x.shape
        side, w = int(length**0.5), self.window
        x = x.view(n, side, side, dim)
        x = torch.roll(x, (-self.shift, -self.shift), (1, 2)) if self.shift else x
        x = x.view(n, side // w, w, side // w, w, dim).permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, dim)
        q, k, v = self.inner(x).view(-1, w * w, 3, self.heads, 32).permute(2, 0, 3, 1, 4).unbind(0)
        y = ((q * 32**-0.5) @ k.transpose(-1, -2) + self.bias).softmax(dim=-1) @ v
        y = self.outer(y.transpose(1, 2).reshape(-1, w * w, dim))
        y = y.view(n, side // w, side // w, w, w, dim).permute(0, 1, 3, 2, 4, 5).reshape(n, side, side, dim)
        y = torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y
        return y.reshape(n, length, dim)

    def _mixed(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "windows":
            return self._windows(x)
        if self.kind == "pool":
            n, length, dim = x.shape
            image = x.transpose(1, 2).reshape(n, dim, int(length**0.5), -1)
            return (F.avg_pool2d(image, 3, 1, 1) - image).flatten(2).transpose(1, 2)
        y = self.one(x.transpose(1, 2))
        y = y if self.kind == "linear" else self.two(F.gelu(y))
        return y.transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, scale, part in zip(self.norms, self.scales, (self._mixed, self.net), strict=True):
            y = part(norm(x))
            x = x + (y * scale if self.scaled else y)
        return x


def mixer(seed: int) -> Made:
    """Patches of an image, mixed along tokens, by pooling, or by attention in windows."""
    torch.manual_seed(seed)
    dice = random.Random(seed)
    side, dim = dice.choice((7, 14, 14, 28)), dice.choice((96, 128, 192, 256, 384))
    patch = dice.choice((4, 8, 16))
    blocks = [_Block(dice, side * side, dim) for _ in range(3)]
    embed = nn.Sequential(nn.Conv2d(3, dim, patch, patch), nn.Flatten(2))
    return _Mixer(embed, nn.Sequential(*blocks), dim).eval(), image(side * patch)


class _Mixer(nn.Module):
    def __init__(self, embed: nn.Module, blocks: nn.Module, dim: int) -> None:
        super().__init__()
        self.embed, self.blocks, self.norm, self.head = embed, blocks, nn.LayerNorm(dim), nn.Linear(dim, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.blocks(self.embed(x).transpose(1, 2)))
        out: torch.Tensor = self.head(x.mean(dim=1))
        return out


class _Shared(nn.Module):
    """Causal attention whose keys and values serve several heads, rotated by position or with distances as bias."""

    def __init__(self, dice: random.Random, dim: int, length: int) -> None:
        super().__init__()
        self.size = dice.choice((32, 64))
        self.heads = dim // self.size
        self.kept = dice.choice([g for g in (1, 2, self.heads) if self.heads % g == 0])
        self.rotated, biased = dice.random() < 0.6, dice.random() < 0.5
        self.q, self.out = nn.Linear(dim, dim, bias=biased), nn.Linear(dim, dim, bias=biased)
        self.k, self.v = (nn.Linear(dim, self.kept * self.size, bias=biased) for _ in range(2))
        angle = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, self.size, 2) / self.size)
        self.register_buffer("cos", torch.cat((angle, angle), -1).cos())
        self.register_buffer("sin", torch.cat((angle, angle), -1).sin())
        self.register_buffer("mask", torch.full((length, length), -1e9).triu(1))
        self.distance = nn.Parameter(torch.rand(self.heads, length, length))

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-b, a), dim=-1) * self.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, dim = x.shape
        q = self.q(x).view(n, length, self.heads, self.size).transpose(1, 2)
        k, v = (part(x).view(n, length, self.kept, self.size).transpose(1, 2) for part in (self.k, self.v))
        if self.rotated:
            q, k = self._turn(q), self._turn(k)
        repeats = self.heads // self.kept
        if repeats > 1:
            k, v = (t[:, :, None].expand(n, self.kept, repeats, length, self.size).reshape(q.shape) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * self.size**-0.5 + self.mask
        scores = scores if self.rotated else scores + self.distance
        y = scores.softmax(dim=-1) @ v
        out: torch.Tensor = self.out(y.transpose(1, 2).reshape(n, length, dim))
        return out


class _Decoder(nn.Module):
    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.dim, self.length = dice.choice((128, 192, 256, 320, 384)), dice.choice((32, 48, 64, 96, 128, 160))
        norm: Callable[[int], nn.Module] = dice.choice((nn.LayerNorm, nn.RMSNorm))
        inner, self.gated = self.dim * dice.choice((2, 3, 4)), dice.random() < 0.5
        self.embed = nn.Embedding(4000, self.dim)
        self.mixes = nn.ModuleList(_Shared(dice, self.dim, self.length) for _ in range(2))
        self.nets = nn.ModuleList(
            nn.ModuleList((nn.Linear(self.dim, inner), nn.Linear(self.dim, inner), nn.Linear(inner, self.dim)))
            for _ in range(2)
        )
        self.norms = nn.ModuleList(norm(self.dim) for _ in range(5))
        self.act: Callable[[torch.Tensor], torch.Tensor] = dice.choice((F.relu, F.silu, F.gelu, torch.tanh))
        self.head = nn.Linear(self.dim, dice.choice((1000, 4000, 12000)), bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for i, (mix, (gate, up, down)) in enumerate(zip(self.mixes, self.nets, strict=True)):
            x = x + mix(self.norms[2 * i](x))
            y = self.norms[2 * i + 1](x)
            x = x + down(self.act(gate(y)) * up(y) if self.gated else self.act(gate(y)))
        out: torch.Tensor = self.head(self.norms[-1](x))
        return out


def decoder(seed: int) -> Made:
    """Two layers of a language model with rotated or shared heads."""
    torch.manual_seed(seed)
    model = _Decoder(random.Random(seed)).eval()
    return model, (torch.randint(0, 4000, (1, model.length)),)


class _Grown(nn.Module):
    """x beside what a norm, an activation and a window, twice, make of it."""

    def __init__(self, width: int, inner: int, growth: int, act: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.BatchNorm2d(width), act(), nn.Conv2d(width, inner, 1, bias=False),
            nn.BatchNorm2d(inner), act(), nn.Conv2d(inner, growth, 3, 1, 1, bias=False),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, self.net(x)), 1)


def before(seed: int) -> Made:
    """An image classifier whose norms and activations stand before its convolutions, many of them of 1 x 1."""
    dice = random.Random(f"before {seed}")
    torch.manual_seed(seed)
    size, width = dice.choice((96, 128, 160, 192, 224)), dice.choice((24, 32, 48, 64))
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3), nn.MaxPool2d(3, 2, 1)]
    for _ in range(3):
        growth, act = dice.choice((12, 16, 24, 32)), dice.choice(ACTIVATIONS)
        for _ in range(dice.choice((2, 3, 4))):
            layers.append(_Grown(width, growth * dice.choice((2, 4)), growth, act))
            width += growth
        half = width // 2 // 8 * 8
        layers += [nn.BatchNorm2d(width), act(), nn.Conv2d(width, half, 1), nn.AvgPool2d(2)]
        width = half
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)]
    return nn.Sequential(*layers).eval(), image(size)


_KINDS = (mobile, thin, pyramid, recurrent, mixer, decoder, before)
MODELS: dict[str, Callable[[int], Made]] = {f.__name__: f for f in _KINDS}
