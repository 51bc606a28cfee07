"""Several threads that wait for the same descriptors: one watches them, the others wait for what anybody has heard.

    thread 1: wait ── poll(descriptors, told) ──► readable ─┐
    thread 2: wait ── condition ◄───────────────────────────┤ then each asks again, under the lock of what it waits for
    thread 3: reads them meanwhile, tell() ─────────────────┘

Who reads the descriptors does so under a lock of its own, and calls `tell`, so that nobody waits for what was read.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress


class Watch:
    """Waits on descriptors that another thread may read meanwhile."""

    def __init__(self, descriptors: Iterable[int]) -> None:
        self._changed = threading.Condition()
        self._is_watched = self._has_ended = False
        self._told = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._free = weakref.finalize(self, os.close, self._told)
        self._poll = select.poll()
        for fd in (*descriptors, self._told):
            self._poll.register(fd, select.POLLIN)

    def wait(self, is_there: Callable[[], bool], timeout_s: float) -> None:
        """Wait until a descriptor can be read or `tell` was called, at most so long; not if `is_there` already."""
        with self._changed:
            if is_there() or self._has_ended:
                return
            if self._is_watched:
                self._changed.wait(timeout_s)
                return
            self._is_watched = True
        try:
            self._poll.poll(1e3 * timeout_s)
        finally:
            with self._changed:
                self._is_watched = False
                with suppress(BlockingIOError):
                    os.eventfd_read(self._told)  # what was told is told
                if self._has_ended:
                    self._free()
                self._changed.notify_all()

    def tell(self) -> None:
        """Wake all who wait: something was read. Who watches is woken here, and wakes the others."""
        with self._changed:
            if self._is_watched:
                os.eventfd_write(self._told, 1)

    def end(self) -> None:
        """Wake all who wait, and let nobody wait again: the descriptors are closed."""
        with self._changed:
            self._has_ended = True
            if not self._is_watched:
                self._free()
        self.tell()
