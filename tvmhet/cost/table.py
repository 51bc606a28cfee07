"""Seconds for each kernel on each device type, each with its interval and where it comes from.

                 v100              cpu-x86-64-v3
    kernel 0     12 us roofline    80 us measured
    kernel 1     inf (no float16)  3 ms given by the user

An entry is replaced only by one whose source ranks at least as high: a measurement always wins ("tuned" is one of a
kernel whose schedule was found by search), then the fact that a kernel cannot run, then what the user gave, then
predictions, the roofline last. A time that is not finite is inf and says why. Tables are frozen; every change is a new
table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from tvmhet.cost.measure import Measurement
from tvmhet.errors import BadInput, BadTime

Floats = NDArray[np.float64]

#: Sources by rank, the weakest first. "none": nobody has said anything yet.
SOURCES = ("none", "roofline", "learned", "calibrated", "transfer", "given", "cannot run", "measured", "tuned")
_RANK: Mapping[str, int] = MappingProxyType({name: rank for rank, name in enumerate(SOURCES)})
#: Sources that are times taken on the device.
MEASURED = frozenset({"measured", "tuned"})
_NOT_PRICED = "not priced yet"


@dataclass(frozen=True, slots=True)
class Entry:
    """One time in seconds, its interval, its source and a note for people; `schedule` is what a tuned kernel needs."""

    seconds: float
    low: float
    high: float
    source: str
    note: str = ""
    schedule: str = ""

    def __post_init__(self) -> None:
        if self.source not in _RANK:
            raise BadTime(f"time source {self.source!r} is unknown", f"use one of {', '.join(SOURCES)}")
        if self.seconds == math.inf:
            if not self.note:
                raise BadTime("a time is inf without a reason", "say in the note why the kernel cannot run")
        elif not 0 < self.low <= self.seconds <= self.high < math.inf:
            raise BadTime(
                f"time {self.seconds} s with interval [{self.low}, {self.high}] from {self.source!r}",
                "a time is finite and positive and lies in its interval, or is inf with a reason",
            )


@dataclass(frozen=True, slots=True)
class TimeTable:
    """Times of `num_kernels` kernels on device types; arrays have shape (num_kernels, len(device_types)).

    `rank` indexes `SOURCES`. `notes` and `schedules` hold the entries that have one, by (kernel, device type index).
    """

    device_types: tuple[str, ...]
    seconds: Floats
    low: Floats
    high: Floats
    rank: NDArray[np.int8]
    notes: Mapping[tuple[int, int], str]
    schedules: Mapping[tuple[int, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(set(self.device_types)) != len(self.device_types):
            raise BadInput(f"device types {self.device_types} repeat", "name each once")
        shape = (self.num_kernels, len(self.device_types))
        for name in ("seconds", "low", "high", "rank"):
            array = getattr(self, name).copy()
            if array.shape != shape:
                raise BadInput(
                    f"{name} has shape {array.shape}, the table {shape}", "give one entry per kernel and type"
                )
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        object.__setattr__(self, "notes", MappingProxyType(dict(self.notes)))
        object.__setattr__(self, "schedules", MappingProxyType(dict(self.schedules)))
        self._check()

    def _check(self) -> None:
        runs = np.isfinite(self.seconds)
        sound = (self.low > 0) & (self.low <= self.seconds) & (self.seconds <= self.high) & np.isfinite(self.high)
        for k, d in zip(*np.nonzero(~(runs & sound)), strict=True):
            where = f"kernel {k} on {self.device_types[d]!r}"
            if self.seconds[k, d] != math.inf:
                raise BadTime(
                    f"{where} has time {self.seconds[k, d]} s in [{self.low[k, d]}, {self.high[k, d]}]",
                    "a time is finite and positive and lies in its interval, or is inf with a reason",
                )
            if not self.notes.get((int(k), int(d))):
                raise BadTime(f"{where} has time inf without a reason", "say in the note why it cannot run")

    @classmethod
    def empty(cls, num_kernels: int, device_types: Sequence[str]) -> TimeTable:
        """Return a table without times: every entry is inf, "not priced yet"."""
        shape = (num_kernels, len(device_types))
        unknown = np.full(shape, math.inf)
        notes = {(k, d): _NOT_PRICED for k in range(num_kernels) for d in range(len(device_types))}
        return cls(tuple(device_types), unknown, unknown, unknown, np.zeros(shape, np.int8), notes)

    @property
    def num_kernels(self) -> int:
        """Number of kernels."""
        return int(self.seconds.shape[0])

    def column(self, device_type: str) -> int:
        """Return the index of a device type; BadInput if the table does not have it."""
        if device_type not in self.device_types:
            raise BadInput(
                f"the time table has no device type {device_type!r}", f"it has {', '.join(self.device_types)}"
            )
        return self.device_types.index(device_type)

    def entry(self, kernel: int, device_type: str) -> Entry:
        """Return one entry."""
        k, d = self._row(kernel), self.column(device_type)
        seconds, low, high = float(self.seconds[k, d]), float(self.low[k, d]), float(self.high[k, d])
        note, schedule = self.notes.get((k, d), ""), self.schedules.get((k, d), "")
        return Entry(seconds, low, high, SOURCES[self.rank[k, d]], note, schedule)

    def with_entries(self, device_type: str, entries: Mapping[int, Entry]) -> TimeTable:
        """Return a table with these entries, by kernel, except where a higher source stands already."""
        d = self.column(device_type)
        seconds, low, high, rank = self.seconds.copy(), self.low.copy(), self.high.copy(), self.rank.copy()
        notes, schedules = dict(self.notes), dict(self.schedules)
        for kernel, entry in entries.items():
            k = self._row(kernel)
            if _RANK[entry.source] < rank[k, d]:
                continue
            seconds[k, d], low[k, d], high[k, d] = entry.seconds, entry.low, entry.high
            rank[k, d] = _RANK[entry.source]
            notes.pop((k, d), None)
            if entry.note:
                notes[k, d] = entry.note
            schedules.pop((k, d), None)
            if entry.schedule:
                schedules[k, d] = entry.schedule
        return TimeTable(self.device_types, seconds, low, high, rank, notes, schedules)

    def lowest(self) -> TimeTable:
        """Return the table with the low end of its interval for every time that is only an estimate."""
        estimated = self.rank < _RANK["given"]
        seconds = np.where(estimated, self.low, self.seconds)
        return replace(self, seconds=seconds)

    def _row(self, kernel: int) -> int:
        if not 0 <= kernel < self.num_kernels:
            raise BadInput(f"the time table has no kernel {kernel}", f"it has kernels 0 to {self.num_kernels - 1}")
        return kernel


def measured_entry(measurement: Measurement) -> Entry:
    """Return a measurement as an entry; inf with the status as its reason if there is no time."""
    if measurement.status != "ok":
        reason = f"{measurement.status} when measured" + (f": {measurement.note}" if measurement.note else "")
        return Entry(math.inf, math.inf, math.inf, "measured", reason)
    note = measurement.note or ("measured on a busy machine" if measurement.busy else "")
    return Entry(measurement.median_s, measurement.min_s, max(measurement.times_s), "measured", note)
