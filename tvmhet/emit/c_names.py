"""Give kernels' tensors names that are identifiers in C, as the source of a CUDA kernel needs them.

Before:  prim_func matmul(0_norm1: Buffer, w.x: Buffer)      After:  prim_func matmul(v0_norm1: Buffer, w_x: Buffer)

Tensors carry the names of the model's operators ("0.norm1" of a list of layers), and TVM writes a leading digit as it
stands. Runs before scheduling, which derives further names from these. Two names may become one: TVM keeps them apart.
"""

from __future__ import annotations

import re
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvmhet._tvm import PrimFunc


def c_name(name: str) -> str:
    """Return `name` with what C does not allow in an identifier replaced.

    >>> c_name("0.norm1"), c_name("weight")
    ('v0_norm1', 'weight')
    """
    plain = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return f"v{plain}" if plain[:1].isdigit() else plain


@tirx.transform.prim_func_pass(opt_level=0, name="tvmhet.NameInC")
class NameInC:
    """Rename the variables of every PrimFunc; Relax functions are untouched."""

    def transform_function(self, func: PrimFunc, _mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> PrimFunc:
        """Return the same function up to names."""
        return _renamed(func)


def _renamed(func: PrimFunc) -> PrimFunc:
    fresh: dict[Any, Any] = {}

    def rename(var: Any) -> Any:
        name = c_name(str(var.name))
        return var if name == var.name else fresh.setdefault(var, tvm.ir.Var(name, var.ty))

    return tvm_ffi.structural_map(func, (tvm.ir.Var, rename))
