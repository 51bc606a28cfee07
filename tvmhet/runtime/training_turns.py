"""Devices that share cores take turns on them, pass by pass, as the simulator has it; none is in another's way.

    a  ─F0─┐        ┌─F1─┐              of those that wait, the pass with the longest chain behind it goes first
    b      └─F0─────┘    └─B0─ ...      what is ready on the device whose pass ended counts as waiting

Left to the system, two passes at once take slices of a core: both end late, and what waits for the first waits longer.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from tvmhet.runtime.program import Array, DeviceBinding

NOBODY = np.iinfo(np.int64).max  # in a row: this device does not wait
_FREE, _TAKEN = 0, 1


def shared_cores(bindings: Mapping[str, DeviceBinding]) -> tuple[int, ...]:
    """Return the cores that several devices hold, ascending."""
    held = [core for b in bindings.values() for core in b.cores]
    return tuple(sorted({core for core in held if held.count(core) > 1}))


def new_row(num_devices: int) -> Array:
    """Return what lies in shared memory for a core that nobody has: free or taken, then each device's wish."""
    return np.array([_FREE, *[NOBODY] * num_devices], np.int64)


class Turns:
    """One device's part in taking turns on `cores`; `rows` are theirs, in shared memory.

    `wait(core)` returns once another device has handed the core over, `hand(device, core)` does that.
    """

    def __init__(
        self,
        rows: Sequence[Array],
        cores: Sequence[int],
        number: int,
        lock_fd: int,
        wait: Callable[[int], None],
        hand: Callable[[int, int], None],
    ) -> None:
        self._rows = dict(zip(cores, rows, strict=True))
        self._number, self._lock_fd = number, lock_fd
        self._wait, self._hand = wait, hand
        self._holds = False

    def take(self, rank: int) -> None:
        """Return once this device has its cores, asked for in ascending order; the lowest `rank` comes first."""
        if self._holds:
            return
        for core, row in self._rows.items():
            with self._locked(core):
                mine = row[0] == _FREE
                if mine:
                    row[0] = _TAKEN
                else:
                    row[1 + self._number] = rank
            if not mine:
                self._wait(core)
        self._holds = True

    def give(self, ready: int = NOBODY) -> None:
        """Hand each core to the device whose wish comes first, unless a pass of rank `ready` here goes before all."""
        if not self._holds:
            return
        if self._rows:
            os.sched_yield()  # whoever was told of the last pass, on this core, says what it wants
        if ready < NOBODY and all(ready <= row[1:].min() for row in self._rows.values()):
            return
        self._holds = False
        for core, row in self._rows.items():
            with self._locked(core):
                next_ = int(row[1:].argmin())
                waits = row[1 + next_] < NOBODY
                row[0] = _TAKEN if waits else _FREE
                row[1 + next_] = NOBODY
            if waits:
                self._hand(next_, core)

    @contextmanager
    def _locked(self, core: int) -> Iterator[None]:
        """Hold the core's lock: a record lock, which ends with its process."""
        fcntl.lockf(self._lock_fd, fcntl.LOCK_EX, 1, core)
        try:
            yield
        finally:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_UN, 1, core)
