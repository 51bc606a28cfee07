"""Times of runs on a GPU, without what the host takes to launch them: as they are inside a captured stage.

    run x n, captured ─► launch ─► event ─► launch ─► event        the first launch keeps the GPU busy until the second

Operands are those of the run before, so what fits the second-level cache is there. A run that cannot be captured is
timed between two events of its own: its launches count. Processes that time on one GPU take turns.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tvmhet.runtime.cuda import runtime_library
from tvmhet.runtime.cuda_graph import CudaGraph, check

_LEAST_S = 300e-6  # of a launch: it is short to the host, and long to the clock of events
_MOST_RUNS = 64  # in a graph


def run_times(
    run: Callable[[], Any], ordinal: int, with_torch: bool, repeats: int, budget_s: float
) -> tuple[list[float], str]:
    """Return seconds of a run, `repeats` of them (fewer if they take longer than `budget_s`), and what was odd.

    Takes its turn. Raises what the run raises.
    """
    with turn(ordinal):
        return times_of(run, ordinal, with_torch, repeats, budget_s)


@contextmanager
def turn(ordinal: int) -> Iterator[None]:
    """While inside, no other process of this user that asks for its turn times on a GPU. Not to be nested."""
    with (Path(tempfile.gettempdir()) / f"tvmhet-gpu-{os.getuid()}-{ordinal}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def times_of(
    run: Callable[[], Any], ordinal: int, with_torch: bool, repeats: int, budget_s: float
) -> tuple[list[float], str]:
    """As `run_times`, for who has the turn."""
    run()
    check(runtime_library().cudaDeviceSynchronize())
    try:
        graph = CudaGraph.of(run, ordinal, with_torch)
        graph.launch()
        once_s = _seconds(graph.launch)
        count = max(1, min(_MOST_RUNS, int(_LEAST_S / once_s)))
        if count > 1:
            graph = CudaGraph.of(run, ordinal, with_torch, count)
        launch, note = graph.launch, ""
    except Exception as error:  # TVM's and torch's kernels raise anything
        launch, count, note = run, 1, f"launches are counted, as it cannot be captured: {error}"
    times: list[float] = []
    until = time.monotonic() + budget_s
    while len(times) < repeats and (len(times) < 3 or time.monotonic() < until):
        launch()
        times.append(_seconds(launch) / count)
    return times, note


def _seconds(launch: Callable[[], Any]) -> float:
    """Seconds of a launch, between two events of the default stream."""
    cuda, milliseconds = runtime_library(), ctypes.c_float()
    start, end = ctypes.c_void_p(), ctypes.c_void_p()
    for event in (start, end):
        check(cuda.cudaEventCreate(ctypes.byref(event)))
    try:
        check(cuda.cudaEventRecord(start, None))
        launch()
        check(cuda.cudaEventRecord(end, None))
        check(cuda.cudaEventSynchronize(end))
        check(cuda.cudaEventElapsedTime(ctypes.byref(milliseconds), start, end))
    finally:
        for event in (start, end):
            cuda.cudaEventDestroy(event)
    return milliseconds.value * 1e-3
