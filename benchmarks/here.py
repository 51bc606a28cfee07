"""The device types of this machine."""

from __future__ import annotations

from tvmhet.cluster.cpu import read_cpu
from tvmhet.cluster.local import cuda_ordinals


def cpu_types() -> tuple[str, ...]:
    """Return one device type for each x86-64 level of this processor, lowest first. Exits below x86-64-v2."""
    levels = read_cpu().levels
    if not levels:
        raise SystemExit("this benchmark needs an x86-64-v2 processor or later")
    return tuple(f"cpu-{level}" for level in levels)


def gpu_type() -> str:
    """Return the device type of this machine's first GPU. Exits without one."""
    ordinals = cuda_ordinals()
    if not ordinals:
        raise SystemExit("this machine has no NVIDIA GPU that can be described: see tvmhet devices --local")
    return min(ordinals, key=lambda name: ordinals[name]).rpartition("/")[2].rpartition(":")[0]
