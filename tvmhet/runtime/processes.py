"""Start a worker as a process or as a thread, and learn how it ended. Both speak the same messages."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from tvmhet.runtime.messages import STOP_STAGE, Token, send_object, write_token
from tvmhet.runtime.worker import WorkerConfig, serve

_STDERR_TAIL_BYTES = 4000
_STACK_S = 2.0  # in which a process that can write its stack has done so
_BOOTSTRAP = "import sys; sys.path[:] = {path!r}; from {module} import main; main({fd})"


class Worker(Protocol):
    """A running worker: what it was given, and the parent's end of its control socket."""

    @property
    def config(self) -> WorkerConfig: ...

    @property
    def control(self) -> socket.socket: ...

    def stop(self, inbound_fd: int) -> None:
        """Ask the worker to end. `inbound_fd` is the writing end of its token pipe."""

    def join(self, timeout_s: float) -> None:
        """Wait for its end; after `timeout_s` end it by force where that is possible."""

    def obituary(self) -> str:
        """Return how it ended, with the last of what it wrote to its standard error."""

    def stack(self) -> str:
        """Return where its threads are, of one that runs."""


class WorkerProcess:
    """A CPU device: a fresh interpreter with its own environment, which sees the parent's import path and no more."""

    def __init__(
        self,
        config: Any,
        environment: Mapping[str, str],
        pass_fds: Sequence[int],
        module: str = "tvmhet.runtime.worker",
    ) -> None:
        self.config = config  # what `module.main` takes: a WorkerConfig, or another with a binding
        self.control, theirs = socket.socketpair()
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the worker
        path = [p or os.getcwd() for p in sys.path]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP.format(path=path, module=module, fd=theirs.fileno())],
                env=dict(environment),
                pass_fds=(*pass_fds, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
            )
        send_object(self.control, config)

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def stop(self, inbound_fd: int) -> None:
        """Close the control socket; the worker leaves at once, whatever it is doing."""
        self.control.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the process and reap it; kill it after `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()

    def obituary(self) -> str:
        """Return the exit status or the signal's name, and the tail of standard error."""
        try:
            status = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "closed its control socket"
        how = f"ended with status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _STDERR_TAIL_BYTES))
        tail = self._stderr.read().decode(errors="replace").strip()
        return how + (f"; its last words:\n{tail}" if tail else "")

    def stack(self) -> str:
        """Return what the process itself writes of its threads; it writes nothing while it is stopped."""
        fd = self._stderr.fileno()
        begin = end = os.fstat(fd).st_size
        self._process.send_signal(signal.SIGUSR1)  # which `worker.main` has registered
        deadline_s = time.monotonic() + _STACK_S
        while time.monotonic() < deadline_s:
            time.sleep(0.05)
            if end == (end := os.fstat(fd).st_size) > begin:
                break
        written = os.pread(fd, end - begin, begin).decode(errors="replace").strip()  # its own offset stays
        return written or f"no answer from process {self.pid} in state {self._state()}"

    def _state(self) -> str:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "unknown"


class WorkerThread:
    """A GPU: a thread of this process, since the driver serves a process best when it alone holds the context."""

    def __init__(self, config: Any, run: Callable[[Any, socket.socket], None] = serve) -> None:
        self.config = config  # what `run` takes
        self._run = run
        self.control, theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, args=(theirs,), name=config.binding.device_id, daemon=True)
        self._thread.start()

    def _serve(self, control: socket.socket) -> None:
        with control, suppress(BrokenPipeError):  # the parent went first
            self._run(self.config, control)

    def stop(self, inbound_fd: int) -> None:
        """Ask the loop to return after the stage it is in."""
        write_token(inbound_fd, Token(STOP_STAGE, 0, 0, False))

    def join(self, timeout_s: float) -> None:
        """Wait for the thread; a thread that hangs in a kernel is left behind as a daemon."""
        self._thread.join(timeout_s)
        self.control.close()

    def obituary(self) -> str:
        """Return that the thread ended: what it raised came as a Failure before."""
        return "ended its thread"

    def stack(self) -> str:
        """Return where the thread is."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return self.obituary() if frame is None else "".join(traceback.format_stack(frame)).rstrip()
