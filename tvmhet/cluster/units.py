"""Quantities as people write them ("80 GiB", "900 GB/s", "2.49 USD/h") to SI numbers, and back for reports.

A quantity is a number, an optional space and a unit. The unit says the dimension, which is checked, so a rate can
never be read where a size is meant. A bare number is an error: nobody can tell GiB from GB in it.
"""

from __future__ import annotations

import enum
import math
import re
from fractions import Fraction

from tvmhet.errors import BadQuantity


class Dimension(enum.Enum):
    """What a quantity measures; the value is the SI unit that parsed numbers are in."""

    BYTES = "B"
    BYTE_RATE = "B/s"
    BIT_RATE = "bit/s"  # of one memory pin; network rates are BYTE_RATE, and may be written in bits
    TIME = "s"
    FREQUENCY = "Hz"
    FLOP_RATE = "FLOP/s"
    POWER = "W"
    PRICE = "USD/h"
    WIDTH = "bit"


_DECIMAL = {"": 0, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12, "P": 15}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}


def _prefixed(*suffixes: str, divisor: int = 1) -> dict[str, Fraction]:
    return {f"{p}{s}": Fraction(10**e, divisor) for s in suffixes for p, e in _DECIMAL.items()}


def _binary(suffix: str) -> dict[str, Fraction]:
    return {f"{p}{suffix}": Fraction(2**e) for p, e in _BINARY.items()}


# Exact factors, so that "5 us" is the float nearest to 5e-6.
_UNITS: dict[Dimension, dict[str, Fraction]] = {
    Dimension.BYTES: _prefixed("B") | _binary("B"),
    Dimension.BYTE_RATE: _prefixed("B/s") | _binary("B/s") | _prefixed("bit/s", "bps", divisor=8),
    Dimension.BIT_RATE: _prefixed("bit/s", "bps"),
    Dimension.TIME: {u: Fraction(1, 10**e) for u, e in (("s", 0), ("ms", 3), ("us", 6), ("µs", 6), ("ns", 9))}
    | {"min": Fraction(60), "h": Fraction(3600)},
    Dimension.FREQUENCY: _prefixed("Hz"),
    Dimension.FLOP_RATE: _prefixed("FLOP/s", "FLOPS", "OP/s", "OPS"),
    Dimension.POWER: {"W": Fraction(1), "mW": Fraction(1, 1000), "kW": Fraction(1000)},
    Dimension.PRICE: {u: Fraction(1) for u in ("USD/h", "USD/hour", "$/h")}
    | {"USD/s": Fraction(3600), "USD/min": Fraction(60), "USD/day": Fraction(1, 24)},
    Dimension.WIDTH: {"bit": Fraction(1)},
}
# The spellings that errors list and files are written in.
_USUAL: dict[Dimension, tuple[str, ...]] = {
    Dimension.BYTES: ("B", "kB", "KiB", "MB", "MiB", "GB", "GiB", "TB", "TiB"),
    Dimension.BYTE_RATE: ("B/s", "MB/s", "GB/s", "GiB/s", "TB/s", "Mbit/s", "Gbit/s"),
    Dimension.BIT_RATE: ("bit/s", "Mbit/s", "Gbit/s"),
    Dimension.TIME: ("s", "ms", "us", "ns"),
    Dimension.FREQUENCY: ("Hz", "MHz", "GHz"),
    Dimension.FLOP_RATE: ("FLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"),
    Dimension.POWER: ("W", "kW"),
    Dimension.PRICE: ("USD/h", "USD/day"),
    Dimension.WIDTH: ("bit",),
}
_EXAMPLE = {
    Dimension.BYTES: "80 GiB",
    Dimension.BYTE_RATE: "900 GB/s",
    Dimension.BIT_RATE: "14 Gbit/s",
    Dimension.TIME: "5 us",
    Dimension.FREQUENCY: "1.41 GHz",
    Dimension.FLOP_RATE: "312 TFLOP/s",
    Dimension.POWER: "700 W",
    Dimension.PRICE: "2.49 USD/h",
    Dimension.WIDTH: "5120 bit",
}
_NOUN = {
    Dimension.BYTES: "a size",
    Dimension.BYTE_RATE: "a transfer rate",
    Dimension.BIT_RATE: "a bit rate",
    Dimension.TIME: "a time",
    Dimension.FREQUENCY: "a frequency",
    Dimension.FLOP_RATE: "an arithmetic rate",
    Dimension.POWER: "a power",
    Dimension.PRICE: "a price",
    Dimension.WIDTH: "a width",
}
_WHOLE = frozenset({Dimension.BYTES, Dimension.WIDTH})
_QUANTITY = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(\S*)\s*")


def parse_quantity(value: object, dimension: Dimension, key: str = "value", zero_ok: bool = False) -> float:
    """Return `value` in the SI unit of `dimension`, rounded to a whole number for sizes.

    Raises BadQuantity, naming `key`, for a bare number, an unknown or foreign unit, or a value that is not > 0
    (not >= 0 where `zero_ok`).

    >>> parse_quantity("80 GiB", Dimension.BYTES)
    85899345920.0
    >>> parse_quantity("100 Gbit/s", Dimension.BYTE_RATE)
    12500000000.0
    """
    example = _EXAMPLE[dimension]
    if not isinstance(value, str):
        raise BadQuantity(
            f"{key} is {value!r}, which has no unit"
            if _is_number(value)
            else f"{key} is {_kind(value)}, not a quantity",
            f'write {_NOUN[dimension]} with its unit, for example {key}: "{example}"',
        )
    match = _QUANTITY.fullmatch(value)
    if match is None:
        raise BadQuantity(
            f"{key} is {value!r}, which is not a number and a unit", f'write for example {key}: "{example}"'
        )
    try:
        result = float(Fraction(match[1].replace("_", "")) * _factor(match[2], dimension, value, key))
    except OverflowError:
        result = math.inf
    if not math.isfinite(result) or result < 0 or (result == 0 and not zero_ok):
        limit = "0 or more" if zero_ok else "more than 0"
        raise BadQuantity(f"{key} is {value!r}; it must be finite and {limit}", f'write for example {key}: "{example}"')
    return float(round(result)) if dimension in _WHOLE else result


def _factor(unit: str, dimension: Dimension, value: str, key: str) -> Fraction:
    if not unit:
        raise BadQuantity(
            f"{key} is {value!r}, which has no unit",
            f'write {_NOUN[dimension]} with its unit, for example {key}: "{_EXAMPLE[dimension]}"',
        )
    if unit in _UNITS[dimension]:
        return _UNITS[dimension][unit]
    known = ", ".join(_USUAL[dimension])
    for other, units in _UNITS.items():
        if unit in units:
            raise BadQuantity(
                f"{key} is {value!r}, which is {_NOUN[other]}, not {_NOUN[dimension]}", f"use one of {known}"
            )
    raise BadQuantity(
        f"{key} is {value!r}; the unit {unit!r} is not known for {_NOUN[dimension]}", f"use one of {known}"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _kind(value: object) -> str:
    names = {dict: "a mapping", list: "a list", bool: f"the truth value {str(value).lower()}", type(None): "empty"}
    return names.get(type(value), repr(value))


def exact_quantity(value: float, dimension: Dimension) -> str:
    """Return text that `parse_quantity` reads back to exactly `value`: the largest unit that loses nothing.

    >>> exact_quantity(85899345920, Dimension.BYTES)
    '80 GiB'
    """
    units = _UNITS[dimension]
    for unit in sorted(_USUAL[dimension], key=lambda u: -units[u]):
        text = f"{float(Fraction(value) / units[unit]):.12g}"
        if (
            not text.startswith("0")
            and "e" not in text
            and len(text) <= 10
            and float(Fraction(text) * units[unit]) == value
        ):
            return f"{text} {unit}"
    return f"{value!r} {dimension.value}"


def gib(size_bytes: float) -> str:
    """Return bytes as text for reports: B, KiB, MiB or GiB with one decimal."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size_bytes) >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def duration(time_s: float) -> str:
    """Return seconds as text for reports, with three digits: "1.25 ms".

    >>> duration(0.00125)
    '1.25 ms'
    """
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(time_s) >= factor:
            return f"{time_s / factor:.3g} {unit}" if time_s / factor < 1000 else f"{time_s / factor:.0f} {unit}"
    return f"{time_s / 1e-9:.3g} ns"


def rate(value: float, unit: str) -> str:
    """Return a rate as text with a decimal prefix: `rate(9e11, "B/s")` is "900 GB/s"."""
    for prefix in ("P", "T", "G", "M", "k"):
        if abs(value) >= 10 ** _DECIMAL[prefix]:
            return f"{value / 10 ** _DECIMAL[prefix]:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"
