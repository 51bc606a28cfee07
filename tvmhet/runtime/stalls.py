"""Notice that a run goes no further, and learn what each worker is doing: a hang ends with its place, not never.

looks  |·······|·······|·······|  what the workers are at: a b b b     b for longer than the limit: stalled
               progress        └ seconds between two looks count, those of a pause of this process do not
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tvmhet.errors import BadInput, NotSupported, WorkerFailed
from tvmhet.runtime.crew import HEED_S
from tvmhet.runtime.processes import Worker

#: Seconds without progress after which a run is given up: what torch.distributed waits for a collective of NCCL.
DEFAULT_LIMIT_S = 600.0
_REMEDY = "look at what the workers were doing; where a stage takes so long, raise `stall_limit_s`, or set it to None"


class StallClock:
    """Seconds for which what the workers are at has not changed while somebody waited for it."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._looked_s = now()
        self._doing = b""
        self.stalled_s = 0.0

    def progress(self) -> None:
        """Begin anew: something has ended, or nothing is waited for."""
        self.stalled_s = 0.0

    def look(self, doing: Callable[[], bytes]) -> float:
        """Return the seconds so far. Looks at most twice in the longest wait, so that it may be asked at any time."""
        now = self._now()
        if (passed_s := now - self._looked_s) < HEED_S / 2:
            return self.stalled_s
        self._looked_s = now
        seen = doing()
        self.stalled_s = self.stalled_s + min(passed_s, 2 * HEED_S) if seen == self._doing else 0.0
        self._doing = seen
        return self.stalled_s


def check_stall_limit(seconds: float | None) -> float | None:
    """Return a limit that makes sense. Raises BadInput for another."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and 0 < seconds < math.inf):
        raise BadInput(f"stall_limit_s is {seconds!r}; seconds above 0 are needed", "pass them, or None for no limit")
    return seconds


class NoStallLimit:
    """What runs in the caller's own thread cannot be given up from there."""

    @property
    def stall_limit_s(self) -> float | None:
        """None."""
        return None

    @stall_limit_s.setter
    def stall_limit_s(self, seconds: float | None) -> None:
        if check_stall_limit(seconds) is not None:
            raise NotSupported(
                f"stall_limit_s is {seconds}, and the model runs in this process, which waits for it to return",
                "build without inline=True, or run this process with a limit of time",
            )


class Place(NamedTuple):
    """What a worker is at: words, and, if it runs something, the stage and the input."""

    words: str
    stage: str | None = None
    input_index: int | None = None


def stalled(workers: Sequence[Worker], places: Sequence[Place], what: str) -> WorkerFailed:
    """Return the error of a run that goes no further: of the first device that runs something, or of none.

    Its text has the stack of each worker.
    """
    devices = [worker.config.binding.device_id for worker in workers]
    said = "; ".join(f"device {d!r} {p.words}" for d, p in zip(devices, places, strict=True))
    text = "\n".join(f"{d}:\n{worker.stack()}" for d, worker in zip(devices, workers, strict=True))
    running = [(d, p.stage, p.input_index) for d, p in zip(devices, places, strict=True) if p.stage is not None]
    device, stage, index = running[0] if running else (None, None, None)
    problem = f"{what}: {said}\n{text}"
    return WorkerFailed(problem, _REMEDY, device=device, stage=stage, input_index=index, text=text)
