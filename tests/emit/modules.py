"""Small stage modules that the tests of emit share."""

from __future__ import annotations

import tvm
from tvm import relax

from tvmhet.ir.attrs import NUM_INPUT_ATTR

SIDE = 8


def chain(*names: str, side: int = SIDE) -> tvm.IRModule:
    """main(x, w): the operators one after the other on a square float32 matrix; "matmul" multiplies by w."""
    builder = relax.BlockBuilder()
    ty = relax.TensorType((side, side), "float32")
    x, w = relax.Var("x", ty), relax.Var("w", ty)
    with builder.function("main", [x, w], attrs={NUM_INPUT_ATTR: 1}):
        with builder.dataflow():
            value = x
            for i, name in enumerate(names):
                call = relax.op.matmul(value, w) if name == "matmul" else getattr(relax.op, name)(value)
                value = builder.emit(call, name_hint=f"{name}{i}")
            out = builder.emit_output(relax.Tuple([value]))
        builder.emit_func_output(out)
    return builder.get()


def unsupported(side: int = SIDE) -> tvm.IRModule:
    """main(x): exp, then a PrimFunc "broken" that needs a GPU's warps, which no CPU target can compile, then exp."""
    x = tvm.te.placeholder((side,), "float32", name="x")
    y = tvm.te.compute(
        (side,), lambda i: tvm.tirx.call_intrin("float32", "tirx.tvm_warp_shuffle", *[x[i]] * 5), name="y"
    )
    builder = relax.BlockBuilder()
    v = relax.Var("x", relax.TensorType((side,), "float32"))
    gvar = builder.add_func(tvm.te.create_prim_func([x, y]).with_attr("global_symbol", "broken"), "broken")
    with builder.function("main", [v], attrs={NUM_INPUT_ATTR: 1}):
        with builder.dataflow():
            before = builder.emit(relax.op.exp(v), name_hint="before")
            shuffled = builder.emit(relax.call_tir(gvar, [before], v.ty), name_hint="shuffled")
            after = builder.emit(relax.op.exp(shuffled), name_hint="after")
            out = builder.emit_output(relax.Tuple([after]))
        builder.emit_func_output(out)
    return builder.get()
