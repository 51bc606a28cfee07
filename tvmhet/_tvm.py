"""Every TVM symbol that was renamed or is fragile, in one place: tested against apache-tvm 0.27.0.post1.

When TVM is upgraded, this file and its test are what to mend.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.s_tir import dlight
from tvm.support.cc import get_cc as host_compiler
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
    "onnx_convert_map",
    "relax_from_onnx",
    "s_tir",
    "structural_equal",
    "structural_hash",
]
