"""An emulated GPU for a process that measures: `tvmhet.runtime.gpu_place` by the host's clock."""

import time
from contextlib import nullcontext
from functools import partial

from tests import emulated_cuda
from tvmhet.runtime.cubins import compiled_for
from tvmhet.runtime.cuda_times import turn

ORDINAL = 1000  # beyond those of GPUs of this machine, whose turns are other ones


def place(ordinal):
    """How stages are loaded and called there, what times a call, and its turn."""
    emulated_cuda.install()
    return partial(compiled_for, "sm_80"), nullcontext, run_times, partial(turn, ORDINAL + ordinal)


def run_times(run, repeats, budget_s):
    """Seconds of `repeats` calls."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return times, "emulated"
