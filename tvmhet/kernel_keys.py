"""Under which key the database keeps a kernel's times: what decides them, on CPUs the processor's model included."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from tvmhet import _tvm
from tvmhet.cluster.device import DeviceType
from tvmhet.cost.measured import KernelKey
from tvmhet.emit.library_steps import STEPS_VERSIONS
from tvmhet.emit.lower import lowering_version

#: What calling a library kernel from the VM on a CPU takes beyond the kernel: Python, DLPack and torch's dispatcher.
#: `benchmarks/stage_overhead.py` on one idle core: 7.3 us a call; the rooflines of CPU types count 2 us of it.
LIBRARY_CALL_S = 5e-6

_INSIDE = "; inside 2^"  # ends the toolchain of times that were taken inside a model, before the size of the model


def measured_key(key: str, maker: str, device: DeviceType) -> KernelKey:
    """Return the database key of a kernel on a device type: on CPUs bound to this processor's model."""
    return KernelKey(
        kernel_hash=key,
        target=json.dumps(dict(device.target), sort_keys=True),
        device=cpu_model() if device.is_cpu else device.name,
        toolchain=toolchain(maker, device),
        tvm_version=_tvm.TVM_VERSION,
    )


def inside_key(key: KernelKey, model_bytes: float) -> KernelKey:
    """Return the key of what the same kernel takes inside a model of so many bytes of parameters, by powers of two."""
    return _inside(key, _power(model_bytes))


def inside_keys(key: KernelKey, model_bytes: float) -> tuple[KernelKey, ...]:
    """Return the keys of what the same kernel takes inside models of about that size, the nearest first."""
    power = _power(model_bytes)
    return tuple(_inside(key, p) for p in (power, power + 1, power - 1))


def split_inside(name: str) -> tuple[str, float]:
    """Return a toolchain's name and the bytes of the model that it was timed inside; 0 if alone.

    >>> split_inside("lowering 3; 1 cores; inside 2^20"), split_inside("lowering 3; 1 cores")
    (('lowering 3; 1 cores', 1048576.0), ('lowering 3; 1 cores', 0.0))
    """
    plain, found, power = name.partition(_INSIDE)
    return plain, float(2 ** int(power)) if found else 0.0


def _power(model_bytes: float) -> int:
    return round(math.log2(max(1.0, model_bytes)))


def _inside(key: KernelKey, power: int) -> KernelKey:
    return replace(key, toolchain=f"{key.toolchain}{_INSIDE}{max(0, power)}")


def toolchain(maker: str, device: DeviceType) -> str:
    """Return what besides the kernel decides its code: the maker's version, on CPUs also the number of cores."""
    if maker == "library":
        made = f"torch {torch.__version__}, steps {STEPS_VERSIONS[device.kind]}"
    else:
        made = f"lowering {lowering_version(device.kind)}"
    return f"{made}; {device.num_sms} cores" if device.is_cpu else made


@lru_cache(maxsize=1)
def cpu_model() -> str:
    """The processor's name, family and model as the kernel gives them; "unknown processor" where it gives no name.

    Virtual machines name processors of several generations alike ("AMD EPYC"): the numbers tell them apart.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return model_of(lines)


def model_of(lines: Sequence[str]) -> str:
    """Return what `cpu_model` does of the lines of a /proc/cpuinfo.

    >>> model_of(["cpu family\t: 25", "model\t\t: 1", "model name\t: AMD EPYC"]), model_of([])
    ('AMD EPYC (family 25, model 1)', 'unknown processor')
    """
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    numbers = [
        f"{word} {found[name]}" for word, name in (("family", "cpu family"), ("model", "model")) if name in found
    ]
    return (found.get("model name") or "unknown processor") + (f" ({', '.join(numbers)})" if numbers else "")
