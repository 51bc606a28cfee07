"""An emulated GPU for a process that measures: `tvmhet.runtime.gpu_place` by the host's clock."""

import time
from contextlib import nullcontext
from functools import partial

from tests import emulated_cuda
from tvmhet.runtime.cubins import compiled_for


def place(ordinal):
    """How stages are loaded and called there, and what times a call."""
    emulated_cuda.install()
    return partial(compiled_for, "sm_80"), nullcontext, run_times


def run_times(run, repeats, budget_s):
    """Seconds of `repeats` calls."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return times, "emulated"
