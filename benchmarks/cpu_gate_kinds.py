"""Models made of dice for `cpu_gate.py`, each of one kind of kernel that drawn networks seldom have.

`pooled(seed)`: norms of few groups over whole images. `stem(seed)`: large windows in large steps, large products.
`words(seed)`: tied heads of many columns. `cells(seed)`: recurrent cells of a few microseconds. `steps(seed)`:
depthwise windows in steps of two. `chains(seed)`: softmax, norms and reductions along rows with element-wise operators
around them. `dense(seed)`: windows with holes, sums of images and resizing to the input's size. `padded(seed)`: images
padded at two sides before a step, weights made of unit variance on the way. `wide(seed)`: windows of many channels on
few pixels, products with scaled residuals. None of them is a published model.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.cpu_gate_parts import ACTIVATIONS, Made, Recurrent, image


def _dice(name: str, seed: int) -> random.Random:
    return random.Random(f"{name} {seed}")  # numbers alone as seeds begin alike


class _Added(nn.Module):
    """x + scale * body(x); without a scale x + body(x)."""

    def __init__(self, body: nn.Module, scaled: int) -> None:
        super().__init__()
        self.body = body
        self.scale = nn.Parameter(torch.rand(scaled, 1, 1)) if scaled else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return x + (y if self.scale is None else y * self.scale)


class _LessItself(nn.Module):
    def __init__(self, window: int) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(window, 1, window // 2, count_include_pad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.pool(x) - x
        return out


def pooled(seed: int) -> Made:
    """An image classifier of blocks with group or instance norms, mixed by pooling or depthwise windows."""
    dice = _dice("pooled", seed)
    torch.manual_seed(seed)
    size, patch, width = dice.choice((112, 128, 160, 192)), dice.choice((3, 5, 7, 8)), dice.choice((32, 48, 64, 80))
    layers: list[nn.Module] = [nn.Conv2d(3, width, patch, dice.choice((2, 4)), patch // 2)]
    for _ in range(3):
        num_groups = dice.choice((1, 1, 2, width // 16, width))
        scaled, ratio, act = dice.choice((0, width)), dice.choice((2, 3, 4)), dice.choice(ACTIVATIONS)
        mix = _LessItself(dice.choice((3, 5))) if dice.random() < 0.6 else nn.Conv2d(width, width, 3, 1, 1, 1, width)
        net = [nn.Conv2d(width, ratio * width, 1), act(), nn.Conv2d(ratio * width, width, 1)]
        layers.append(_Added(nn.Sequential(nn.GroupNorm(num_groups, width), mix), scaled))
        layers.append(_Added(nn.Sequential(nn.GroupNorm(num_groups, width), *net), scaled))
        wider = width * dice.choice((3, 4)) // 2 // 16 * 16
        layers.append(nn.Conv2d(width, wider, 3, 2, 1))
        width = wider
    layers += [nn.GroupNorm(dice.choice((1, 2)), width), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)]
    return nn.Sequential(*layers).eval(), image(size)


def stem(seed: int) -> Made:
    """A few wide windows in large steps, pooled, then products of flattened images."""
    dice = _dice("stem", seed)
    torch.manual_seed(seed)
    size, window, step = (
        dice.choice((128, 160, 192, 224, 256)),
        dice.choice((5, 6, 8, 9, 10, 12)),
        dice.choice((2, 3, 4)),
    )
    a, b, c = dice.choice((24, 32, 48, 80, 96)), dice.choice((64, 96, 128, 160)), dice.choice((128, 192, 320))
    pool: Callable[..., nn.Module] = dice.choice((nn.MaxPool2d, nn.MaxPool2d, nn.AvgPool2d))
    side, hidden = dice.choice((3, 4, 5, 7)), dice.choice((512, 1024, 2048, 3072))
    layers = [
        nn.Conv2d(3, a, window, step, window // 2 - dice.choice((0, 1))), nn.ReLU(), pool(3, 2),
        nn.Conv2d(a, b, dice.choice((5, 7)), dice.choice((1, 1, 2, 3)), 2), nn.ReLU(), pool(3, 2),
        nn.Conv2d(b, c, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(side), nn.Flatten(),
        nn.Linear(c * side * side, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1000),
    ]  # fmt: skip
    return nn.Sequential(*layers).eval(), image(size)


class _Words(nn.Module):
    """A layer of causal attention between a table of words and the same table as its head; weights are (in, out)."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.dim, self.length = dice.choice((128, 160, 192, 320, 384)), dice.choice((24, 48, 80, 96, 128, 160))
        self.vocabulary, self.heads = dice.choice((3000, 5000, 6000, 10000, 12000, 16000)), self.dim // 32
        self.embed = nn.Embedding(self.vocabulary, self.dim)
        self.place = nn.Parameter(torch.rand(self.length, self.dim))
        self.joint = nn.Parameter(0.02 * torch.randn(self.dim, 3 * self.dim))
        inner = self.dim * dice.choice((2, 3, 4))
        self.up = nn.Parameter(0.02 * torch.randn(self.dim, inner))
        self.down = nn.Parameter(0.02 * torch.randn(inner, self.dim))
        self.bias = nn.ParameterList([torch.rand(n) for n in (3 * self.dim, inner, self.dim)])
        self.norms = nn.ModuleList(nn.LayerNorm(self.dim) for _ in range(3))
        self.act: Callable[[torch.Tensor], torch.Tensor] = dice.choice((F.relu, F.gelu, torch.tanh))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[0]) + self.place
        q, k, v = torch.addmm(self.bias[0], self.norms[0](x), self.joint).view(self.length, 3, self.heads, 32).unbind(1)
        y = F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), is_causal=True)
        x = x + y[0].transpose(0, 1).reshape(self.length, self.dim)
        inner = self.act(torch.addmm(self.bias[1], self.norms[1](x), self.up))
        x = x + torch.addmm(self.bias[2], inner, self.down)
        return F.linear(self.norms[2](x)[None], self.embed.weight)


def words(seed: int) -> Made:
    """A language model of one layer whose head is its table of words."""
    torch.manual_seed(seed)
    model = _Words(_dice("words", seed)).eval()
    return model, (torch.randint(0, model.vocabulary, (1, model.length)),)


def cells(seed: int) -> Made:
    """A short sequence through small recurrent cells."""
    torch.manual_seed(seed)
    dice = _dice("cells", seed)
    length, width, inner = dice.choice((6, 10, 12)), dice.choice((32, 48, 80, 96)), dice.choice((32, 48, 96, 160))
    kind, both = dice.choice((nn.LSTM, nn.GRU, nn.GRU)), dice.random() < 0.3
    model = Recurrent(kind, 800, width, inner, 1, both, dice.choice((5, 20))).eval()
    return model, (torch.randint(0, 800, (1, length)),)


def steps(seed: int) -> Made:
    """Wide middles whose depthwise windows of 3, 5 or 7 halve the image more often than not."""
    dice = _dice("steps", seed)
    torch.manual_seed(seed)
    size, width, act = dice.choice((96, 128, 160, 192, 224, 240)), dice.choice((16, 24, 32)), dice.choice(ACTIVATIONS)
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), act()]
    for step in (1, 2, 2, 1, 2, 2):
        inner, window = width * dice.choice((1, 2, 3, 6)), dice.choice((3, 5, 5, 7))
        wider = width if step == 1 else width * dice.choice((3, 4)) // 2 // 8 * 8
        layers += [nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), act()]
        layers += [nn.Conv2d(inner, inner, window, step, window // 2, 1, inner, False), nn.BatchNorm2d(inner), act()]
        layers += [nn.Conv2d(inner, wider, 1, bias=False), nn.BatchNorm2d(wider)]
        width = wider
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)]
    return nn.Sequential(*layers).eval(), image(size)


class _Chain(nn.Module):
    """A few operators along the rows of one tensor, each with element-wise operators around it."""

    def __init__(self, dice: random.Random, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.kinds = dice.choices(("attend", "norm", "rms", "unit", "centre", "log", "mean"), k=2)
        self.act: Callable[[torch.Tensor], torch.Tensor] = dice.choice(
            (F.relu, F.gelu, torch.tanh, F.silu, torch.sigmoid)
        )
        self.before, self.after = dice.random() < 0.5, dice.random() < 0.5
        self.gain, self.offset = nn.Parameter(torch.rand(shape[2])), nn.Parameter(torch.rand(shape[2]))
        self.mask, self.other = nn.Parameter(torch.rand(shape[1:])), nn.Parameter(torch.rand(shape))

    def _along(self, kind: str, x: torch.Tensor) -> torch.Tensor:
        if kind == "attend":
            return (x * 0.125 + self.mask).softmax(-1)
        if kind == "norm":
            return F.layer_norm(x + self.other, x.shape[-1:], self.gain, self.offset)
        if kind == "rms":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain
        if kind == "unit":
            return x / (x.square().sum(-1, keepdim=True).sqrt() + 1e-6)
        if kind == "centre":
            return (x - x.mean(-1, keepdim=True)) * self.gain + self.offset
        if kind == "log":
            return F.log_softmax(x + self.offset, dim=-1)
        return self.act(x).mean(-1, keepdim=True) * self.other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for kind in self.kinds:
            x = self._along(kind, self.act(x) if self.before else x)
            x = self.act(x) * self.gain if self.after else x + self.other
        return x


class _Chains(nn.Module):
    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        shapes = [
            (dice.choice((1, 2, 4, 8, 12)), dice.choice((16, 49, 64, 100, 128, 196)), dice.choice(_COLUMNS))
            for _ in range(4)
        ]
        self.shapes = [shape if shape[0] * shape[1] * shape[2] < 1 << 19 else (1, *shape[1:]) for shape in shapes]
        self.chains = nn.ModuleList(_Chain(dice, shape) for shape in self.shapes)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(chain(x) for chain, x in zip(self.chains, inputs, strict=True))


_COLUMNS = (16, 32, 49, 64, 96, 128, 160, 197, 256, 320, 384, 768, 1000)


def chains(seed: int) -> Made:
    """Four tensors, each through operators along its rows."""
    torch.manual_seed(seed)
    model = _Chains(_dice("chains", seed)).eval()
    return model, tuple(torch.rand(shape) for shape in model.shapes)


class _Dense(nn.Module):
    """One score a pixel: two images of different size through windows with holes, resized, added, resized again."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.mode, width = dice.choice(("bilinear", "bilinear", "nearest")), dice.choice((16, 24, 32))
        deep, classes = dice.choice((160, 256, 320, 480)), dice.choice((8, 19, 30, 40))
        self.coarse = dice.choice((True, False))
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU()
        )
        self.body = nn.Sequential(
            nn.Conv2d(2 * width, deep, 3, 2, 1), nn.ReLU(), nn.Conv2d(deep, deep, 3, 2, 1), nn.ReLU()
        )
        holes = dice.sample((1, 2, 3, 4, 6, 8, 12, 18), 3)
        inner = dice.choice((48, 64, 96, 128))
        self.parts = nn.ModuleList(nn.Conv2d(deep, inner, 3, 1, d, d) for d in holes)
        self.deep, self.near = nn.Conv2d(3 * inner, classes, 1), nn.Conv2d(2 * width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = self.stem(x)
        deep = self.body(near)
        deep = self.deep(torch.cat([F.relu(part(deep)) for part in self.parts], 1))
        near = self.near(F.max_pool2d(near, 2) if self.coarse else near)
        both = near + F.interpolate(deep, size=near.shape[-2:], mode=self.mode)
        return F.interpolate(both, size=x.shape[-2:], mode=self.mode)


def dense(seed: int) -> Made:
    """A segmenting network of a few layers."""
    dice = _dice("dense", seed)
    torch.manual_seed(seed)
    size = dice.choice((96, 128, 160, 192, 256))
    return _Dense(dice).eval(), image(size)


class _Even(nn.Module):
    """A convolution, unevenly padded where it must be; its weights may be made unit on the way."""

    def __init__(self, layer: nn.Conv2d, unit: bool) -> None:
        super().__init__()
        self.layer = layer
        self.gain = nn.Parameter(torch.rand(layer.out_channels)) if unit else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        window, step = self.layer.kernel_size[0], self.layer.stride[0]
        before, after = (window - step) // 2, (window - step + 1) // 2
        x = F.pad(x, (before, after, before, after))
        weight = self.layer.weight
        if self.gain is not None:
            flat = weight.reshape(1, weight.shape[0], -1)
            weight = F.batch_norm(flat, None, None, weight=self.gain, training=True, momentum=0.0).reshape_as(weight)
        return F.conv2d(x, weight, self.layer.bias, self.layer.stride, 0, 1, self.layer.groups)


def padded(seed: int) -> Made:
    """An image classifier that pads as TensorFlow does, or with weights of unit variance."""
    dice = _dice("padded", seed)
    torch.manual_seed(seed)
    size, width = dice.choice((128, 160, 192, 224)), dice.choice((16, 24, 32))
    unit, act = seed % 2 == 1, dice.choice(ACTIVATIONS)
    layers: list[nn.Module] = [_Even(nn.Conv2d(3, width, 3, 2), unit), act()]
    for _ in range(3):
        inner, window = width * dice.choice((2, 3, 6)), dice.choice((3, 5))
        groups = 1 if unit and dice.random() < 0.5 else inner
        layers += [_Even(nn.Conv2d(width, inner, 1), unit), act()]
        layers += [_Even(nn.Conv2d(inner, inner, window, 2, groups=groups), unit), act()]
        wider = width * dice.choice((3, 4)) // 2 // 8 * 8
        layers += [_Even(nn.Conv2d(inner, wider, 1), unit)]
        width = wider
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)]
    return nn.Sequential(*layers).eval(), image(size)


class _Scaled(nn.Module):
    """x + gain * body(x) along the last axis."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.gain = body, nn.Parameter(torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.body(x)


class _Wide(nn.Module):
    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        a, b = dice.choice((256, 384, 512)), dice.choice((640, 768, 1024, 1152))
        self.windows = nn.Sequential(
            nn.Conv2d(64, a, 3, 1, 1), nn.ReLU(), nn.Conv2d(a, a, 3, 1, 1), nn.ReLU(),
            nn.Conv2d(a, b, 3, 2, 1), nn.ReLU(), nn.Conv2d(b, b, 3, 1, 1), nn.ReLU(),
        )  # fmt: skip
        width = dice.choice((320, 512, 640, 768, 896))
        self.turn = nn.Linear(b, width)
        act = dice.choice((nn.GELU, nn.ReLU, nn.SiLU))
        inner = width * dice.choice((3, 4))
        net = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), act(), nn.Linear(inner, width))
        self.tokens = nn.Parameter(torch.rand(1, dice.choice((120, 150, 210, 256)), width))
        self.nets = nn.Sequential(_Scaled(net, width), nn.Linear(width, width), nn.LayerNorm(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.turn(self.windows(x).mean((2, 3)))
        out: torch.Tensor = self.nets(self.tokens + seen[:, None])
        return out


def wide(seed: int) -> Made:
    """Windows of many channels, then rows through wide products."""
    dice = _dice("wide", seed)
    torch.manual_seed(seed)
    model = _Wide(dice).eval()
    return model, (torch.rand(1, 64, *(dice.choice((8, 10, 13, 14, 16)),) * 2),)


_KINDS = (pooled, stem, words, cells, steps, chains, dense, padded, wide)
MODELS: dict[str, Callable[[int], Made]] = {f.__name__: f for f in _KINDS}
