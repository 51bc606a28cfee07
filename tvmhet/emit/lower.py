"""A planned stage -> a Relax VM executable for one target, through TVM's own lowering passes.

    dispatch sort, scan, sampling -> LegalizeOps -> FuseTIR (the plan's groups, nothing else) -> schedule -> VM lowering

Plain `tvm.compile` runs the same passes without the fusion, so a stage whose kernels are single operators gets the
same code from both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
from tvm import relax

from tvmhet.emit.schedule import ScheduleReport, schedule_for_cuda

LOWERING_VERSION = 1  # part of every cache key: raise it when the code made from a stage changes

T = relax.transform


def make_target(description: Mapping[str, Any]) -> tvm.target.Target:
    """Return the TVM target of a device type's `target` mapping; a CUDA target gets an llvm host."""
    plain = dict(description)
    host = "llvm" if plain.get("kind") == "cuda" else None
    return tvm.target.Target(plain, host=host)


def kernel_passes() -> list[tvm.transform.Pass]:
    """Passes that turn planned groups and single operators into one PrimFunc each."""
    return [
        relax.backend.DispatchSampling(),
        relax.backend.DispatchSortScan(),
        T.LegalizeOps(),
        T.AnnotateTIROpPattern(),
        T.FuseTIR(),
        T.DeadCodeElimination(),
    ]


def vm_passes(is_cuda: bool) -> list[tvm.transform.Pass]:
    """Passes from scheduled kernels to VM code: memory planning, in-place reshapes, calls."""
    passes = [
        T.RewriteDataflowReshape(),
        T.ToNonDataflow(),
        T.RemovePurityChecking(),
        T.CallTIRRewrite(),
        T.StaticPlanBlockMemory(),
    ]
    if is_cuda:
        passes.append(T.RewriteCUDAGraph())
    return [
        *passes,
        T.LowerAllocTensor(),
        T.KillAfterLastUse(),
        T.LowerRuntimeBuiltin(),
        T.ComputePrimValue(),
        T.VMShapeLower(),
        T.AttachGlobalSymbol(),
    ]


def lower_stage(mod: tvm.IRModule, description: Mapping[str, Any]) -> tuple[Any, ScheduleReport]:
    """Compile a stage module; return its executable and what the scheduling rules did."""
    target = make_target(description)
    report = ScheduleReport()
    is_cuda = target.kind.name == "cuda"
    with target:
        mod = tvm.transform.Sequential(kernel_passes())(mod)
        if is_cuda:
            mod = schedule_for_cuda(mod, target, report)
        mod = tvm.transform.Sequential(vm_passes(is_cuda))(mod)
        return tvm.compile(mod, target=target, relax_pipeline=None), report


def lower_plain(mod: tvm.IRModule, description: Mapping[str, Any]) -> Any:
    """Compile a module as `tvm.compile` does by default."""
    target = make_target(description)
    with target:
        return tvm.compile(mod, target=target)
