"""The database of measured kernels to a file and back: JSON lines, or Parquet where the name ends in .parquet.

Both hold the same columns, one run a row, in the same order; a file appears whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tvmhet.cost.measured import ImportCount, MeasuredKernels
from tvmhet.errors import BadBundle, MissingPackage

PARQUET = ".parquet"


def export_runs(database: MeasuredKernels, path: Path) -> int:
    """Write every sound run of `database` to `path` and return how many. Raises MissingPackage for Parquet."""
    part = path.with_name(path.name + ".part")
    try:
        write = _write_parquet if path.suffix == PARQUET else _write_jsonl
        count = write(database.records(), part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


def import_runs(database: MeasuredKernels, path: Path) -> ImportCount:
    """Add the runs of an exported file; what is no run is counted. Raises BadBundle for a file that cannot be read."""
    return database.add_records(read_parquet(path) if path.suffix == PARQUET else _read_jsonl(path))


def _write_jsonl(records: Iterable[dict[str, Any]], path: Path) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as out:
        for record in records:
            out.write(json.dumps(record) + "\n")
            count += 1
    return count


def _read_jsonl(path: Path) -> Iterator[object]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    return (_parsed(line) for line in lines)


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _write_parquet(records: Iterable[dict[str, Any]], path: Path) -> int:
    arrow, parquet = parquet_package()
    texts = ("tvm_version", "kernel_hash", "target", "device", "toolchain", "status")
    schema = arrow.schema(
        [(name, arrow.string()) for name in texts]
        + [("times_s", arrow.list_(arrow.float64())), ("busy", arrow.bool_())]
        + [("note", arrow.string()), ("taken_ns", arrow.int64()), ("description", arrow.string())]
    )
    table = arrow.Table.from_pylist(list(records), schema=schema)
    parquet.write_table(table, path)
    return int(table.num_rows)


def read_parquet(path: Path) -> list[object]:
    """Return the rows of a file. Raises MissingPackage without pyarrow, BadBundle for a file that cannot be read."""
    arrow, parquet = parquet_package()
    try:
        return list(parquet.read_table(path).to_pylist())
    except (OSError, arrow.ArrowException) as error:
        raise _unreadable(path, error) from error


def parquet_package() -> tuple[Any, Any]:
    """Return pyarrow and its module for Parquet. Raises MissingPackage where it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingPackage(
            "Parquet files need pyarrow", "pip install tvmhet[parquet], or name a .jsonl file"
        ) from error
    return pyarrow, pyarrow.parquet


def _unreadable(path: Path, error: Exception) -> BadBundle:
    return BadBundle(f"measurements {str(path)!r} cannot be read: {error}", "give a file of `tvmhet database --export`")
