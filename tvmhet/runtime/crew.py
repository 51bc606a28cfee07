"""The workers of one run: started together, each with a pipe for its tokens, ended as one.

parent ──inbound[device]──► worker ──done──► parent        control sockets: configuration, Ready or Failure, the end
"""

from __future__ import annotations

import os
import re
import selectors
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic

from tvmhet.errors import OutOfMemory, WorkerFailed
from tvmhet.runtime.messages import Failure, Token, receive_object, write_token
from tvmhet.runtime.processes import Worker

#: The longest wait in one call. Python heeds a signal between calls: one that arrives just before a wait begins, or in
#: another thread, does not end it, so that Ctrl-C would be lost where no worker answers any more.
HEED_S = 0.5
_JOIN_S = 5.0
#: What TVM's VM says of a function that no library and no registration of the process has.
_UNKNOWN_FUNCTION = re.compile(r"Cannot find ffi::Function (\S+) in")


class Crew:
    """Pipes for `devices`, then the workers that `hire` adds. `close` gives everything back and may be repeated."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.pid = os.getpid()
        self.workers: list[Worker] = []
        self._fds: list[int] = []
        self._inbound = {device: self._pipe() for device in devices}
        self.done_fd, self.done_write_fd = self._pipe()

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._fds.extend(ends)
        return ends

    def reading_end(self, device: str) -> int:
        """The end of a device's pipe that its worker reads."""
        return self._inbound[device][0]

    def writing_ends(self) -> Mapping[str, int]:
        """The ends of all devices' pipes that others write to."""
        return {device: ends[1] for device, ends in self._inbound.items()}

    def hire(self, worker: Worker) -> None:
        """Take a started worker over: `close` ends it."""
        self.workers.append(worker)

    def tell(self, device: str, token: Token) -> None:
        """Send a token. Of a dead worker the control socket tells."""
        with suppress(BrokenPipeError):
            write_token(self._inbound[device][1], token)

    def wait_ready(self, timeout_s: float, what: str) -> None:
        """Wait until every worker has loaded its `what`. Raises WorkerFailed with the worker's own text."""
        deadline_s = monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                selector.register(worker.control, selectors.EVENT_READ, worker)
            while selector.get_map():
                events = selector.select(max(0.0, deadline_s - monotonic()))
                if not events:
                    late = ", ".join(key.data.config.binding.device_id for key in selector.get_map().values())
                    raise WorkerFailed(
                        f"the workers of {late} have not loaded their {what} after {timeout_s:g} s",
                        "raise start_timeout_s, or look for what keeps this machine busy",
                    )
                for key, _ in events:
                    _expect_ready(key.data, what)
                    selector.unregister(key.fileobj)

    def close(self) -> None:
        """Stop the workers, wait for their end, close the pipes. In a forked child this does nothing."""
        if os.getpid() != self.pid:
            return
        for worker in self.workers:
            with suppress(OSError):
                worker.stop(self._inbound[worker.config.binding.device_id][1])
        deadline_s = monotonic() + _JOIN_S
        for worker in self.workers:
            worker.join(max(0.0, deadline_s - monotonic()))
        self.workers.clear()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def _expect_ready(worker: Worker, what: str) -> None:
    device = worker.config.binding.device_id
    try:
        message = receive_object(worker.control)
    except EOFError:
        raise worker_failed(device, "while it started", worker.obituary(), None, None) from None
    if isinstance(message, Failure):
        raise failure(device, f"while it loaded its {what}", message)


def failure(device: str, when: str, message: Failure) -> WorkerFailed:
    """Return the error for what a worker reported."""
    if unknown := _UNKNOWN_FUNCTION.search(message.text):
        return WorkerFailed(
            f"the worker of device {device!r} has no function {unknown[1]!r}, which the model calls: a function that "
            "was registered in one process is unknown to others",
            "build(..., inline=True) runs a plan of one CPU stage in this process; plan for one device",
            device=device,
            text=message.text,
        )
    if not message.needs_memory:
        return worker_failed(device, when, message.text, None, None)
    said = message.text.strip().splitlines()[-1]
    return OutOfMemory(
        f"device {device!r} has used up its memory {when}: {said}",
        "plan for this cluster again, recompute more stages, use more of them, or another schedule",
        device=device,
        text=message.text,
    )


def worker_failed(device: str, when: str, text: str, stage: str | None, input_index: int | None) -> WorkerFailed:
    """Return the error for a worker that raised or died, with what it said."""
    return WorkerFailed(
        f"the worker of device {device!r} failed {when}: {text.strip()}",
        "the text above is the worker's own; a killed worker may have run out of memory",
        device=device,
        stage=stage,
        input_index=input_index,
        text=text,
    )
