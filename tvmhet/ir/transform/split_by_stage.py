"""Outline one function per stage; `main` only calls them and hands their live-outs on.

Before:  a = R.nn.relu(x)                 After:  def stage0(x):     R.func_attr({"tvmhet.stage": 0})   return (a,)
         b = R.exp(a)                             def stage1(a):     R.func_attr({"tvmhet.stage": 1})   return (b,)
         c = R.add(a, b)                          def stage2(a, b):  R.func_attr({"tvmhet.stage": 2})   return (c,)
                                                  main:  a = stage0(x)[0];  b = stage1(a)[0];  c = stage2(a, b)[0]

A stage takes its live-in tensors, then the weights it reads, each in order of first use, and always returns a tuple
of its live-outs. Stages are given in an execution order. Runs after FuseByPlan; kernels and calls are untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from tvmhet.errors import BadGraph
from tvmhet.ir.attrs import NUM_INPUT_ATTR, STAGE_ATTR
from tvmhet.ir.bindings import Bindings, Emitter, live_ins, live_outs, outline, readers_of, rebuild_main


@dataclass(frozen=True, slots=True)
class StageInterface:
    """What a stage reads and leaves: live-in tensors, weights, live-out tensors, by name."""

    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]


def check_stages(bindings: Bindings, stages: Sequence[Sequence[str]]) -> None:
    """Raise BadGraph unless `stages` hold every call once, in an execution order, and none is empty."""
    stage_of: dict[str, int] = {}
    for i, names in enumerate(stages):
        if not names:
            raise BadGraph(f"stage {i} is empty", "leave it out")
        for name in names:
            if name not in bindings.calls:
                raise BadGraph(f"stage {i} names call {name!r}, which main does not have", "name calls of main")
            if name in stage_of:
                raise BadGraph(f"call {name!r} is in two stages, {stage_of[name]} and {i}", "name each call once")
            stage_of[name] = i
    if missing := [name for name in bindings.calls if name not in stage_of]:
        raise BadGraph(
            f"call {missing[0]!r} is in no stage ({len(missing)} of {len(bindings.calls)} are not)",
            "name each call once",
        )
    place = {name: k for k, name in enumerate(stage_of)}
    for name, i in stage_of.items():
        for t in bindings.reads(name):
            if (maker := bindings.producer.get(t)) is None or place[maker] < place[name]:
                continue
            if stage_of[maker] > i:
                raise BadGraph(f"stage {i} reads {t!r}, which a later stage makes", "list stages in execution order")
            raise BadGraph(f"stage {i}: {name!r} runs before {t!r}, which it reads, is made", "reorder its calls")


def stage_interfaces(bindings: Bindings, stages: Sequence[Sequence[str]]) -> tuple[StageInterface, ...]:
    """Return the interface of each stage, a sequence of call names. Raises BadGraph for stages that cannot be run."""
    check_stages(bindings, stages)
    weights = set(bindings.param_names[bindings.num_input :])
    readers = readers_of(bindings)
    interfaces = []
    for names in stages:
        ins = live_ins(bindings, names)
        interfaces.append(
            StageInterface(
                inputs=tuple(t for t in ins if t not in weights),
                weights=tuple(t for t in ins if t in weights),
                outputs=live_outs(bindings, names, readers),
            )
        )
    return tuple(interfaces)


def stage_function(bindings: Bindings, names: Sequence[str], interface: StageInterface) -> relax.Function:
    """Return the function of one stage, which returns a tuple even of one tensor."""
    func = outline(bindings, names, (*interface.inputs, *interface.weights), interface.outputs, always_tuple=True)
    return func.with_attr(NUM_INPUT_ATTR, len(interface.inputs))


@tvm.transform.module_pass(opt_level=0, name="tvmhet.SplitByStage")
class SplitByStage:
    """Outline `stages[i]`, a sequence of call names of `main`, as function `stage<i>`."""

    def __init__(self, stages: Sequence[Sequence[str]]) -> None:
        self.stages = tuple(tuple(names) for names in stages)

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        bindings = Bindings(mod["main"])
        interfaces = stage_interfaces(bindings, self.stages)

        def emit(emitter: Emitter, env: dict[str, relax.Expr]) -> None:
            for i, (names, interface) in enumerate(zip(self.stages, interfaces, strict=True)):
                func = stage_function(bindings, names, interface).with_attr(STAGE_ATTR, i)
                gvar = emitter.builder.add_func(func, f"stage{i}")
                args = [env[t] for t in (*interface.inputs, *interface.weights)]
                call = relax.Call(gvar, args, ret_ty=func.ret_ty)
                env |= emitter.emit(call, interface.outputs, f"stage{i}")

        return rebuild_main(mod, bindings, emit)
