"""Resizing gives torch's numbers for every mode, at sizes that TVM's own operator places elsewhere."""

import re

import pytest
import torch
from torch.nn.functional import interpolate

from tests.ir.test_importers import Function, run
from tvmhet.errors import UnsupportedOperator
from tvmhet.ir.importers import from_torch

SIZES = ({"scale_factor": 2}, {"size": (7, 5)}, {"scale_factor": 1.3}, {"size": (2, 3)})
MODES = {
    **{mode: {"mode": mode} for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")},
    "corners": {"mode": "bilinear", "align_corners": True},
    "antialiased": {"mode": "bilinear", "antialias": True},
    "antialiased cubic": {"mode": "bicubic", "antialias": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_two_dims(mode):
    x = torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    every = Function(lambda x: tuple(interpolate(x, **MODES[mode], **size) for size in SIZES))
    for got, want in zip(run(from_torch(every, (x,)), x), every(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(got), want)


def test_one_and_three_dims():
    x = torch.randn(1, 2, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    both = Function(
        lambda x: (
            interpolate(x, size=(3, 7, 6), mode="trilinear"),
            interpolate(x, size=(3, 7, 6)),
            interpolate(x[0, 0], size=9, mode="linear"),
            interpolate(x[0, 0], size=9),
        )
    )
    for got, want in zip(run(from_torch(both, (x,)), x), both(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(got), want)


def test_means_of_bytes_are_refused():
    x = torch.zeros(1, 1, 4, 4, dtype=torch.uint8)
    with pytest.raises(UnsupportedOperator, match=r"upsample_bilinear2d.* means of uint8, which torch rounds"):
        from_torch(Function(lambda x: interpolate(x, size=(3, 3), mode="bilinear")), (x,))


@pytest.mark.parametrize(
    ("size", "axes"),
    [((9, 11), [3, 3, 2, 2]), ((4, 5), [2, 2, 3, 3]), ((9, 5), [3, 3, 2, 2]), ((4, 11), [2, 2, 3, 3])],
)
def test_what_becomes_smaller_comes_first_and_rows_before_what_is_across_them(size, axes):
    model = from_torch(Function(lambda x: interpolate(x, size=size, mode="bilinear")), (torch.randn(1, 2, 6, 7),))
    assert [int(a) for a in re.findall(r"R\.take\(.*axis=(\d)", model.mod.script())] == axes
