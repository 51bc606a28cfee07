"""Benchmarks that run kernels in their own process: in an environment like that of a worker for one CPU type.

glibc's limits (memory of temporaries stays in the process), thread counts and caps of the libraries' instruction sets
count from the start of a process on, so the command is run again in one that has them.
"""

from __future__ import annotations

import os
import subprocess
import sys

import tvmhet
from tvmhet.runtime.cores import CpuDevice, assign_cores, worker_environment

_DEVICE = "BENCHMARK_WORKER_DEVICE"  # set in the process that measures


def as_worker(module: str, device: str) -> None:
    """Return in a process that has the environment of a worker for `device`; elsewhere run `module` in one and exit."""
    if os.environ.get(_DEVICE) == device:
        return
    (binding,) = assign_cores([CpuDevice(device, isa=str(tvmhet.device_type(device).target["mcpu"]))]).values()
    environment = {**worker_environment(binding, os.environ), _DEVICE: device}
    sys.exit(subprocess.run([sys.executable, "-m", module, *sys.argv[1:]], env=environment).returncode)
