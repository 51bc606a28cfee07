"""How a convolution's window slides, as torch takes it, and torch's calls for it.

    nn.conv1d   as an image of one row        nn.conv2d   F.conv2d       nn.conv3d   oneDNN on CPUs, F.conv3d

On one core torch takes convolutions along three axes by a product of gathered windows where their steps are one. Their
calls of oneDNN on one core of an AMD EPYC (family 25), GFLOP/s, `F.conv3d` in brackets: 32 channels of 16 x 16 x 16,
windows of 3 x 3 x 3 86 (20); 64 of 8 x 28 x 28 95 (20); 128 of 8 x 14 x 14 90 (41); 24 of 8 x 56 x 56, windows of
5 x 1 x 1 66 (18); 16 of 32 x 32 x 32, 5 x 5 x 5 66 (65). Of two axes, windows of 3 x 3, both are alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Sliding:
    """Steps, zeros around the image and holes of a window along each axis, and how many groups the channels are."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> Sliding:
        """Read Relax's attributes."""
        strides = list(attrs["strides"])
        return cls(strides, list(attrs["padding"][: len(strides)]), list(attrs["dilation"]), int(attrs["groups"]))

    @property
    def rank(self) -> int:
        """Along how many axes it slides."""
        return len(self.stride)

    def convolve(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the convolution of x with w, plus a bias of a value per channel."""
        if self.rank == 2:
            return F.conv2d(x, w, bias, self.stride, self.padding, self.dilation, self.groups)
        if is_for_onednn(x):
            made: torch.Tensor = torch.mkldnn_convolution(
                x, w, bias, self.padding, self.stride, self.dilation, self.groups
            )
            return made
        return F.conv3d(x, w, bias, self.stride, self.padding, self.dilation, self.groups)

    def spread(self, x: torch.Tensor, w: torch.Tensor, extra: list[int]) -> torch.Tensor:
        """Return the transposed convolution of x with w, `extra` results more at the ends of the axes."""
        call = F.conv_transpose2d if self.rank == 2 else F.conv_transpose3d
        return call(x, w, None, self.stride, self.padding, extra, self.groups, self.dilation)


def is_for_onednn(x: torch.Tensor) -> bool:
    """Whether oneDNN is here and takes such an image."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and bool(torch.backends.mkldnn.is_available())


def planar(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a convolution along one axis for images of one row."""
    first, last = attrs["padding"]
    along = {key: [1, *attrs[key]] for key in ("strides", "dilation")}
    if "output_padding" in attrs:
        along["output_padding"] = [0, *attrs["output_padding"]]
    return {**attrs, **along, "padding": [0, first, 0, last]}
