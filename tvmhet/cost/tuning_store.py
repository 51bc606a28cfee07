"""Schedules that tuning tried: one sqlite file per device type, in a folder beside the database of measured kernels.

    measured.db                       times of kernels, tuned ones too: what plans are made from
    measured.tuning/<device type>.db  runs       every trial: status, all times (the same tables as measured.db)
                                      schedules  the trace of every trial, and whether it was kept

A schedule is kept when it was compared with the rule's kernel and its time stands in measured.db. A trial is a commit:
kill -9 loses at most the one that runs. Records of another TVM, function, target or processor are stale: they stay in
the file, are counted, and are never used.
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tvmhet.cost.measure import Measurement
from tvmhet.cost.measured import KernelKey, MeasuredKernels
from tvmhet.errors import BadBundle
from tvmhet.graph.schedule import TunedSchedule

_TABLE = """
CREATE TABLE IF NOT EXISTS schedules (
  id INTEGER PRIMARY KEY, kernel TEXT NOT NULL, function TEXT NOT NULL, digest TEXT NOT NULL, trace TEXT NOT NULL,
  tvm_version TEXT NOT NULL, target TEXT NOT NULL, device TEXT NOT NULL, toolchain TEXT NOT NULL,
  kept INTEGER NOT NULL DEFAULT 0,
  UNIQUE (kernel, digest, tvm_version, target, device, toolchain))
"""
_PLACE = "tvm_version, target, device, toolchain"
_WHERE = " AND ".join(f"{name} = ?" for name in _PLACE.split(", "))
_BUSY_TIMEOUT_S = 60.0


def tuning_path(database: Path, device_type: str) -> Path:
    """Return the file that holds the schedules of a device type beside a database of measured kernels."""
    return database.with_suffix(".tuning") / (re.sub(r"[^A-Za-z0-9._-]", "_", device_type) + ".db")


def scheduled_key(kernel: KernelKey, schedule: TunedSchedule) -> KernelKey:
    """Return the key of a generated kernel with this schedule instead of the rules'."""
    toolchain = f"{kernel.toolchain}; schedule {schedule.digest}"
    return KernelKey(kernel.kernel_hash, kernel.target, kernel.device, toolchain, kernel.tvm_version)


@dataclass(frozen=True, slots=True)
class Trial:
    """One schedule and what became of it."""

    schedule: TunedSchedule
    run: Measurement


class TuningStore:
    """The open file of one device type; a context manager. Several processes may share the file.

    `kernel` below is the key of the kernel as the rules make it. Raises BadBundle for a file that is no such store.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._runs = MeasuredKernels(path)
        try:
            self._db = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
            self._db.execute(_TABLE)
        except sqlite3.DatabaseError as error:
            self._runs.close()
            raise BadBundle(
                f"tuning file {str(path)!r} cannot be used: {error}", "move it away: its kernels are tuned again"
            ) from error

    def add(self, kernel: KernelKey, trial: Trial, *, taken_ns: int | None = None) -> None:
        """Keep a trial: first the schedule, then the run, so that a run is never without its schedule."""
        s = trial.schedule
        self._db.execute(
            f"INSERT OR IGNORE INTO schedules (kernel, function, digest, trace, {_PLACE}) VALUES (?,?,?,?,?,?,?,?)",
            (kernel.kernel_hash, s.function, s.digest, s.trace, *_place(kernel)),
        )
        self._runs.insert(scheduled_key(kernel, s), trial.run, taken_ns=taken_ns)

    def trials(self, kernel: KernelKey, function: str = "") -> tuple[Trial, ...]:
        """Return the sound trials of a kernel, oldest first; with `function` those of that function only."""
        rows = self._db.execute(
            f"SELECT function, trace FROM schedules WHERE kernel = ? AND {_WHERE} ORDER BY id",
            (kernel.kernel_hash, *_place(kernel)),
        )
        schedules = [TunedSchedule(str(f), str(t)) for f, t in rows.fetchall() if function in ("", f)]
        return tuple(Trial(s, run) for s in schedules for run in self._runs.runs(scheduled_key(kernel, s))[-1:])

    def tried(self, place: KernelKey) -> tuple[str, ...]:
        """Return the hashes of the kernels that have schedules of the place's TVM, target, device and toolchain."""
        rows = self._db.execute(f"SELECT DISTINCT kernel FROM schedules WHERE {_WHERE} ORDER BY kernel", _place(place))
        return tuple(str(row[0]) for row in rows)

    def stale(self, place: KernelKey) -> Counter[str]:
        """Return how many schedules of the file are of another place, by the first thing that differs."""
        words = ("another TVM", "another target", "another processor", "another lowering")
        found: Counter[str] = Counter()
        for row in self._db.execute(f"SELECT {_PLACE} FROM schedules"):
            if differs := [word for word, a, b in zip(words, row, _place(place), strict=True) if a != b]:
                found[differs[0]] += 1
        return found

    def keep(self, kernel: KernelKey, schedule: TunedSchedule) -> None:
        """Mark a schedule as one that plans may use."""
        self._db.execute(
            f"UPDATE schedules SET kept = 1 WHERE kernel = ? AND digest = ? AND {_WHERE}",
            (kernel.kernel_hash, schedule.digest, *_place(kernel)),
        )

    def kept(self, place: KernelKey) -> Mapping[str, tuple[TunedSchedule, ...]]:
        """Return the kept schedules of every kernel by its hash; only those of the place's TVM, target and device."""
        rows = self._db.execute(
            f"SELECT kernel, function, trace FROM schedules WHERE kept = 1 AND {_WHERE} ORDER BY id", _place(place)
        )
        found: dict[str, tuple[TunedSchedule, ...]] = {}
        for kernel, function, trace in rows:
            found[kernel] = (*found.get(kernel, ()), TunedSchedule(str(function), str(trace)))
        return found

    def close(self) -> None:
        """Close the file."""
        self._db.close()
        self._runs.close()

    def __enter__(self) -> TuningStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def kept_schedules(database: Path, device_type: str, place: KernelKey) -> Mapping[str, tuple[TunedSchedule, ...]]:
    """Return the kept schedules of a device type by kernel hash; none if it was never tuned here."""
    path = tuning_path(database, device_type)
    if not path.exists():
        return {}
    with closing(TuningStore(path)) as store:
        return store.kept(place)


def _place(key: KernelKey) -> tuple[str, ...]:
    return (key.tvm_version, key.target, key.device, key.toolchain)
