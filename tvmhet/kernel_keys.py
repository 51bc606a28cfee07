"""Under which key the database keeps a kernel's times: what decides them, on CPUs the processor's model included."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from tvmhet import _tvm
from tvmhet.cluster.device import DeviceType
from tvmhet.cost.measured import KernelKey
from tvmhet.emit.library_steps import STEPS_VERSION
from tvmhet.emit.lower import lowering_version

#: What calling a library kernel from the VM on a CPU takes beyond the kernel: Python, DLPack and torch's dispatcher.
#: `benchmarks/stage_overhead.py` on one idle core: 7.3 us a call; the rooflines of CPU types count 2 us of it.
LIBRARY_CALL_S = 5e-6

#: What ends the toolchain of times that were taken inside a model.
INSIDE = "inside"


def measured_key(key: str, maker: str, device: DeviceType) -> KernelKey:
    """Return the database key of a kernel on a device type: on CPUs bound to this processor's model."""
    return KernelKey(
        kernel_hash=key,
        target=json.dumps(dict(device.target), sort_keys=True),
        device=cpu_model() if device.is_cpu else device.name,
        toolchain=toolchain(maker, device),
        tvm_version=_tvm.TVM_VERSION,
    )


def inside_key(key: KernelKey) -> KernelKey:
    """Return the key of what the same kernel takes inside a model."""
    return replace(key, toolchain=f"{key.toolchain}; {INSIDE}")


def toolchain(maker: str, device: DeviceType) -> str:
    """Return what besides the kernel decides its code: the maker's version, on CPUs also the number of cores."""
    if maker == "library":
        made = f"torch {torch.__version__}, steps {STEPS_VERSION}"
    else:
        made = f"lowering {lowering_version(device.kind)}"
    return f"{made}; {device.num_sms} cores" if device.is_cpu else made


@lru_cache(maxsize=1)
def cpu_model() -> str:
    """The processor's name as the kernel gives it; the machine type where it gives none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else "unknown processor"
