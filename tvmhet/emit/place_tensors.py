"""Plan anew where the tensors of a stage lie: what leaves it apart, all others in one storage, the largest first.

Before:  s0 = storage(36);  a = tensor(s0, 36);  f(x, a)
         s1 = storage(9);   b = tensor(s1, 9);   f(a, b)
                            c = tensor(s0, 9);   f(b, c)        nobody reads a any more
         s2 = storage(36);  d = tensor(s2, 36);  f(b, c, d)     s0 is taken
         s3 = storage(36);  y = tensor(s3, 36);  f(d, y)
         return y

After:   s0 = storage(36);  a = tensor(s0, 36);  f(x, a)        where y will be
         s1 = storage(45);  m = tensor(s1, 45)
                            b = TensorAt(m, 36); f(a, b)        behind d
                            c = tensor(s0, 9);   f(b, c)        nobody reads a any more
                            d = tensor(s1, 36);  f(b, c, d)
                            y = tensor(s0, 36);  f(d, y)
         return y

TVM plans in the order of time, where a small tensor takes the large storage that the next large one would need, never
puts two tensors side by side into one, and gives what leaves a function memory that nothing else was in. TVM's kernels
refuse tensors that say at which offset they begin: those of `TensorAt` (passes/tensor_at.cc) begin at their address.
Runs after LowerAllocTensor, so that results have storages, too. A function with branches, with a size that is not
constant, or with memory of several devices, stays as TVM planned it. One that is "pooled" gets storages that hold one
tensor at a time, for others to take (`graph/storage.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import tvm
from tvm import relax
from tvm.script import relax as R

from tvmhet._functions import TENSOR_AT
from tvmhet.emit.allocations import STORAGE, TENSOR, allocates, sizes
from tvmhet.graph.storage import Life, Place, place_tensors, share_storages
from tvmhet.ir.attrs import POOLED_ATTR


@tvm.transform.module_pass(opt_level=0, name="PlaceTensors")
class PlaceTensors:
    """The module with the tensors of each function placed anew."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return a module whose functions differ in nothing but where tensors lie."""
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
    lives = [Life(i, last[i], _size_bytes(bindings[i].value)) for i in tensors]
    pooled = bool((function.attrs or {}).get(POOLED_ATTR, False))
    places, bytes_of = (share_storages if pooled else place_tensors)(lives, len(bindings))
    place = dict(zip(tensors, places, strict=True))
    memory = _Memory(bytes_of, {p.storage for p in places if p.offset}, bindings)
    out = list[relax.Binding]()
    for i, binding in enumerate(bindings):
        if i in place:
            out += memory.tensor(binding, place[i])
        elif not allocates(binding.value, STORAGE):
            out.append(binding)
    body = relax.SeqExpr([relax.BindingBlock(out)], function.body.body)
    made_anew = relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)
    return relax.BlockBuilder().normalize(made_anew)


class _Memory:
    """The storages of a function, made where the first tensor of each is."""

    def __init__(self, sizes_bytes: Sequence[int], shared: Collection[int], bindings: Sequence[relax.Binding]) -> None:
        self._sizes_bytes = sizes_bytes
        self._shared = shared  # storages where tensors lie at an offset
        self._kind = next(b.value for b in bindings if allocates(b.value, STORAGE)).args[1:]
        self._storages = dict[int, relax.Var]()
        self._blocks = dict[int, relax.Var]()  # of those, all their bytes as a tensor
        self._builder = relax.BlockBuilder()

    def tensor(self, binding: relax.Binding, place: Place) -> list[relax.Binding]:
        """Return the bindings that allocate a tensor at its place."""
        out = [] if place.storage in self._storages else self._make(place.storage, binding.value.args[4])
        _, _, shape, dtype, device = binding.value.args
        if place.offset:
            args = [self._blocks[place.storage], relax.prim_value(place.offset), shape, dtype]
            value = relax.Call(relax.ExternFunc(TENSOR_AT), args, ty_args=[binding.var.ty])
        else:
            value = relax.Call(TENSOR, [self._storages[place.storage], relax.prim_value(0), shape, dtype, device])
        return [*out, relax.VarBinding(binding.var, self._builder.normalize(value))]

    def _make(self, number: int, device: relax.Expr) -> list[relax.Binding]:
        size = relax.ShapeExpr([self._sizes_bytes[number]])
        value = self._builder.normalize(relax.Call(STORAGE, [size, *self._kind]))
        self._storages[number] = relax.Var("storage", value.ty)
        made = [relax.VarBinding(self._storages[number], value)]
        if number in self._shared:
            args = [self._storages[number], relax.prim_value(0), size, R.dtype("uint8"), device]
            value = self._builder.normalize(relax.Call(TENSOR, args))
            self._blocks[number] = relax.Var("block", value.ty)
            made.append(relax.VarBinding(self._blocks[number], value))
        return made


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
