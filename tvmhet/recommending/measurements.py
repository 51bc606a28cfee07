"""Measured times of single kernels that come back in a file, one JSON object a line, or Parquet for a .parquet name.

    {"device": "t4", "kernel": "9f31c0...", "seconds": 0.00134}

`tvmhet recommend --profile-budget-usd 5 --dry-run --out FILE` writes the list without `seconds`; fill them in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmhet.cluster.document import suggest
from tvmhet.cost.runs_file import PARQUET, parquet_package, read_parquet
from tvmhet.cost.table import Entry, TimeTable
from tvmhet.errors import BadBundle, BadInput
from tvmhet.recommending.measuring import Campaign
from tvmhet.report.files import write_text

_ROW = 'write {"device": ..., "kernel": ..., "seconds": ...}'
_REPEATS = 0.02  # what a repeated measurement may differ by: the interval of one that comes without a spread


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of the kernel with this key on a device type."""

    device_type: str
    key: str
    seconds: float


def read_measurements(path: Path) -> tuple[Measured, ...]:
    """Read a file of measured kernels; lines without `seconds` are not measured yet.

    Raises BadInput with the line, or where nothing is measured.
    """
    out = []
    for where, row in _rows(path):
        if (made := _read(where, row)) is not None:
            out.append(made)
    if not out:
        raise BadInput(f"{path}: no line has seconds", "fill in the seconds of the kernels that were measured")
    return tuple(out)


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a file, with where they are."""
    remedy = "give a file of measured kernels, one JSON object a line, or Parquet"
    if path.suffix == PARQUET:
        try:
            rows = read_parquet(path)
        except BadBundle as e:
            raise BadInput(f"{path}: cannot be read as Parquet", remedy) from e
        yield from ((f"{path.name}, row {number}", row) for number, row in enumerate(rows, 1))
        return
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise BadInput(f"{path}: cannot be read: {e}", remedy) from e
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield f"{path.name}:{number}", json.loads(line)
            except ValueError as e:
                raise BadInput(f"{path.name}:{number}: not JSON: {e}", _ROW) from e


def _read(where: str, row: Any) -> Measured | None:
    if not isinstance(row, Mapping) or not {"device", "kernel"} <= set(row):
        raise BadInput(f"{where}: no device and kernel", _ROW)
    seconds = row.get("seconds")
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise BadInput(f"{where}: seconds is {seconds!r}", "give a number of more than 0")
    return Measured(str(row["device"]), str(row["kernel"]), float(seconds))


def measuring_list(campaign: Campaign, called: Callable[[str], Sequence[str]]) -> str:
    """Return what to measure as JSON lines; `seconds` is to be filled in. `called`: a key's operators."""
    rows = [
        {"device": c.device_type, "kernel": c.key, "ops": list(called(c.key)), "usd": c.usd, "seconds": None}
        for c in campaign.choices
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_list(path: Path, listed: str) -> None:
    """Write what to measure: as it is, or as Parquet for a .parquet name. Raises MissingPackage without pyarrow."""
    if path.suffix != PARQUET:
        write_text(path, listed)
        return
    arrow, parquet = parquet_package()
    text, number = arrow.string(), arrow.float64()
    kinds = {"device": text, "kernel": text, "ops": arrow.list_(text), "usd": number, "seconds": number}
    rows = [json.loads(line) for line in listed.splitlines()]
    parquet.write_table(arrow.Table.from_pylist(rows, schema=arrow.schema(list(kinds.items()))), path)


def check_known(measurements: Sequence[Measured], keys: Set[str]) -> None:
    """Raise BadInput for a kernel that is none of `keys`."""
    for m in measurements:
        if m.key not in keys:
            raise BadInput(
                f"the measured kernel {m.key!r} is none of this model's {len(keys)} candidates",
                "measure kernels of the list for this model, shapes and makers",
            )


def with_measured(table: TimeTable, keys: Sequence[str], measurements: Sequence[Measured]) -> TimeTable:
    """Return the table with the measured times. Raises BadInput for a kernel or a type that the table does not have."""
    check_known(measurements, set(keys))
    rows: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        rows.setdefault(key, []).append(i)
    for m in measurements:
        if m.device_type not in table.device_types:
            what = f"a kernel was measured on {m.device_type!r}, a device type that the market does not have"
            raise BadInput(what, suggest(m.device_type, table.device_types))
        entry = Entry(m.seconds, m.seconds * (1 - _REPEATS), m.seconds * (1 + _REPEATS), "measured")
        table = table.with_entries(m.device_type, dict.fromkeys(rows[m.key], entry))
    return table
