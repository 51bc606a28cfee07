"""Convolutions on GPUs: which call computes them, what it joins, and into whose memory it writes.

    relu(conv2d(x, w) + bias [+ other])        one call of cuDNN, whose result is copied to where it is wanted
    conv2d(x, w), all others                   cuDNN, torch's kernel by channel or a product write it there

cuDNN 9.19 adds bias and relu at no cost: on an H200, those of Inception-v3, ResNet-50 and MobileNetV3 at batch 8 take
as long with both as without them (`benchmarks/gpu_library.py`). Those by channel are faster by torch's own kernel, and
those of 1 x 1 as products (`library_products.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tvmhet.emit.library_convolutions import Sliding
from tvmhet.emit.library_products import is_long_product, is_product_on_gpu, pointwise_into

_LOG = logging.getLogger("tvmhet.emit")


class _Attempt:
    """Calls of one kind, which are left for good where cuDNN has no kernel for them."""

    def __init__(self, instead: str) -> None:
        self._instead, self._refused = instead, False

    def __call__(self, call: Callable[..., torch.Tensor], *arguments: Any, **named: Any) -> torch.Tensor | None:
        """Return what the call returns, None where it is refused."""
        if self._refused:
            return None
        try:
            return call(*arguments, **named)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._refused = True
            _LOG.info("%s: %s", self._instead, error)
            return None


class ConvolutionOnGpu:
    """One convolution, given as Relax's attributes, and what follows it."""

    def __init__(self, attrs: Mapping[str, Any]) -> None:
        self._how = Sliding.of(attrs)
        self._with_relu = _Attempt("a convolution and its relu are apart")
        self._written = _Attempt("the result of a convolution is copied")

    def joined(
        self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, other: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return the result with bias, `other` and relu, None where they are to be computed one after another.

        `bias` has a value per channel.
        """
        if not self._joins(x, w):
            return None
        flat, how = None if bias is None else bias.reshape(-1), self._how
        moves = (how.stride, how.padding, how.dilation, how.groups)
        if other is None:
            return self._with_relu(torch.cudnn_convolution_relu, x, w, flat, *moves)
        return self._with_relu(torch.cudnn_convolution_add_relu, x, w, other.contiguous(), 1.0, flat, *moves)

    def _joins(self, x: torch.Tensor, w: torch.Tensor) -> bool:
        """Whether cuDNN computes it, and no other call is faster in spite of what cuDNN would join."""
        if x.device.type != "cuda" or x.dtype == torch.float64 or not torch.backends.cudnn.is_available():
            return False
        how = self._how
        return how.groups == 1 and (max(how.stride) > 1 or not is_long_product(x, w, how.padding, how.groups))

    def into(
        self, out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None,
        other: torch.Tensor | None = None, *, relu: bool = False,
    ) -> None:  # fmt: skip
        """Write the convolution of x with w + bias + other to `out`; with `relu` what is below 0 as 0."""
        made = self.joined(x, w, bias, other) if relu else None
        if made is not None:
            out.copy_(made)
            return
        self._with_bias_into(out, x, w, bias)
        if other is not None:
            out.add_(other)
        if relu:
            out.relu_()

    def _with_bias_into(self, out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> None:
        how = self._how
        flat = None if bias is None else bias.reshape(-1)
        if how.groups > 1 and how.groups == x.shape[1] and how.rank == 2:
            by_channel, moves = torch.ops.aten._conv_depthwise2d.out, (how.stride, how.padding, how.dilation)
            if self._written(by_channel, x, w, list(w.shape[2:]), flat, *moves, out=out) is None:
                out.copy_(how.convolve(x, w, flat))
            return
        if max(how.stride) == 1 and is_product_on_gpu(x, w, how.padding, how.groups):
            pointwise_into(w.flatten(1), x, out)
        else:
            exactly = (False, False, False)  # no search for the fastest, not the same every time, no TF32
            cudnn, moves = torch.ops.aten.cudnn_convolution.out, (how.padding, how.stride, how.dilation)
            if self._written(cudnn, x, w, *moves, how.groups, *exactly, out=out) is None:
                out.copy_(how.convolve(x, w, None))
        if flat is not None:
            out.add_(flat.reshape(-1, *[1] * how.rank))
