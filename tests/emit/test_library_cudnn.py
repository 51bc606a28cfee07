"""Convolutions on GPUs: what is computed where no call writes in place or joins, and which call is asked for what.

On this CPU every call of cuDNN is refused; on a GPU tests/emit/test_library_gpu.py runs them.
"""

import pytest
import torch
import torch.nn.functional as F

from tvmhet.emit.library_cudnn import ConvolutionOnGpu

X, W = torch.randn(2, 4, 7, 6), torch.randn(8, 4, 3, 3)


def attrs(groups=1, stride=1):
    return {"strides": [stride] * 2, "padding": [1] * 4, "dilation": [1, 1], "groups": groups}


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_what_no_library_writes_in_place_is_copied(groups, bias, residual, relu):
    conv = ConvolutionOnGpu(attrs(groups, 2))
    w, b = W[:, : 4 // groups], torch.randn(1, 8, 1, 1) if bias else None
    want = F.conv2d(X, w, b.flatten() if bias else None, 2, 1, 1, groups)
    other = torch.randn_like(want) if residual else None
    want = want + other if residual else want
    for _ in range(2):  # refused, then known to be
        out = torch.full_like(want, float("nan"))
        conv.into(out, X, w, b, other, relu=relu)
        torch.testing.assert_close(out, want.relu() if relu else want)


class OnGpu:
    """As much of a tensor as the rules look at."""

    device, dtype = torch.device("cuda"), torch.float32

    def __init__(self, *shape):
        self.shape = shape


@pytest.mark.parametrize(
    ("channels", "window", "stride", "groups", "joined"),
    [
        (512, (3, 3), 1, 1, True), (512, (1, 7), 1, 1, True), (512, (1, 1), 2, 1, True), (64, (1, 1), 1, 1, True),
        (192, (1, 1), 1, 1, False), (512, (3, 3), 1, 512, False), (512, (3, 3), 1, 2, False),
    ],
)  # fmt: skip
def test_cudnn_joins_where_nothing_else_is_faster(channels, window, stride, groups, joined, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    conv = ConvolutionOnGpu(attrs(groups, stride) | {"padding": [0] * 4})
    assert conv._joins(OnGpu(1, channels, 14, 14), OnGpu(64, channels // groups, *window)) == joined


def test_a_lack_of_memory_is_no_refusal(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    conv = ConvolutionOnGpu(attrs())
    monkeypatch.setattr(torch.ops.aten.cudnn_convolution, "out", full)
    with pytest.raises(torch.OutOfMemoryError):
        conv.into(torch.empty(2, 8, 7, 6), X, W)
