"""The parent of a training run: start the workers, hand them micro-batches, take their losses, change generations."""

from __future__ import annotations

import math
import os
import selectors
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import numpy as np

from tvmhet.errors import NotFinite, NotSupported, WorkerFailed
from tvmhet.runtime.arena import Segment
from tvmhet.runtime.cores import check_host_runs, worker_environment
from tvmhet.runtime.crew import HEED_S, Crew, failure, worker_failed
from tvmhet.runtime.fleet import runs_in_thread
from tvmhet.runtime.messages import Token, read_tokens, receive_object
from tvmhet.runtime.processes import Worker, WorkerProcess, WorkerThread
from tvmhet.runtime.program import Array
from tvmhet.runtime.stalls import DEFAULT_LIMIT_S, Place, StallClock, stalled
from tvmhet.runtime.training_loop import TrainingConfig
from tvmhet.runtime.training_mail import START
from tvmhet.runtime.training_memory import TrainingMemory
from tvmhet.runtime.training_program import Action, TrainingProgram
from tvmhet.runtime.training_turns import new_row, shared_cores
from tvmhet.runtime.training_worker import serve_in_thread

_WORKER_MODULE = "tvmhet.runtime.training_worker"


@dataclass(frozen=True, slots=True)
class PassTime:
    """When one pass ran, in seconds of CLOCK_MONOTONIC; `action` is None for exchange and update.

    `waited_s` of it the device's worker was ready to run and had no core, as other processes had them, and
    `waited_before_s` of the time since its last pass.
    """

    device: str
    action: Action | None
    start_s: float
    end_s: float
    waited_s: float
    waited_before_s: float

    @property
    def worked_s(self) -> float:
        """Seconds of the pass on a machine that does nothing else."""
        return self.end_s - self.start_s - self.waited_s


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
        self._restores = 0
        self._serial = 0  # of step attempts, failed ones too: tokens carry it
        self.stall_limit_s: float | None = DEFAULT_LIMIT_S
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
        self._restores += 1

    def step(
        self, number: int, seed: int, microbatches: Sequence[Sequence[Array]], scalars: Mapping[str, float]
    ) -> list[float]:
        """Run step `number` (from 1) and return the loss of each micro-batch. On any failure the state stays.

        Raises NotFinite, and WorkerFailed; after that workers are gone, and the next step starts new ones.
        """
        fleet = self._running()
        for frame, arrays in zip(self._frames, microbatches, strict=True):
            for name, array in zip(self.program.batch, arrays, strict=True):
                np.copyto(frame[name], array)
        self._serial += 1
        self._board["step"][:] = number, self._generation, seed, self._restores
        for name, value in scalars.items():
            self._board[name][...] = value
        for core in shared_cores(self.program.bindings):
            self._board[f"turns.{core}"][...] = new_row(len(self.program.devices))
        try:
            self._run(fleet, number)
        except BaseException:
            self.stop_workers()
            raise
        losses = [float(frame[self.program.loss]) for frame in self._frames]
        self._check_finite(number, losses)
        self._generation = 1 - self._generation
        return losses

    def _run(self, fleet: _Fleet, number: int) -> None:
        """Run a step to its end. Raises WorkerFailed where no pass ends for `stall_limit_s`."""
        times = [self._board[f"times.{device}"] for device in self.program.devices]
        clock, start_s = StallClock(), time.monotonic()
        for missing in fleet.run(self._serial):
            seconds = clock.look(lambda: b"".join(rows.tobytes() for rows in times))
            if self.stall_limit_s is not None and seconds >= self.stall_limit_s:
                places = [
                    self._place(device, rows.tolist(), start_s) if i in missing else Place("is done")
                    for i, (device, rows) in enumerate(zip(self.program.devices, times, strict=True))
                ]
                raise stalled(fleet.workers, places, f"step {number}: no pass has ended for {seconds:.0f} s")

    def _place(self, device: str, rows: Sequence[Sequence[float]], step_start_s: float) -> Place:
        """Return which pass of this step a device is in, or waits before."""
        for action, (start_s, end_s, *_) in zip((*self.program.orders[device], None), rows, strict=True):
            if end_s < step_start_s:
                is_in = start_s >= step_start_s
                stage = None if action is None else f"stage {action.stage}"
                what = "the update"
                if action is not None:
                    half = "backward" if action.backward else "forward"
                    what = f"the {half} pass of {stage}, micro-batch {action.microbatch}"
                return Place(f"is in {what}" if is_in else f"waits before {what}", stage if is_in else None)
        return Place("is behind its update")

    def _check_finite(self, number: int, losses: Sequence[float]) -> None:
        found = {f"the loss of micro-batch {m}": loss for m, loss in enumerate(losses)}
        found["the squared norm of the gradients"] = float(self._board["norms"].sum())
        if bad := [(what, value) for what, value in found.items() if not math.isfinite(value)]:
            what, value = bad[0]
            raise NotFinite(
                f"step {number}: {what} is {value}; parameters stay as they were before it",
                "look for NaN in the batch; else lower the learning rate, or clip with max_norm",
            )

    def times(self) -> list[PassTime]:
        """Return when each pass of the last step ran."""
        found = []
        for device, order in self.program.orders.items():
            rows = self._board[f"times.{device}"].tolist()
            for action, row in zip((*order, None), rows, strict=True):
                found.append(PassTime(device, action, *row))
        return found

    def update_times(self, device: str) -> list[float]:
        """Return what each of `program.updates_of(device)` took in the last step, in seconds."""
        found: list[float] = self._board[f"updates.{device}"].tolist()
        return found

    def stash_bytes(self) -> dict[str, int]:
        """Return, by device, the most bytes of activations kept at once in the last step."""
        return {device: int(self._board[f"stash.{device}"][0]) for device in self.program.orders}

    def memory_bytes(self) -> dict[str, int]:
        """Return, by device, the memory that its worker has taken since it started, at the end of the last step."""
        return {device: int(self._board[f"memory.{device}"][0]) for device in self.program.orders}

    def _running(self) -> _Fleet:
        if self._segment.fd < 0:
            raise NotSupported("this trainer is closed", "build or load it again, and restore a checkpoint")
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
    """The workers of a training run."""

    def __init__(self, program: TrainingProgram, layout: TrainingMemory, memory_fd: int, timeout_s: float) -> None:
        self._crew = Crew(program.devices)
        ends = self._crew.writing_ends()
        try:
            for number, device in enumerate(program.devices):
                outbound = {d: fd for d, fd in ends.items() if d != device}
                inbound, done = self._crew.reading_end(device), self._crew.done_write_fd
                binding = program.bindings[device]
                config = TrainingConfig(number, binding, program, layout, memory_fd, inbound, outbound, done)
                if runs_in_thread(binding):
                    self._crew.hire(WorkerThread(config, serve_in_thread))
                    continue
                fds = sorted({memory_fd, inbound, done, *outbound.values()})
                environment = worker_environment(binding, os.environ)
                self._crew.hire(WorkerProcess(config, environment, fds, _WORKER_MODULE))
            self._crew.wait_ready(timeout_s, "functions")
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers, in order of their devices."""
        return self._crew.workers

    def run(self, serial: int) -> Iterator[AbstractSet[int]]:
        """Start a step and wait until all workers are done. Raises WorkerFailed as soon as one is not.

        While nothing is heard, the numbers of those that are not done are yielded now and then.
        """
        for worker in self.workers:
            self._crew.tell(worker.config.binding.device_id, Token(START, 0, serial, False))
        missing = set(range(len(self.workers)))
        with selectors.DefaultSelector() as selector:
            selector.register(self._crew.done_fd, selectors.EVENT_READ)
            for worker in self.workers:
                selector.register(worker.control, selectors.EVENT_READ, worker)
            while missing:
                for key, _ in (heard := selector.select(HEED_S)):
                    if key.data is None:
                        missing.difference_update(token.frame for token in read_tokens(self._crew.done_fd))
                    else:
                        raise _failure(key.data)
                if not heard:
                    yield missing

    def close(self) -> None:
        """End every worker at once; in a forked child this does nothing."""
        self._crew.close()


def _failure(worker: Worker) -> WorkerFailed:
    device = worker.config.binding.device_id
    try:
        message = receive_object(worker.control)
    except EOFError:
        return worker_failed(device, "during a training step", worker.obituary(), None, None)
    return failure(device, "during a training step", message)
