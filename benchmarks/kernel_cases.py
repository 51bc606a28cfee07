"""The kernels of `kernels_alone.py`: each in Relax and in torch, with its operands' shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tvm import relax

op = relax.op
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A family of `generated.yaml`, the kernel in Relax and in torch, its operands' shapes, and its FLOPs.

    With `masked` the last operand takes out what lies behind the diagonal, by minus infinity.
    """

    family: str
    name: str
    ours: Callable[..., Any]
    torchs: Callable[..., torch.Tensor]
    shapes: tuple[Shape, ...]
    flop: float = 0.0
    masked: bool = False

    def operands(self) -> list[Any]:
        """Arrays from -1 to 1, the same each time."""
        dice = np.random.default_rng(0)
        made = [dice.uniform(-1, 1, shape).astype("float32") for shape in self.shapes]
        if self.masked:
            made[-1] = np.triu(np.full(self.shapes[-1], -np.inf, "float32"), 1)
        return made


def linear(m: int, k: int, n: int, transposed: bool = False) -> Case:
    """A product of matrices."""
    if transposed:
        name = f"{m} x {k} x {n}, transposed"
        return Case("linear", name, lambda x, w: op.matmul(x, op.permute_dims(w)), lambda x, w: x @ w.T,
                    ((m, k), (n, k)), 2.0 * m * k * n)  # fmt: skip
    return Case("linear", f"{m} x {k} x {n}", op.matmul, torch.matmul, ((m, k), (k, n)), 2.0 * m * k * n)


def linear_gelu(rows: Shape, k: int, n: int) -> Case:
    """A product with its bias and its gelu."""
    return Case(
        "linear", f"{'x'.join(map(str, rows))} x {k} x {n}, bias, gelu",
        lambda x, w, b: op.nn.gelu(op.add(op.matmul(x, w), b)), lambda x, w, b: F.gelu(x @ w + b),
        ((*rows, k), (k, n), (n,)), 2.0 * math.prod(rows) * k * n,
    )  # fmt: skip


def matmul(b: int, m: int, k: int, n: int) -> Case:
    """A batched product."""
    return Case(
        "matmul", f"{b} x {m} x {k} x {n}", op.matmul, torch.matmul, ((b, m, k), (b, k, n)), 2.0 * b * m * k * n
    )


def conv(c: int, o: int, side: int, window: int, stride: int = 1, groups: int = 1) -> Case:
    """A convolution with its bias and relu."""
    pad, out = window // 2, (side - 1) // stride + 1
    return Case(
        "conv2d", f"{c} to {o}, {side} pixels, window {window}, stride {stride}, {groups} groups",
        lambda x, w, b: op.nn.relu(op.add(op.nn.conv2d(x, w, strides=stride, padding=pad, groups=groups), b)),
        lambda x, w, b: F.relu(F.conv2d(x, w, b.reshape(-1), stride, pad, 1, groups)),
        ((1, c, side, side), (o, c // groups, window, window), (1, o, 1, 1)),
        2.0 * o * out * out * c // groups * window * window,
    )  # fmt: skip


def depthwise_silu(c: int, side: int, window: int, stride: int = 1) -> Case:
    """A convolution by channel with its bias and silu, as in EfficientNet."""
    plain = conv(c, c, side, window, stride, c)
    pad = window // 2
    return replace(
        plain, name=f"{plain.name}, silu",
        ours=lambda x, w, b: op.nn.silu(op.add(op.nn.conv2d(x, w, strides=stride, padding=pad, groups=c), b)),
        torchs=lambda x, w, b: F.silu(F.conv2d(x, w, b.reshape(-1), stride, pad, 1, c)),
    )  # fmt: skip


def softmax(*shape: int) -> Case:
    """Along the last axis."""
    return Case("softmax", f"{shape}", lambda x: op.nn.softmax(x, -1), lambda x: torch.softmax(x, -1), (shape,))


def layer_norm(rows: int, n: int) -> Case:
    """Of rows."""
    return Case(
        "layer_norm", f"({rows}, {n})", lambda x, g, b: op.nn.layer_norm(x, g, b, axes=-1),
        lambda x, g, b: F.layer_norm(x, (n,), g, b), ((rows, n), (n,), (n,)),
    )  # fmt: skip


def turned_norm(c: int, side: int) -> Case:
    """Over the channels of an image, written pixel by pixel."""
    return Case(
        "layer_norm", f"permute, ({side * side}, {c})",
        lambda x, g, b: op.nn.layer_norm(op.permute_dims(x, (0, 2, 3, 1)), g, b, axes=-1),
        lambda x, g, b: F.layer_norm(x.permute(0, 2, 3, 1), (c,), g, b), ((1, c, side, side), (c,), (c,)),
    )  # fmt: skip


def layer_norm_backward(rows: int, n: int) -> Case:
    """The gradient of a layer norm's input from (dy, x, gamma) and the rows' (mean, 1 / deviation)."""

    def ours(dy: Any, x: Any, gamma: Any, mean: Any, rstd: Any) -> Any:
        centred = op.multiply(op.subtract(x, mean), rstd)
        scaled = op.multiply(dy, gamma)
        along = op.multiply(centred, op.mean(op.multiply(scaled, centred), axis=-1, keepdims=True))
        return op.multiply(rstd, op.subtract(op.subtract(scaled, op.mean(scaled, axis=-1, keepdims=True)), along))

    def torchs(dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> Any:
        wanted = [True, False, False]
        return torch.ops.aten.native_layer_norm_backward(dy, x, [n], mean, rstd, gamma, gamma, wanted)[0]

    return Case("layer_norm", f"({rows}, {n}), backward", ours, torchs,
                ((rows, n), (rows, n), (n,), (rows, 1), (rows, 1)))  # fmt: skip


def unary(name: str, ours: Callable[..., Any], torchs: Callable[..., torch.Tensor], *shape: int) -> Case:
    """An element-wise function."""
    return Case("elementwise", f"{name} {shape}", ours, torchs, (shape,))


def added(*shape: int) -> Case:
    """The sum of two tensors, and its relu."""
    return Case("elementwise", f"add, relu {shape}", lambda x, y: op.nn.relu(op.add(x, y)),
                lambda x, y: torch.relu(x + y), (shape, shape))  # fmt: skip


def reduced(axis: int, *shape: int) -> Case:
    """A sum along one axis."""
    return Case(
        "reduction", f"sum {shape}, axis {axis}", lambda x: op.sum(x, axis=axis), lambda x: x.sum(axis), (shape,)
    )


def permuted(axes: Shape, *shape: int) -> Case:
    """A transposition."""
    return Case("movement", f"permute {shape} to {axes}", lambda x: op.permute_dims(x, axes),
                lambda x: x.permute(axes).contiguous(), (shape,))  # fmt: skip


def joined(count: int, rows: int, columns: int) -> Case:
    """A concatenation along the second axis."""
    return Case("movement", f"concat {count} of ({rows}, {columns})", lambda *x: op.concat(list(x), 1),
                lambda *x: torch.cat(x, 1), ((rows, columns),) * count)  # fmt: skip


def attention(heads: int, words: int, depth: int, causal: bool = False) -> Case:
    """Attention over rows of all heads' channels, to the same; with `causal` to no word from a later one."""
    width = heads * depth
    shape = (1, words, heads, depth)

    def ours(q: Any, k: Any, v: Any, *mask: Any) -> Any:
        builder = relax.BlockBuilder.current()
        q, v = (builder.emit(op.permute_dims(op.reshape(x, shape), (0, 2, 1, 3))) for x in (q, v))
        k = builder.emit(op.permute_dims(op.reshape(k, shape), (0, 2, 3, 1)))
        scores = op.multiply(op.matmul(q, k), relax.const(depth**-0.5, "float32"))
        scores = op.add(scores, mask[0]) if mask else scores
        made = builder.emit(op.matmul(op.nn.softmax(scores, -1), v))
        return op.reshape(op.permute_dims(made, (0, 2, 1, 3)), (1, words, width))

    def torchs(*operands: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.view(shape).transpose(1, 2) for x in operands[:3])
        made = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return made.transpose(1, 2).reshape(1, words, width)

    flop = 4.0 * heads * words * words * depth
    name = f"{heads} heads of {words} x {depth}{', causal' * causal}"
    shapes = ((1, words, width),) * 3 + ((words, words),) * causal
    return Case("attention", name, ours, torchs, shapes, flop, masked=causal)


def attention_apart(heads: int, words: int, depth: int) -> tuple[Case, ...]:
    """The kernels of the same attention by TVM's fusion rules, of one head after the other."""
    scale = relax.const(depth**-0.5, "float32")
    scaled = Case(
        "attention", f"scale, softmax ({heads}, {words}, {words})", lambda s: op.nn.softmax(op.multiply(s, scale), -1),
        lambda s: torch.softmax(s * depth**-0.5, -1), ((heads, words, words),),
    )  # fmt: skip
    rows = permuted((1, 0, 2), words, heads, depth)
    back = permuted((1, 0, 2), heads, words, depth)
    columns = permuted((1, 2, 0), words, heads, depth)
    products = matmul(heads, words, depth, words), matmul(heads, words, words, depth)
    return tuple(replace(c, family="attention") for c in (rows, columns, rows, products[0], scaled, products[1], back))


def gated(c: int, o: int, side: int) -> Case:
    """An image times a factor of each channel, through a convolution of 1 x 1 with its bias."""
    return Case(
        "conv2d", f"gate, {c} to {o}, {side} pixels, window 1",
        lambda x, g, w, b: op.add(op.nn.conv2d(op.multiply(x, g), w), b),
        lambda x, g, w, b: F.conv2d(x * g, w, b.reshape(-1)),
        ((1, c, side, side), (1, c, 1, 1), (o, c, 1, 1), (1, o, 1, 1)), 2.0 * o * c * side * side,
    )  # fmt: skip


def conv_then(c: int, o: int, side: int, name: str, ours: Callable[..., Any], torchs: Callable[..., Any]) -> Case:
    """A convolution of 1 x 1 with its bias and what follows it in the same kernel."""
    return Case(
        "conv2d", f"{c} to {o}, {side} pixels, window 1, {name}", lambda x, w, b: ours(op.add(op.nn.conv2d(x, w), b)),
        lambda x, w, b: torchs(F.conv2d(x, w, b.reshape(-1))), ((1, c, side, side), (o, c, 1, 1), (1, o, 1, 1)),
        2.0 * o * c * side * side,
    )  # fmt: skip


def unpadded(c: int, side: int, window: int, stride: int) -> Case:
    """A convolution by channel of an image that was padded before, as in TensorFlow's models."""
    padded = depthwise_silu(c, side, window, stride)
    return replace(
        padded, name=f"{c} by channel, {side} pixels, window {window}, stride {stride}, not padded",
        ours=lambda x, w, b: op.clip(op.add(op.nn.conv2d(x, w, strides=stride, groups=c), b), 0, 6),
        torchs=lambda x, w, b: F.relu6(F.conv2d(x, w, b.reshape(-1), stride, 0, 1, c)),
        flop=2.0 * c * ((side - window) // stride + 1) ** 2 * window**2,
    )  # fmt: skip


CASES: tuple[Case, ...] = (
    added(1, 256, 56, 56), added(1, 512, 28, 28), added(1, 1024, 14, 14), added(16, 1024, 1024),
    unary("relu", op.nn.relu, torch.relu, 16, 1024, 1024), unary("exp", op.exp, torch.exp, 128, 3072),
    unary("gelu", op.nn.gelu, F.gelu, 128, 3072), unary("silu", op.nn.silu, F.silu, 128, 3072),
    reduced(-1, 16384, 1024), reduced(0, 16384, 1024), reduced(-1, 4096, 197),
    softmax(12, 128, 128), softmax(12, 197, 197), layer_norm(128, 768), layer_norm(197, 768), layer_norm(768, 197),
    layer_norm_backward(128, 768), layer_norm_backward(1568, 384),
    turned_norm(96, 56), turned_norm(192, 28), turned_norm(384, 14), turned_norm(768, 7),
    permuted((1, 0, 2), 128, 12, 64), permuted((1, 0), 2048, 2048), joined(27, 128, 64),
    linear(1, 2048, 1000), linear(1, 2048, 1000, True), linear(1, 768, 3072), linear(2, 1024, 1000),
    linear(8, 512, 2048), linear(16, 512, 512), linear(128, 768, 768), linear(128, 768, 768, True),
    linear(128, 3072, 768), linear_gelu((197,), 768, 3072), linear_gelu((1, 14, 14), 384, 1536),
    matmul(12, 128, 128, 64), matmul(12, 197, 197, 64), matmul(12, 197, 64, 197),
    conv(3, 64, 224, 7, 2), conv(64, 64, 56, 3), conv(256, 64, 56, 1), conv(64, 256, 56, 1), conv(128, 128, 28, 3),
    conv(256, 256, 14, 3), conv(1024, 256, 14, 1), conv(512, 512, 7, 3), conv(512, 2048, 7, 1),
    conv(480, 480, 14, 5, 1, 480), conv(72, 72, 56, 5, 2, 72), conv(240, 240, 28, 5, 2, 240),
    conv(96, 96, 112, 3, 2, 96), conv(96, 96, 56, 7, 1, 96), conv(384, 384, 14, 7, 1, 384),
    conv(192, 192, 28, 7, 1, 192), conv(768, 768, 7, 7, 1, 768), conv(1152, 1152, 7, 5, 1, 1152),
    conv(672, 672, 14, 5, 1, 672), conv(672, 672, 14, 5, 2, 672), conv(120, 120, 28, 5, 1, 120),
    conv(192, 192, 28, 3, 1, 192), conv(32, 32, 112, 3, 1, 32), conv(384, 384, 14, 3, 1, 384),
    depthwise_silu(480, 14, 3), depthwise_silu(96, 112, 3, 2), conv(3, 64, 224, 11, 4), conv(16, 64, 64, 5, 3),
    unpadded(672, 17, 5, 2),
    linear_gelu((56, 56), 96, 384), linear(64, 512, 32128), linear(64, 512, 32128, True),
    linear(128, 768, 50257, True), conv_then(64, 256, 56, "gelu", op.nn.gelu, F.gelu),
    conv_then(96, 576, 14, "silu", op.nn.silu, F.silu), conv_then(96, 576, 14, "relu", op.nn.relu, F.relu),
    conv_then(16, 96, 112, "relu6, padded", lambda y: op.nn.pad(op.clip(y, 0, 6), (0, 0, 0, 0, 0, 1, 0, 1)),
              lambda y: F.pad(F.relu6(y), (0, 1, 0, 1))),
)  # fmt: skip


#: Kernels that only CPUs have in one, and the parts that they are made of.
CPU_CASES: tuple[Case, ...] = (
    *CASES,
    *(attention(12, words, 64) for words in (128, 197, 512)), attention(8, 1024, 64),
    attention(12, 128, 64, True), attention(8, 1024, 64, True),
    *attention_apart(12, 197, 64),
    gated(72, 40, 28), conv_then(72, 40, 28, "no more", lambda y: y, lambda y: y),
    gated(480, 112, 14), conv_then(480, 112, 14, "no more", lambda y: y, lambda y: y),
    gated(960, 160, 7), conv_then(960, 160, 7, "no more", lambda y: y, lambda y: y),
)  # fmt: skip


#: Products that fill a GPU, beside those of CPUs.
GPU_CASES: tuple[Case, ...] = (
    *CASES,
    linear(1024, 768, 3072),
    linear(1024, 3072, 768),
    linear(4096, 4096, 4096),
    matmul(96, 128, 128, 64),
)
