"""Make one product of several that read one tensor: their weights concatenated, their results slices of its result.

Before:  q  = R.matmul(x, wq)             After:  w  = R.concat((wq, wk), axis=1)
         q1 = R.add(q, bq)                        q_merged  = R.matmul(x, w)
         k  = R.matmul(x, wk)                     b  = R.concat((bq, bk), axis=0)
         k1 = R.add(k, bk)                        q1_merged = R.add(q_merged, b)
                                                  q1 = R.strided_slice(q1_merged, axes=[1], begin=[0], end=[4])
                                                  k1 = R.strided_slice(q1_merged, axes=[1], begin=[4], end=[8])

Convolutions are merged along their output channels. Weights and biases must be parameters that nothing else reads:
`fold_parameters`, which runs next, then makes the concatenated ones parameters, so nothing is concatenated at run
time. Runs after NameOperators, before FuseByPlan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import tvm
from tvm import relax

from tvmhet.errors import BadGraph
from tvmhet.graph.rewrites import Merge, merged_names
from tvmhet.ir.bindings import Bindings, Emitter, readers_of, rebuild_main
from tvmhet.ir.rewrite import op_name, shape_of

#: For each product: the output channels' axis in its result, in its weight, and in its bias counted from the end.
CHANNEL_AXIS = {"matmul": (-1, 1, -1), "nn.conv2d": (1, 0, -3)}


@tvm.transform.module_pass(opt_level=0, name="tvmhet.MergeProducts")
class MergeProducts:
    """Apply disjoint `Merge`s to `main`. Raises BadGraph if members are not products of one tensor by parameters."""

    def __init__(self, rewrites: Sequence[Merge]) -> None:
        self.rewrites = tuple(rewrites)

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        bindings = Bindings(mod["main"])
        check_merges(bindings, self.rewrites)
        merge_of = {name: i for i, rewrite in enumerate(self.rewrites) for m in rewrite.members for name in m}
        names = merged_names(self.rewrites, {*bindings.calls, *bindings.types})
        begun: set[int] = set()

        def emit(emitter: Emitter, env: dict[str, relax.Expr]) -> None:
            for call in bindings.calls:
                i = merge_of.get(call)
                if i is None:
                    env |= emitter.emit(bindings.rebuild(call, env), bindings.results[call], call)
                elif i not in begun:
                    begun.add(i)
                    _emit_merged(emitter, bindings, self.rewrites[i], names[i], env)

        return rebuild_main(mod, bindings, emit)


def _emit_merged(
    emitter: Emitter, bindings: Bindings, rewrite: Merge, names: tuple[str, ...], env: dict[str, relax.Expr]
) -> None:
    """Emit the merged operators and the slices; leave the members' results in `env`."""
    builder, lead = emitter.builder, rewrite.members[0]
    axis, weight_axis, bias_axis = CHANNEL_AXIS[op_name(bindings.calls[lead[0]])]
    made: dict[str, relax.Expr] = {}  # by the name of the first member's operator
    for step, (old, name) in enumerate(zip(lead, names, strict=True)):
        seen = env | made
        parameter = _parameter(bindings, rewrite.members[0], step)
        if parameter is not None:
            parts = [_parameter(bindings, member, step) for member in rewrite.members]
            along = weight_axis if step == 0 else bias_axis + len(shape_of(env[parameter]) or ())
            joined = relax.op.concat([env[p] for p in parts if p is not None], axis=along)
            seen[parameter] = builder.emit(joined, name_hint=f"{name}_{'bias' if step else 'weight'}")
        call = bindings.rebuild(old, seen)
        made[old] = builder.emit(relax.Call(call.op, call.args, call.attrs, call.ty_args), name_hint=name)
    result = made[lead[-1]]
    axis %= len(shape_of(result) or ())
    begin = 0
    for member in rewrite.members:
        shape = shape_of(bindings.calls[member[-1]])
        assert shape is not None
        end = begin + shape[axis]
        piece = relax.op.strided_slice(result, axes=[axis], begin=[begin], end=[end])
        env |= emitter.emit(piece, bindings.results[member[-1]], member[-1])
        begin = end


def _parameter(bindings: Bindings, member: tuple[str, ...], step: int) -> str | None:
    """The parameter that a member's operator reads beside what runs before it; None for an activation."""
    before = member[step - 1] if step else None
    others = [t for t in bindings.reads(member[step]) if t != before]
    return others[-1] if others and others[-1] not in bindings.producer else None


def check_merges(bindings: Bindings, rewrites: Sequence[Merge]) -> None:
    """Raise BadGraph unless merges are disjoint and each one's members alike: one operand, parameters of their own."""
    names = [name for rewrite in rewrites for member in rewrite.members for name in member]
    if missing := [name for name in names if name not in bindings.calls]:
        raise BadGraph(f"merge names operator {missing[0]!r}, which main does not have", "plan this module again")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadGraph(f"operator {twice!r} is in two merges", "name it in one")
    readers = readers_of(bindings)
    for rewrite in rewrites:
        _check_members(bindings, rewrite, readers)


def _check_members(bindings: Bindings, rewrite: Merge, readers: Mapping[str, frozenset[str]]) -> None:
    operands, families = set(), set()
    for member in rewrite.members:
        families.add(tuple(op_name(bindings.calls[name]) for name in member))
        operands.add(bindings.reads(member[0])[0])
        parameters = [_parameter(bindings, member, step) for step in range(len(member))]
        alone = all(len(readers[p]) == 1 for p in parameters if p is not None)
        chained = all(readers.get(a) == frozenset({b}) for a, b in pairwise(member))
        if parameters[0] is None or not alone or not chained:
            raise BadGraph(f"{member[0]!r} cannot be merged: others read its weights or its result", "plan again")
    if len(operands) != 1 or len(families) != 1 or next(iter(families))[0] not in CHANNEL_AXIS:
        raise BadGraph(f"merged operators {rewrite.members} are not alike", "plan this module again")
