"""What workers of a training run tell each other: which passes, sums and norms of the running step are there.

And when a core that several devices share is handed over.
"""

from __future__ import annotations

import select

from tvmhet.runtime.messages import STOP_STAGE, read_tokens

#: Kinds of tokens; a token's `stage` is kind + NUM_KINDS * stage, its `frame` the micro-batch or replica.
FORWARD, BACKWARD, SUMMED, NORMED, START, TURN, NUM_KINDS = 0, 1, 2, 3, 4, 5, 6


class Stopped(Exception):
    """The parent asked this worker to end."""


class Mailbox:
    """Tokens of this step that have arrived."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._seen: set[tuple[int, int, int]] = set()
        self._arrivals = select.poll()
        self._arrivals.register(fd, select.POLLIN)

    def wait(self, stage: int, frame: int, step: int) -> None:
        """Return once the token is there. Raises Stopped when none will come."""
        while (stage, frame, step) not in self._seen:
            self._read()

    def has(self, stage: int, frame: int, step: int) -> bool:
        """Return whether the token is there, or has arrived just now. Raises Stopped when none will come."""
        while (stage, frame, step) not in self._seen and self._arrivals.poll(0):
            self._read()
        return (stage, frame, step) in self._seen

    def wait_once(self, stage: int, frame: int, step: int) -> None:
        """As `wait`, for a token that may come again."""
        self.wait(stage, frame, step)
        self._seen.remove((stage, frame, step))

    def check(self) -> None:
        """Raise Stopped where the parent has asked for it: a thread cannot be ended from outside."""
        while self._arrivals.poll(0):
            self._read()

    def next_step(self, last: int) -> int:
        """Wait for the start of a step after `last`; forget tokens of earlier ones."""
        while True:
            started = [step for stage, _, step in self._seen if stage == START and step > last]
            if started:
                self._seen = {token for token in self._seen if token[2] >= started[0]}
                return started[0]
            self._read()

    def _read(self) -> None:
        tokens = list(read_tokens(self._fd))
        if not tokens or any(t.stage == STOP_STAGE for t in tokens):
            raise Stopped
        self._seen.update((t.stage, t.frame, t.input_index) for t in tokens)
