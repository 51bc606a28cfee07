"""Models made of dice: what `cpu_gate.py` profiles beside the zoo, so that kernels of many kinds and sizes are known.

`cnn(seed)` and `transformer(seed)` draw an architecture from the usual parts. None of them is a published model.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]
_ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU, nn.SiLU, nn.Hardswish, nn.GELU, nn.ReLU6, nn.LeakyReLU, nn.Identity,
)  # fmt: skip


class _Gate(nn.Module):
    """Scale channels by what a small network makes of their means."""

    def __init__(self, width: int, inner: int, gate: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, inner, 1), nn.ReLU(), nn.Conv2d(inner, width, 1), gate()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x * self.net(x)
        return out


class _Residual(nn.Module):
    """x + body(x), then an activation."""

    def __init__(self, body: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.body, self.after = body, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.after(x + self.body(x))
        return out


class _Join(nn.Module):
    """The results of several branches, side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([b(x) for b in self.branches], dim=1)


class _Shuffle(nn.Module):
    """Interleave the channels of `groups` groups."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        return x.view(n, self.groups, c // self.groups, h, w).transpose(1, 2).reshape(n, c, h, w)


class _LastNorm(nn.Module):
    """Layer norm over the channels of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return out


def _unit(a: int, b: int, kernel: int, act: nn.Module, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(a, b, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(b), act]


def _block(dice: random.Random, w: int, act: Callable[[], nn.Module]) -> nn.Module:
    kind = dice.choice(("plain", "bottleneck", "grouped", "separable", "inverted", "branches", "dense", "next"))
    k = dice.choice((3, 3, 5))
    if kind == "plain":
        return _Residual(nn.Sequential(*_unit(w, w, 3, act()), *_unit(w, w, 3, nn.Identity())), act())
    if kind in ("bottleneck", "grouped"):
        inner = max(16, w // dice.choice((1, 2, 4)) // 16 * 16)
        groups = dice.choice([g for g in (2, 4, 8, 32) if inner % g == 0]) if kind == "grouped" else 1
        body = [*_unit(w, inner, 1, act()), *_unit(inner, inner, 3, act(), groups=groups)]
        gate = [_Gate(inner, max(8, inner // 4), nn.Sigmoid)] if dice.random() < 0.4 else []
        return _Residual(nn.Sequential(*body, *gate, *_unit(inner, w, 1, nn.Identity())), act())
    if kind in ("separable", "inverted"):
        inner = w * (dice.choice((2, 3, 4, 6)) if kind == "inverted" else 1)
        body = [*_unit(w, inner, 1, act())] if kind == "inverted" else []
        body += _unit(inner, inner, k, act(), groups=inner)
        gates = (nn.Sigmoid, nn.Hardsigmoid)
        body += [_Gate(inner, max(8, inner // 8), dice.choice(gates))] if dice.random() < 0.5 else []
        return _Residual(nn.Sequential(*body, *_unit(inner, w, 1, nn.Identity())), nn.Identity())
    if kind == "branches":
        part = w // 4
        pool = nn.Sequential(dice.choice((nn.MaxPool2d, nn.AvgPool2d))(3, 1, 1), *_unit(w, w - 3 * part, 1, act()))
        five = nn.Sequential(*_unit(w, part, 1, act()), *_unit(part, part, dice.choice((3, 5)), act()))
        three = nn.Sequential(*_unit(w, part, 1, act()), *_unit(part, part, 3, act()))
        return nn.Sequential(_Join(nn.Sequential(*_unit(w, part, 1, act())), three, five, pool), _Shuffle(2))
    if kind == "dense":
        grow = dice.choice((16, 32, 48))
        body = nn.Sequential(
            nn.BatchNorm2d(w), act(), nn.Conv2d(w, 4 * grow, 1, bias=False), *_unit(4 * grow, grow, 3, act())
        )
        return nn.Sequential(_Join(nn.Identity(), body), *_unit(w + grow, w, 1, act()))
    kernel, ratio = dice.choice((5, 7, 9)), dice.choice((2, 4))
    wide = nn.Conv2d(w, w, kernel, padding=kernel // 2, groups=w)
    mix = [nn.Conv2d(w, ratio * w, 1), nn.GELU(), nn.Conv2d(ratio * w, w, 1)]
    return _Residual(nn.Sequential(wide, _LastNorm(w), *mix), nn.Identity())


def cnn(seed: int) -> Made:
    """An image classifier of three to five resolutions, each with a few blocks of its own kind."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    size, width = dice.choice((96, 112, 128, 160, 192, 224)), dice.choice((16, 24, 32, 48, 64))
    act = dice.choice(_ACTIVATIONS[:-1])
    layers: list[nn.Module] = _unit(3, width, dice.choice((3, 7)), act(), dice.choice((1, 2, 2)))
    layers += [nn.MaxPool2d(3, 2, 1)] if dice.random() < 0.5 else []
    for _ in range(dice.choice((3, 4))):
        wider = min(int(width * dice.choice((1.5, 2, 2))) // 8 * 8, 640)
        act = dice.choice(_ACTIVATIONS[:-1]) if dice.random() < 0.5 else act
        down = dice.random()
        if down < 0.6:
            layers += _unit(width, wider, dice.choice((1, 3, 3)), act(), 2)
        else:
            layers += [nn.AvgPool2d(2, 2) if down < 0.8 else nn.MaxPool2d(2, 2), *_unit(width, wider, 1, act())]
        width = wider
        layers += [_block(dice, width, act) for _ in range(dice.choice((1, 2, 3)))]
    hidden = dice.choice((256, 1000, 2048))
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1000)]
    return nn.Sequential(*layers, *head).eval(), (torch.rand(1, 3, size, size),)


class _Attention(nn.Module):
    def __init__(self, dim: int, heads: int, joint: bool, causal: bool, bias: int) -> None:
        super().__init__()
        self.heads, self.joint, self.causal = heads, joint, causal
        self.inner = nn.Linear(dim, 3 * dim) if joint else nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.outer = nn.Linear(dim, dim)
        self.bias = nn.Parameter(torch.rand(heads, bias, bias)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, dim = x.shape
        q, k, v = self.inner(x).chunk(3, dim=-1) if self.joint else [part(x) for part in self.inner]
        q, k, v = (t.view(n, length, self.heads, dim // self.heads).transpose(1, 2) for t in (q, k, v))
        if self.bias is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            y = ((q @ k.transpose(-1, -2)) * (dim // self.heads) ** -0.5 + self.bias).softmax(dim=-1) @ v
        out: torch.Tensor = self.outer(y.transpose(1, 2).reshape(n, length, dim))
        return out


class _Gated(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(dim, inner), nn.Linear(dim, inner), nn.Linear(inner, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class _Layer(nn.Module):
    def __init__(self, dice: random.Random, dim: int, heads: int, causal: bool, length: int) -> None:
        super().__init__()
        norm: Callable[[int], nn.Module] = dice.choice((nn.LayerNorm, nn.LayerNorm, nn.RMSNorm))
        self.before, self.norms = dice.random() < 0.5, nn.ModuleList((norm(dim), norm(dim)))
        bias = length if not causal and dice.random() < 0.4 else 0
        self.mix = _Attention(dim, heads, dice.random() < 0.5, causal, bias)
        inner, act = dim * dice.choice((2, 3, 4)), dice.choice((nn.GELU, nn.ReLU, lambda: nn.GELU("tanh"), nn.Tanh))
        gated = dice.random() < 0.3
        self.net = _Gated(dim, inner) if gated else nn.Sequential(nn.Linear(dim, inner), act(), nn.Linear(inner, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, part in zip(self.norms, (self.mix, self.net), strict=True):
            x = x + part(norm(x)) if self.before else norm(x + part(x))
        return x


class _Tokens(nn.Module):
    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.dim, self.length = (
            dice.choice((128, 192, 256, 384, 512, 768)),
            dice.choice((16, 32, 49, 64, 128, 197, 256)),
        )
        heads = self.dim // dice.choice([d for d in (16, 32, 64) if self.dim % d == 0])
        self.vocabulary, causal = dice.choice((1000, 8000, 16000)), dice.random() < 0.5
        self.embed, self.place = (
            nn.Embedding(self.vocabulary, self.dim),
            nn.Parameter(torch.rand(self.length, self.dim)),
        )
        self.layers = nn.ModuleList(_Layer(dice, self.dim, heads, causal, self.length) for _ in range(3))
        self.norm, self.head = (
            nn.LayerNorm(self.dim),
            nn.Linear(self.dim, dice.choice((10, self.vocabulary)), bias=False),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def transformer(seed: int) -> Made:
    """A stack of three attention layers over one sequence of tokens."""
    torch.manual_seed(seed)
    model = _Tokens(random.Random(seed)).eval()
    return model, (torch.randint(0, model.vocabulary, (1, model.length)),)


MODELS: dict[str, Callable[[int], Made]] = {"cnn": cnn, "transformer": transformer}
