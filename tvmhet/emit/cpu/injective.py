"""Element-wise chains and data movement: one loop nest per result, contiguous at the innermost axes, in vectors.

Before:  t[i, j] = x[i, j] + b[j]         After:  for ij_outer: y[vector of j] = max(x[..] + b[..], 0)
         y[i, j] = max(t[i, j], 0)

Everything is inlined into the results. The innermost axes along which all operands are contiguous become one; the
longest divisor of its extent that fits four registers is the vector. Extents without one are left to LLVM's own
vectoriser, which makes a loop and a remainder of them. A transposition has no contiguous axis common to both sides: it
is cut into tiles whose both sides fit the cache. A concatenation is written out operand by operand, as copies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi

from tvmhet._tvm import Analyzer, detect_linear_equation
from tvmhet.emit.cpu.blocks import (
    BlockInfo,
    CpuTarget,
    Schedule,
    blocks_of,
    conditions_of,
    inline_injective,
    loads_of,
    may_fuse,
    num_reductions,
    parallelize,
    replaced,
    stride_along,
    uses,
    vector_length,
    vector_lengths,
)
from tvmhet.emit.cpu.transposing import transposed, turn_of

_VECTORS = 4  # registers per step
_TILE = 16  # a transposition's tile: 16 rows of one cache line
_MAX_PARTS = 64  # of a concatenation that are written out


def injective(func: Any, cpu: CpuTarget) -> Schedule | None:
    """Schedule a kernel without reductions; None for any other."""
    if num_reductions(func) > 0:
        return None
    sch = tvm.s_tir.Schedule(func)
    inline_injective(sch)
    infos = blocks_of(sch)
    if infos is None:
        return None
    if len(infos) == 1 and (turn := turn_of(sch, infos[0], cpu)) is not None:
        return tvm.s_tir.Schedule(transposed(sch.mod["main"], turn, cpu.for_elements(infos)))
    for info in infos:
        schedule_spatial(sch, info, cpu)
    return sch


def schedule_spatial(sch: Schedule, info: BlockInfo, cpu: CpuTarget) -> None:
    """Vectorise, and parallelise, one block without reductions, all its loops its own."""
    loops = list(sch.get_loops(info.block))
    if not loops:
        return
    cpu = cpu.for_elements([info])
    transposed = transposed_axis(sch, info)
    if transposed is not None:
        _tile(sch, info, loops, transposed, cpu)
        return
    parts = concatenated_parts(sch, info)
    if parts is not None:
        along, lengths = parts
        count = min(contiguous_axes(sch, info), len(loops) - along - 1)
        if count > 1 and may_fuse(sch):
            sch.fuse(*loops[len(loops) - count :])  # else LLVM's vectors may be longer than a row
        if along:
            parallelize(sch, loops[:along], cpu)
        sch.loop_partition(loops[along], [*lengths[:-1], None])
        return
    if (run := run_length(sch, info)) is not None:
        length, plain = run
        loops[-1:] = sch.split(loops[-1], [None, length])
        around = loops[:-1]
        if plain:
            around.append(_vector_of(sch, info, loops[-1], cpu))
        parallelize(sch, around, cpu)
        return
    count = contiguous_axes(sch, info)
    inner = sch.fuse(*loops[len(loops) - count :]) if count > 1 else loops[-1]
    around = [*loops[: len(loops) - count], *_vectorize(sch, info, inner, count, cpu)]
    parallelize(sch, around or [inner], cpu)


def concatenated_parts(sch: Schedule, info: BlockInfo) -> tuple[int, tuple[int, ...]] | None:
    """Return the axis along which a block chooses its operand, and how much of it each operand fills.

    A concatenation is a chain of conditions, c <= v. With a loop per part each condition is known, and what is left
    are copies. None for a block of one operand, of many, or with parts shorter than a cache line.
    """
    bounds: dict[int, set[int]] = {}
    for condition in conditions_of(sch.get(info.block).body.value):
        found = _lower_bound(condition, info)
        if found is None:
            return None
        bounds.setdefault(found[0], set()).add(found[1])
    if len(bounds) != 1:
        return None
    ((axis, starts),) = bounds.items()
    ends = [*sorted(starts), info.axes[axis].extent]
    lengths = tuple(end - start for start, end in itertools.pairwise([0, *ends]))
    inside = math.prod(a.extent for a in info.axes[axis + 1 :])
    return (axis, lengths) if min(lengths) * inside >= _TILE and len(lengths) <= _MAX_PARTS else None


def _lower_bound(condition: Any, info: BlockInfo) -> tuple[int, int] | None:
    """Read `c <= v`, or `c <= v * k + (inner axes)` of a reshaped concatenation: the axis of v and its bound."""
    if not isinstance(condition, tvm.tirx.LE) or not hasattr(condition.a, "value"):
        return None
    found = detect_linear_equation(condition.b, [a.var for a in info.axes])
    if not found or not all(hasattr(c, "value") for c in found):
        return None
    *factors, offset = (int(c.value) for c in found)
    axis = next((i for i, k in enumerate(factors) if k), None)
    if axis is None or min(factors) < 0 or offset:
        return None
    k, bound = factors[axis], int(condition.a.value)
    within = sum(f * (a.extent - 1) for f, a in zip(factors[axis + 1 :], info.axes[axis + 1 :], strict=True))
    return (axis, bound // k) if within < k and bound % k == 0 else None


def run_length(sch: Schedule, info: BlockInfo) -> tuple[int, bool] | None:
    """How many elements of the innermost axis v are in line where operands are indexed by v // n and v % n.

    Heads that are put together again are read so: x[v // 64, row, v % 64]. And whether they lie one after the other:
    of windows that are reshaped every other element may be read. None where no operand is, or v occurs otherwise.
    """
    last = info.axes[-1]
    lengths: set[int] = set()

    def visit(division: Any) -> None:
        if division.a.same_as(last.var) and hasattr(division.b, "value"):
            lengths.add(int(division.b.value))

    own = loads(sch, info)
    for load in own:
        tvm_ffi.structural_walk(load.indices, (tvm.tirx.FloorMod, visit))
    if len(lengths) != 1 or (length := lengths.pop()) < _TILE // 2 or last.extent % length:
        return None
    within, around = tvm.tirx.Var("within", "int64"), tvm.tirx.Var("around", "int64")
    analyzer = Analyzer()
    for var, extent in ((within, length), (around, last.extent // length)):
        analyzer.bind(var, tvm.ir.Range(0, extent))

    def place(index: Any) -> Any:
        return analyzer.simplify(replaced(index, {last.var: around * length + within}))

    steps: set[int | None] = set()
    for *before, inner in ([place(i) for i in load.indices] for load in own if load.indices):
        if uses(before, [within]):
            return None
        if uses(inner, [within]):
            steps.add(stride_along(inner, within))
    return None if None in steps else (length, steps <= {1})


def _vector_of(sch: Schedule, info: BlockInfo, inner: Any, cpu: CpuTarget) -> Any:
    """Make vectors of a loop along which everything is contiguous; return the loop around them."""
    lanes = cpu.lanes(str(sch.get(info.block).writes[0].source.dtype))
    outer, vector = sch.split(inner, [None, vector_length(int(sch.get(inner).extent), lanes, _VECTORS * lanes)])
    sch.vectorize(vector)
    return outer


def _vectorize(sch: Schedule, info: BlockInfo, inner: Any, count: int, cpu: CpuTarget) -> list[Any]:
    """Make vectors of the innermost loop; return the loop around them, none where LLVM is to make vectors of it."""
    extent = int(sch.get(inner).extent)
    lanes = cpu.lanes(str(sch.get(info.block).writes[0].source.dtype))
    lengths = (n for n in vector_lengths(extent, lanes, _VECTORS * lanes) if n > 1 and _nests(n, info, count))
    length = next(lengths, None)
    if length is None or not all(_is_plain(load, info) for load in loads(sch, info)):
        return []
    outer, vector = sch.split(inner, [None, length])
    sch.vectorize(vector)
    return [outer]


def _nests(length: int, info: BlockInfo, count: int) -> bool:
    """Whether vectors of the fused axes have plain indices: each axis begins with a vector, or ends within one.

    TVM cannot tell that o * 64 + lane, taken apart into rows of 56 and put together again, is itself: it would gather.
    """
    inside = 1
    for axis in reversed(info.axes[len(info.axes) - count + 1 :]):
        inside *= axis.extent
        if inside % length and length % inside:
            return False
    return True


def _tile(sch: Schedule, info: BlockInfo, loops: Sequence[Any], axis: int, cpu: CpuTarget) -> None:
    """Cut the innermost loop and that of `axis`, along which the operand is contiguous, into tiles."""
    outer = tile(sch, loops[axis:])
    parallelize(sch, [*loops[:axis], outer], cpu)


def tile(sch: Schedule, loops: Sequence[Any]) -> Any:
    """Cut the first and the last of some nested loops into tiles; return the loop over tiles of the first."""
    outer, inner = sch.split(loops[0], [None, min(_TILE, int(sch.get(loops[0]).extent))])
    last_outer, last_inner = sch.split(loops[-1], [None, min(_TILE, int(sch.get(loops[-1]).extent))])
    sch.reorder(outer, *loops[1:-1], last_outer, inner, last_inner)
    return outer


def loads(sch: Schedule, info: BlockInfo) -> list[Any]:
    """Loads of a block's body."""
    return loads_of(sch.get(info.block).body.value)


def _is_plain(load: Any, info: BlockInfo) -> bool:
    """Whether the innermost axis occurs in the load's last index only, in steps of one, or not at all.

    The last index of a reshaped operand is a sum, head * 64 + element, along which elements lie one after the other.
    """
    last = info.axes[-1].var
    if not load.indices:
        return True
    if uses(load.indices[:-1], [last]):
        return False
    return not uses(load.indices[-1], [last]) or stride_along(load.indices[-1], last) == 1


def contiguous_axes(sch: Schedule, info: BlockInfo) -> int:
    """How many innermost axes of a block are, in each operand and in the result, the whole innermost axes or absent."""
    store = sch.get(info.block).body
    accesses = [(load.source, load.indices) for load in loads(sch, info)]
    accesses.append((store.buffer, store.indices))
    count = 1
    while count < len(info.axes) and all(_spans(buffer, indices, info, count + 1) for buffer, indices in accesses):
        count += 1
    return count


def _spans(buffer: Any, indices: Sequence[Any], info: BlockInfo, count: int) -> bool:
    tail = info.axes[len(info.axes) - count :]
    names = [a.var for a in tail]
    if not uses(indices, names):
        return True
    if len(indices) < count:
        return False
    own = indices[len(indices) - count :]
    whole = all(
        i.same_as(a.var) and int(e) == a.extent
        for i, a, e in zip(own, tail, buffer.shape[len(indices) - count :], strict=True)
    )
    return whole and not uses(indices[: len(indices) - count], names)


def transposed_axis(sch: Schedule, info: BlockInfo) -> int | None:
    """The axis along which some operand is contiguous while the result is not; None without such an operand."""
    for load in loads(sch, info):
        if not load.indices:
            continue
        for i, axis in enumerate(info.axes[:-1]):
            last = info.axes[-1]
            along = uses(load.indices[-1], [axis.var]) and stride_along(load.indices[-1], axis.var) == 1
            if along and uses(load.indices[:-1], [last.var]) and not uses(load.indices[-1], [last.var]):
                return i if axis.extent >= _TILE // 2 and last.extent >= _TILE // 2 else None
    return None
