"""Schedule every CUDA kernel by the first dlight rule that takes it; a rule that fails falls through and is counted.

dlight's rules may raise on kernels they match only in part, which takes a whole module down when they are applied
together. Here each PrimFunc is tried alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import tvm

from tvmhet._tvm import PrimFunc, dlight

_RULES = (
    dlight.gpu.Matmul,
    dlight.gpu.GEMV,
    dlight.gpu.Reduction,
    dlight.gpu.GeneralReduction,
    dlight.gpu.Fallback,
)
SCHEDULED_ATTR = "tirx.is_scheduled"


@dataclass(slots=True)
class ScheduleReport:
    """Which rule scheduled how many kernels, which rules raised, and which kernels none took."""

    applied: Counter[str] = field(default_factory=Counter)
    raised: Counter[str] = field(default_factory=Counter)
    unscheduled: list[str] = field(default_factory=list)


def is_scheduled(func: tvm.tirx.PrimFunc) -> bool:
    """Whether a rule, or the user, has scheduled `func`."""
    return bool(func.attrs and func.attrs.get(SCHEDULED_ATTR, False))


def schedule_for_cuda(mod: tvm.IRModule, target: tvm.target.Target, report: ScheduleReport) -> tvm.IRModule:
    """Return `mod` with each unscheduled PrimFunc scheduled for `target`; what happened is added to `report`."""
    out = mod.clone()
    with target:
        for gvar, func in mod.functions_items():
            if isinstance(func, PrimFunc) and not is_scheduled(func):
                scheduled = _first_that_takes(gvar.name_hint, func, report)
                if scheduled is not None:
                    out.update_func(gvar, scheduled)
    return out


def _first_that_takes(name: str, func: tvm.tirx.PrimFunc, report: ScheduleReport) -> tvm.tirx.PrimFunc | None:
    for rule in _RULES:
        try:
            scheduled = dlight.ApplyDefaultSchedule(rule())(tvm.IRModule({name: func}))[name]
        except Exception:  # a rule may raise anything on a kernel it does not know; the next one is tried
            report.raised[rule.__name__] += 1
            continue
        if is_scheduled(scheduled):
            report.applied[rule.__name__] += 1
            return scheduled
    report.unscheduled.append(name)
    return None
