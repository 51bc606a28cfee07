"""The database of measured kernels: one sqlite file, every time ever taken, shared by all processes of a user.

    key: TVM version, hash of the kernel function (before any annotation), target, device, toolchain
        └── runs: status, all times in seconds, busy or not, when
    hash ── description: what the kernel computes, for models that learn from the runs

A commit is whole or absent whatever happens to the process (WAL), so kill -9 loses at most the run in flight. Runs that
failed are kept, so that nobody tries again, but give no time. Rows that cannot be times are moved to the table
`quarantine` with the reason and are never read again.
"""

from __future__ import annotations

import json
import math
import sqlite3
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tvmhet._data import CACHE_DIR_VARIABLE, default_cache_dir, keeping
from tvmhet.cost.measure import STATUSES, Measurement
from tvmhet.cost.model import from_text
from tvmhet.errors import BadBundle, BadInput

SCHEMA_VERSION = 1

_BUSY_TIMEOUT_S = 60.0
_KEY = "tvm_version, kernel_hash, target, device, toolchain"
_RUN = f"{_KEY}, status, times_s, busy, note, taken_ns"
_TABLES = """
CREATE TABLE IF NOT EXISTS runs (
  id INTEGER PRIMARY KEY, tvm_version TEXT NOT NULL, kernel_hash TEXT NOT NULL, target TEXT NOT NULL,
  device TEXT NOT NULL, toolchain TEXT NOT NULL, status TEXT NOT NULL, times_s TEXT NOT NULL, busy INTEGER NOT NULL,
  note TEXT NOT NULL, taken_ns INTEGER NOT NULL,
  UNIQUE (tvm_version, kernel_hash, target, device, toolchain, status, times_s, taken_ns));
CREATE TABLE IF NOT EXISTS quarantine (id INTEGER PRIMARY KEY, row TEXT NOT NULL, reason TEXT NOT NULL UNIQUE);
"""
_DESCRIPTIONS = "CREATE TABLE IF NOT EXISTS kernels (kernel_hash TEXT PRIMARY KEY, description TEXT NOT NULL)"
_T = TypeVar("_T")


def default_path() -> Path:
    """Return `measured.db` in the user's cache folder."""
    return default_cache_dir() / "measured.db"


@dataclass(frozen=True, slots=True, order=True)
class KernelKey:
    """What a time belongs to. Two kernels with equal keys take the same time."""

    kernel_hash: str  # structural hash of the unannotated kernel function, lower-case hex
    target: str  # the TVM target as JSON
    device: str  # CPU model or GPU name
    toolchain: str  # whatever else decides the code: makers' versions, schedules, threads
    tvm_version: str

    def __post_init__(self) -> None:
        if not self.kernel_hash or set(self.kernel_hash) - set("0123456789abcdef"):
            raise BadInput(f"kernel_hash {self.kernel_hash!r} is not lower-case hex", "format the hash with ':x'")
        for name in ("target", "device", "tvm_version"):
            if not getattr(self, name):
                raise BadInput(f"the key of kernel {self.kernel_hash} has no {name}", f"give its {name}")


@dataclass(frozen=True, slots=True)
class ImportCount:
    """What an import did with the lines of a file."""

    new: int
    known: int
    bad: int


class MeasuredKernels:
    """An open database; a context manager. Use one per thread; several threads and processes may share the file.

    Raises BadBundle if the file is no such database, is damaged, or was written by another version of tvmhet, BadInput
    if its folder cannot be made.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = default_path() if path is None else Path(path)
        with keeping(self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._naming_the_file():
            self._db = sqlite3.connect(self.path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
            try:
                self._open()
            except BaseException:
                self._db.close()
                raise

    def insert(self, key: KernelKey, run: Measurement, *, taken_ns: int | None = None) -> bool:
        """Keep a run. Return whether it is new and sound; one that is not sound goes to the quarantine.

        `taken_ns` is the Unix time in nanoseconds, now if not given.
        """
        taken = time.time_ns() if taken_ns is None else taken_ns
        row = (*_key_values(key), run.status, json.dumps(run.times_s), int(run.busy), run.note, taken)
        with self._writing():
            return self._add(row)

    def median_s(self, key: KernelKey) -> float | None:
        """Return the kernel's time in seconds, or None if it was never measured successfully.

        That is the smallest of its runs' medians, because what disturbs a run only makes it longer; runs on a busy
        machine count only if there are no others.
        """
        good = [r for r in self.runs(key) if r.status == "ok"]
        calm = [r for r in good if not r.busy]
        return min((r.median_s for r in calm or good), default=None)

    def describe(self, kernel_hash: str, description: str) -> None:
        """Keep what the kernel of that hash computes, as text; a later description replaces an earlier one."""
        with self._writing():
            self._db.execute("INSERT OR REPLACE INTO kernels VALUES (?, ?)", (kernel_hash, description))

    def described(self, target: str, device: str, tvm_version: str) -> list[tuple[str, str, str, float]]:
        """Return (hash, toolchain, description, seconds) of every kernel that has a time there, in a fixed order.

        The time is chosen as in `median_s`.
        """
        with self._naming_the_file():
            rows = self._db.execute(
                "SELECT kernel_hash, toolchain, description, times_s, busy FROM runs JOIN kernels USING (kernel_hash) "
                "WHERE target = ? AND device = ? AND tvm_version = ? AND status = 'ok' ORDER BY kernel_hash, toolchain",
                (target, device, tvm_version),
            ).fetchall()
        best: dict[tuple[str, str, str], tuple[int, float]] = {}
        for kernel_hash, toolchain, description, times, busy in rows:
            if _why_unsound(["", "", "", "", "", "ok", times]):
                continue
            found = (int(busy), statistics.median(json.loads(times)))
            key = (str(kernel_hash), str(toolchain), str(description))
            best[key] = min(best.get(key, found), found)
        return [(*key, seconds) for key, (_, seconds) in best.items()]

    def runs(self, key: KernelKey) -> tuple[Measurement, ...]:
        """Return every sound run of this kernel, failed ones included, oldest first."""
        where = " AND ".join(f"{name} = ?" for name in _KEY.split(", "))
        with self._naming_the_file():
            rows = self._db.execute(
                f"SELECT id, {_RUN} FROM runs WHERE {where} ORDER BY taken_ns, id", _key_values(key)
            ).fetchall()
        found = []
        for number, *row in rows:
            if reason := _why_unsound(row):
                with self._writing():
                    self._put_aside(row, reason)
                    self._db.execute("DELETE FROM runs WHERE id = ?", (number,))
            else:
                found.append(_measurement(row))
        return tuple(found)

    def has(self, key: KernelKey) -> bool:
        """Return whether this kernel was run before, with success or without."""
        return bool(self.runs(key))

    def num_runs(self) -> int:
        """Return how many sound runs there are, of all kernels."""
        with self._naming_the_file():
            return int(self._db.execute("SELECT COUNT(*) FROM runs").fetchone()[0])

    def quarantined(self) -> tuple[str, ...]:
        """Return why each unsound row was put aside, oldest first."""
        with self._naming_the_file():
            return tuple(str(r[0]) for r in self._db.execute("SELECT reason FROM quarantine ORDER BY id"))

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield every sound run as plain data, in an order that does not depend on when it was inserted.

        `description` is what its kernel computes, None where that was not kept.
        """
        names = f"{_RUN}, description".split(", ")
        query = f"SELECT {', '.join(names)} FROM runs LEFT JOIN kernels USING (kernel_hash)"
        with self._naming_the_file():
            for row in self._db.execute(f"{query} ORDER BY {_KEY}, taken_ns, times_s"):
                if not _why_unsound(row):
                    yield dict(zip(names, row, strict=True)) | {"times_s": json.loads(row[6]), "busy": bool(row[7])}

    def add_records(self, records: Iterable[object]) -> ImportCount:
        """Add runs as `records` gives them. Known ones, and what is no run, are counted and left out.

        Their kernels' descriptions join those that are here. All or nothing: one transaction.
        """
        new = known = bad = 0
        with self._writing():
            for record in records:
                row = _row_of(record)
                if row is None or _why_unsound(row):
                    bad += 1
                    continue
                if description := record.get("description"):  # type: ignore[attr-defined]
                    self._db.execute("INSERT OR IGNORE INTO kernels VALUES (?, ?)", (row[1], description))
                if self._add(row):
                    new += 1
                else:
                    known += 1
        return ImportCount(new, known, bad)

    def counts(self) -> dict[tuple[str, str], int]:
        """Return how many runs there are by (device, status)."""
        with self._naming_the_file():
            rows = self._db.execute("SELECT device, status, COUNT(*) FROM runs GROUP BY device, status ORDER BY 1, 2")
            return {(str(device), str(status)): int(count) for device, status, count in rows}

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __enter__(self) -> MeasuredKernels:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        """Create or check the tables; several processes may do so at once."""
        _retry_locked(lambda: self._db.execute("PRAGMA journal_mode = WAL"))
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("BEGIN IMMEDIATE")
        version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        tables = {str(r[0]) for r in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if version == 0 and not tables:
            for statement in _TABLES.split(";\n"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            version = SCHEMA_VERSION
        if version == SCHEMA_VERSION:
            self._db.execute(_DESCRIPTIONS)  # not in the first files of this schema
        self._db.execute("COMMIT")
        if version != SCHEMA_VERSION:
            raise BadBundle(
                f"database {str(self.path)!r} has schema {version}; this tvmhet reads schema {SCHEMA_VERSION}",
                f"move the file away, or set {CACHE_DIR_VARIABLE} to another folder; times are measured again",
            )

    def _add(self, row: Sequence[Any]) -> bool:
        if reason := _why_unsound(row):
            self._put_aside(row, reason)
            return False
        marks = ", ".join("?" * len(row))
        return self._db.execute(f"INSERT OR IGNORE INTO runs ({_RUN}) VALUES ({marks})", tuple(row)).rowcount == 1

    def _put_aside(self, row: Sequence[Any], reason: str) -> None:
        text = f"kernel {row[1]} on {row[3]}, taken at {row[9]} ns: {reason}"
        self._db.execute(
            "INSERT OR IGNORE INTO quarantine (row, reason) VALUES (?, ?)", (json.dumps([str(v) for v in row]), text)
        )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._naming_the_file():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise BadBundle(
                f"database {str(self.path)!r} cannot be used: {error}",
                "if it is damaged, move it away (its times are measured again), or set "
                f"{CACHE_DIR_VARIABLE} to another folder; if it is locked, end the process that holds it",
            ) from error


def _key_values(key: KernelKey) -> tuple[str, ...]:
    """Return the key's parts in the order of `_KEY`."""
    return (key.tvm_version, key.kernel_hash, key.target, key.device, key.toolchain)


def _retry_locked(action: Callable[[], _T]) -> _T:
    """The switch to WAL does not wait for other openers by itself."""
    deadline = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            return action()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _why_unsound(row: Sequence[Any]) -> str:
    """Return what is wrong with a row in the order of `_RUN`, or nothing."""
    status, text = row[5], row[6]
    if status not in STATUSES:
        return f"status {status!r} is unknown"
    try:
        times = json.loads(text)
    except (TypeError, ValueError):
        return f"times {str(text)[:40]!r} are not JSON"
    if not isinstance(times, list):
        return f"times {str(text)[:40]!r} are not a list"
    bad = [t for t in times if not isinstance(t, int | float) or isinstance(t, bool) or not 0 < t < math.inf]
    if bad:
        return f"time {bad[0]!r} s is not finite and positive"
    return "no times though the status is ok" if status == "ok" and not times else ""


def _measurement(row: Sequence[Any]) -> Measurement:
    return Measurement(str(row[5]), tuple(float(t) for t in json.loads(row[6])), bool(row[7]), str(row[8]))


def _row_of(record: object) -> list[Any] | None:
    """Return plain data as a row in the order of `_RUN`, or None if it is no run or its description is none.

    Files of older versions have no descriptions.
    """
    if not isinstance(record, dict) or set(record) - {"description"} != set(_RUN.split(", ")):
        return None
    try:
        if (description := record.get("description")) is not None:
            from_text(description)
        key = KernelKey(**{f.name: record[f.name] for f in fields(KernelKey)})
        if not all(isinstance(v, str) for v in asdict(key).values()) or not isinstance(record["taken_ns"], int):
            return None
        ready = record | {"times_s": json.dumps(record["times_s"]), "busy": int(bool(record["busy"]))}
    except (ValueError, TypeError):
        return None
    return [ready[name] for name in _RUN.split(", ")]
