"""Convolutions that slide, against the unscheduled kernel: over images, volumes, in bands; which ones do not."""

from __future__ import annotations

import functools

import pytest
import tvm
from tvm.relax import op

from tests.emit.cpu.kernels import check, kernel, scheduled


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lambda x, w: op.nn.conv2d(x, w, padding=1), [(1, 5, 14, 14), (8, 5, 3, 3)]),
        (lambda x, w: op.nn.conv2d(x, w), [(2, 3, 17, 13), (4, 3, 3, 3)]),
        (lambda x, w: op.nn.conv2d(x, w, padding=[0, 3, 0, 3]), [(1, 4, 17, 17), (12, 4, 1, 7)]),
        (lambda x, w: op.nn.conv2d(x, w, padding=[3, 0, 3, 0]), [(1, 4, 17, 17), (6, 4, 7, 1)]),
        (lambda x, w: op.nn.conv2d(x, w, padding=2, dilation=2), [(1, 4, 20, 20), (8, 4, 3, 3)]),
        (lambda x, w: op.nn.conv2d(x, w, padding=[2, 1, 0, 2]), [(1, 1, 15, 16), (8, 1, 3, 3)]),
        (lambda x, w: op.nn.conv2d(x, w, padding=3, strides=2), [(1, 3, 32, 32), (8, 3, 7, 7)]),
        (lambda x, w: op.nn.conv2d(x, w, padding=1, strides=[1, 2]), [(2, 3, 13, 15), (4, 3, 3, 3)]),
        (lambda x, w: op.nn.conv2d(x, w, strides=2, dilation=2), [(1, 4, 21, 18), (8, 4, 3, 3)]),
        (lambda x, w: op.nn.conv2d(x, w, strides=3, padding=1), [(2, 4, 23, 22), (8, 4, 5, 5)]),
        (lambda x, w: op.nn.conv2d(x, w, strides=4, padding=2), [(1, 3, 35, 33), (8, 3, 11, 11)]),
        (lambda x, w: op.nn.conv2d(op.nn.gelu(x), w, padding=1), [(1, 4, 12, 12), (8, 4, 3, 3)]),
        (lambda x, w: op.nn.conv2d(x, w, padding=1), [(1, 4, 14, 14), (2, 4, 3, 3)]),
        (lambda x, w: op.nn.conv2d(x, w, padding=3), [(1, 4, 14, 14), (3, 4, 7, 7)]),
        (lambda x, w: op.nn.conv2d(x, w, padding=1, strides=2), [(1, 4, 19, 14), (17, 4, 3, 3)]),  # a prime number
        (
            lambda x, w, b, y: op.nn.relu(op.add(op.add(op.nn.conv2d(x, w, padding=1), b), y)),
            [(2, 4, 14, 14), (8, 4, 3, 3), (1, 8, 1, 1), (2, 8, 14, 14)],
        ),
    ],
)
def test_a_window_slides_over_an_image(make, shapes, num_cores):
    check(make, *shapes, rule="sliding", num_cores=num_cores)


@pytest.mark.parametrize(
    ("batch", "groups", "num_cores", "together"),
    [(4, 1, 1, True), (4, 1, 2, True), (2, 3, 2, False), (3, 1, 2, False), (1, 1, 1, False), (1, 1, 2, False)],
)
def test_an_image_is_laid_out_just_before_it_is_slid_over(batch, groups, num_cores, together):
    """In one loop over a batch that shares out evenly; groups, which are channels of one image, stay apart."""
    shapes = (batch, 16 * groups, 32, 32), (32 * groups, 16, 3, 3)
    func = kernel(lambda x, w: op.nn.conv2d(x, w, padding=1, groups=groups), *shapes)
    sch = tvm.s_tir.Schedule(scheduled(func, num_cores=num_cores)[1])
    image, last = (sch.get_loops(sch.get_sblock(name)) for name in ("image", "last"))
    assert sch.get(image[0]).same_as(sch.get(last[0])) == together
    check(lambda x, w: op.nn.conv2d(x, w, padding=1, groups=groups), *shapes, rule="sliding", num_cores=num_cores)


VOLUMES = [
    (lambda x, w: op.nn.conv3d(x, w, padding=1), [(2, 3, 9, 7, 8), (8, 3, 3, 3, 3)]),
    (lambda x, w: op.nn.conv3d(x, w), [(1, 4, 5, 9, 12), (4, 4, 1, 3, 3)]),
    (lambda x, w: op.nn.conv3d(x, w, padding=[0, 1, 0, 1, 1, 2], dilation=2), [(1, 3, 9, 11, 8), (8, 3, 3, 3, 2)]),
    (lambda x, w: op.nn.conv3d(x, w, padding=1, groups=2), [(2, 6, 9, 7, 8), (8, 3, 3, 3, 3)]),
    (
        lambda x, w, b, y: op.nn.relu(op.add(op.add(op.nn.conv3d(x, w, padding=1, strides=[1, 2, 2]), b), y)),
        [(1, 3, 9, 9, 13), (8, 3, 3, 3, 3), (1, 8, 1, 1, 1), (1, 8, 9, 5, 7)],
    ),
]


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize(("make", "shapes"), VOLUMES)
def test_a_window_slides_over_a_volume(make, shapes, num_cores):
    check(make, *shapes, rule="sliding", num_cores=num_cores)


BANDED = [
    *VOLUMES,
    (lambda x, w: op.nn.conv2d(x, w), [(3, 3, 17, 13), (4, 3, 3, 3)]),
    (lambda x, w: op.nn.conv2d(x, w, padding=3, strides=2), [(1, 3, 43, 32), (8, 3, 7, 7)]),
    (lambda x, w: op.nn.conv2d(x, w, padding=2, strides=[3, 1]), [(2, 3, 40, 11), (8, 3, 5, 5)]),
    (lambda x, w: op.nn.conv2d(op.nn.gelu(x), w, padding=1), [(1, 4, 19, 12), (8, 4, 3, 3)]),
    (
        lambda x, w, b, y: op.nn.relu(op.add(op.add(op.nn.conv2d(x, w, padding=1), b), y)),
        [(2, 5, 14, 14), (8, 5, 3, 3), (1, 8, 1, 1), (2, 8, 14, 14)],
    ),
]


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize("band_bytes", [1 << 10, 4 << 10])
@pytest.mark.parametrize(("make", "shapes"), BANDED)
def test_large_images_are_slid_over_in_bands(make, shapes, band_bytes, num_cores, monkeypatch):
    monkeypatch.setattr("tvmhet.emit.cpu.sliding._MAX_IMAGE_BYTES", 1 << 10)
    monkeypatch.setattr("tvmhet.emit.cpu.sliding._BAND_BYTES", band_bytes)
    check(make, *shapes, rule="sliding", num_cores=num_cores)


@pytest.mark.parametrize(
    ("batch", "rows", "num_cores", "steps", "limit"),
    [
        (1, 224, 1, 112, None),
        (1, 100, 2, 8, 100),
        (3, 100, 2, 24, 100),
        (1, 149, 1, 19, 149),
        (1, 149, 16, 30, None),
    ],
)
def test_a_band_and_its_sums_stay_in_the_cache(batch, rows, num_cores, steps, limit):
    """Cores share the bands evenly; where these do not divide an image, the last one ends with it."""
    channels = 64 if rows == 224 else 32
    shapes = (batch, channels, rows, rows), (channels, channels, 3, 3)
    func = scheduled(kernel(lambda x, w: op.nn.conv2d(x, w, padding=1), *shapes), num_cores=num_cores)[1]
    sch = tvm.s_tir.Schedule(func)
    image, last = (sch.get_loops(sch.get_sblock(name)) for name in ("image", "last"))
    outer = [int(sch.get(i).extent) for i, j in zip(image, last, strict=False) if sch.get(i).same_as(sch.get(j))]
    assert outer == ([steps] if num_cores > 1 else [n for n in (batch, steps) if n > 1])
    lines = int(sch.get(sch.get_sblock("image")).writes[0].source.shape[-1]) // 16
    assert lines % 2 == 1  # else the images of all channels begin in few sets of the cache
    assert (f"< T.int64({limit})" in func.script().split('T.sblock("last")')[1]) == (limit is not None)


def test_a_large_image_of_a_number_of_rows_that_is_prime():
    check(
        lambda x, w, b: op.nn.relu(op.add(op.nn.conv2d(x, w, padding=1), b)),
        (1, 32, 401, 131), (8, 32, 3, 3), (1, 8, 1, 1), rule="sliding", num_cores=2,
    )  # fmt: skip


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize(
    ("rule", "length", "window", "strides", "groups"),
    [("sliding", 67, 9, 1, 6), ("sliding", 64, 5, 2, 6), ("windows", 64, 5, 1, 6), ("contraction", 64, 5, 2, 1),
     ("contraction", 64, 5, 1, 2)],
)  # fmt: skip
def test_a_window_of_one_axis(rule, length, window, strides, groups, num_cores):
    make = functools.partial(op.nn.conv1d, strides=strides, padding=window // 2, groups=groups)
    check(make, (2, 6, length), (12 if groups < 6 else 6, 6 // groups, window), rule=rule, num_cores=num_cores)


@pytest.mark.parametrize("strides", [1, 2])
def test_a_window_slides_without_gathering(strides):
    func = kernel(lambda x, w: op.nn.conv2d(x, w, padding=1, strides=strides), (1, 16, 35, 35), (32, 16, 3, 3))
    sums = scheduled(func)[1].script().split('T.sblock("sums_update")')[1].split("T.sblock")[0]
    assert "v_place //" not in sums and "v_place %" not in sums and "v_place *" not in sums


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lambda x, w: op.nn.conv2d(x, w, padding=1, strides=5), [(1, 4, 24, 24), (8, 4, 3, 3)]),
        (lambda x, w: op.nn.conv2d(x, w, strides=2), [(1, 4, 14, 14), (8, 4, 1, 1)]),
        (lambda x, w: op.nn.conv2d(x, w), [(1, 4, 14, 14), (8, 4, 1, 1)]),
        (lambda x, w: op.nn.conv2d(x, w, padding=1), [(1, 2, 8, 8), (320, 2, 3, 3)]),  # many channels, few places
        (lambda x, w: op.nn.conv3d(x, w, padding=[1, 0, 0, 1, 0, 0]), [(1, 4, 5, 9, 8), (8, 4, 3, 1, 1)]),  # one axis
    ],
)
def test_other_convolutions_are_contractions(make, shapes):
    check(make, *shapes, rule="contraction")
