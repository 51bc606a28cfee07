"""Run a placed program: calls, streams and benchmarks."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import cycle
from types import TracebackType
from typing import Any

from tvmhet.errors import BadInput, HetError
from tvmhet.nested import call_arguments
from tvmhet.runtime.crew import HEED_S
from tvmhet.runtime.engine import Engine, PipelineEngine, check_in_flight
from tvmhet.runtime.inline import InlineEngine
from tvmhet.runtime.program import Array, PipelineProgram
from tvmhet.runtime.stalls import check_stall_limit
from tvmhet.runtime.states import named_states, specs_of
from tvmhet.runtime.stats import RunStats, StageRun, planned_runs, stage_stats
from tvmhet.runtime.tensors import check_inputs, is_torch, to_user


class HetRuntime:
    """A program on its devices: CPU devices are pinned processes, GPUs threads, tensors in shared memory.

    Workers start at the first call, or with `start` or `with`. Several inputs are in flight in `map` and `benchmark`;
    outputs come in order, and calls from several threads overlap. After WorkerFailed from a stage that raised, the
    runtime goes on; after a worker's death everything is closed, and `start` begins anew.

    `max_in_flight` bounds the inputs in flight (each holds one frame of shared memory); by default enough to keep
    every device busy. `inline=True` runs a program of one stage in this process, unpinned. With `engine` the program
    runs where that engine has it.
    """

    def __init__(
        self,
        program: PipelineProgram,
        *,
        max_in_flight: int | None = None,
        inline: bool = False,
        start_timeout_s: float = 120.0,
        engine: Engine | None = None,
    ) -> None:
        check_in_flight(max_in_flight)
        self.program = program
        if engine is None:
            engine = InlineEngine(program) if inline else PipelineEngine(program, max_in_flight, start_timeout_s)
        self._engine = engine
        self._specs = [program.values[name] for name in program.inputs]
        self._started = False
        self._lock = threading.RLock()

    @property
    def stall_limit_s(self) -> float | None:
        """Seconds for which no stage may end while somebody waits: after them WorkerFailed says where each worker is.

        None is no limit. Raises BadInput for what is no limit, NotSupported where `inline=True` leaves nothing to end.
        """
        return self._engine.stall_limit_s

    @stall_limit_s.setter
    def stall_limit_s(self, seconds: float | None) -> None:
        self._engine.stall_limit_s = check_stall_limit(seconds)

    def start(self) -> HetRuntime:
        """Start the workers and load every stage. Raises WorkerFailed or NotSupported, and leaves nothing running."""
        with self._lock:
            self._engine.start()
            self._started = True
        return self

    def close(self) -> None:
        """Stop the workers and free the shared memory. May be repeated; also done at exit."""
        with self._lock:
            self._engine.close()
            self._started = True

    def __enter__(self) -> HetRuntime:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, *inputs: Any) -> Any:
        """Run one input. Returns numpy arrays that the caller owns, or torch tensors if any input was one.

        Inputs may stand in tuples and lists, as the model takes them, or in one mapping by their names.
        One output or a tuple of them, as the model returns. Raises BadInput or WorkerFailed.
        """
        return self.call(inputs, 0)

    def call(self, inputs: Sequence[Any], session: int) -> Any:
        """Run one input of a session: of a program with states, after that session's calls before."""
        inputs = call_arguments(inputs, self.program.inputs)
        return self._take(self._submit(inputs, session), any(is_torch(x) for x in inputs))

    def states(self, session: int) -> dict[str, Array]:
        """Return copies of what a session's calls have handed on, by name, once they have ended."""
        with self._idle(session):
            return self._engine.states(session)

    def set_states(self, session: int, given: Mapping[str, Any] | None) -> None:
        """Replace states of a session by name, or all by their first values, once its calls have ended.

        Raises BadInput for a name, a shape or a dtype that is not the state's.
        """
        arrays = None if given is None else named_states(given, specs_of(self.program))
        with self._idle(session):
            self._engine.set_states(session, arrays)

    @contextmanager
    def _idle(self, session: int) -> Iterator[None]:
        """Keep the calls of a session that has none in flight out."""
        while True:
            with self._lock:
                self.start_if_new()
                if self._engine.has_room(session):
                    yield
                    return
            self._engine.wait(None, HEED_S, session)

    def map(
        self, inputs: Iterable[Any], max_in_flight: int | None = None, sessions: Sequence[int] = (0,)
    ) -> Iterator[Any]:
        """Run many inputs, several at a time; yield the results of each in the order of the inputs.

        Each item is a tuple or list of the model's inputs, a mapping of them, or the one input itself. `inputs` is read
        only as far ahead as `max_in_flight`. An input that fails raises when its turn comes, and ends the iteration.
        Of a program with states each input is one of `sessions`, in turn.
        """
        check_in_flight(max_in_flight)
        limit = self._engine.capacity if max_in_flight is None else max_in_flight
        pending: deque[tuple[int, bool]] = deque()
        try:
            for item, session in zip(inputs, cycle(sessions), strict=False):
                arguments = call_arguments(item if isinstance(item, tuple | list) else (item,), self.program.inputs)
                while pending and (len(pending) >= limit or self._is_done(pending[0][0])):
                    yield self._take(*pending.popleft())
                pending.append((self._submit(arguments, session), any(is_torch(x) for x in arguments)))
            while pending:
                yield self._take(*pending.popleft())
        finally:
            for index, _ in pending:
                with suppress(HetError):  # nobody asks for these any more
                    self._take(index, False)

    def benchmark(self, inputs: Sequence[Any], num_inputs: int = 20, warmup: int = 3) -> RunStats:
        """Measure the program on one input, given as a sequence of its tensors and repeated.

        First `num_inputs` one at a time (latency), then as many in a full pipeline (throughput, from the end of the
        warm-up to the last output). `warmup` more inputs go before each and are not counted; before the second, at
        least as many as are in flight. Inputs of the pipeline are of all sessions in turn; states are as before then.
        """
        if num_inputs < 1 or warmup < 0:
            raise BadInput(f"num_inputs is {num_inputs} and warmup {warmup}", "pass at least 1 and at least 0")
        with self._lock:
            before = [self.states(session) for session in self._sessions]
            for _ in range(warmup):
                self(*inputs)
            latency_s, alone = self._measure_alone(inputs, num_inputs)
            elapsed_s, streamed = self._measure_stream(inputs, num_inputs, warmup)
            for session, states in zip(self._sessions, before, strict=True):
                self._engine.set_states(session, states)
        return RunStats(
            latency_s,
            num_inputs / elapsed_s,
            stage_stats(self.program, planned_runs(self.program, alone, True), with_hops=True),
            stage_stats(self.program, planned_runs(self.program, streamed, False), with_hops=False),
            tuple(replace(run, stage=self.program.planned(run.stage)) for run in streamed),
            self._engine.shared_cores,
            self._engine.over_machines,
        )

    def period_s(self, inputs: Sequence[Any], num_inputs: int) -> float:
        """Return the seconds of one input in a full pipeline: the mean of `num_inputs`, once it is full."""
        with self._lock:
            return self._measure_stream(inputs, num_inputs, 0)[0] / num_inputs

    def latency_s(self, inputs: Sequence[Any], num_inputs: int) -> float:
        """Return the seconds of one input alone: the median of `num_inputs` after one that does not count."""
        with self._lock:
            self(*inputs)
            return statistics.median(self._measure_alone(inputs, num_inputs)[0])

    def _measure_alone(self, inputs: Sequence[Any], num_inputs: int) -> tuple[tuple[float, ...], list[StageRun]]:
        self.start_if_new()
        latency_s = []
        runs: list[StageRun] = []
        self._engine.record = runs
        try:
            for _ in range(num_inputs):
                start_s = time.monotonic()
                self(*inputs)
                latency_s.append(time.monotonic() - start_s)
        finally:
            self._engine.record = None
        return tuple(latency_s), runs

    def _measure_stream(self, inputs: Sequence[Any], num_inputs: int, warmup: int) -> tuple[float, list[StageRun]]:
        warmup = max(warmup, self._engine.capacity)
        runs: list[StageRun] = []
        self._engine.record = runs
        start_s = time.monotonic()
        stream = self.map((tuple(inputs) for _ in range(warmup + num_inputs)), sessions=self._sessions or (0,))
        try:
            for position, _ in enumerate(stream):
                if position == warmup - 1:
                    start_s = time.monotonic()
        finally:
            self._engine.record = None
        elapsed_s = time.monotonic() - start_s
        first = max(run.input_index for run in runs) + 1 - num_inputs if runs else 0
        measured = [run for run in runs if run.input_index >= first]
        return elapsed_s, sorted(measured, key=lambda run: (run.start_s, run.stage, run.input_index))

    def start_if_new(self) -> None:
        """Start the workers unless they were started, or closed, before."""
        if not self._started:
            self.start()

    @property
    def _sessions(self) -> Sequence[int]:
        """The sessions of a program with states."""
        return range(self.program.num_sessions) if self.program.states else ()

    def _submit(self, inputs: Sequence[Any], session: int) -> int:
        """Submit once there is room, without keeping other threads out meanwhile."""
        arrays = check_inputs(inputs, self._specs)
        while True:
            with self._lock:
                self.start_if_new()
                if self._engine.has_room(session):
                    return self._engine.submit(arrays, session)
            self._engine.wait(None, HEED_S, session)

    def _is_done(self, index: int) -> bool:
        with self._lock:
            return self._engine.is_done(index)

    def _take(self, index: int, as_torch: bool) -> Any:
        """Wait for one result, without keeping other threads out meanwhile."""
        while True:
            self._engine.wait(index, HEED_S)
            with self._lock:
                if self._engine.is_done(index):
                    return to_user(self._engine.take(index), as_torch, self.program.structure)
