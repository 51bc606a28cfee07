"""Plan anew which tensors of a stage share a storage: what leaves it first, then the largest.

Before:  s0 = storage(36);  a = tensor(s0, 36);  f(x, a)
         s1 = storage(9);   b = tensor(s1, 9);   f(a, b)
                            c = tensor(s0, 9);   f(b, c)        nobody reads a any more
         s2 = storage(36);  d = tensor(s2, 36);  f(b, c, d)     s0 is taken
         s3 = storage(36);  y = tensor(s3, 36);  f(d, y)
         return y

After:   as before, but
                            y = tensor(s0, 36);  f(d, y)        a and c are where y will be

TVM plans in the order of time, where a small tensor takes the large storage that the next large one would need, and
gives what leaves a function memory that nothing else was in. Runs after LowerAllocTensor, so that results have
storages, too. A function with branches, with a size that is not constant, or with memory of several devices, stays as
TVM planned it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import tvm
from tvm import relax

from tvmhet.emit.allocations import STORAGE, TENSOR, allocates, sizes
from tvmhet.graph.storage import Life, share


@tvm.transform.module_pass(opt_level=0, name="ShareStorages")
class ShareStorages:
    """The module with the storages of each function planned anew."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return a module whose functions differ in nothing but their storages."""
        out = mod.clone()
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function) and _is_straight(function):
                out[name] = _planned(function)
        return out


def _is_straight(function: relax.Function) -> bool:
    """Whether every step of a function is taken once, in order, every size is known, and all memory is of one kind."""
    values = [b.value for block in function.body.blocks for b in block.bindings]
    places = {(int(v.args[1]), str(v.args[2])) for v in values if allocates(v, STORAGE)}
    return (
        not any(isinstance(v, relax.If | relax.Function) for v in values)
        and all(isinstance(size, tvm.tirx.IntImm) for v in values for size in sizes(v))
        and len(places) == 1
    )


def _planned(function: relax.Function) -> relax.Function:
    bindings = [b for block in function.body.blocks for b in block.bindings]
    last = _last_uses(bindings, function.body.body)
    tensors = [i for i, b in enumerate(bindings) if allocates(b.value, TENSOR)]
    numbers, bytes_of = share([Life(i, last[i], _size_bytes(bindings[i].value)) for i in tensors], len(bindings))
    number = dict(zip(tensors, numbers, strict=True))
    rest = next(b.value for b in bindings if allocates(b.value, STORAGE)).args[1:]
    builder, made, out = relax.BlockBuilder(), dict[int, relax.Var](), list[relax.Binding]()
    for i, binding in enumerate(bindings):
        if i in number:
            if number[i] not in made:
                size = relax.ShapeExpr([bytes_of[number[i]]])
                storage = builder.normalize(relax.Call(STORAGE, [size, *rest]))
                made[number[i]] = relax.Var("storage", storage.ty)
                out.append(relax.VarBinding(made[number[i]], storage))
            tensor = relax.Call(TENSOR, [made[number[i]], *binding.value.args[1:]])
            out.append(relax.VarBinding(binding.var, builder.normalize(tensor)))
        elif not allocates(binding.value, STORAGE):
            out.append(binding)
    body = relax.SeqExpr([relax.BindingBlock(out)], function.body.body)
    made_anew = relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)
    return builder.normalize(made_anew)


def _last_uses(bindings: list[relax.Binding], result: relax.Expr) -> dict[int, int]:
    """Return the last step that may read each allocated tensor, by the step that allocates it.

    A call may return any of its arguments, or a view of it: what reads its result reads them.
    """
    holds: dict[relax.Var, frozenset[int]] = {}
    tuples: dict[relax.Var, relax.Tuple] = {}
    last: dict[int, int] = {}
    for i, binding in enumerate(bindings):
        read = _read(binding.value, holds, tuples)
        if allocates(binding.value, TENSOR):
            read = frozenset({i})
        if isinstance(binding.value, relax.Tuple):
            tuples[binding.var] = binding.value
        last.update(dict.fromkeys(read, i))
        holds[binding.var] = read
    return last | dict.fromkeys(_read(result, holds, tuples), len(bindings))


def _read(
    value: relax.Expr, holds: Mapping[relax.Var, frozenset[int]], tuples: Mapping[relax.Var, relax.Tuple]
) -> frozenset[int]:
    """Return the allocated tensors that an expression may read, or hold."""
    if isinstance(value, relax.Var):
        return holds.get(value, frozenset())
    if isinstance(value, relax.TupleGetItem):
        known = tuples.get(value.tuple_value)
        return _read(value.tuple_value if known is None else known.fields[value.index], holds, tuples)
    parts = value.args if isinstance(value, relax.Call) else value.fields if isinstance(value, relax.Tuple) else ()
    return frozenset().union(*(_read(part, holds, tuples) for part in parts))


def _size_bytes(value: relax.Call) -> int:
    dtype = tvm.DataType(value.args[3].value)
    return math.prod(int(d) for d in sizes(value)) * int((dtype.bits * dtype.lanes + 7) // 8)
