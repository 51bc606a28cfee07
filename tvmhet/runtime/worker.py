"""A device's own loop: wait for tokens, run the oldest input that is ready, announce it to the stages that follow.

There is no dispatcher: each worker knows which tokens a stage of its own waits for and whom its results serve. A CPU
device is a process started by `main`, pinned before TVM loads; a GPU is a thread of the parent in the same loop.
"""

from __future__ import annotations

import faulthandler
import heapq
import os
import select
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tvmhet._threads import share_threads
from tvmhet._without_torch import without_torch
from tvmhet.runtime.arena import FrameLayout, Layout, Segment
from tvmhet.runtime.messages import (
    FORGET_STAGE,
    STOP_STAGE,
    STORE_STAGE,
    Failure,
    Ready,
    Token,
    read_tokens,
    receive_object,
    send_object,
    write_token,
)
from tvmhet.runtime.program import DeviceBinding, StageProgram
from tvmhet.runtime.states import StateLayout
from tvmhet.runtime.vm import is_out_of_memory

_PARENT_CHECK_MS = 1000


@dataclass(frozen=True, slots=True)
class Route:
    """Where a finished stage's token goes: a stage that waits, and its replicas' pipes (None: this worker itself)."""

    stage: int
    fds: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Everything one worker needs. `num_tokens[s]` tokens make an input of stage s ready; a sink tells `done_fd`.

    `renewed[s]` are the states that stay with stage s, each with the value that it becomes.
    """

    worker: int
    binding: DeviceBinding
    stages: tuple[StageProgram, ...]
    num_tokens: Mapping[int, int]
    routes: Mapping[int, tuple[Route, ...]]
    inbound_fd: int
    done_fd: int
    frames: FrameLayout
    frames_fd: int
    params: Layout
    params_fd: int
    states: StateLayout
    states_fd: int
    renewed: Mapping[int, Mapping[str, str]]

    @property
    def needs_library(self) -> bool:
        """Whether a stage calls the library."""
        return any(stage.needs_library for stage in self.stages)


class WorkerLoop:
    """The stages of one device over the shared frames."""

    def __init__(self, config: WorkerConfig, control: socket.socket) -> None:
        from tvmhet.runtime.executor import BoundFrame, StageExecutor  # after main() has settled the environment

        self._config = config
        self._control = control
        self._memory = Segment.attach(config.frames_fd, config.frames.size_bytes).memory
        params = config.params.views(Segment.attach(config.params_fd, config.params.size_bytes).memory, 0)
        self._states = (
            Segment.attach(config.states_fd, config.states.size_bytes).memory if config.states.size_bytes else None
        )
        self._executors = {
            s.index: StageExecutor(s, config.binding, params, config.renewed.get(s.index)) for s in config.stages
        }
        self._busy = config.frames.busy(self._memory, config.worker)
        self._busy[:] = -1, -1
        self._times = [config.frames.times(self._memory, f) for f in range(config.frames.num_frames)]
        self._bound: dict[tuple[int, int, int], BoundFrame] = {}
        self._missing: dict[tuple[int, int], tuple[int, bool]] = {}
        self._ready: list[tuple[int, int, int, int, bool]] = []  # heap of (input, stage, frame, slot, failed)

    def run(self) -> None:
        """Serve until told to stop, or until nobody is left who could send a token."""
        arrivals = select.poll()
        arrivals.register(self._config.inbound_fd, select.POLLIN)
        while True:
            if not self._ready or arrivals.poll(0):
                tokens = list(read_tokens(self._config.inbound_fd))
                if not tokens or any(token.stage == STOP_STAGE for token in tokens):
                    return
                for token in tokens:
                    self._arrive(token)
            else:
                self._serve(*heapq.heappop(self._ready))

    def _arrive(self, token: Token) -> None:
        if token.stage in (STORE_STAGE, FORGET_STAGE):
            self._exchange(token)
            return
        key = (token.input_index, token.stage)
        missing, failed = self._missing.pop(key, (self._config.num_tokens[token.stage], False))
        missing, failed = missing - 1, failed or token.failed
        if missing:
            self._missing[key] = (missing, failed)
        else:
            heapq.heappush(self._ready, (token.input_index, token.stage, token.frame, token.slot, failed))

    def _exchange(self, token: Token) -> None:
        """Bring the states of a slot into shared memory, or drop those of its session."""
        for executor in self._executors.values():
            if token.stage == FORGET_STAGE:
                executor.forget_states(token.slot)
            elif self._states is not None:
                executor.store_states(token.slot, self._config.states.views(self._states, token.slot))
        if token.stage == STORE_STAGE:
            write_token(self._config.done_fd, token)

    def _serve(self, input_index: int, stage: int, frame: int, slot: int, failed: bool) -> None:
        if not failed:
            failed = not self._run(input_index, stage, frame, slot)
        turn = input_index if self._states is None else slot // 2
        for route in self._config.routes[stage]:
            token = Token(route.stage, frame, input_index, failed, slot)
            fd = route.fds[turn % len(route.fds)]
            if fd is None:
                self._arrive(token)
            else:
                write_token(fd, token)
        if not self._config.routes[stage]:
            write_token(self._config.done_fd, Token(stage, frame, input_index, failed))

    def _run(self, input_index: int, stage: int, frame: int, slot: int) -> bool:
        """Run one stage; on an error tell the parent its text first, so that it is there when the token comes."""
        self._busy[:] = stage, input_index
        executor = self._executors[stage]
        try:
            bound = self._bound.get((stage, frame, slot))
            if bound is None:
                values = self._config.frames.frame(self._memory, frame)
                if self._states is not None:
                    values |= self._config.states.views(self._states, slot)
                bound = self._bound[stage, frame, slot] = executor.bind(values)
            times = executor.run(bound, slot)
        except Exception as error:
            text, needs_memory = traceback.format_exc(limit=-3), is_out_of_memory(error)
            send_object(self._control, Failure(stage, input_index, text, needs_memory))
            return False
        finally:
            self._busy[:] = -1, -1
        spans = (times.start_s, times.loaded_s, times.computed_s, times.stored_s)
        self._times[frame][stage] = *spans, self._config.worker
        return True


def serve(config: WorkerConfig, control: socket.socket) -> None:
    """Load the stages, report Ready or a Failure through `control`, then run the loop to its end."""
    try:
        loop = WorkerLoop(config, control)
    except Exception as error:
        send_object(control, Failure(None, None, traceback.format_exc(limit=-3), is_out_of_memory(error)))
        return
    send_object(control, Ready())
    loop.run()


def _leave_with_parent(control: socket.socket, parent: int) -> None:
    """End this process once the parent's end of the socket is gone or the parent is another process than it was."""
    gone = select.poll()
    gone.register(control, select.POLLIN)
    while not gone.poll(_PARENT_CHECK_MS) and os.getppid() == parent:
        pass
    os._exit(0)


def main(control_fd: int, run: Callable[[Any, socket.socket], None] = serve) -> None:
    """Run one CPU device in this process. The parent started it with the environment that limits its kernels.

    `run` takes what the parent sends first: a configuration with `binding` and `needs_library`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    faulthandler.register(signal.SIGUSR1)  # the parent asks where this process is when nothing comes from it
    parent = os.getppid()
    control = socket.socket(fileno=control_fd)
    try:
        config = receive_object(control)
        if config.binding.cores:
            os.sched_setaffinity(0, config.binding.cores)  # threads started from here on inherit it
        threading.Thread(target=_leave_with_parent, args=(control, parent), daemon=True).start()
        if not config.needs_library:
            with without_torch():
                import tvm_ffi  # noqa: F401
        elif len(config.binding.cores) > 1:
            share_threads(len(config.binding.cores))
        run(config, control)
    except (EOFError, BrokenPipeError):  # the parent went first
        pass
    os._exit(0)  # no destructors: the threads and maps of this process go with it
