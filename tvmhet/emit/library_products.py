"""Products and convolutions of one pixel: which of torch's libraries computes them, and as how many products.

    torch.mm         MKL: on processors that are not Intel's it stays at AVX2, half of what AVX-512 cores can
    oneDNN's linear  their full rate; a fixed cost of about 10 us

    conv2d of 1 x 1 on n images  ==>  one product of all pixels: (o, c) @ (c, n * pixels), where images are small

Measured on one core of an AMD EPYC (family 26): 128 x 768 x 768 1.36 ms by MKL and 0.63 by oneDNN, 64 x 64 x 64 6 and
15 us; a convolution of 4 images of 3 x 3 pixels, 128 to 512 channels, 270 us image by image and 72 as one product.

On GPUs torch adds a bias by cuBLASLt, which is slower for few results in float32 than cuBLAS for the product alone. On
an H100 (cuBLAS 13.1): 128 x 768 x 768 11.3 us, with a bias 28.6; 128 x 768 x 3072 22.2 and 62.7; 1024 x 3072 x 768 117
and 117. A bias added afterwards takes about 1.5 us of few results. Convolutions of 1 x 1 by cuDNN 9.19 are slower than
products, too: 2048 to 512 channels of 7 x 7 pixels 49 us and 9.8 (as if the inner dimension were not divided among
blocks), others of ResNet-50 1.04 to 2.7 times; on an H200 at batch 8 1.03 to 3.0 times (52 of Inception-v3, ResNet-50
and MobileNetV3). A product, a bias and a relu took 0.44 to 1.18 of the time of cuDNN's one call and a copy from 192
channels up (33 of them, median 0.88), below 0.88 to 1.42. Images of one pixel are products image by image, too: 8 of
240 to 960 channels take 3.4 us so (32 by cuDNN), and 30 to 50 as one product of 8 rows, for which cuBLAS takes tiles of
32 x 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch

from tvmhet.cluster.cpu import vendor_of

_FEWEST_FLOPS = 4e6  # of a product that oneDNN computes
_FEWEST_ROWS, _FEWEST_ROWS_ON_GPU = 4, 16
_SMALL_IMAGE = 128  # pixels
_FEW_RESULTS = 1 << 20  # of a product on a GPU: a bias is added to them afterwards
_MANY_CHANNELS = 192  # of a convolution on a GPU: it is a product in spite of what cuDNN would join with it


@lru_cache(maxsize=1)
def _mkl_is_slow() -> bool:
    """Whether MKL leaves half of this processor's vector units unused."""
    try:
        vendor = vendor_of(Path("/proc/cpuinfo").read_text())
    except OSError:
        return False
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    has_linear = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return vendor == "AuthenticAMD" and wide and has_linear and torch.backends.mkl.is_available()


def _by_onednn(a: torch.Tensor, b: torch.Tensor) -> bool:
    rows, inner = a.shape
    return (
        a.dtype == torch.float32
        and a.device.type == "cpu"
        and rows >= _FEWEST_ROWS
        and 2 * rows * inner * b.shape[1] >= _FEWEST_FLOPS
        and _mkl_is_slow()
    )


def adds_bias_afterwards(dtype: str, rows: int, columns: int) -> bool:
    """Whether the bias of a product on a GPU is added to its result by a call of its own."""
    return dtype == "float32" and rows >= _FEWEST_ROWS_ON_GPU and rows * columns <= _FEW_RESULTS


def _apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    dtype = str(a.dtype).removeprefix("torch.")
    return a.device.type == "cuda" and adds_bias_afterwards(dtype, a.shape[0], b.shape[1])


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return a @ b, (m, k) by (k, n), plus a bias of n values; operands may be transposed views."""
    if _by_onednn(a, b):
        made: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")
        return made
    if bias is None:
        return torch.mm(a, b)
    return torch.mm(a, b).add_(bias) if _apart(a, b) else torch.addmm(bias, a, b)


def product_into(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write a @ b, plus a bias of n values, into `out`, (m, n)."""
    if _by_onednn(a, b):
        out.copy_(product(a, b, bias))
    elif bias is None:
        torch.mm(a, b, out=out)
    elif _apart(a, b):
        torch.mm(a, b, out=out)
        out.add_(bias)
    else:
        torch.addmm(bias, a, b, out=out)


def is_pointwise(x: torch.Tensor, kernel: Sequence[int], padding: Sequence[int], groups: int) -> bool:
    """Whether a convolution of x on a CPU is a product of its pixels: of 1 x 1, without padding and groups."""
    plain = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    return plain and tuple(kernel) == (1, 1) and not any(padding) and groups == 1


def is_product_on_gpu(x: torch.Tensor, w: torch.Tensor, padding: Sequence[int], groups: int) -> bool:
    """Whether a convolution on a GPU that is not strided is a product of its pixels: of 1 x 1, without padding."""
    plain = x.device.type == "cuda" and x.dtype == torch.float32
    return plain and tuple(w.shape[2:]) == (1, 1) and not any(padding) and groups == 1


def is_long_product(x: torch.Tensor, w: torch.Tensor, padding: Sequence[int], groups: int) -> bool:
    """Whether it is faster as a product even where cuDNN would join what follows: of many channels."""
    return is_product_on_gpu(x, w, padding, groups) and is_long(w.shape[1])


def is_long(channels: int) -> bool:
    """Whether a convolution of 1 x 1 has so many channels."""
    return channels >= _MANY_CHANNELS


def pointwise_into(w: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    """Write w @ x[n] of each image, (o, c) and (n, c, h, w), to `out`, (n, o, h, w) in row order: on GPUs."""
    num, channels = x.shape[:2]
    if num == 1:
        torch.mm(w, x.reshape(channels, -1), out=out.view(w.shape[0], -1))
    else:
        pixels, results = x.reshape(num, channels, -1), out.view(num, w.shape[0], -1)
        torch.bmm(w.expand(num, *w.shape), pixels, out=results)


def pointwise(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return w @ x[n] of each image: (o, c) and (n, c, h, w) to (n, o, h, w), perhaps as a transposed view."""
    num, channels, height, width = x.shape
    if x.device.type == "cuda":
        made = x.new_empty(num, w.shape[0], height, width)
        pointwise_into(w, x, made)
        return made
    if num == 1:
        return product(w, x.reshape(channels, -1)).view(1, -1, height, width)
    if num * height * width <= max(w.shape):
        rows = x.flatten(2).transpose(1, 2).reshape(-1, channels)
        return product(rows, w.t()).view(num, height, width, -1).permute(0, 3, 1, 2)
    pixels = _pixels(x)
    if height * width < _SMALL_IMAGE or _by_onednn(w, pixels):
        return product(w, pixels).view(-1, num, height, width).transpose(0, 1)
    return torch.bmm(w.expand(num, *w.shape), x.reshape(num, channels, -1)).view(num, -1, height, width)


def pointwise_weight_gradient(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum over images and pixels of gradient and x: (n, c, h, w) and (n, o, h, w) to (o, c, 1, 1)."""
    return product(_pixels(gradient), _pixels(x).t()).view(gradient.shape[1], x.shape[1], 1, 1)


def _pixels(x: torch.Tensor) -> torch.Tensor:
    """(n, c, h, w) to (c, n * h * w)."""
    return x.transpose(0, 1).reshape(x.shape[1], -1)
