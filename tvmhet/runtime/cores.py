"""Which host cores stand for which CPU device, and the environment that limits its library kernels.

Distinct physical cores first; when the devices ask for more than there are, they share in turn and say so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tvmhet.errors import NotSupported
from tvmhet.runtime.program import DeviceBinding

# Instruction-set caps of oneDNN, MKL and ATen; they are read when torch loads, so a process has one for life.
_ISA_ENVIRONMENT: Mapping[str, Mapping[str, str]] = {
    "x86-64-v2": {"ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ATEN_CPU_CAPABILITY": "default"},
    "x86-64-v3": {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "x86-64-v4": {},
}
# x86-64 psABI, "micro-architecture levels": the flags (as Linux spells them) that tell one level from the one below.
_ISA_FLAGS: Mapping[str, frozenset[str]] = {
    "x86-64-v2": frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}),
    "x86-64-v3": frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}),
    "x86-64-v4": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
}
# What glibc frees at the top of its heap, or had from the system in one piece, goes back to the system, and comes again
# page by page at the next call: for the temporaries of library kernels that is up to half of a kernel's time, in some
# processes and not in others. Kept: pieces to 32 MiB (the most that glibc lets one ask), and 1 GiB of free memory.
_MALLOC_ENVIRONMENT: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
# How often threads look for work before they sleep. Where library kernels run, both makers' run on OpenMP's threads
# (`_threads`). On two cores of an Intel Xeon models by the library alone gain nothing from that with 1,000, 1.1 to 1.8
# with 10,000, and hardly more with 100,000, which costs ConvNeXt-T by both makers 6 to 13 %.
_WAITING_ENVIRONMENT: Mapping[str, str] = {"GOMP_SPINCOUNT": "10000", "TVM_THREAD_POOL_SPIN_COUNT": "10000"}
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TVM_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """A CPU device of the plan that wants `num_cores` host cores, limited to `isa` (None: no limit)."""

    device_id: str
    num_cores: int = 1
    isa: str | None = None


def host_cores() -> tuple[tuple[int, ...], ...]:
    """Return the physical cores this process may use, each as its logical CPU numbers (hyper-threads), ascending."""
    allowed = os.sched_getaffinity(0)
    physical: dict[str, list[int]] = {}
    for cpu in sorted(allowed):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        key = siblings.read_text().strip() if siblings.exists() else str(cpu)
        physical.setdefault(key, []).append(cpu)
    return tuple(tuple(cpus) for cpus in physical.values())


def assign_cores(
    devices: Sequence[CpuDevice], host: Sequence[tuple[int, ...]] | None = None
) -> dict[str, DeviceBinding]:
    """Return one binding per device id: the first hyper-thread of distinct physical cores, in the order given.

    Devices that ask for more cores than the host has get all of them. When cores run out, later devices start again
    at the first core, and every device on a core held twice has `shared_cores` set. A device named twice counts once.
    `host` overrides `host_cores()`.
    """
    devices = tuple({device.device_id: device for device in devices}.values())
    ring = [cpus[0] for cpus in (host_cores() if host is None else host)]
    holders: dict[int, int] = dict.fromkeys(ring, 0)
    taken: dict[str, tuple[int, ...]] = {}
    start = 0
    for device in devices:
        count = max(1, min(device.num_cores, len(ring)))
        taken[device.device_id] = tuple(sorted(ring[(start + k) % len(ring)] for k in range(count)))
        start += count
        for core in taken[device.device_id]:
            holders[core] += 1
    return {
        device.device_id: DeviceBinding(
            device.device_id,
            "llvm",
            device.isa,
            taken[device.device_id],
            shared_cores=any(holders[core] > 1 for core in taken[device.device_id]),
            num_cores=device.num_cores,
        )
        for device in devices
    }


def worker_environment(binding: DeviceBinding, base: Mapping[str, str]) -> dict[str, str]:
    """Return `base` with the thread counts, instruction-set caps and memory pool of one CPU device.

    What `base` says of glibc's pool, and of how threads wait, stays. TVM's own thread binding is switched off: it would
    undo the worker's pinning. Raises NotSupported for an unknown `isa`.
    """
    if binding.isa is not None and binding.isa not in _ISA_ENVIRONMENT:
        raise NotSupported(
            f"device {binding.device_id!r} is limited to isa {binding.isa!r}; known: {', '.join(_ISA_ENVIRONMENT)}",
            "use one of them, or isa=None for no limit",
        )
    environment = {**_MALLOC_ENVIRONMENT, **(_WAITING_ENVIRONMENT if len(binding.cores) > 1 else {}), **base}
    if binding.isa is not None:
        for variable in ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY"):
            environment.pop(variable, None)
        environment.update(_ISA_ENVIRONMENT[binding.isa])
    if binding.cores:
        environment.update(dict.fromkeys(_THREAD_VARIABLES, str(len(binding.cores))))
    environment["TVM_BIND_THREADS"] = "0"
    environment["KMP_AFFINITY"] = "disabled"
    return environment


def check_host_runs(bindings: Iterable[DeviceBinding], cpuinfo: str | None = None) -> None:
    """Raise NotSupported when this host's processor lacks an instruction set that a device's code may use."""
    text = Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo
    flags = next((set(line.split(":", 1)[1].split()) for line in text.splitlines() if line.startswith("flags")), set())
    if not flags:  # another architecture: its binaries are refused by the loader, not here
        return
    for binding in bindings:
        needed: set[str] = set()
        for level, level_flags in _ISA_FLAGS.items():
            if binding.isa is not None and level <= binding.isa:
                needed |= level_flags
        if missing := sorted(needed - flags):
            raise NotSupported(
                f"device {binding.device_id!r} runs {binding.isa} code; this processor lacks {', '.join(missing)}",
                "place its stages on a lower instruction set, or run on a newer processor",
            )
