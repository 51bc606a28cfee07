"""Convolutions that cuDNN joins with a bias, a residual and a relu, on GPUs.

    relu(conv2d(x, w) + bias [+ other])        one call, where that was measured to be faster than one after another

cuDNN 9.19 on an H100 (`benchmarks/gpu_library.py`) adds bias and relu at no cost for the windows below: 1.0 to 1.7
times as fast. With all windows joined, Inception-v3, of 1 x 7 and 5 x 5, took twice torch's time at batch 8.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from tvmhet.emit.library_products import is_long_product

_LOG = logging.getLogger("tvmhet.emit")
JOINED_WINDOWS = ((1, 1), (3, 3), (7, 7))


class JoinedRelu:
    """The call of one convolution, given as Relax's attributes; left for good where cuDNN has no kernel for it."""

    def __init__(self, attrs: Mapping[str, Any]) -> None:
        self._stride, self._dilation = list(attrs["strides"]), list(attrs["dilation"])
        self._padding, self._groups = list(attrs["padding"][:2]), int(attrs["groups"])
        self._refused = False

    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, other: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return the result, None where it is to be computed one after another. `bias` has a value per channel."""
        if self._refused or not self._suits(x, w):
            return None
        flat = None if bias is None else bias.reshape(-1)
        how = (flat, self._stride, self._padding, self._dilation, self._groups)
        try:
            if other is None:
                return torch.cudnn_convolution_relu(x, w, *how)
            return torch.cudnn_convolution_add_relu(x, w, other.contiguous(), 1.0, *how)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._refused = True
            _LOG.info("a convolution and its relu are apart: %s", error)
            return None

    def _suits(self, x: torch.Tensor, w: torch.Tensor) -> bool:
        """Those by channel are faster by torch's own kernel, those of many channels to few pixels as products."""
        if x.device.type != "cuda" or x.dtype == torch.float64 or not torch.backends.cudnn.is_available():
            return False
        if self._groups != 1 or tuple(w.shape[2:]) not in JOINED_WINDOWS:
            return False
        return self._stride != [1, 1] or not is_long_product(x, w, self._padding, self._groups)
