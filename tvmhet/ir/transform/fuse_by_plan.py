"""Make exactly the planned kernels: one private Primitive function for each group of operators.

Before:  a = R.matmul(x, w)               After:  @R.function(private=True)
         b = R.add(a, bias)                       def fused_matmul_add_relu(x, w, bias):
         c = R.nn.relu(b)                             R.func_attr({"Primitive": True, "tvmhet.kernel": "c"})
                                                      ... a, b, c in one dataflow block ...
                                                  c = fused_matmul_add_relu(x, w, bias)

A kernel of one operator stays a plain call. Kernels are emitted in the order given, which must be an execution order
that covers every call of `main` once. Runs after NameOperators, before SplitByStage; LegalizeOps and FuseTIR then
make one PrimFunc of each group. Idempotent for the plan of its own output. Operators, attributes and parameters are
untouched.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax

from tvmhet.errors import BadGraph
from tvmhet.graph.placement import KernelPlacement
from tvmhet.ir.attrs import KERNEL_ATTR, PRIMITIVE_ATTR
from tvmhet.ir.bindings import Bindings, Emitter, flatten, live_ins, live_outs, outline, readers_of, rebuild_main
from tvmhet.ir.naming import operator_stem


def check_cover(bindings: Bindings, kernels: Sequence[KernelPlacement]) -> None:
    """Raise BadGraph unless `kernels` cover every call once and list them in an execution order."""
    made = set(bindings.param_names)
    covered: set[str] = set()
    for kernel in kernels:
        if unknown := [op for op in kernel.ops if op not in bindings.calls]:
            raise BadGraph(f"kernel {kernel.name!r} names operator {unknown[0]!r}, which main does not have")
        if twice := [op for op in kernel.ops if op in covered]:
            raise BadGraph(f"operator {twice[0]!r} is in two kernels, the second is {kernel.name!r}")
        for op in kernel.ops:
            if late := [t for t in bindings.reads(op) if t not in made]:
                raise BadGraph(f"kernel {kernel.name!r} runs before {late[0]!r}, which it reads, is made")
            made.update(flatten(bindings.results[op]))
        covered.update(kernel.ops)
    if missing := [op for op in bindings.calls if op not in covered]:
        raise BadGraph(f"operator {missing[0]!r} is in no kernel ({len(missing)} of {len(bindings.calls)} are not)")


def kernel_function(bindings: Bindings, kernel: KernelPlacement, outs: Sequence[str]) -> relax.Function:
    """Return the Primitive function of a kernel; its parameters are the kernel's live-ins in order of first use."""
    func = outline(bindings, kernel.ops, live_ins(bindings, kernel.ops), outs)
    return func.with_attr(PRIMITIVE_ATTR, True).with_attr(KERNEL_ATTR, kernel.name)


def fused_name(bindings: Bindings, kernel: KernelPlacement) -> str:
    """`fused_matmul_add_relu`; long chains are cut after six operators."""
    stems = [operator_stem(bindings.calls[op]) for op in kernel.ops]
    return "_".join(["fused", *stems[:6]]) + (f"_and_{len(stems) - 6}_more" if len(stems) > 6 else "")


@tvm.transform.module_pass(opt_level=0, name="tvmhet.FuseByPlan")
class FuseByPlan:
    """Group the calls of `main` into the given kernels."""

    def __init__(self, kernels: Sequence[KernelPlacement]) -> None:
        self.kernels = tuple(kernels)

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        bindings = Bindings(mod["main"])
        check_cover(bindings, self.kernels)
        readers = readers_of(bindings)

        def emit(emitter: Emitter, env: dict[str, relax.Expr]) -> None:
            for kernel in self.kernels:
                if len(kernel.ops) == 1:
                    op = kernel.ops[0]
                    env |= emitter.emit(bindings.rebuild(op, env), bindings.results[op], op)
                    continue
                ins = live_ins(bindings, kernel.ops)
                outs = live_outs(bindings, kernel.ops, readers)
                func = kernel_function(bindings, kernel, outs)
                gvar = emitter.builder.add_func(func, fused_name(bindings, kernel))
                call = relax.Call(gvar, [env[t] for t in ins], ret_ty=func.ret_ty)
                env |= emitter.emit(call, outs[0] if len(outs) == 1 else outs, kernel.name)

        return rebuild_main(mod, bindings, emit)
