"""Numbers and tables from files that strangers wrote: checked once, with an error that names the place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tvmhet.errors import BadModel

#: Beyond this, sums of thousands of numbers would overflow or lose all digits; no time, size or count comes near.
LARGEST = 1e15


def number(
    record: Mapping[str, Any], key: str, where: str, *, lowest: float = 0.0, default: float | None = None
) -> float:
    """Return record[key] as a finite number of at least `lowest`. Raises BadModel with the place and the value."""
    value = record.get(key, default)
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = None
    if not isinstance(value, int | float) or not math.isfinite(value) or not lowest <= value <= LARGEST:
        raise BadModel(f"{where}: {key} is {record.get(key)!r}", f"give a number between {lowest:g} and {LARGEST:g}")
    return float(value)


def whole(record: Mapping[str, Any], key: str, where: str, *, lowest: int = 0) -> int:
    """Return record[key] as a whole number. Raises BadModel."""
    value = number(record, key, where, lowest=lowest)
    if value != int(value):
        raise BadModel(f"{where}: {key} is {record[key]!r}", "give a whole number")
    return int(value)


def table(record: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """Return record[key] as a table of fields. Raises BadModel."""
    value = record.get(key)
    if not isinstance(value, Mapping):
        raise BadModel(f"{where}: {key} is {value!r}", "give a table of fields")
    return value


def tables(record: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    """Return record[key] as a list of tables. Raises BadModel."""
    value = record.get(key) if isinstance(record, Mapping) else None
    if not isinstance(value, list) or not all(isinstance(x, Mapping) for x in value):
        raise BadModel(f"{where}: {key} is not a list of tables", "see the format's README")
    return value
