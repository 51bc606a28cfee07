"""Calls from several threads: they overlap, each gets its own result, and all of them hear of what goes wrong."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.runtime.programs import full, skip_answer
from tests.runtime.test_failures import asserting_program, nothing_left, pids  # noqa: F401
from tvmhet.errors import NotSupported, WorkerFailed
from tvmhet.runtime import HetRuntime, PipelineProgram
from tvmhet.runtime.program import Array
from tvmhet.runtime.watch import Watch


class Scripted:
    """An engine whose inputs are done when the test says so."""

    over_machines, shared_cores, record = False, (), None

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.arrays: list[list[Array]] = []
        self.done: set[int] = set()
        self.taken: set[int] = set()

    def start(self) -> None: ...

    def close(self) -> None: ...

    def has_room(self, session: int = 0) -> bool:
        return len(self.arrays) - len(self.done) < self.capacity

    def submit(self, arrays: list[Array], session: int = 0) -> int:
        assert self.has_room()
        self.arrays.append(arrays)
        return len(self.arrays) - 1

    def states(self, session: int) -> dict[str, Array]:
        return {}

    def set_states(self, session: int, given: Mapping[str, Array] | None) -> None: ...

    def is_done(self, index: int) -> bool:
        return index in self.done

    def wait(self, index: int | None, timeout_s: float, session: int = 0) -> None:
        time.sleep(0.001)

    def take(self, index: int) -> list[Array]:
        assert index in self.done and index not in self.taken
        self.taken.add(index)
        return list(skip_answer(self.arrays[index][0]))


def wait_for(true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert true()


def test_a_call_keeps_no_other_out(skip_program: PipelineProgram) -> None:
    """Two in flight at once end in the other order; a third waits for room and keeps neither from its result."""
    engine = Scripted(2)
    runtime = HetRuntime(skip_program, engine=engine)
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(runtime, full(1))]
        wait_for(lambda: len(engine.arrays) == 1)
        calls.append(pool.submit(runtime, full(2)))
        wait_for(lambda: len(engine.arrays) == 2)
        calls.append(pool.submit(runtime, full(3)))
        engine.done.add(1)
        np.testing.assert_array_equal(calls[1].result(30)[0], skip_answer(full(2))[0])
        assert not calls[0].done()
        wait_for(lambda: len(engine.arrays) == 3)
        engine.done |= {0, 2}
        for call, x in ((calls[0], 1), (calls[2], 3)):
            np.testing.assert_array_equal(call.result(30)[0], skip_answer(full(x))[0])


def test_calls_and_streams_together(skip_program: PipelineProgram, nothing_left: None) -> None:  # noqa: F811
    """More threads than frames, so that they wait for room, too."""

    def stream(start: int) -> None:
        for i, got in enumerate(runtime.map(full(start + i) for i in range(40))):
            np.testing.assert_array_equal(got[0], skip_answer(full(start + i))[0])

    def call(start: int) -> None:
        for i in range(start, start + 40):
            np.testing.assert_array_equal(runtime(full(i))[0], skip_answer(full(i))[0])

    with HetRuntime(skip_program, max_in_flight=2) as runtime, ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(call if k % 3 else stream, 100 * k) for k in range(6)]:
            done.result(60)


def test_a_failure_is_of_its_own_call(
    asserting_program: PipelineProgram,  # noqa: F811
    nothing_left: None,  # noqa: F811
) -> None:
    def call(i: int) -> bool:
        try:
            np.testing.assert_array_equal(runtime(full(i), np.array(i % 3 > 0)), full(2 * i + 1))
        except WorkerFailed as error:
            assert "the stage refuses its input" in str(error)
            return False
        return True

    with HetRuntime(asserting_program) as runtime, ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, range(60))) == [i % 3 > 0 for i in range(60)]


@pytest.fixture
def stuck(skip_program: PipelineProgram) -> Iterator[tuple[HetRuntime, list[WorkerFailed | NotSupported]]]:
    """A runtime whose second worker stands still, three threads that call it, and what they raised."""
    found: list[WorkerFailed | NotSupported] = []

    def call() -> None:
        try:
            runtime(full(1))
        except (WorkerFailed, NotSupported) as error:
            found.append(error)

    runtime = HetRuntime(skip_program, max_in_flight=2).start()
    worker = pids(runtime)[1]
    os.kill(worker, signal.SIGSTOP)
    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: not runtime._engine._free)  # type: ignore[attr-defined]
    yield runtime, found
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    runtime.close()


def test_a_worker_that_dies_fails_all_calls(stuck: tuple[HetRuntime, list[WorkerFailed | NotSupported]]) -> None:
    runtime, found = stuck
    os.kill(pids(runtime)[1], signal.SIGKILL)
    wait_for(lambda: len(found) == 3)
    assert all(isinstance(error, WorkerFailed) and "SIGKILL" in str(error) for error in found)


def test_closing_ends_all_calls(stuck: tuple[HetRuntime, list[WorkerFailed | NotSupported]]) -> None:
    runtime, found = stuck
    threading.Timer(0.2, os.kill, (pids(runtime)[1], signal.SIGCONT)).start()  # it ends when it is told to
    runtime.close()
    wait_for(lambda: len(found) == 3)
    assert all(isinstance(error, NotSupported) and "closed" in str(error) for error in found)


def test_nobody_waits_for_what_another_has_read() -> None:
    """The pipe is read between a thread's look at what is there and its wait; the other waiter is told, too."""
    reader, writer = os.pipe()
    heard: list[bytes] = []
    watch = Watch([reader])
    try:
        for _ in range(200):
            heard.clear()
            threads = [threading.Thread(target=watch.wait, args=(lambda: bool(heard), 30.0)) for _ in range(3)]
            for thread in threads:
                thread.start()
            os.write(writer, b"x")
            heard.append(os.read(reader, 1))
            watch.tell()
            for thread in threads:
                thread.join(10)
                assert not thread.is_alive()
        start_s = time.monotonic()
        watch.wait(lambda: False, 0.05)  # what was told before is no news
        assert time.monotonic() - start_s > 0.04
        threads = [threading.Thread(target=watch.wait, args=(lambda: False, 30.0)) for _ in range(2)]
        for thread in threads:
            thread.start()
        watch.end()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        watch.wait(lambda: False, 30.0)  # at once
    finally:
        os.close(reader)
        os.close(writer)
