"""The parent of a training run: start the workers, hand them micro-batches, take their losses, change generations."""

from __future__ import annotations

import os
import selectors
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic

import numpy as np

from tvmhet.errors import WorkerFailed
from tvmhet.runtime.arena import Segment
from tvmhet.runtime.cores import check_host_runs, worker_environment
from tvmhet.runtime.fleet import worker_failed
from tvmhet.runtime.messages import Failure, Token, read_tokens, receive_object, write_token
from tvmhet.runtime.processes import WorkerProcess
from tvmhet.runtime.program import Array
from tvmhet.runtime.training_memory import TrainingMemory
from tvmhet.runtime.training_program import Action, TrainingProgram
from tvmhet.runtime.training_worker import START, TrainingConfig

_JOIN_S = 5.0
_WORKER_MODULE = "tvmhet.runtime.training_worker"


@dataclass(frozen=True, slots=True)
class PassTime:
    """When one pass ran, in seconds of CLOCK_MONOTONIC; `action` is None for exchange and update."""

    device: str
    action: Action | None
    start_s: float
    end_s: float


class TrainingEngine:
    """The workers of one program. State lives as long as the engine; workers are started anew after a failure."""

    def __init__(self, program: TrainingProgram, start_timeout_s: float = 120.0) -> None:
        check_host_runs(program.bindings.values())
        self.program = program
        self._timeout_s = start_timeout_s
        self._layout = TrainingMemory.of(program)
        self._segment = Segment.create("tvmhet-training", self._layout.size_bytes)
        self._layout.fill(self._segment.memory, program)
        self._frames = [self._layout.frame(self._segment.memory, m) for m in range(program.num_microbatches)]
        self._states = [self._layout.state_of(self._segment.memory, g) for g in (0, 1)]
        self._board = self._layout.board_of(self._segment.memory)
        self._generation = 0
        self._serial = 0  # of step attempts, failed ones too: tokens carry it
        self._fleet: _Fleet | None = None

    @property
    def state(self) -> Mapping[str, Array]:
        """Parameters, buffers and the optimiser's tensors as they are now: views, to be copied before the next step."""
        return self._states[self._generation]

    def restore(self, values: Mapping[str, Array]) -> None:
        """Set the state, all of it."""
        for state in self._states:
            for name, view in state.items():
                np.copyto(view, values[name])

    def step(
        self, number: int, seed: int, microbatches: Sequence[Sequence[Array]], scalars: Mapping[str, float]
    ) -> list[float]:
        """Run step `number` (from 1) and return the loss of each micro-batch. On any failure the state stays.

        Raises WorkerFailed; workers are then gone, and the next step starts new ones.
        """
        fleet = self._running()
        for frame, arrays in zip(self._frames, microbatches, strict=True):
            for name, array in zip(self.program.batch, arrays, strict=True):
                np.copyto(frame[name], array)
        self._serial += 1
        self._board["step"][:] = number, self._generation, seed
        for name, value in scalars.items():
            self._board[name][...] = value
        try:
            fleet.run(self._serial)
        except BaseException:
            self.stop_workers()
            raise
        self._generation = 1 - self._generation
        return [float(frame[self.program.loss]) for frame in self._frames]

    def times(self) -> list[PassTime]:
        """Return when each pass of the last step ran."""
        found = []
        for device, order in self.program.orders.items():
            rows = self._board[f"times.{device}"].tolist()
            for action, (start, end) in zip((*order, None), rows, strict=True):
                found.append(PassTime(device, action, start, end))
        return found

    def stash_bytes(self) -> dict[str, int]:
        """Return, by device, the most bytes of activations kept at once in the last step."""
        return {device: int(self._board[f"stash.{device}"][0]) for device in self.program.orders}

    def _running(self) -> _Fleet:
        if self._fleet is None:
            bare = replace(self.program, state={}, constants={})
            self._fleet = _Fleet(bare, self._layout, self._segment.fd, self._timeout_s)
            self._finalizer = weakref.finalize(self, self._fleet.close)
        return self._fleet

    def stop_workers(self) -> None:
        """End the workers; the state stays."""
        if self._fleet is not None:
            self._finalizer()
            self._fleet = None

    def close(self) -> None:
        """End the workers and give the memory back. May be repeated."""
        self.stop_workers()
        self._segment.close()


class _Fleet:
    """Worker processes and their pipes."""

    def __init__(self, program: TrainingProgram, layout: TrainingMemory, memory_fd: int, timeout_s: float) -> None:
        self.workers: list[WorkerProcess] = []
        self._fds: list[int] = []
        self._pid = os.getpid()
        inbound = {device: self._pipe() for device in program.devices}
        self._done_fd, done_write = self._pipe()
        self._inbound = inbound
        try:
            for number, device in enumerate(program.devices):
                outbound = {d: ends[1] for d, ends in inbound.items() if d != device}
                config = TrainingConfig(
                    number,
                    program.bindings[device],
                    program,
                    layout,
                    memory_fd,
                    inbound[device][0],
                    outbound,
                    done_write,
                )
                fds = sorted({memory_fd, inbound[device][0], done_write, *outbound.values()})
                environment = worker_environment(config.binding, os.environ)
                self.workers.append(WorkerProcess(config, environment, fds, _WORKER_MODULE))
            self._wait_ready(timeout_s)
        except BaseException:
            self.close()
            raise

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._fds.extend(ends)
        return ends

    def _wait_ready(self, timeout_s: float) -> None:
        deadline_s = monotonic() + timeout_s
        for worker in self.workers:
            worker.control.settimeout(max(0.001, deadline_s - monotonic()))
            try:
                message = receive_object(worker.control)
            except TimeoutError:
                raise WorkerFailed(
                    f"the worker of {worker.config.binding.device_id} has not loaded its functions in {timeout_s:g} s",
                    "raise start_timeout_s, or look for what keeps this machine busy",
                ) from None
            except EOFError:
                raise worker_failed(
                    worker.config.binding.device_id, "while it started", worker.obituary(), None, None
                ) from None
            worker.control.settimeout(None)
            if isinstance(message, Failure):
                device = worker.config.binding.device_id
                raise worker_failed(device, "while it loaded its functions", message.text, None, None)

    def run(self, serial: int) -> None:
        """Start a step and wait until all workers are done. Raises WorkerFailed as soon as one is not."""
        for _, write_fd in self._inbound.values():
            write_token(write_fd, Token(START, 0, serial, False))
        missing = len(self.workers)
        with selectors.DefaultSelector() as selector:
            selector.register(self._done_fd, selectors.EVENT_READ)
            for worker in self.workers:
                selector.register(worker.control, selectors.EVENT_READ, worker)
            while missing:
                for key, _ in selector.select():
                    if key.data is None:
                        missing -= len(list(read_tokens(self._done_fd)))
                    else:
                        raise self._failure(key.data)

    def _failure(self, worker: WorkerProcess) -> WorkerFailed:
        device = worker.config.binding.device_id
        try:
            message = receive_object(worker.control)
        except EOFError:
            return worker_failed(device, "during a training step", worker.obituary(), None, None)
        return worker_failed(device, "during a training step", message.text, None, None)

    def close(self) -> None:
        """End every worker at once; in a forked child this does nothing."""
        if os.getpid() != self._pid:
            return
        for worker in self.workers:
            with suppress(OSError):
                worker.stop(self._inbound[worker.config.binding.device_id][1])
        for worker in self.workers:
            worker.join(_JOIN_S)
        self.workers.clear()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
