"""Every TVM symbol that was renamed or is fragile, in one place: tested against apache-tvm 0.27.0.post1.

When TVM is upgraded, this file and its test are what to mend.
"""

from __future__ import annotations

import json
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.s_tir import dlight, meta_schedule
from tvm.s_tir.meta_schedule import tune_context as tune_context_module
from tvm.support.cc import get_cc as host_compiler
from tvm.sym import Analyzer
from tvm.sym.pattern import detect_linear_equation

TVM_VERSION: str = tvm.__version__

PrimFunc = tirx.PrimFunc
Call = relax.Call
Constant = tvm.ir.GenericConst
TensorLoad = tvm.ir.expr.TensorLoad
SBlock = s_tir.SBlock
SBlockRealize = s_tir.SBlockRealize
access_regions = s_tir.analysis.get_sblock_access_region
estimate_tir_flops = s_tir.analysis.estimate_tir_flops
renew_defs = s_tir.renew_defs
structural_hash = tvm_ffi.structural_hash
structural_equal = tvm_ffi.structural_equal


def from_exported_program(*args: Any, **options: Any) -> tvm.IRModule:
    """Convert a torch export; TVM's module is imported here because it needs torch, which running a bundle does not."""
    from tvm.relax.frontend.torch import from_exported_program as convert

    return convert(*args, **options)


def exported_program_importer() -> Any:
    """Return TVM's class that converts torch exports; needs torch."""
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

    return ExportedProgramImporter


def replay(mod: tvm.IRModule, trace: Any) -> Any:
    """Return the schedule of `mod` by a MetaSchedule trace in its JSON form."""
    schedule = s_tir.Schedule(mod)
    s_tir.schedule.Trace.apply_json_to_schedule(trace, schedule)
    return schedule


def trace_json(trace: Any) -> str:
    """Return a MetaSchedule trace in its JSON form, as text."""
    return json.dumps(_plain(trace.as_json()), separators=(",", ":"))


def _plain(node: Any) -> Any:
    """Numbers in a trace come as TVM's immediates."""
    if node is None or isinstance(node, str | int | float):
        return node
    return node.value if hasattr(node, "value") else [_plain(part) for part in node]


def tune_context(mod: tvm.IRModule, target: Any, *, seed: int, population: int, generations: int) -> Any:
    """Return a MetaSchedule context: evolutionary search over the default space of the target's kind.

    Built by hand because the constructor of TuneContext first imports every tensor intrinsic, which the default spaces
    of llvm and cuda do not use: 496 calls of `inspect.stack()`, 7 to 29 CPU s. A logging function that says nothing
    keeps the search's own report off the terminal.
    """
    kind = target.kind.name
    space = meta_schedule.space_generator.PostOrderApply(sch_rules=kind, postprocs=kind, mutator_probs=kind)
    strategy = meta_schedule.search_strategy.EvolutionarySearch(
        population_size=population, init_min_unmeasured=population // 2, genetic_num_iters=generations
    )
    made = tune_context_module.TuneContext
    context = made.__new__(made)
    context.__init_handle_by_constructor__(
        tune_context_module._ffi_api.TuneContext, mod, target, space, strategy, "tvmhet", 1, max(1, seed), _silent
    )
    tune_context_module._ffi_api.TuneContextInitialize(context)
    return context


def _silent(_level: int, _file: str, _line: int, _text: str) -> None:
    """Drop a message of the search."""


def measure_candidate(mod: tvm.IRModule, trace: Any) -> Any:
    """Return MetaSchedule's candidate for `mod` scheduled by a trace in its JSON form."""
    schedule = replay(mod, trace)
    args = meta_schedule.arg_info.ArgInfo.from_entry_func(mod, remove_preproc=True)
    return meta_schedule.search_strategy.MeasureCandidate(schedule, args)


def relax_from_onnx(proto: Any) -> tvm.IRModule:
    """Convert an ONNX model; TVM's module is imported here because it needs the package onnx, which is optional."""
    from tvm.relax.frontend.onnx import from_onnx

    return from_onnx(proto)


def onnx_convert_map() -> dict[str, Any]:
    """Return TVM's ONNX converters by operator name; needs the package onnx."""
    from tvm.relax.frontend.onnx.onnx_frontend import _get_convert_map

    return dict(_get_convert_map())


__all__ = [
    "TVM_VERSION",
    "Analyzer",
    "Call",
    "Constant",
    "PrimFunc",
    "TensorLoad",
    "detect_linear_equation",
    "dlight",
    "estimate_tir_flops",
    "exported_program_importer",
    "from_exported_program",
    "host_compiler",
    "measure_candidate",
    "meta_schedule",
    "onnx_convert_map",
    "relax_from_onnx",
    "renew_defs",
    "replay",
    "s_tir",
    "structural_equal",
    "structural_hash",
    "trace_json",
    "tune_context",
]


def drop_unfinished(error: BaseException) -> None:
    """End the blocks that front ends left open where `error` arose: TVM warns on standard error of those it finds open.

    Builders are found in the frames of the traceback.
    """
    trace = error.__traceback__
    builders: list[relax.BlockBuilder] = []
    while trace is not None:
        for value in list(trace.tb_frame.f_locals.values()):
            builder = getattr(value, "block_builder", getattr(value, "bb", value))
            if isinstance(builder, relax.BlockBuilder) and not any(builder.same_as(b) for b in builders):
                builders.append(builder)
        trace = trace.tb_next
    for builder in builders:
        try:
            while True:
                builder._end_block()
        except tvm.error.InternalError:  # no block is left
            continue
