"""What every CPU rule asks of a kernel: its blocks, its axes, and the machine's vector width and cores."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import tvm
import tvm_ffi

from tvmhet._tvm import SBlock, TensorLoad, detect_linear_equation, dlight, s_tir

Schedule = Any  # tvm.s_tir.Schedule; TVM ships no types
Block = Any  # SBlockRV

NEAR_BYTES = 24 << 10  # what is used again soon: half a first cache and more of today's machines
_VECTOR_BITS = {"x86-64-v2": 128, "x86-64-v3": 256, "x86-64-v4": 512}
_REGISTERS = {128: 16, 256: 16, 512: 32}
_DEFAULT_VECTOR_BITS = 128
# What one core computes in about 5 us (AMD EPYC of family 26, AVX-512): entering a parallel loop costs it 2.8 us.
_MIN_ELEMENTS = 1 << 16
_MIN_PRODUCTS = 1 << 19
_PADDING_READERS = 2  # that a padding is made again for
_FEW_ELEMENTS = 4  # of a tensor that one element is made of: so many are not computed again for each
_TAKEN = 2  # times, at least, that each element of a tensor is taken which is not computed again for each
_REDUCED = 2  # the kind of a block's variable that TVM calls CommReduce
_FEW_PARTS = 4  # of a concatenation: more are not chosen from for each element of a transposition


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """What the rules need of an llvm target: bits and number of vector registers, and cores."""

    vector_bits: int
    num_registers: int
    num_cores: int

    @staticmethod
    def of(target: tvm.target.Target) -> CpuTarget:
        """Read a target; an unknown `mcpu` counts as 128 bits wide, no `num-cores` as one core."""
        bits = _VECTOR_BITS.get(str(target.attrs.get("mcpu", "")), _DEFAULT_VECTOR_BITS)
        return CpuTarget(bits, _REGISTERS[bits], max(1, int(target.attrs.get("num-cores", 1))))

    def lanes(self, dtype: str) -> int:
        """Elements of `dtype` in a vector register."""
        return max(1, self.vector_bits // int(tvm.DataType(dtype).bits))

    @property
    def has_fma(self) -> bool:
        """Whether it multiplies and adds in one instruction: x86-64-v3 and above."""
        return self.vector_bits > _DEFAULT_VECTOR_BITS

    def for_elements(self, infos: Sequence[BlockInfo]) -> CpuTarget:
        """This target, with one core only if the blocks have too few elements for a parallel loop to pay."""
        return self if _steps(infos) >= _MIN_ELEMENTS else replace(self, num_cores=1)

    def for_products(self, infos: Sequence[BlockInfo]) -> CpuTarget:
        """As `for_elements`, for blocks that multiply and add."""
        return self if _steps(infos) >= _MIN_PRODUCTS else replace(self, num_cores=1)


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a block: its variable, extent, and whether it is reduced."""

    var: Any
    extent: int
    reduced: bool


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """A block whose loops are its axes, one to one."""

    block: Block
    axes: tuple[Axis, ...]

    @property
    def is_reduction(self) -> bool:
        """Whether any axis is reduced."""
        return any(a.reduced for a in self.axes)

    @property
    def num_leading(self) -> int:
        """How many axes come before the first reduced one."""
        return next((i for i, a in enumerate(self.axes) if a.reduced), len(self.axes))


def _steps(infos: Sequence[BlockInfo]) -> int:
    return sum(math.prod(a.extent for a in info.axes) for info in infos)


def blocks_of(sch: Schedule) -> tuple[BlockInfo, ...] | None:
    """Return the blocks in order; None if one has symbolic extents or loops that are not its axes."""
    infos = dlight.analysis.normalize_prim_func(sch)
    if not infos:
        return None
    found = []
    for info in infos:
        axes = []
        for it in info.iters:
            if it.kind not in ("S", "R") or not isinstance(it.dom, int):
                return None
            axes.append(Axis(it.var, it.dom, it.kind == "R"))
        found.append(BlockInfo(info.block_rv, tuple(axes)))
    return tuple(found)


def is_output(sch: Schedule, block: Block) -> bool:
    """Whether the block writes a result of the kernel."""
    return any(sch.get(block).same_as(sch.get(out)) for out in sch.get_output_blocks("root"))


def inline_injective(sch: Schedule, keep: Sequence[Block] = ()) -> None:
    """Inline blocks without reductions into their readers, else into their producers, where TVM allows it.

    Results of the kernel stay, and so do blocks of `keep`, and blocks that a reduction reads and others read too: they
    hold values (an exponential) that cost more to make twice than to keep. So does a padding that many read, and a
    concatenation that is read across its rows: each would ask of every element whether, or where, it is in it. And so
    does what is computed before an image is made larger or smaller: each of its elements is read for many others.
    """
    for info in blocks_of(sch) or ():
        if (
            info.is_reduction
            or is_output(sch, info.block)
            or any(sch.get(info.block).same_as(sch.get(k)) for k in keep)
        ):
            continue
        readers = sch.get_consumers(info.block)
        if len(readers) > 1 and any(reduces(sch, r) for r in readers) and _is_costly(sch, info.block):
            continue
        conditions = conditions_of(sch.get(info.block).body)
        if conditions and len(readers) > _PADDING_READERS:
            continue
        if len(conditions) >= _FEW_PARTS and _is_turned(sch, info.block, readers):
            continue
        if _is_interpolated(sch, info.block, readers):
            continue
        _try(sch, sch.compute_inline, info.block)


def _is_interpolated(sch: Schedule, block: Block, readers: Sequence[Block]) -> bool:
    """Whether a block computes what readers take several elements of for each of their own, as bilinear resizing.

    Of two are enough where their places are looked up or rounded, and each is taken twice: they are gathered, then.
    """
    body = sch.get(block).body
    if isinstance(body.value, TensorLoad):
        return False
    stmts = [sch.get(r) for r in readers if not reduces(sch, r)]
    found = [(s, x) for s in stmts for x in loads_of(s.body) if x.source.same_as(body.buffer)]
    if len(found) >= _FEW_ELEMENTS * len(readers):
        return True
    taken = sum(math.prod(int(v.dom.extent) for v in s.iter_vars) for s, _ in found)
    made = math.prod(int(v.dom.extent) for v in sch.get(block).iter_vars)
    return taken >= _TAKEN * made and all(any(_is_gathered(i) for i in x.indices) for _, x in found)


def _is_gathered(index: Any) -> bool:
    """Whether an index is looked up in a tensor, or rounded."""
    found = bool(loads_of(index))

    def visit(cast: Any) -> None:
        nonlocal found
        found = found or "float" in str(cast.value.ty)

    tvm_ffi.structural_walk(index, (tvm.tirx.Cast, visit))
    return found


def _is_turned(sch: Schedule, block: Block, readers: Sequence[Block]) -> bool:
    """Whether a block is read, element by element, by one whose innermost axis is not its own."""
    made = sch.get(block).body.buffer
    for reader in readers:
        stmt = sch.get(reader)
        last = [v.var for v in stmt.iter_vars][-1:]
        loads = [] if reduces(sch, reader) else loads_of(stmt.body)
        if any(x.source.same_as(made) and x.indices and not uses(x.indices[-1], last) for x in loads):
            return True
    return False


def costly_producers(sch: Schedule, block: Block) -> list[Block]:
    """Producers of a block, moves apart, that do more than move data: those that a product should read from memory."""
    found = []
    for producer in sch.get_producers(block):
        if not isinstance(sch.get(producer).body.value, TensorLoad):
            found.append(producer)
        elif len(sch.get_consumers(producer)) == 1:
            found += costly_producers(sch, producer)
    return found


def num_reductions(func: Any) -> int:
    """How many of a kernel's blocks reduce more than one element to one; inlining changes nothing about it."""
    found = 0

    def count(block: Any) -> None:
        nonlocal found
        found += any(int(v.iter_type) == _REDUCED and not _is_one(v.dom.extent) for v in block.iter_vars)

    tvm_ffi.structural_walk(func.body, (SBlock, count))
    return found


def _is_one(extent: Any) -> bool:
    return isinstance(extent, tvm.tirx.IntImm) and int(extent) == 1


def around_reduction(func: Any) -> tuple[Schedule, tuple[BlockInfo, ...], int] | None:
    """Inline what surrounds the one reduction of a kernel; return the blocks that are left and its place among them.

    None where there is no reduction, or several. Rules that are tried in turn ask of one kernel: each gets a copy.
    """
    if num_reductions(func) != 1:
        return None
    sch, infos, place = _around_reduction(func)
    return (sch.copy(), infos, place) if infos else None


@lru_cache(maxsize=1)
def _around_reduction(func: Any) -> tuple[Schedule, tuple[BlockInfo, ...], int]:
    sch = s_tir.Schedule(func)
    reductions = [i.block for i in blocks_of(sch) or () if i.is_reduction]
    if len(reductions) != 1:
        return sch, (), 0
    inline_injective(sch, keep=costly_producers(sch, reductions[0]))
    infos = blocks_of(sch) or ()
    return sch, infos, next(n for n, info in enumerate(infos) if info.is_reduction)


def _try(sch: Schedule, primitive: Any, block: Block) -> None:
    with contextlib.suppress(s_tir.ScheduleError):
        primitive(block)


def reduces(sch: Schedule, block: Block) -> bool:
    return any(int(v.iter_type) == _REDUCED for v in sch.get(block).iter_vars)


def _is_costly(sch: Schedule, block: Block) -> bool:
    """Whether the block computes anything beyond arithmetic: a call."""
    return any(str(call.op.name).startswith("tirx.") for call in calls(sch.get(block).body))


def calls(stmt: Any) -> Iterator[Any]:
    """Every intrinsic call in a statement or expression, but for conditions."""
    cheap = {"tirx.if_then_else", "tirx.likely", "tirx.isnan", "tirx.sqrt", "tirx.rsqrt", "tirx.fabs"}
    found: list[Any] = []

    def visit(call: Any) -> None:
        if hasattr(call.op, "name") and call.op.name not in cheap:
            found.append(call)

    tvm_ffi.structural_walk(stmt, (tvm.ir.Call, visit))
    return iter(found)


def conditions_of(expr: Any) -> list[Any]:
    """The conditions of every `if_then_else` in a statement or an expression."""
    found: list[Any] = []

    def visit(call: Any) -> None:
        if str(getattr(call.op, "name", "")).endswith(".if_then_else"):
            found.append(call.args[0])

    tvm_ffi.structural_walk(expr, (tvm.ir.Call, visit))
    return found


def uses(expr: Any, variables: Sequence[Any]) -> bool:
    """Whether an expression, or any of a sequence of them, mentions one of `variables`."""
    if isinstance(expr, Sequence | tvm_ffi.Array):
        return any(uses(e, variables) for e in expr)
    found = False

    def visit(var: Any) -> None:
        nonlocal found
        found = found or any(var.same_as(v) for v in variables)

    tvm_ffi.structural_walk(expr, (tvm.ir.Var, visit))
    return found


def replaced(expr: Any, to: Mapping[Any, Any]) -> Any:
    """Return an expression with variables replaced."""
    return tvm_ffi.structural_map(expr, (tvm.ir.Var, lambda v: next((n for o, n in to.items() if o.same_as(v)), v)))


def loads_of(expr: Any) -> list[Any]:
    """Every load in a statement or an expression, innermost first."""
    found: list[Any] = []

    def visit(load: Any) -> None:
        found.append(load)

    tvm_ffi.structural_walk(expr, (TensorLoad, visit))
    return found


def long_indices(load: Any) -> list[Any]:
    """Indices of a load along the extents of its tensor that are not 1."""
    return [
        i for i, e in zip(load.indices, load.source.shape, strict=True) if not (hasattr(e, "value") and e.value == 1)
    ]


def stride_along(index: Any, var: Any) -> int | None:
    """How far an index moves with `var`: its constant factor, None if there is none."""
    factors = detect_linear_equation(index, [var])
    return int(factors[0].value) if factors and hasattr(factors[0], "value") else None


def vector_lengths(extent: int, lanes: int, limit: int) -> list[int]:
    """Return divisors of `extent` from half a register to `limit` elements: whole registers first, then by length.

    >>> vector_lengths(576, 16, 64)
    [64, 48, 32, 16, 36, 24, 18, 12, 9]
    """
    divisors = [d for d in range(min(extent, limit), 0, -1) if extent % d == 0 and 2 * d > lanes]
    return sorted(divisors, key=lambda d: d % lanes != 0)


def vector_length(extent: int, lanes: int, limit: int) -> int:
    """Return the longest divisor of `extent` up to `limit` elements, one in whole registers if there is any; 1 if none.

    >>> vector_length(768, 16, 64), vector_length(1000, 16, 64), vector_length(197, 16, 64)
    (64, 50, 1)
    """
    return next(iter(vector_lengths(extent, lanes, limit)), 1)


def may_fuse(sch: Schedule) -> bool:
    """Whether loops of the kernel may be fused: False where an index divides a shifted variable, as in (v - 1) // 2.

    TVM's simplifier merges such a quotient with the others that a fused loop variable f is taken apart by, and gets it
    wrong: f // 64 * 32 + f % 64 // 16 * 8 + (f % 16 - 1) // 2 became (f + 1) // 2 - 9, which is 8 too small.
    """
    found: list[Any] = []

    def visit(division: Any) -> None:
        shifted = isinstance(division.a, tvm.tirx.Add | tvm.tirx.Sub)
        if shifted and (hasattr(division.a.a, "value") or hasattr(division.a.b, "value")):
            found.append(division)

    divisions = (tvm.tirx.FloorDiv, tvm.tirx.FloorMod, tvm.tirx.Div, tvm.tirx.Mod)
    tvm_ffi.structural_walk(sch.mod["main"].body, (divisions, visit))
    return not found


def parallelize(sch: Schedule, loops: Sequence[Any], cpu: CpuTarget) -> Any:
    """Fuse the outer loops into one, run it on the target's cores if there are several, and return it.

    Where loops may not be fused, the outermost runs on the cores and the innermost is returned.
    """
    if len(loops) > 1 and may_fuse(sch):
        loops = [sch.fuse(*loops)]
    if cpu.num_cores > 1:
        sch.parallel(loops[0])
    return loops[-1]
