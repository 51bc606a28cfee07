"""Waiting for a core is told from work."""

import os
import subprocess
import sys

_SPIN = """
import os, time
os.sched_setaffinity(0, {{{core}}})
from tvmhet.runtime.waiting import WaitClock
print(flush=True)
clock, start, worked = WaitClock(), time.monotonic(), time.thread_time()
before = clock.seconds()
while time.monotonic() < start + 0.4:
    pass
print(time.monotonic() - start, time.thread_time() - worked, clock.seconds() - before)
"""


def test_two_threads_on_one_core_wait_for_each_other():
    core = min(os.sched_getaffinity(0))
    command = [sys.executable, "-c", _SPIN.format(core=core)]
    pair = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in pair:
        wall_s, worked_s, waited_s = map(float, process.communicate()[0].split())
        assert waited_s > 0.05  # the other ran for most of the time too
        assert abs(wall_s - worked_s - waited_s) < 0.05 + 0.1 * wall_s
