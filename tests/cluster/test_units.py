"""Quantities: exact, checked for dimension, and read back unchanged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvmhet.cluster.units import Dimension, duration, exact_quantity, gib, parse_quantity, rate
from tvmhet.errors import BadQuantity


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("80 GiB", Dimension.BYTES, 80 * 2**30),
        ("80GB", Dimension.BYTES, 80e9),
        ("1.5 MiB", Dimension.BYTES, 1572864),
        ("900 GB/s", Dimension.BYTE_RATE, 900e9),
        ("100 Gbit/s", Dimension.BYTE_RATE, 12.5e9),
        ("100 Gbps", Dimension.BYTE_RATE, 12.5e9),
        ("14 Gbit/s", Dimension.BIT_RATE, 14e9),
        ("5 us", Dimension.TIME, 5e-6),
        ("0 s", Dimension.TIME, None),
        ("1.41 GHz", Dimension.FREQUENCY, 1.41e9),
        ("312 TFLOP/s", Dimension.FLOP_RATE, 312e12),
        ("130 TOPS", Dimension.FLOP_RATE, 130e12),
        ("700 W", Dimension.POWER, 700),
        ("2.49 USD/h", Dimension.PRICE, 2.49),
        ("16.8 USD/day", Dimension.PRICE, 0.7),
        ("$2.49/h", Dimension.PRICE, None),
        ("5_120 bit", Dimension.WIDTH, 5120),
        ("1e3 MB", Dimension.BYTES, 1e9),
    ],
)
def test_parse(text, dimension, value):
    if value is None:
        with pytest.raises(BadQuantity):
            parse_quantity(text, dimension)
    else:
        assert parse_quantity(text, dimension) == value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (16, "memory is 16, which has no unit"),
        (16.5, "memory is 16.5, which has no unit"),
        ("16", "memory is '16', which has no unit"),
        ("16 GIB", "the unit 'GIB' is not known for a size"),
        ("16 GB/s", "is a transfer rate, not a size"),
        ("-16 GiB", "must be finite and more than 0"),
        ("0 GiB", "must be finite and more than 0"),
        ("1e400 GiB", "is not a number and a unit|must be finite"),
        ("1e999 GiB", "must be finite"),
        ("nan GiB", "is not a number and a unit"),
        ("inf GiB", "is not a number and a unit"),
        ("GiB", "is not a number and a unit"),
        ("", "is not a number and a unit"),
        ("16 Gi B", "is not a number and a unit"),
        (None, "memory is empty, not a quantity"),
        (True, "memory is the truth value true, not a quantity"),
        ([16], "memory is a list, not a quantity"),
        ({"GiB": 16}, "memory is a mapping, not a quantity"),
    ],
)
def test_bad_quantities_say_what_is_wrong(value, says):
    with pytest.raises(BadQuantity, match=says) as caught:
        parse_quantity(value, Dimension.BYTES, "memory")
    assert caught.value.remedy


def test_zero_is_a_time_where_it_is_allowed():
    assert parse_quantity("0 us", Dimension.TIME, zero_ok=True) == 0.0
    with pytest.raises(BadQuantity, match="0 or more"):
        parse_quantity("-1 us", Dimension.TIME, zero_ok=True)


@given(st.floats(1e-12, 1e18), st.sampled_from([d for d in Dimension if d not in (Dimension.BYTES, Dimension.WIDTH)]))
def test_exact_quantity_reads_back_unchanged(value, dimension):
    assert parse_quantity(exact_quantity(value, dimension), dimension) == value


@given(st.integers(1, 2**50))
def test_sizes_read_back_unchanged(size):
    assert parse_quantity(exact_quantity(size, Dimension.BYTES), Dimension.BYTES) == size


@pytest.mark.parametrize(
    ("value", "dimension", "text"),
    [
        (80 * 2**30, Dimension.BYTES, "80 GiB"),
        (2039e9, Dimension.BYTE_RATE, "2.039 TB/s"),
        (2e-6, Dimension.TIME, "2 us"),
        (0.0, Dimension.TIME, "0.0 s"),
        (2.49, Dimension.PRICE, "2.49 USD/h"),
        (5120, Dimension.WIDTH, "5120 bit"),
    ],
)
def test_exact_quantity_uses_the_usual_units(value, dimension, text):
    assert exact_quantity(value, dimension) == text


def test_report_texts():
    assert [gib(n) for n in (512, 2048, 3 * 2**20, 22.5 * 2**30)] == ["512 B", "2.0 KiB", "3.0 MiB", "22.5 GiB"]
    assert [duration(t) for t in (0.0, 3e-9, 5e-6, 1.25e-3, 2.0, 4321.0)] == [
        "0 ns", "3 ns", "5 us", "1.25 ms", "2 s", "4321 s"
    ]  # fmt: skip
    assert rate(9e11, "B/s") == "900 GB/s"
    assert rate(3.12e14, "FLOP/s") == "312 TFLOP/s"
    assert rate(12, "B/s") == "12 B/s"
