"""Operators drawn as models have them, for calibrating CPU types: sides of products and images, windows, groups.

What a CPU library reaches depends on each size, so the few round sizes that suffice for a GPU's scalars do not do.
"""

from __future__ import annotations

import math
import random

from tvmhet.cost.model import KernelDesc, OpDesc
from tvmhet.cost.workload import kernel_of

_TOKENS = (1, 1, 2, 4, 8, 16, 32, 49, 64, 100, 128, 128, 196, 197, 256, 384, 512, 784, 1024, 3136)
_WIDTHS = (10, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1000, 1024, 1280, 1536, 2048, 3072, 4096, 8000)
_CHANNELS = (3, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 240, 256, 320, 384, 480, 512, 672, 960, 1024)
_IMAGES = (4, 5, 7, 8, 10, 12, 14, 16, 20, 24, 28, 35, 40, 48, 56, 64, 80, 112)
_MOST_FLOP = 3e9
_MOST_BYTES = 256e6


def drawn(count: int, seed: int = 0) -> tuple[KernelDesc, ...]:
    """Return `count` different float32 library kernels; the first of them are the same for any count."""
    dice = random.Random(seed)
    found: dict[KernelDesc, None] = {}
    while len(found) < count:
        kernel = kernel_of(_operator(dice))
        if kernel.flop <= _MOST_FLOP and kernel.read_bytes + kernel.write_bytes <= _MOST_BYTES:
            found.setdefault(kernel)
    return tuple(found)


def _operator(dice: random.Random) -> OpDesc:
    family = dice.choices(("linear", "conv2d", "matmul", "rows", "elementwise"), (40, 40, 10, 5, 5))[0]
    if family == "linear":
        return OpDesc("linear", (1, dice.choice(_TOKENS), dice.choice(_WIDTHS), dice.choice(_WIDTHS[1:])), "float32")
    if family == "matmul":
        length, other, head = dice.choice(_TOKENS[2:]), dice.choice(_TOKENS[2:]), dice.choice((16, 32, 64, 128))
        n, k = dice.choice(((other, head), (head, other)))
        return OpDesc("matmul", (dice.choice((2, 3, 4, 6, 8, 12, 16)), length, n, k), "float32")
    if family == "rows":
        name = dice.choice(("softmax", "layer_norm"))
        return OpDesc(name, (dice.choice(_TOKENS) * dice.choice((1, 4, 12)), dice.choice(_WIDTHS)), "float32", name)
    if family == "elementwise":
        size, name = 2 ** dice.randint(8, 23), dice.choice(("add", "multiply", "relu", "gelu", "tanh", "exp"))
        return OpDesc("elementwise", (size * (2 if name in ("add", "multiply") else 1), size), "float32", name)
    return _convolution(dice)


def _convolution(dice: random.Random) -> OpDesc:
    c, size, k = dice.choice(_CHANNELS), dice.choice(_IMAGES), dice.choice((1, 1, 1, 3, 3, 3, 5, 7))
    groups = dice.choice((1, 1, 1, 1, c, *(g for g in (2, 4, 8, 32) if c % g == 0)))
    oc = c if groups > 1 else dice.choice(_CHANNELS[1:])
    stride = dice.choice((1, 1, 1, 2)) if size >= 7 else 1
    out = math.floor((size + 2 * (k // 2) - k) / stride) + 1
    return OpDesc("conv2d", (1, c, size, size, oc, k, k, out, out, groups), "float32")
