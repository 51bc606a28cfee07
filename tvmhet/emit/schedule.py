"""Schedule every kernel by the first rule that takes it; a rule that fails falls through to the next and is counted.

dlight's rules for CUDA and ours for CPUs may raise on kernels they match only in part, which would take a whole module
down. Here each PrimFunc is tried alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tvm

from tvmhet._tvm import PrimFunc, dlight
from tvmhet.emit.apart import apart
from tvmhet.emit.begin_at_infinity import WRITE_OUT
from tvmhet.emit.block_reductions import block_reduction
from tvmhet.emit.bool_vectors import UnrollBoolVectors
from tvmhet.emit.cpu.blocks import CpuTarget
from tvmhet.emit.cpu.rules import RULES, CpuRule
from tvmhet.emit.cpu.shares import in_shares
from tvmhet.emit.deep_rows import deep_rows
from tvmhet.emit.one_thread_each import has_host_blocks, launches_threads, one_thread_each
from tvmhet.emit.shared_memory import shared_bytes
from tvmhet.emit.short_reductions import short_reduction
from tvmhet.emit.tuned import apply_schedule, function_hash
from tvmhet.emit.two_parts import behind_reduction
from tvmhet.emit.unit_reductions import without_unit_reductions
from tvmhet.emit.vectors import vectors
from tvmhet.emit.warp_reductions import warp_reduction
from tvmhet.errors import PlanMismatch

SCHEDULED_ATTR = "tirx.is_scheduled"
_FOR_CODEGEN = tvm.transform.Sequential([UnrollBoolVectors()])  # what TVM's CUDA code generator gets wrong
_SHARED_BYTES = 48 << 10  # of a block, without asking for more (CUDA C++ programming guide)

#: A rule by name: it returns the scheduled kernel, or None for a kernel that is not its own.
NamedRule = tuple[str, Callable[[Any], Any]]


@dataclass(slots=True)
class ScheduleReport:
    """Which rule scheduled how many kernels, which rules raised, and which kernels none took."""

    applied: Counter[str] = field(default_factory=Counter)
    raised: Counter[str] = field(default_factory=Counter)
    unscheduled: list[str] = field(default_factory=list)
    tuned: set[str] = field(default_factory=set)  # kernels that got a given schedule instead of a rule's

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
        limit_bytes = int(target.attrs.get("max_shared_memory_per_block", _SHARED_BYTES))
        products = (gpu.Matmul, gpu.GEMV)
        others = (gpu.Reduction, gpu.GeneralReduction)
        return (
            ("apart", partial(_apply_own, apart)),
            ("warp reduction", partial(_apply_own, warp_reduction)),
            *((rule.__name__, partial(_apply_dlight, rule(), limit_bytes)) for rule in products),
            ("short reduction", partial(_apply_own, short_reduction)),
            ("deep rows", partial(_apply_own, deep_rows)),
            ("vectors", partial(_apply_own, vectors)),
            *((rule.__name__, partial(_apply_dlight, rule(), limit_bytes)) for rule in others),
            ("block reduction", partial(_apply_own, block_reduction)),
            ("Fallback", partial(_apply_dlight, gpu.Fallback(), limit_bytes)),
            ("one thread each", partial(_apply_own, one_thread_each)),
        )
    if target.kind.name == "llvm":
        cpu = CpuTarget.of(target)
        return tuple((name, partial(_apply_cpu, rule, cpu)) for name, rule in RULES)
    return ()


def _apply_dlight(rule: Any, limit_bytes: int, func: Any) -> Any:
    scheduled = dlight.ApplyDefaultSchedule(rule)(tvm.IRModule({"main": func}))["main"]
    if not is_scheduled(scheduled):
        return None
    WRITE_OUT(tvm.IRModule({"main": scheduled}))  # raises here, where the next rule can be tried, instead of later
    if (needed := shared_bytes(scheduled)) > limit_bytes:
        raise ValueError(f"{needed} bytes of shared memory, {limit_bytes} at most")
    return scheduled


def _apply_own(rule: Callable[[Any], Any], func: Any) -> Any:
    schedule = rule(func)
    return None if schedule is None else schedule.mod["main"].with_attr(SCHEDULED_ATTR, True)


def _apply_to_parts(rules: Sequence[NamedRule], raised: Counter[str], func: Any) -> Any:
    """Schedule what a kernel does behind its reduction apart from it, where it may not be in the reduction's loops.

    Rules that raise on a part are added to `raised`.
    """
    parts = behind_reduction(func)
    if parts is None:
        return None
    report = ScheduleReport(raised=raised)
    head, tail = (_first_that_takes("", part, rules, report) for part in (parts.head, parts.tail))
    return None if report.unscheduled else parts.joined(head, tail).with_attr(SCHEDULED_ATTR, True)


def _apply_cpu(rule: CpuRule, cpu: CpuTarget, func: Any) -> Any:
    schedule = rule(func, cpu)
    return None if schedule is None else in_shares(schedule.mod["main"], cpu.num_cores).with_attr(SCHEDULED_ATTR, True)


def schedule_kernels(
    mod: tvm.IRModule, target: tvm.target.Target, report: ScheduleReport, traces: Mapping[str, str] | None = None
) -> tvm.IRModule:
    """Return `mod` with each unscheduled PrimFunc scheduled for `target`; what happened is added to `report`.

    `traces` are tuned schedules by the hash of their function; they go before the rules. Raises PlanMismatch for one
    that fits no function: a plan that rests on it would not get its kernel.
    """
    rules = rules_for(target)
    if target.kind.name == "cuda":
        rules = (("two parts", partial(_apply_to_parts, rules, report.raised)), *rules)
    if traces:
        mod = _tuned(mod, traces, report)
    out = mod.clone()
    with target:
        for gvar, func in mod.functions_items():
            if isinstance(func, PrimFunc) and not is_scheduled(func):
                plain = without_unit_reductions(func) if target.kind.name == "cuda" else func
                scheduled = _first_that_takes(gvar.name_hint, plain, rules, report)
                if scheduled is not None:
                    out.update_func(gvar, scheduled)
    return _FOR_CODEGEN(out) if target.kind.name == "cuda" else out


def _tuned(mod: tvm.IRModule, traces: Mapping[str, str], report: ScheduleReport) -> tvm.IRModule:
    """Return `mod` with the functions that have a trace scheduled by it."""
    out = mod.clone()
    unused = set(traces)
    for gvar, func in mod.functions_items():
        if not isinstance(func, PrimFunc) or is_scheduled(func) or (name := function_hash(func)) not in traces:
            continue
        out.update_func(gvar, apply_schedule(func, traces[name]).with_attr(SCHEDULED_ATTR, True))
        unused.discard(name)
        report.applied["tuned"] += 1
        report.tuned.add(gvar.name_hint)
    if unused:
        raise PlanMismatch(
            f"a tuned schedule is for function {min(unused)}, which this stage does not have",
            "plan again: the plan was made with another version of TVM or tvmhet",
        )
    return out


def _first_that_takes(name: str, func: Any, rules: Sequence[NamedRule], report: ScheduleReport) -> Any:
    if launches_threads(func.body):  # a rule would bind them a second time
        report.applied["by hand"] += 1
        if not has_host_blocks(func):
            return None
        rules = (("one thread each", partial(_apply_own, one_thread_each)),)
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
