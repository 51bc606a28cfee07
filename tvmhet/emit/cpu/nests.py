"""Write a block and its loops by hand, a loop per axis: where a rule needs what no primitive makes of a block."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tvm
from tvm import tirx

from tvmhet._tvm import SBlock, SBlockRealize, access_regions
from tvmhet.emit.cpu.blocks import loads_of

REDUCE, SPATIAL = 2, 0  # IterVar kinds


def axis(name: str) -> Any:
    """Return the variable of a new axis."""
    return tirx.Var(name, "int64")


def nest(
    name: str,
    axes: Sequence[Any],
    extents: Sequence[int],
    kinds: Sequence[int],
    body: Any,
    init: Any,
    bound: Mapping[int, tuple[Any, int]] | None = None,
) -> Any:
    """Return the loops over a block that stores `body`; `init` is None for a block without reduced axes.

    `bound` says of an axis, by its position, where it begins in terms of loops outside, and how far its own loop goes
    from there; it has none if that is 0. What would go beyond an axis is left out.
    """
    given = bound or {}
    loops, values, inside = [], [], []
    for i, extent in enumerate(extents):
        base, own = given.get(i, (None, extent))
        loop = axis(f"i{i}")
        loops += [(loop, own)] if own else []
        values.append(loop if base is None else base + loop if own else base)
        if own and extent % own:
            inside.append(values[-1] < number(extent))
    ranges = [tvm.ir.Range(tirx.const(0, "int64"), tirx.const(int(e), "int64")) for e in extents]
    variables = [tirx.IterVar(r, v, kind) for r, v, kind in zip(ranges, axes, kinds, strict=True)]
    buffers = [body.buffer, *(load.source for load in loads_of(body.value))]
    reads, writes, _ = access_regions(SBlock(variables, [], [], name, body, init), {b: b for b in buffers})
    made: Any = SBlockRealize(
        values, tirx.all(*inside) if inside else True, SBlock(variables, reads, writes, name, body, init)
    )
    for loop, extent in reversed(loops):
        made = over(loop, extent, made)
    return made


def over(loop: Any, extent: Any, body: Any) -> Any:
    """Return a serial loop from 0; its extent may be one that is known when it runs only."""
    return _loop(loop, extent, body, tirx.ForKind.SERIAL)


def vector(lane: Any, lanes: int, body: Any) -> Any:
    """Return a loop from 0 that is one vector."""
    return _loop(lane, lanes, body, tirx.ForKind.VECTORIZED)


def unrolled(loop: Any, extent: int, body: Any) -> Any:
    """Return a loop from 0 of which every step is written out."""
    return _loop(loop, extent, body, tirx.ForKind.UNROLLED)


def on_cores(loop: Any, extent: int, body: Any) -> Any:
    """Return a loop from 0 whose steps are shared among the target's cores."""
    return _loop(loop, extent, body, tirx.ForKind.PARALLEL)


def _loop(loop: Any, extent: Any, body: Any, kind: Any) -> Any:
    return tirx.For(loop, number(0), number(extent) if isinstance(extent, int) else extent, kind, body)


def places_of(loop: Any, extents: Sequence[int]) -> list[Any]:
    """Return where one loop over all of several axes is along each of them."""
    places, rest = [], math.prod(extents)
    for extent in extents:
        rest //= extent
        places.append(loop // rest % extent)
    return places


def number(value: int) -> Any:
    """Return an index."""
    return tirx.const(value, "int64")


def in_order(statements: Sequence[Any]) -> Any:
    """Return statements as one."""
    return tirx.SeqStmt(list(statements)) if len(statements) > 1 else statements[0]


def apart(name: str, body: Any) -> Any:
    """Return a statement that is compiled as a function of its own, which LLVM does not put back in.

    It takes the constants of an exponential, and of shuffles, out of all loops of a function: they would occupy
    registers that the tiles of products need. The statement after it brings LLVM's notes on lines of code back to the
    function around: TVM leaves them in the inner one, and LLVM refuses the module. Its name is no kernel's.
    """
    scope = tirx.AttrStmt(number(0), "compute_scope", tvm.ir.StringImm(f"{name}_apart"), body)
    return tirx.SeqStmt([scope, tirx.Evaluate(tirx.call_llvm_intrin("void", "llvm.donothing"))])


def held(body: Any, buffers: Sequence[Any], name: str) -> Any:
    """Return `body` with tensors of its own."""
    return SBlockRealize([], True, SBlock([], [], [], name, body, alloc_buffers=list(buffers)))


def stages_of(func: Any) -> list[Any]:
    """Return the loop nests of a function's root block, in order."""
    root = func.body.block
    return list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]


def block_in(stage: Any) -> Any | None:
    """Return the block inside a loop nest; None where something else is."""
    while isinstance(stage, tirx.For):
        stage = stage.body
    return stage.block if isinstance(stage, SBlockRealize) else None


def with_stages(func: Any, stages: Sequence[Any], buffers: Sequence[Any], unused: Collection[str] = ()) -> Any:
    """Return `func` with other loop nests, with further buffers of its own, and without those named in `unused`."""
    root = func.body.block
    own = [*(b for b in root.alloc_buffers if str(b.name) not in unused), *buffers]
    return func.with_body(held(in_order(stages), own, root.name_hint))
