"""Inputs in flight: put each into a free frame, let the workers pass it on, copy the outputs out, free the frame.

    submit -> frame f: [x | ...] -> token -> workers ... -> token from every sink -> outputs copied -> frame f is free

A submit that finds no free frame waits for one: that is the back-pressure. Inputs may finish out of order; `take` asks
for one by its index.
"""

from __future__ import annotations

import os
import select
import selectors
import weakref
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from tvmhet.errors import BadInput, HetError, NotSupported, WorkerFailed
from tvmhet.runtime.crew import HEED_S, failure, worker_failed
from tvmhet.runtime.fleet import Fleet, default_num_frames, max_num_frames, needs_source, sinks
from tvmhet.runtime.messages import FORGET_STAGE, STORE_STAGE, Failure, Token, read_tokens, receive_object
from tvmhet.runtime.processes import Worker
from tvmhet.runtime.program import Array, PipelineProgram
from tvmhet.runtime.stalls import DEFAULT_LIMIT_S, Place, StallClock, stalled
from tvmhet.runtime.stats import StageRun
from tvmhet.runtime.watch import Watch


class Engine(Protocol):
    """How a program is run. `record`, when not None, collects every stage run of the inputs that finish.

    `over_machines` says whether each machine of the plan is one; else all of them are this one. While somebody waits
    and no stage ends for `stall_limit_s`, the run is given up, and WorkerFailed says what each worker is at.
    """

    record: list[StageRun] | None
    over_machines: bool
    stall_limit_s: float | None

    @property
    def capacity(self) -> int:
        """How many inputs may be in flight."""

    @property
    def shared_cores(self) -> tuple[str, ...]:
        """The devices whose cores another device uses too."""

    def start(self) -> None: ...

    def close(self) -> None: ...

    def has_room(self, session: int = 0) -> bool:
        """Whether `submit` would return at once: fewer than `capacity` inputs are in flight, or it would raise.

        Of a program with states, at most one of each session is in flight.
        """

    def submit(self, arrays: list[Array], session: int = 0) -> int:
        """Take one input, checked, and return its index. Waits until there is room."""

    def states(self, session: int) -> dict[str, Array]:
        """Return copies of the states of a session that has no input in flight."""

    def set_states(self, session: int, given: Mapping[str, Array] | None) -> None:
        """Replace them, by name; with None all by their first values."""

    def is_done(self, index: int) -> bool:
        """Whether `take` would return, or raise, at once."""

    def wait(self, index: int | None, timeout_s: float, session: int = 0) -> None:
        """Wait until `is_done(index)`, without an index `has_room(session)`, may have changed, at most so long.

        This alone may be called while another thread is in the engine, and by several at once.
        """

    def take(self, index: int) -> list[Array]:
        """Return the outputs of an input, once. Raises WorkerFailed if it failed."""


def check_in_flight(most: int | None) -> None:
    """Raise BadInput unless at least one input may be in flight."""
    if most is not None and most < 1:
        raise BadInput(f"max_in_flight is {most}; at least one input must be in flight", "pass 1 or more")


@dataclass(slots=True)
class _Flight:
    frame: int
    session: int
    num_missing: int  # sinks that have not reported yet
    failed: bool = False


class PipelineEngine:
    """The stages of a program on workers of their own."""

    over_machines = False

    def __init__(self, program: PipelineProgram, max_in_flight: int | None, start_timeout_s: float) -> None:
        wanted = default_num_frames(program) if max_in_flight is None else max_in_flight
        self.record: list[StageRun] | None = None
        self.stall_limit_s: float | None = DEFAULT_LIMIT_S
        most = min(max_num_frames(program), program.num_sessions) if program.states else max_num_frames(program)
        self.capacity = max(1, min(wanted, most))
        self.shared_cores = tuple(b.device_id for b in program.bindings.values() if b.shared_cores)
        self._program = program
        self._start_timeout_s = start_timeout_s
        self._sources = tuple(s.index for s in program.stages if needs_source(program, s.index))
        self._num_sinks = len(sinks(program))
        self._next_index = 0
        self._fleet: Fleet | None = None
        self._broken: WorkerFailed | None = None
        self._watch: Watch | None = None
        self._reset()

    def _reset(self) -> None:
        self._flights: dict[int, _Flight] = {}
        self._results: dict[int, list[Array] | HetError] = {}
        self._failures: dict[int, WorkerFailed] = {}
        self._frames: list[dict[str, Array]] = []
        self._free: list[int] = []  # a stack: the frame used last is the one whose pages are warm
        self._busy: set[int] = set()  # sessions of a program with states
        self._num_stored = 0  # answers of devices that were asked for states, less how often they were asked
        self._stall = StallClock()

    def start(self) -> None:
        """Start the workers. After `close` or a worker's death, start afresh."""
        if self._fleet is not None:
            return
        self._reset()
        self._broken = None
        fleet = Fleet.start(self._program, self.capacity, self._start_timeout_s)
        self._fleet = fleet
        self._finalizer = weakref.finalize(self, fleet.close)
        self._frames = [fleet.layout.frame(fleet.memory, f) for f in range(self.capacity)]
        self._times = [fleet.layout.times(fleet.memory, f) for f in range(self.capacity)]
        self._busy_with = [fleet.layout.busy(fleet.memory, w.config.worker) for w in fleet.workers]
        self._free.extend(range(self.capacity))
        self._speakers = {worker.control.fileno(): worker for worker in fleet.workers}
        self._poll = select.poll()
        for fd in self.descriptors():
            self._poll.register(fd, select.POLLIN)
        self._watch = Watch(self.descriptors())

    def close(self) -> None:
        """Stop the workers and give all memory back. May be repeated."""
        if self._fleet is None:
            return
        self._fleet = None
        self._finalizer()
        self._frames, self._times, self._busy_with = [], [], []
        if self._watch is not None:
            self._watch.end()

    def has_room(self, session: int = 0) -> bool:
        """Whether a frame is free, and the session idle, after hearing what the workers have already said."""
        if not self._may_go(session) and self._fleet is not None:
            self._pump(0.0)
        return self._may_go(session) or self._fleet is None

    def _may_go(self, session: int) -> bool:
        return bool(self._free) and session not in self._busy

    def states(self, session: int) -> dict[str, Array]:
        """Return copies of an idle session's states."""
        fleet = self._running()
        self._num_stored -= fleet.exchange(STORE_STAGE, fleet.states.slot(session))
        while self._num_stored < 0:
            self._running()
            self._pump(HEED_S)
        return fleet.states.read(session)

    def set_states(self, session: int, given: Mapping[str, Array] | None) -> None:
        """Replace an idle session's states, or begin it anew."""
        if given is not None:
            self.states(session)  # those that are not given stay as they are
        fleet = self._running()
        if given is None:
            fleet.states.reset(session)
        else:
            fleet.states.write(session, given)
        fleet.exchange(FORGET_STAGE, fleet.states.slot(session))

    def submit(self, arrays: list[Array], session: int = 0) -> int:
        """Put one input into a free frame and tell the stages that read it."""
        fleet = self._running()
        while not self._may_go(session):
            self._pump(HEED_S)
        frame, index = self._free.pop(), self._next_index
        self._next_index += 1
        for name, array in zip(self._program.inputs, arrays, strict=True):
            np.copyto(self._frames[frame][name], array)
        self._flights[index] = _Flight(frame, session, self._num_sinks)
        if self._program.states:
            self._busy.add(session)
        slot = fleet.states.slot(session)
        for stage in self._sources:
            fleet.send(stage, frame, index, slot)
        if not self._num_sinks:
            self._complete(index)
        return index

    def is_done(self, index: int) -> bool:
        """Whether the outputs are there, after hearing what the workers have already said."""
        if index not in self._results and self._fleet is not None:
            self._pump(0.0)
        return index in self._results or self._fleet is None

    def wait(self, index: int | None, timeout_s: float, session: int = 0) -> None:
        """Wait for what the workers say, or for another thread to have heard it."""
        if (watch := self._watch) is not None:
            watch.wait(lambda: self._may_go(session) if index is None else index in self._results, timeout_s)

    def take(self, index: int) -> list[Array]:
        """Wait for one input's outputs."""
        while index not in self._results:
            self._running()
            self._pump(HEED_S)
        result = self._results.pop(index)
        if isinstance(result, HetError):
            raise result
        return result

    @property
    def is_running(self) -> bool:
        """Whether the workers are there."""
        return self._fleet is not None

    def descriptors(self) -> tuple[int, ...]:
        """Return what can be read once `is_done` may have changed, for a loop that waits for other things too."""
        return () if self._fleet is None else (self._fleet.done_fd, *self._speakers)

    def _running(self) -> Fleet:
        if self._broken is not None:
            raise self._broken
        if self._fleet is None:
            raise NotSupported("the module is closed", "build or load it again")
        if self._fleet.pid != os.getpid():
            raise NotSupported("this runtime belongs to the process that forked this one", "make one of your own here")
        return self._fleet

    def _pump(self, timeout_s: float) -> None:
        """Hear what the workers say, waiting at most `timeout_s` for the first word.

        Their sockets come before the done pipe: a token may make `_failure_of` read the sockets too, and what select
        said of them would then no longer hold.
        """
        ready = [fd for fd, _ in self._poll.poll(1e3 * timeout_s)]
        self._heed_stall(bool(ready))
        for fd in ready:
            if fd in self._speakers:
                self._hear(self._speakers[fd])
        if ready and (done_fd := self._running().done_fd) in ready:
            for token in read_tokens(done_fd):
                if token.stage == STORE_STAGE:
                    self._num_stored += 1
                else:
                    self._finish(token)
            if self._watch is not None:
                self._watch.tell()

    def _heed_stall(self, has_word: bool) -> None:
        """Give the run up if something is waited for and nothing has come of it for too long."""
        if has_word or not (self._flights or self._num_stored < 0):
            self._stall.progress()
        elif (limit_s := self.stall_limit_s) is not None and self._fleet is not None:
            seconds = self._stall.look(lambda: b"".join(line.tobytes() for line in self._busy_with))
            if seconds >= limit_s:
                raise self._give_up(seconds)

    def _give_up(self, seconds: float) -> WorkerFailed:
        """Close everything; return the error that says where the workers were."""
        places = [self._place(*line.tolist()) for line in self._busy_with]
        num = len(self._flights)
        what = f"no stage has ended for {seconds:.0f} s with {num} input{'' if num == 1 else 's'} in flight"
        self._broken = stalled(self._running().workers, places, what)
        self.close()
        return self._broken

    def _place(self, number: int, index: int) -> Place:
        if number < 0:
            return Place("waits")
        stage = self._program.stages[number].name
        return Place(f"is in stage {stage!r} on input {index}", stage, index)

    def _hear(self, worker: Worker) -> None:
        device = worker.config.binding.device_id
        try:
            message = receive_object(worker.control)
        except EOFError:
            raise self._bury(worker) from None
        if isinstance(message, Failure) and message.stage is not None and message.input_index is not None:
            stage = self._program.stages[message.stage].name
            when = f"in stage {stage!r} on input {message.input_index}"
            if message.input_index not in self._flights:  # a second failure of an input already given up
                return
            self._failures[message.input_index] = (
                failure(device, when, message)
                if message.needs_memory
                else worker_failed(device, when, message.text, stage, message.input_index)
            )

    def _bury(self, worker: Worker) -> WorkerFailed:
        """Close everything after a worker's death; return the error that every input in flight now raises."""
        fleet = self._running()
        number, input_index = (int(x) for x in fleet.layout.busy(fleet.memory, worker.config.worker))
        stage = self._program.stages[number].name if number >= 0 and input_index in self._flights else None
        when = "between inputs" if stage is None else f"in stage {stage!r} on input {input_index}"
        self._broken = worker_failed(
            worker.config.binding.device_id, when, worker.obituary(), stage, None if stage is None else input_index
        )
        self.close()
        return self._broken

    def _finish(self, token: Token) -> None:
        flight = self._flights[token.input_index]
        flight.num_missing -= 1
        flight.failed = flight.failed or token.failed
        if flight.num_missing == 0:
            self._complete(token.input_index)

    def _complete(self, index: int) -> None:
        """Copy the outputs of a finished input out of its frame, and free the frame."""
        flight = self._flights[index]
        if flight.failed:
            self._results[index] = self._failure_of(index)
        else:
            states = self._running().states
            kept = states.views(states.slot(flight.session))
            values = ChainMap(self._frames[flight.frame], kept, cast("dict[str, Array]", self._program.params))
            self._results[index] = [np.array(values[name]) for name in self._program.outputs]
            if self._program.states:
                states.advance(flight.session, values)
            if self.record is not None:
                self.record.extend(self._runs(index, flight.frame))
        del self._flights[index]
        self._busy.discard(flight.session)
        self._free.append(flight.frame)

    def _failure_of(self, index: int) -> WorkerFailed:
        """Return why an input failed. The worker said so before it passed the token on: its word is there to read."""
        fleet = self._running()
        with selectors.DefaultSelector() as selector:
            for worker in fleet.workers:
                selector.register(worker.control, selectors.EVENT_READ, worker)
            while index not in self._failures:
                for key, _ in selector.select():
                    self._hear(key.data)
        return self._failures.pop(index)

    def _runs(self, index: int, frame: int) -> list[StageRun]:
        devices = self._running().devices
        rows = enumerate(self._times[frame].tolist())
        return [StageRun(stage, devices[int(worker)], index, *spans) for stage, (*spans, worker) in rows]
