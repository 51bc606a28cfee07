"""How long a thread was ready to run and had no core: time that is the machine's load, not the work's."""

from __future__ import annotations

import os
import threading

_LONGEST = 128  # bytes of the file


class WaitClock:
    """Seconds that the thread which makes it has waited for a core so far, by Linux's schedstat; 0 where there is none.

    A device of several cores waits as its first thread does.
    """

    def __init__(self) -> None:
        try:
            self._fd = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def seconds(self) -> float:
        """Return the seconds; takes about 2 us."""
        return int(os.pread(self._fd, _LONGEST, 0).split()[1]) * 1e-9 if self._fd >= 0 else 0.0
