"""A CPU type's kernels as a model learned from all that were measured on it: `profile`d ones and calibrated ones.

database of measured kernels (of any models) ──┐
`tvmhet calibrate`d operators of the library ──┴► LearnedCpu, fitted when first asked for, kept in this process
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache

from tvmhet import _tvm
from tvmhet.cluster.device import DeviceType
from tvmhet.cost.calibration import read_measured, stored_path
from tvmhet.cost.learned_cpu import MIN_KERNELS, LearnedCpu, MeasuredKernel, learn
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.cost.model import KernelDesc, from_text
from tvmhet.kernel_keys import LIBRARY_CALL_S, cpu_model, split_inside, toolchain

_Row = tuple[str, str, str, float]
_Op = tuple[KernelDesc, float]


@dataclass(frozen=True, slots=True)
class _Known:
    """What was measured on one device type; equal measurements give the same model."""

    device: DeviceType = field(compare=False)
    name: str
    kernels: tuple[_Row, ...]
    operators: tuple[_Op, ...]


def learned_cpu(device: DeviceType, database: MeasuredKernels | None) -> LearnedCpu | None:
    """Return what measurements teach of a CPU type; None of other types, and where too few kernels were measured."""
    known = None if database is None or not device.is_cpu else _known(device, database)
    return None if known is None else _learned(known)


def _known(device: DeviceType, database: MeasuredKernels) -> _Known | None:
    target = json.dumps(dict(device.target), sort_keys=True)
    made = {toolchain(maker, device) for maker in ("tvm", "library")}
    every = database.described(target, cpu_model(), _tvm.TVM_VERSION)
    kernels = tuple(r for r in every if split_inside(r[1])[0] in made)
    if len(kernels) < MIN_KERNELS:
        return None
    return _Known(device, device.name, kernels, _operators(device))


def _operators(device: DeviceType) -> tuple[_Op, ...]:
    """The operators that `tvmhet calibrate` measured on this processor."""
    path = stored_path(device)
    found = read_measured(path, device) if path.is_file() else None
    if found is None or found.measured_on != cpu_model():
        return ()
    return tuple(zip(found.descs, found.seconds, strict=True))


@lru_cache(maxsize=8)
def _learned(known: _Known) -> LearnedCpu:
    return learn(known.device, _measured(known))


def _measured(known: _Known) -> list[MeasuredKernel]:
    kernels = [MeasuredKernel(from_text(text), s, split_inside(name)[1]) for _, name, text, s in known.kernels]
    return kernels + [MeasuredKernel(desc, s + LIBRARY_CALL_S, inside_bytes=0) for desc, s in known.operators]
