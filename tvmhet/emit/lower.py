"""A planned stage -> a Relax VM executable for one target, through TVM's own lowering passes.

    dispatch sort, scan, sampling -> LegalizeOps -> FuseTIR (the plan's groups, nothing else)
    -> ShareKernels -> names for C (CUDA) -> schedule -> fast math (CPU) -> VM lowering

Plain `tvm.compile` runs the same passes without the fusion, so a stage whose kernels are single operators gets the
same code from both.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tvm
from tvm import relax

from tvmhet._tvm import PrimFunc
from tvmhet.emit.begin_at_infinity import BeginAtInfinity
from tvmhet.emit.bool_vectors import UnrollBoolVectors
from tvmhet.emit.c_names import NameInC
from tvmhet.emit.cpu.fast_math import FastMath
from tvmhet.emit.keep_nan import KeepNan
from tvmhet.emit.kept_storages import KeepStorages
from tvmhet.emit.place_tensors import PlaceTensors
from tvmhet.emit.run_together import run_together
from tvmhet.emit.schedule import ScheduleReport, schedule_kernels
from tvmhet.emit.share_kernels import ShareKernels
from tvmhet.emit.source_only import source_only
from tvmhet.ir.legalize import legalize_ops

#: By target kind; in the keys of cached stages and of measured times: raise it when the code made of a stage changes.
LOWERING_VERSIONS: Mapping[str, int] = MappingProxyType({"llvm": 38, "cuda": 25})

T = relax.transform
_LOG = logging.getLogger("tvmhet.emit")
_CPU_MATH = tvm.transform.Sequential([BeginAtInfinity(is_cuda=False), FastMath(), KeepNan(is_cuda=False)])
_CUDA_MATH = tvm.transform.Sequential([BeginAtInfinity(is_cuda=True), KeepNan(is_cuda=True)])


def lowering_version(kind: str) -> int:
    """Return the version of the code that is made for targets of a kind; 0 for kinds without rules here.

    >>> lowering_version("rocm")
    0
    """
    return LOWERING_VERSIONS.get(kind, 0)


def make_target(description: Mapping[str, Any]) -> tvm.target.Target:
    """Return the TVM target of a device type's `target` mapping; a CUDA target gets an llvm host."""
    plain = dict(description)
    host = "llvm" if plain.get("kind") == "cuda" else None
    return tvm.target.Target(plain, host=host)


def _legal() -> list[tvm.transform.Pass]:
    return [relax.backend.DispatchSampling(), relax.backend.DispatchSortScan(), legalize_ops()]


def kernel_passes() -> list[tvm.transform.Pass]:
    """Passes that turn planned groups and single operators into one PrimFunc each."""
    return [
        *_legal(),
        T.AnnotateTIROpPattern(),
        T.FuseTIR(),
        T.DeadCodeElimination(),
        ShareKernels(),
    ]


def vm_passes(is_cuda: bool) -> list[tvm.transform.Pass]:
    """Passes from scheduled kernels to VM code: memory planning, in-place reshapes, calls."""
    return [
        T.RewriteDataflowReshape(),
        T.ToNonDataflow(),
        T.RemovePurityChecking(),
        T.CallTIRRewrite(),
        T.StaticPlanBlockMemory(),
        T.LowerAllocTensor(),
        PlaceTensors(),
        *([KeepStorages()] if is_cuda else []),
        T.KillAfterLastUse(),
        T.LowerRuntimeBuiltin(),
        T.ComputePrimValue(),
        T.VMShapeLower(),
        T.AttachGlobalSymbol(),
    ]


def lower_stage(
    mod: tvm.IRModule, description: Mapping[str, Any], traces: Mapping[str, str] | None = None
) -> tuple[Any, ScheduleReport]:
    """Compile a stage module; return its executable and what the scheduling rules did.

    `traces` are tuned schedules by the hash of their function. A kernel that a rule schedules so that TVM cannot lower
    it is compiled as it came, and counted under "lowering" in `report.raised`; a tuned one raises. On CUDA a kernel
    that no rule takes, and that binds no threads by itself, raises ValueError.
    """
    target = make_target(description)
    report = ScheduleReport()
    is_cuda = target.kind.name == "cuda"
    with target:
        mod, scheduled = scheduled_kernels(mod, target, report, traces)
        if is_cuda:
            if report.unscheduled:  # TVM would make host code of them, which cannot read a GPU's memory
                raise ValueError(f"no rule binds threads in kernels {', '.join(sorted(report.unscheduled))}")
            return _to_vm(_CUDA_MATH(scheduled), target), report
        try:
            return _to_vm(_CPU_MATH(scheduled), target), report
        except Exception:  # one kernel may take the build down: find it, and compile it without its schedule
            return _to_vm(_CPU_MATH(_without_failing(scheduled, mod, target, report)), target), report


def scheduled_kernels(
    mod: tvm.IRModule, target: tvm.target.Target, report: ScheduleReport, traces: Mapping[str, str] | None = None
) -> tuple[tvm.IRModule, tvm.IRModule]:
    """Return a stage module with one function per kernel, before and after they are scheduled; within `target`."""
    names = [NameInC()] if target.kind.name == "cuda" else []
    mod = run_together(tvm.transform.Sequential([*kernel_passes(), *names])(mod), target, report)
    return mod, schedule_kernels(mod, target, report, traces)


def _to_vm(mod: tvm.IRModule, target: tvm.target.Target) -> Any:
    mod = tvm.transform.Sequential(vm_passes(target.kind.name == "cuda"))(mod)
    with source_only():
        return tvm.compile(mod, target=target, relax_pipeline=None)


def _without_failing(
    scheduled: tvm.IRModule, plain: tvm.IRModule, target: tvm.target.Target, report: ScheduleReport
) -> tvm.IRModule:
    """Return `scheduled` with the kernels that cannot be built alone put back as they were in `plain`."""
    out = scheduled.clone()
    for gvar, func in scheduled.functions_items():
        if not isinstance(func, PrimFunc):
            continue
        try:
            tvm.compile(_CPU_MATH(tvm.IRModule({"main": func.with_attr("global_symbol", "main")})), target=target)
        except Exception:  # the reason is TVM's; the count says that it happened
            if gvar.name_hint in report.tuned:
                raise
            report.raised["lowering"] += 1
            report.unscheduled.append(gvar.name_hint)
            out.update_func(gvar, plain[gvar.name_hint])
    return out


def lower_plain(mod: tvm.IRModule, description: Mapping[str, Any]) -> Any:
    """Compile a module as TVM does for its target, with our kernels' arithmetic of NaN and infinities.

    What the target's own pipeline refuses, which fuses, is compiled for CPUs as `tvm.compile` does by default, which
    does not. For GPUs that would leave kernels without threads.
    """
    target = make_target(description)
    is_cuda = target.kind.name == "cuda"
    mends = [BeginAtInfinity(is_cuda), KeepNan(is_cuda), *([UnrollBoolVectors()] if is_cuda else [])]
    with target:
        mod = tvm.transform.Sequential(_legal())(mod)
        try:
            return _plainly(mod, target, [relax.get_default_pipeline(target), *mends])
        except Exception as error:
            if is_cuda:
                raise
            _LOG.info("compiled without fusion, as the pipeline of %s raised: %s", target.kind.name, error)
            return _plainly(mod, target, [relax.get_pipeline("default"), *mends])


def _plainly(mod: tvm.IRModule, target: tvm.target.Target, passes: Sequence[tvm.transform.Pass]) -> Any:
    with source_only():
        return tvm.compile(mod, target=target, relax_pipeline=tvm.transform.Sequential(passes))
