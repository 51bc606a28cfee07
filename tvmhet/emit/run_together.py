"""Make one kernel of branches that run at the same time: a parallel loop, each step of which is one core's share.

Before:  concurrent(x, w0, w1):  {"tvmhet.branches": [[work, 1], [work, 2]]}
             a = call_tir(conv, (x, w0));  b = call_tir(pool, (x,));  c = call_tir(conv1, (b, w1));  return a, c
         main:  y = concurrent(x, w0, w1)

After:   main:  y = call_tir(concurrent, (x, w0, w1), out: a, c, b);  (y[0], y[1])
         concurrent:  for share in T.parallel(2):
                          if share == 0: conv's body
                          else: pool's body, conv1's body

Every kernel is scheduled for one core. What lies between kernels of a branch is a result of the call, so that memory
planning places it; each tensor is one parameter, however many kernels read it, as kernels may say that their parameters
do not overlap. Runs after ShareKernels, before kernels are scheduled. A module without branches is left alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.s_tir import SBlock, SBlockRealize

from tvmhet._tvm import PrimFunc, renew_defs
from tvmhet.emit.cpu.nests import apart
from tvmhet.emit.schedule import SCHEDULED_ATTR, ScheduleReport, schedule_kernels
from tvmhet.errors import NotSupported
from tvmhet.graph.concurrent import shares
from tvmhet.ir.attrs import BRANCHES_ATTR

_INT = "int64"


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a kernel: its results by name, its function and its arguments."""

    made: tuple[relax.Var, ...]
    func: tvm.ir.GlobalVar
    args: tuple[relax.Expr, ...]


def run_together(mod: tvm.IRModule, target: tvm.target.Target, report: ScheduleReport) -> tvm.IRModule:
    """Return `mod` with one kernel for each function of branches. Raises NotSupported if one cannot be merged."""
    branches = {g: f for g, f in mod.functions_items() if isinstance(f, relax.Function) and _spec(f)}
    if not branches:
        return mod
    cores = int(target.attrs.get("num-cores", 1))
    one_core = tvm.target.Target({**target.export(), "num-cores": 1})
    builder = relax.BlockBuilder(mod)
    merged = {g: _Merged.of(builder, g.name_hint, f, cores, one_core, report) for g, f in branches.items()}
    calls = _Calls(merged)
    out = {
        g: calls.visit_expr(f) if isinstance(f, relax.Function) else f
        for g, f in builder.get().functions_items()
        if g not in branches
    }
    return relax.transform.DeadCodeElimination()(tvm.IRModule(out, attrs=mod.attrs, global_infos=mod.global_infos))


def _spec(func: relax.Function) -> str:
    return str(func.attrs[BRANCHES_ATTR]) if func.attrs and BRANCHES_ATTR in func.attrs else ""


@dataclass(frozen=True, slots=True)
class _Merged:
    """The merged kernel, what it is called with, and which of its results the function of branches returns.

    `args` are the function's parameters, and constants; `out_types` those of its results and of what lies between.
    """

    func: tvm.ir.GlobalVar
    params: tuple[relax.Var, ...]
    args: tuple[relax.Expr, ...]
    out_types: tuple[Any, ...]
    returned: tuple[int, ...]
    returns_tuple: bool

    @staticmethod
    def of(
        builder: relax.BlockBuilder,
        name: str,
        func: relax.Function,
        cores: int,
        one_core: tvm.target.Target,
        report: ScheduleReport,
    ) -> _Merged:
        """Merge the kernels that a function of branches calls, and add the result to the builder's module."""
        mod = builder.get()
        calls, results = _read(name, func)
        counts = json.loads(_spec(func))
        if sum(n for _, n in counts) != len(calls):
            raise NotSupported(
                f"the branches of {name!r} became {len(calls)} kernels, planned were {sum(n for _, n in counts)}",
                'plan with ablate="no-concurrent"',
            )
        used = {call.func for call in calls}
        alone = schedule_kernels(tvm.IRModule({g: mod[g] for g in used}), one_core, report)
        by_name = {g.name_hint: f for g, f in alone.functions_items()}
        buffers: dict[Any, Any] = {}  # relax value -> the merged function's parameter
        bodies = [_body(by_name[call.func.name_hint], [*call.args, *call.made], buffers) for call in calls]
        made = [v for call in calls for v in call.made]
        read = [v for v in buffers if v not in made]
        starts = [sum(n for _, n in counts[:b]) for b in range(len(counts))]
        parts = shares([work for work, _ in counts], cores)
        loop = _parallel([[s for b in part for s in bodies[starts[b] : starts[b] + counts[b][1]]] for part in parts])
        merged = PrimFunc([buffers[v] for v in (*read, *made)], loop).with_attrs(
            {"tirx.noalias": True, "s_tir": True, SCHEDULED_ATTR: True}
        )
        return _Merged(
            builder.add_func(merged, f"{name}_at_once"),
            tuple(func.params),
            tuple(read),
            tuple(v.ty for v in made),
            tuple(made.index(v) for v in results),
            isinstance(func.ret_ty, relax.TupleType),
        )

    def call(self, args: Sequence[relax.Expr]) -> relax.Expr:
        """Return the call over the arguments of the function of branches."""
        given = dict(zip(self.params, args, strict=True))
        return relax.call_tir(self.func, relax.Tuple([given.get(a, a) for a in self.args]), out_ty=list(self.out_types))


def _read(name: str, func: relax.Function) -> tuple[list[_Call], list[relax.Var]]:
    """The calls of kernels in a function, and the values that it returns."""
    calls: list[_Call] = []
    same: dict[relax.Var, Any] = {}
    for block in func.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.Call) and str(getattr(value.op, "name", "")) == "relax.call_tir":
                calls.append(_Call((binding.var,), value.args[0], tuple(same.get(a, a) for a in value.args[1].fields)))
            elif isinstance(value, (relax.Var, relax.Tuple)):
                same[binding.var] = same.get(value, value)
            else:
                raise NotSupported(
                    f"{name!r} holds {binding.var.name!r}, which is no generated kernel",
                    'plan with ablate="no-concurrent"',
                )
    result = same.get(func.body.body, func.body.body)
    fields = list(result.fields) if isinstance(result, relax.Tuple) else [result]
    return calls, [same.get(v, v) for v in fields]


def _body(func: PrimFunc, values: Sequence[relax.Expr], buffers: dict[Any, Any]) -> Any:
    """The body of a kernel over the buffers of some values; those that have none yet take the kernel's own."""
    own = renew_defs(func)
    swap: dict[Any, Any] = {}
    for param, value in zip(own.params, values, strict=True):
        swap[param] = buffers.setdefault(value, param)
    return tvm_ffi.structural_map(own.body, (tvm.ir.Var, lambda v: swap.get(v, v)))


def _parallel(parts: Sequence[Sequence[Any]]) -> SBlockRealize:
    """A parallel loop over the parts, each a function of its own, as a root block."""
    share = tirx.Var("share", _INT)
    bodies = [part[0] if len(part) == 1 else tirx.SeqStmt(list(part)) for part in parts]
    if len(bodies) > 1:
        bodies = [apart("share", body) for body in bodies]  # see `cpu/shares.py`
    body = bodies[-1]
    for k in range(len(bodies) - 2, -1, -1):
        body = tirx.IfThenElse(tirx.EQ(share, tirx.IntImm(_INT, k)), bodies[k], body)
    if len(bodies) > 1:
        body = tirx.For(share, tirx.IntImm(_INT, 0), tirx.IntImm(_INT, len(bodies)), tirx.ForKind.PARALLEL, body)
    return SBlockRealize([], tirx.IntImm("bool", 1), SBlock([], [], [], "root", body))


@relax.expr_functor.mutator
class _Calls(relax.PyExprMutator):
    """Calls merged kernels in place of the functions of branches."""

    def __init__(self, merged: Mapping[tvm.ir.GlobalVar, _Merged]) -> None:
        super().__init__()
        self._merged = merged

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Replace a call of a function of branches by one of its kernel, and the choice of its results."""
        call = self.visit_expr_post_order(call)
        merged = self._merged.get(call.op) if isinstance(call.op, tvm.ir.GlobalVar) else None
        if merged is None:
            return call
        every = self.builder_.emit(merged.call(list(call.args)))
        chosen = [relax.TupleGetItem(every, i) if len(merged.out_types) > 1 else every for i in merged.returned]
        return relax.Tuple(chosen) if merged.returns_tuple else chosen[0]
