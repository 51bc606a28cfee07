"""Take TVM's own device annotations out: where what runs is what the plan decides.

Before:  main(x: (4,) on llvm:0):  y = R.to_vdevice(x, llvm:1)        After:  main(x: (4,)):  z = R.exp(x)
                                   z = R.exp(y)

Types lose their device, and operators that only move a tensor or say where it shall be disappear.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from tvmhet.ir.rewrite import Rebuild, Step, bindings_of, op_name, rewrite_straight_lines

_MOVES = ("to_vdevice", "hint_on_device")


@tvm.transform.module_pass(opt_level=0, name="tvmhet.ForgetDevices")
class ForgetDevices:
    """Remove devices from types, and operators that name them."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return rewrite_straight_lines(mod, _make_step, _without_device)


def _make_step(func: relax.Function) -> Step | None:
    placed = any(_device(v.ty) for v in (*func.params, *(b.var for b in bindings_of(func))))
    return _step if placed or any(op_name(b.value) in _MOVES for b in bindings_of(func)) else None


def _step(_state: Rebuild, _var: relax.Var, value: Any) -> Any:
    return value.args[0] if op_name(value) in _MOVES else value


def _without_device(func: relax.Function) -> dict[relax.Var, relax.Var]:
    return {p: relax.Var(p.name, _anywhere(p.ty)) for p in func.params if _device(p.ty)}


def _device(ty: object) -> bool:
    return isinstance(ty, relax.TensorType) and ty.vdevice is not None


def _anywhere(ty: relax.TensorType) -> relax.TensorType:
    return (
        relax.TensorType(ty.shape, ty.dtype) if ty.shape is not None else relax.TensorType(dtype=ty.dtype, ndim=ty.ndim)
    )
