"""Schedule every kernel by the first rule that takes it; a rule that fails falls through to the next and is counted.

dlight's rules for CUDA and ours for CPUs may raise on kernels they match only in part, which would take a whole module
down. Here each PrimFunc is tried alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tvm

from tvmhet._tvm import PrimFunc, dlight
from tvmhet.emit.cpu.blocks import CpuTarget
from tvmhet.emit.cpu.rules import RULES, CpuRule

SCHEDULED_ATTR = "tirx.is_scheduled"

#: A rule by name: it returns the scheduled kernel, or None for a kernel that is not its own.
NamedRule = tuple[str, Callable[[Any], Any]]


@dataclass(slots=True)
class ScheduleReport:
    """Which rule scheduled how many kernels, which rules raised, and which kernels none took."""

    applied: Counter[str] = field(default_factory=Counter)
    raised: Counter[str] = field(default_factory=Counter)
    unscheduled: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """`7 kernels: 5 injective, 2 rows; raised: 1 contraction; without a schedule: resize2d`, sorted."""
        applied = ", ".join(f"{n} {rule}" for rule, n in sorted(self.applied.items())) or "none"
        parts = [f"{sum(self.applied.values())} kernels: {applied}"]
        if self.raised:
            parts.append("raised: " + ", ".join(f"{n} {rule}" for rule, n in sorted(self.raised.items())))
        if self.unscheduled:
            parts.append("without a schedule: " + ", ".join(sorted(self.unscheduled)))
        return "; ".join(parts)


def is_scheduled(func: tvm.tirx.PrimFunc) -> bool:
    """Whether a rule, or the user, has scheduled `func`."""
    return bool(func.attrs and func.attrs.get(SCHEDULED_ATTR, False))


def rules_for(target: tvm.target.Target) -> tuple[NamedRule, ...]:
    """Return the rules of a target's kind, in the order in which they are tried; none for an unknown kind."""
    if target.kind.name == "cuda":
        gpu = dlight.gpu
        rules = (gpu.Matmul, gpu.GEMV, gpu.Reduction, gpu.GeneralReduction, gpu.Fallback)
        return tuple((rule.__name__, partial(_apply_dlight, rule())) for rule in rules)
    if target.kind.name == "llvm":
        cpu = CpuTarget.of(target)
        return tuple((name, partial(_apply_cpu, rule, cpu)) for name, rule in RULES)
    return ()


def _apply_dlight(rule: Any, func: Any) -> Any:
    scheduled = dlight.ApplyDefaultSchedule(rule)(tvm.IRModule({"main": func}))["main"]
    return scheduled if is_scheduled(scheduled) else None


def _apply_cpu(rule: CpuRule, cpu: CpuTarget, func: Any) -> Any:
    schedule = rule(func, cpu)
    return None if schedule is None else schedule.mod["main"].with_attr(SCHEDULED_ATTR, True)


def schedule_kernels(mod: tvm.IRModule, target: tvm.target.Target, report: ScheduleReport) -> tvm.IRModule:
    """Return `mod` with each unscheduled PrimFunc scheduled for `target`; what happened is added to `report`."""
    rules = rules_for(target)
    out = mod.clone()
    with target:
        for gvar, func in mod.functions_items():
            if isinstance(func, PrimFunc) and not is_scheduled(func):
                scheduled = _first_that_takes(gvar.name_hint, func, rules, report)
                if scheduled is not None:
                    out.update_func(gvar, scheduled)
    return out


def _first_that_takes(name: str, func: Any, rules: Sequence[NamedRule], report: ScheduleReport) -> Any:
    for rule, apply in rules:
        try:
            scheduled = apply(func)
        except Exception:  # a rule may raise anything on a kernel it does not know; the next one is tried
            report.raised[rule] += 1
            continue
        if scheduled is not None:
            report.applied[rule] += 1
            return scheduled
    report.unscheduled.append(name)
    return None
