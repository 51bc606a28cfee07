"""Make exactly the planned kernels: one private Primitive function for each group of operators.

Before:  a = R.matmul(x, w)               After:  @R.function(private=True)
         b = R.add(a, bias)                       def fused_matmul_add_relu(x, w, bias):
         c = R.nn.relu(b)                             R.func_attr({"Primitive": True, "tvmhet.kernel": "c"})
                                                      ... a, b, c in one dataflow block ...
                                                  c = fused_matmul_add_relu(x, w, bias)

A kernel of one operator stays a plain call; a library kernel becomes `R.call_dps_packed("tvmhet.library", ...)`; of a
concurrent kernel a private function calls the kernels, branch by branch, and `RunTogether` makes it one PrimFunc.
Kernels are emitted in the order given, which must be an execution order that covers every call of `main` once. Runs
after NameOperators, before SplitByStage; LegalizeOps and FuseTIR then make one PrimFunc of each group. Idempotent for
the plan of its own output. Operators, attributes and parameters are untouched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import tvm
from tvm import relax

from tvmhet.errors import BadGraph
from tvmhet.graph.concurrent import CONCURRENT
from tvmhet.graph.placement import KernelPlacement
from tvmhet.ir.attrs import BRANCHES_ATTR, KERNEL_ATTR, LIBRARY_FUNCTION, PRIMITIVE_ATTR
from tvmhet.ir.bindings import Bindings, Emitter, flatten, live_ins, live_outs, outline, readers_of, rebuild_main
from tvmhet.ir.naming import operator_stem


def check_cover(bindings: Bindings, kernels: Sequence[KernelPlacement]) -> None:
    """Raise BadGraph unless `kernels` cover every call once and list them in an execution order."""
    made = set(bindings.param_names)
    covered: set[str] = set()
    for kernel in kernels:
        if unknown := [op for op in kernel.ops if op not in bindings.calls]:
            raise BadGraph(
                f"kernel {kernel.name!r} names operator {unknown[0]!r}, which main does not have",
                "plan this module again",
            )
        if twice := [op for op in kernel.ops if op in covered]:
            raise BadGraph(
                f"operator {twice[0]!r} is in two kernels, the second is {kernel.name!r}", "name each operator once"
            )
        for op in kernel.ops:
            if late := [t for t in bindings.reads(op) if t not in made]:
                raise BadGraph(
                    f"kernel {kernel.name!r} runs before {late[0]!r}, which it reads, is made",
                    "list kernels in execution order",
                )
            made.update(flatten(bindings.results[op]))
        covered.update(kernel.ops)
    if missing := [op for op in bindings.calls if op not in covered]:
        raise BadGraph(
            f"operator {missing[0]!r} is in no kernel ({len(missing)} of {len(bindings.calls)} are not)",
            "plan this module again",
        )


def kernel_function(bindings: Bindings, kernel: KernelPlacement, outs: Sequence[str]) -> relax.Function:
    """Return the Primitive function of a kernel: of its live-ins in order of first use, then its tensor constants.

    FuseTIR takes no tensor constant inside a group, so they are handed in, as FuseOps does.
    """
    constants = bindings.tensor_constants(kernel.ops)
    func = outline(bindings, kernel.ops, live_ins(bindings, kernel.ops), outs, constants=constants)
    return func.with_attr(PRIMITIVE_ATTR, True).with_attr(KERNEL_ATTR, kernel.name)


def fused_name(bindings: Bindings, kernel: KernelPlacement) -> str:
    """`fused_matmul_add_relu`; long chains are cut after six operators."""
    stems = [operator_stem(bindings.calls[op]) for op in kernel.ops]
    return "_".join(["fused", *stems[:6]]) + (f"_and_{len(stems) - 6}_more" if len(stems) > 6 else "")


def library_call(bindings: Bindings, kernel: KernelPlacement, env: Mapping[str, relax.Expr]) -> relax.Call:
    """Return the call of a library kernel: its spec, then its live-ins; the VM passes the result to write last."""
    args = [env[t] for t in live_ins(bindings, kernel.ops)]
    result = bindings.types[kernel.ops[-1]]
    return relax.call_dps_packed(LIBRARY_FUNCTION, relax.Tuple([tvm.ir.StringImm(kernel.spec), *args]), out_ty=result)


def concurrent_function(
    emitter: Emitter, bindings: Bindings, kernel: KernelPlacement, outs: Sequence[str]
) -> relax.Function:
    """Return the function of a concurrent kernel: of its live-ins, with a call for each kernel, branch after branch."""
    branches = json.loads(kernel.spec)
    members = [KernelPlacement(ops[-1], tuple(ops), "tvm") for branch in branches for ops in branch["kernels"]]
    readers = readers_of(bindings)
    inner = relax.BlockBuilder()
    params = [relax.Var(t, bindings.types[t]) for t in live_ins(bindings, kernel.ops)]
    env: dict[str, relax.Expr] = {p.name: p for p in params}
    body = Emitter(inner, frozenset(), frozenset(outs))
    with inner.function("concurrent", params, private=True):
        with inner.dataflow():
            for member in members:
                made = live_outs(bindings, member.ops, readers)
                env |= body.emit(member_call(emitter, bindings, member, env, made), made[0], member.name)
        inner.emit_func_output(env[outs[0]] if len(outs) == 1 else relax.Tuple([env[t] for t in outs]))
    counts = [[branch["work"], len(branch["kernels"])] for branch in branches]
    return inner.get()["concurrent"].with_attr(BRANCHES_ATTR, json.dumps(counts)).with_attr(KERNEL_ATTR, kernel.name)


def member_call(
    emitter: Emitter, bindings: Bindings, kernel: KernelPlacement, env: Mapping[str, relax.Expr], outs: Sequence[str]
) -> relax.Call:
    """Return the call of a generated kernel; the function of a fused one is added to the emitter's module."""
    if len(kernel.ops) == 1:
        return bindings.rebuild(kernel.ops[0], env)
    func = kernel_function(bindings, kernel, outs)
    gvar = emitter.builder.add_func(func, fused_name(bindings, kernel))
    args = [env[t] for t in live_ins(bindings, kernel.ops)]
    return relax.Call(gvar, [*args, *bindings.tensor_constants(kernel.ops)], ret_ty=func.ret_ty)


def emit_kernel(
    emitter: Emitter, bindings: Bindings, kernel: KernelPlacement, env: Mapping[str, relax.Expr], outs: Sequence[str]
) -> dict[str, relax.Expr]:
    """Emit one kernel over the values of `env`; return the values of its live-outs `outs`."""
    last = kernel.ops[-1]
    if kernel.maker == "library":
        return emitter.emit(library_call(bindings, kernel, env), last, kernel.name)
    if len(kernel.ops) == 1:
        return emitter.emit(bindings.rebuild(last, env), bindings.results[last], last)
    if kernel.maker == CONCURRENT:
        func = concurrent_function(emitter, bindings, kernel, outs)
        gvar = emitter.builder.add_func(func, fused_name(bindings, kernel).replace("fused", "concurrent", 1))
        call = relax.Call(gvar, [env[t] for t in live_ins(bindings, kernel.ops)], ret_ty=func.ret_ty)
    else:
        call = member_call(emitter, bindings, kernel, env, outs)
    return emitter.emit(call, outs[0] if len(outs) == 1 else tuple(outs), kernel.name)


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
                env |= emit_kernel(emitter, bindings, kernel, env, live_outs(bindings, kernel.ops, readers))

        return rebuild_main(mod, bindings, emit)
