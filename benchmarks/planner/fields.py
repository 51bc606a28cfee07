"""Numbers and tables from files that strangers wrote: checked once, with an error that names the place."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tvmhet.errors import BadModel

#: Beyond this, sums of thousands of numbers would overflow or lose all digits; no time, size or count comes near.
LARGEST = 1e15


def text_of(path: Path) -> str:
    """Return a file's text, without a byte-order mark. Raises BadModel if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as e:
        raise BadModel(f"{path} cannot be read: {e.strerror}", "give a file that exists and may be read") from e
    except UnicodeDecodeError as e:
        raise BadModel(f"{path.name} is not text in UTF-8: {e.reason} at byte {e.start}", "unpack or convert it") from e


def json_of(path: Path) -> Any:
    """Return what a JSON file says. Raises BadModel."""
    text = text_of(path)
    try:
        return json.loads(text)
    except ValueError as e:
        raise BadModel(f"{path.name} is not JSON: {e}", "see the format's README") from e
    except RecursionError as e:
        raise BadModel(f"{path.name} is not JSON: nested too deeply", "see the format's README") from e


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
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not lowest <= value <= LARGEST
    ):
        raise BadModel(f"{where}: {key} is {record.get(key)!r}", f"give a number between {lowest:g} and {LARGEST:g}")
    return float(value)


def flag(record: Mapping[str, Any], key: str, where: str, *, default: bool | None = None) -> bool:
    """Return record[key], which is 0, 1, false or true. Raises BadModel."""
    value = record.get(key, default)
    if value not in (0, 1, "0", "1"):
        raise BadModel(f"{where}: {key} is {value!r}", "give 0 or 1")
    return value in (1, "1")


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
