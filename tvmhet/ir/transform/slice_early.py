"""Compute of products only what is read of them: slices move before the operators whose results they cut.

Before:  y = R.matmul(x, w)       x: 1 x 197 x 768     After:  p = R.strided_slice(x, axes=[1], begin=[0], end=[1])
         z = R.nn.gelu(y)                                      y = R.matmul(p, w)
         c = R.take(z, 0, axis=1)                              z = R.nn.gelu(y)
                                                               c = R.reshape(z, (1, 3072))

A classifier reads one token of its last block, a language model's caller the logits of the last one: of that block only
keys and values are then computed for all. A causal convolution, padded on both sides and cut behind, computes what is
kept. Every reader of a tensor counts: what is computed is a box around all that is read. A slice moves up to the first
product that does less then (three quarters at most, or a convolution that only pads less), and not beyond, since an
operator that only moves or maps elements gains nothing from it. Runs after common subexpressions are joined; dead code
is to be removed after it. Idempotent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax

from tvmhet.ir import convolutions
from tvmhet.ir.parts import Box, Part, extents, hull, part_of, whole
from tvmhet.ir.rewrite import Rebuild, Step, bindings_of, children, op_name, rewrite_straight_lines, shape_of

_PRODUCTS = {"matmul", *convolutions.NAMES}
_MOST = 0.75  # of a product's results: where more are read it stays as it is


@tvm.transform.module_pass(opt_level=0, name="tvmhet.SliceEarly")
class SliceEarly:
    """Move slices before products in every straight-line function; see the picture above."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return rewrite_straight_lines(mod, _make_step)


def _make_step(func: relax.Function) -> Step | None:
    parts = _worth_cutting(func)
    return _Cut(parts).step if any(_is_cut(p, v) for v, p in parts.items()) else None


def _worth_cutting(func: relax.Function) -> dict[Any, Part]:
    """What is computed of each variable that has a rule; in part only where a product does less for it.

    What is not worth cutting is read whole, so that others may have to compute more: until nothing changes.
    """
    bindings = bindings_of(func)
    may_cut = {b.var for b in bindings}
    while True:
        parts = _parts(func, may_cut)
        worth: set[Any] = set()
        for binding in bindings:
            part = parts.get(binding.var)
            if part is None or not _is_cut(part, binding.var):
                continue
            if _does_less(binding, part) or any(operand in worth for operand, _ in part.operands):
                worth.add(binding.var)
        if all(v in worth for v, part in parts.items() if _is_cut(part, v)):
            return parts
        may_cut = worth


def _is_cut(part: Part, var: Any) -> bool:
    return part.box != whole(shape_of(var) or ())


def _does_less(binding: relax.Binding, part: Part) -> bool:
    """A convolution that only pads less needs no slice for it, so that any place less is worth it."""
    if op_name(binding.value) not in _PRODUCTS:
        return False
    if op_name(binding.value) in convolutions.NAMES and all(b == whole(shape_of(o) or ()) for o, b in part.operands):
        return True
    return math.prod(extents(part.box)) <= _MOST * math.prod(shape_of(binding.var) or ())


def _parts(func: relax.Function, may_cut: set[Any]) -> dict[Any, Part]:
    """What is read of each variable, from the last to the first, and of those with a rule what makes it."""
    parts: dict[Any, Part] = {}
    read: dict[Any, Box] = {}

    def need(expr: Any, box: Box | None = None) -> None:
        if isinstance(expr, tvm.ir.Var):
            shape = shape_of(expr)
            if shape is not None:
                wanted = whole(shape) if box is None else box
                read[expr] = hull(read[expr], wanted) if expr in read else wanted
            return
        for child in children(expr):
            need(child)

    need(func.body.body)
    for binding in reversed(bindings_of(func)):
        var, value, shape = binding.var, binding.value, shape_of(binding.var)
        part = None
        if shape is not None and isinstance(binding, relax.VarBinding):
            part = part_of(value, read.get(var, whole(shape)) if var in may_cut else whole(shape))
        if part is None:
            need(value)
            continue
        parts[var] = part
        for operand, box in part.operands:
            need(operand, box)
    return parts


@dataclass
class _Cut:
    """One rebuild: what there is of each variable that was cut, and the slices that were made."""

    parts: Mapping[Any, Part]
    held: dict[Any, tuple[Any, Box]] = field(default_factory=dict)
    slices: dict[tuple[Any, Box], Any] = field(default_factory=dict)

    def step(self, state: Rebuild, var: relax.Var, value: Any) -> Any:
        part = self.parts.get(var)
        if part is None or not (_is_cut(part, var) or any(operand in self.held for operand, _ in part.operands)):
            return value
        made = part.make([self._piece(state, operand, box) for operand, box in part.operands])
        if not _is_cut(part, var):
            return made
        self.held[var] = state.emit(made, str(var.name)), part.box
        return None

    def _piece(self, state: Rebuild, operand: Any, wanted: Box) -> Any:
        """A part of an operand: what there is of it, or a slice of that."""
        there, box = self.held.get(operand) or (state.replaced(operand), whole(shape_of(operand) or ()))
        if box == wanted:
            return there
        if (there, wanted) not in self.slices:
            self.slices[there, wanted] = state.emit(_sliced(there, box, wanted))
        return self.slices[there, wanted]


def _sliced(there: Any, box: Box, wanted: Box) -> Any:
    """A part of what there is of a tensor."""
    cut = [axis for axis, (a, b) in enumerate(zip(box, wanted, strict=True)) if a != b]
    begin, end = ([wanted[axis][k] - box[axis][0] for axis in cut] for k in (0, 1))
    return relax.op.strided_slice(there, cut, begin, end)
