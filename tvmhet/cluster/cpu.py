"""What this machine's CPU offers: cores we may use, the x86-64 level they reach, clock and memory (Linux)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

# Flags of /proc/cpuinfo that each x86-64 psABI level adds ("abm" stands for LZCNT, "pni" for SSE3).
_LEVELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("x86-64-v2", frozenset(["cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"])),
    ("x86-64-v3", frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])),
    ("x86-64-v4", frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])),
)
#: The levels by name, lowest first.
LEVELS = tuple(name for name, _ in _LEVELS)
_KIB = 1024
_LIKE_CORES = {"108": "106", "143": "207"}  # models of Intel's family 6


@dataclass(frozen=True, slots=True)
class Cpu:
    """`cores` may be used by this process. `levels` are the ISA levels it runs, lowest first. None: not readable."""

    cores: tuple[int, ...]
    levels: tuple[str, ...]
    model: str
    clock_hz: float | None
    memory_bytes: int | None
    l2_bytes: int | None


def isa_levels(flags: frozenset[str]) -> tuple[str, ...]:
    """Return the x86-64 levels that a CPU with these /proc/cpuinfo flags runs; each level needs the ones below it."""
    levels = []
    for name, needed in _LEVELS:
        if not needed <= flags:
            break
        levels.append(name)
    return tuple(levels)


def read_cpu(root: Path = Path("/")) -> Cpu:
    """Return this machine's CPU; `root` is where /proc, /sys and the cgroup files lie (another one in tests)."""
    info = _text(root / "proc/cpuinfo")
    flags = re.search(r"^flags\s*:\s*(.*)$", info, re.MULTILINE)
    return Cpu(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        levels=isa_levels(frozenset(flags[1].split())) if flags else (),
        model=_field(info, "model name"),
        clock_hz=_clock_hz(root, info),
        memory_bytes=_memory_bytes(root),
        l2_bytes=_l2_bytes(root),
    )


def processor_vendor() -> str:
    """Return the vendor of this machine's processor as /proc/cpuinfo names it, such as "AuthenticAMD"; "" if unknown.

    The environment variable TVMHET_CPU_VENDOR goes before it, to plan as on another machine.
    """
    given = os.environ.get("TVMHET_CPU_VENDOR")
    return _vendor_here() if given is None else given


def processor_family() -> str:
    """Return the family of this machine's processor, as `family_of` does; "" if unknown.

    Also "" where TVMHET_CPU_VENDOR is set: that machine's is not known.
    """
    return family_of(_text(Path("/proc/cpuinfo"))) if os.environ.get("TVMHET_CPU_VENDOR") is None else ""


def family_of(cpuinfo: str) -> str:
    """Return the family number that a /proc/cpuinfo names; "" if none.

    Of Intel's with the model: all its cores from the Pentium Pro on are of family 6, but for the Pentium 4's. Models
    whose cores are taken to be alike are one family: Ice Lake D is named as Ice Lake SP (106), Sapphire Rapids as
    Emerald Rapids (207; model numbers of Linux, arch/x86/include/asm/intel-family.h).

    >>> family_of("vendor_id : AuthenticAMD\\ncpu family : 25\\nmodel : 17\\n")
    '25'
    >>> family_of("vendor_id : GenuineIntel\\ncpu family : 6\\nmodel : 106\\nmodel name : Xeon\\n")
    '6-106'
    """
    family, model = _field(cpuinfo, "cpu family"), _field(cpuinfo, "model")
    return f"{family}-{_LIKE_CORES.get(model, model)}" if vendor_of(cpuinfo) == "GenuineIntel" else family


@lru_cache(maxsize=1)
def _vendor_here() -> str:
    return vendor_of(_text(Path("/proc/cpuinfo")))


def vendor_of(cpuinfo: str) -> str:
    """Return the vendor that a /proc/cpuinfo names; "" if none.

    >>> vendor_of("processor: 0\\nvendor_id\\t: GenuineIntel\\n")
    'GenuineIntel'
    """
    return _field(cpuinfo, "vendor_id")


def _field(cpuinfo: str, name: str) -> str:
    """The first value of a field of /proc/cpuinfo; "" if there is none."""
    found = re.search(rf"^{name}\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return found[1].strip() if found else ""


def _clock_hz(root: Path, info: str) -> float | None:
    """Return the highest clock of core 0, or what /proc/cpuinfo shows now where there is no frequency driver."""
    khz = _text(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").strip()
    if khz.isdigit():
        return float(khz) * 1e3
    mhz = re.search(r"^cpu MHz\s*:\s*([\d.]+)", info, re.MULTILINE)
    return float(mhz[1]) * 1e6 if mhz and float(mhz[1]) > 0 else None


def _memory_bytes(root: Path) -> int | None:
    """Return the machine's memory, or the control group's limit where that is less."""
    total = re.search(r"^MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    limits = [int(total[1]) * _KIB] if total else []
    limits += [int(t) for p in ("memory.max", "memory/memory.limit_in_bytes")
               if (t := _text(root / "sys/fs/cgroup" / p).strip()).isdigit()]  # fmt: skip
    return min(limits) if limits else None


def _l2_bytes(root: Path) -> int | None:
    for index in range(8):
        cache = root / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        size = re.fullmatch(r"(\d+)K", _text(cache / "size").strip())
        if _text(cache / "level").strip() == "2" and size:
            return int(size[1]) * _KIB
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
