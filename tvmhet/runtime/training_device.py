"""Where the tensors of a training worker lie: what a device's memory does, and how a CPU device does it.

A CPU device's functions read the memory that all workers share, where it lies; `training_gpu` has the other way.
"""

from __future__ import annotations

import math
import mmap
import resource
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tvmhet.runtime import vm
from tvmhet.runtime.program import Array, numpy_dtype

#: Memory that is no file's: its own, and what it has touched of the shared segment. TVM's allocator keeps what was
#: freed, so at a step's end they are the step's peak.
_RESIDENT = ("RssAnon", "RssShmem")

Tensors = Mapping[str, Any]


class State(Protocol):
    """Parameters, buffers and the optimiser's tensors as one device's functions read them."""

    @property
    def current(self) -> Tensors: ...

    def begin(self, generation: int, restores: int) -> None:
        """Start a step that reads `generation`; `restores` counts how often the parent has set the state."""

    def renew(self, name: str, value: Any) -> None:
        """Write a tensor of the other generation."""


class DeviceMemory(Protocol):
    """A device's memory. `is_shared` says that functions use the shared memory itself."""

    is_shared: bool

    def lend(self, views: Tensors, borrower: Hashable) -> Tensors:
        """Return tensors of the device with the content of views of the shared memory."""

    def take_back(self, borrower: Hashable) -> None:
        """Use again what was lent to `borrower`, once no result can lie in it."""

    def hold(self, states: Sequence[Tensors], read: frozenset[str], written_elsewhere: frozenset[str]) -> State:
        """Return the state for a device that reads `read`, some of which other devices renew."""

    def zeros(self, like: Mapping[str, Array]) -> dict[str, Any]:
        """Return zeros that are only read."""

    def finish(self) -> None:
        """Wait until all that was asked of the device is done."""

    def limit(self, limit_bytes: int, shared_bytes: int) -> None:
        """Let an idle worker take no more, of which `shared_bytes` are state and values. Raises MemoryError."""

    def used_bytes(self) -> int:
        """Return what has been taken by steps."""


class HostMemory:
    """The shared memory, in a process of its own."""

    is_shared = True

    def __init__(self) -> None:
        self._idle_bytes = 0

    def lend(self, views: Tensors, borrower: Hashable) -> Tensors:
        """The views themselves."""
        return views

    def take_back(self, borrower: Hashable) -> None:
        """Nothing was copied."""

    def hold(self, states: Sequence[Tensors], read: frozenset[str], written_elsewhere: frozenset[str]) -> State:
        """Both generations as they lie."""
        return _SharedState(states)

    def zeros(self, like: Mapping[str, Array]) -> dict[str, Any]:
        """All in one place, which takes no memory, as the system maps its one page of zeros."""
        size = max((a.nbytes for a in like.values()), default=0) + 1
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return {name: vm.host_view(np.ndarray(a.shape, a.dtype, pages)) for name, a in like.items()}

    def finish(self) -> None:
        """Host functions are finished when they return."""

    def limit(self, limit_bytes: int, shared_bytes: int) -> None:
        """Limit what this process takes beyond what it has now, and count from here."""
        self._idle_bytes = _status_bytes(*_RESIDENT)
        check_shared(limit_bytes, shared_bytes)
        own = _status_bytes("VmData") + limit_bytes - shared_bytes
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (own if hard == resource.RLIM_INFINITY else min(own, hard), hard))

    def used_bytes(self) -> int:
        """The process's own memory and what it has touched of the shared one."""
        return _status_bytes(*_RESIDENT) - self._idle_bytes


class _SharedState:
    def __init__(self, states: Sequence[Tensors]) -> None:
        self._states = states
        self.begin(0, 0)

    def begin(self, generation: int, restores: int) -> None:
        self.current, self._next = self._states[generation], self._states[1 - generation]

    def renew(self, name: str, value: Any) -> None:
        vm.copy(value, self._next[name])


def bytes_of(tensors: Iterable[Any]) -> int:
    """Return the bytes of tensors."""
    return sum(math.prod(t.shape) * numpy_dtype(str(t.dtype)).itemsize for t in tensors)


def check_shared(limit_bytes: int, shared_bytes: int) -> None:
    """Raise MemoryError where state and values alone are more than the device has."""
    if shared_bytes > limit_bytes:
        raise MemoryError(f"state and values take {shared_bytes} bytes, the device has {limit_bytes}")


def _status_bytes(*rows: str) -> int:
    """Return the sum of rows of this process's status."""
    with open("/proc/self/status") as status:
        found = dict(line.split(":", 1) for line in status)
    return sum(1024 * int(found[row].split()[0]) for row in rows)
