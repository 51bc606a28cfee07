"""The CPU device types whose code this machine runs."""

from __future__ import annotations

from tvmhet.cluster.cpu import read_cpu


def cpu_types() -> tuple[str, ...]:
    """Return one device type for each x86-64 level of this processor, lowest first. Exits below x86-64-v2."""
    levels = read_cpu().levels
    if not levels:
        raise SystemExit("this benchmark needs an x86-64-v2 processor or later")
    return tuple(f"cpu-{level}" for level in levels)
