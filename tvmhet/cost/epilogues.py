"""Estimates of kernels with element-wise operators at an end: no more than their parts apart, less what fusing saves.

    conv ── add ── relu      estimate of {conv add relu} <= estimate of {conv} + what {add relu} does in registers
    add ── layer_norm        estimate of {add layer_norm} <= estimate of {layer_norm} + what {add} does in the cache

An epilogue of a generated kernel works on values that are still in registers, so it saves its call and the traffic
between the two; so does the library's bias, and its convolution's residual with the relu after it. What else follows in
a library kernel is one more call of the library, and saves only the VM's. What comes before a generated kernel that is
element-wise, moves data, works along rows or is a product that takes it in, is made in registers or in the cache; a
move, a pooling or a look-up there takes what it takes alone, but for a move of a small operand. On CPUs some kernels
are two in one call, and take the sum of both, not only at most: a mean and the product that reads it, a residual that
is added up in memory before a convolution (the one before it adds it for next to nothing), and a small product and the
image whose gate it is.

Models that learn kernels one by one do not know: their errors for a kernel and for its parts are independent, and a
plan that takes the least of both leaves epilogues apart wherever one error happens to be upwards. Of 117 generated
convolutions that were measured with and without their last operators the median took 0.95 of the parts' time. Measured
times are not touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tvmhet.cost.model import KernelDesc, OpDesc
from tvmhet.cost.table import MEASURED, Entry

_TAKES_PRODUCERS = frozenset({"layer_norm", "softmax", "reduction", "elementwise", "movement", "conv2d", "linear"})
_PRODUCTS = frozenset({"conv2d", "linear"})
_BEFORE = frozenset({"elementwise", "movement", "pooling", "embedding"})
_KEPT_WHOLE = _BEFORE - {"elementwise"}
_VIEWS = frozenset({"reshape", "flatten", "squeeze"})
_SMALL = 1 / 8  # of what a kernel writes
#: At least, of what comes before, so that of two estimates that are equal otherwise the end is joined: a gate before a
#: convolution of 1 x 1 keeps next to nothing (`benchmarks/kernels_alone.py`), a factor of rows before a sum of eight of
#: them nearly all of its time (76 us, the sum 24, inside a model of experts).
_KEPT_BEFORE = 0.25

_NO_MORE, _IN_TURN = "no more than its parts apart", "its parts, one after the other"
#: Operators whose time is arithmetic, which fusing does not save.
_ARITHMETIC = frozenset(
    {
        "exp", "sigmoid", "silu", "tanh", "gelu", "gelu_tanh", "erf", "softplus", "log", "log2", "log10", "mish",
        "selu", "power", "power_scalar", "sin", "cos", "tan", "acos", "acosh", "asin", "asinh", "atan", "atanh",
        "atan2", "sinh", "cosh", "log_add_exp", "divide", "floor_divide", "floor_mod", "mod", "sqrt", "rsqrt",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Epilogue:
    """A kernel (`whole`) that is another one (`root`, of the same maker) and operators at an end (`apart`), by key.

    `kept` is the share of the time of `apart`, its call aside, that is left when it works in registers. `in_turn` says
    that the two run as they are, one after the other: then the sum is what the kernel takes, and not only at most.
    """

    whole: str
    root: str
    apart: str
    kept: float
    in_turn: bool = False


def epilogues(kernels: Iterable[tuple[str, tuple[int, ...], KernelDesc]], in_turn: bool = True) -> tuple[Epilogue, ...]:
    """Return each way to cut element-wise operators off a kernel's end, or off its beginning, small kernels first.

    Kernels are given by key, operators (ascending, as in the graph) and description; of equal keys one is cut. Without
    `in_turn` no kernel is taken for two, as on GPUs, where none was measured.
    """
    listed = sorted(kernels, key=lambda kernel: len(kernel[1]))
    made = {(desc.maker, ops): (key, desc) for key, ops, desc in listed}
    makers = sorted({maker for maker, _ in made})
    found: dict[str, list[Epilogue]] = {}
    for key, ops, desc in listed:
        if key in found:
            continue
        found[key] = []
        for cut in range(len(ops) - 1, 0, -1):
            if desc.ops[cut].family != "elementwise" and not _is_small(desc.ops[cut], desc):
                break
            root = made.get((desc.maker, ops[:cut]))
            if root is None:
                continue
            joined = desc.maker != "library" or _joins_library(root[1], desc.ops[cut:])
            ends = [made[m, ops[cut:]] for m in (makers if joined else ["library"]) if (m, ops[cut:]) in made]
            own = made.get((desc.maker, ops[cut:]))
            if in_turn and own is not None and _is_spread(root[1], desc):
                found[key].append(Epilogue(key, root[0], own[0], 1.0, in_turn=True))
                break
            found[key] += [Epilogue(key, root[0], end, _kept(desc, root[1], of) if joined else 1.0) for end, of in ends]
        found[key] += _beginnings(key, ops, desc, made, in_turn)
    return tuple(epilogue for ways in found.values() for epilogue in ways)


def _beginnings(
    key: str,
    ops: tuple[int, ...],
    desc: KernelDesc,
    made: Mapping[tuple[str, tuple[int, ...]], tuple[str, KernelDesc]],
    in_turn: bool,
) -> list[Epilogue]:
    """The ways to cut operators off the beginning of a generated kernel that takes some in."""
    found = []
    for cut in range(1, len(ops)):
        if desc.maker != "tvm" or desc.ops[cut - 1].family not in _BEFORE:
            break
        root = made.get(("tvm", ops[cut:]))
        apart = made.get(("tvm", ops[:cut]))
        if apart is None and desc.ops[cut - 1].name in _VIEWS:  # a mean that is given another shape
            apart = made.get(("tvm", ops[: cut - 1]))
        if root is not None and apart is not None and root[1].root.family in _TAKES_PRODUCERS:
            product = root[1].root.family in _PRODUCTS
            apart_first = in_turn and product and any(_is_made_first(op) for op in desc.ops[:cut])
            kept = 1.0 if apart_first else max(_KEPT_BEFORE, _kept(desc, root[1], apart[1]))
            found.append(Epilogue(key, root[0], apart[0], kept, apart_first))
    return found


def with_epilogues(entries: Mapping[str, Entry], found: Sequence[Epilogue], call_s: float) -> dict[str, Entry]:
    """Return the times by key, no estimate above that of the parts that `found` names, in its order.

    `call_s` is what a call of a kernel takes on the device, seconds. Times that were measured, and kernels that cannot
    run, stay as they are.
    """
    out = dict(entries)
    for way in found:
        whole, root, apart = out[way.whole], out[way.root], out[way.apart]
        if whole.source not in MEASURED and math.isfinite(whole.seconds):
            bound_s = root.seconds + max(apart.seconds - call_s, 0.0) * way.kept
            if math.isfinite(bound_s) and (way.in_turn or whole.seconds > bound_s):
                out[way.whole] = _moved_to(whole, bound_s, _IN_TURN if way.in_turn else _NO_MORE)
    return out


def _joins_library(root: KernelDesc, end: Sequence[OpDesc]) -> bool:
    """Whether the library computes `end` in the call that computes `root`."""
    names = [op.name for op in end]
    if root.root.family == "conv2d" and names in (["add"], ["add", "relu"]):
        return names == ["add"] or _adds_tensor(end[0])
    return names == ["add"] and not _adds_tensor(end[0])


def _is_spread(root: KernelDesc, whole: KernelDesc) -> bool:
    """Whether a product of few values ends with what spreads them over a larger tensor, as the gate of an image."""
    return root.root.family in _PRODUCTS and root.maker == "tvm" and root.write_bytes <= _SMALL * whole.write_bytes


def _is_made_first(op: OpDesc) -> bool:
    """Whether what an operator makes is in memory before a product reads any of it: a mean, a sum of two tensors."""
    return op.family == "pooling" or (op.family == "elementwise" and _adds_tensor(op))


def _adds_tensor(op: OpDesc) -> bool:
    """Whether an addition reads two tensors of its result's size: a residual, no bias."""
    return op.size("read") >= 2 * op.size("write")


def _kept(whole: KernelDesc, root: KernelDesc, apart: KernelDesc) -> float:
    """All of arithmetic, moves, poolings, look-ups; of all else the share of its traffic not between the two parts."""
    parts = [op for op in apart.ops if not _is_small(op, apart)]
    if any(op.name in _ARITHMETIC or op.family in _KEPT_WHOLE for op in parts):
        return 1.0
    saved = _moved(root) + _moved(apart) - _moved(whole)
    return 1.0 - min(max(saved / _moved(apart), 0.0), 1.0)


def _is_small(op: OpDesc, desc: KernelDesc) -> bool:
    """Whether an operator moves next to nothing of what its kernel writes, as one that gives a gate another axis."""
    return op.family == "movement" and 4 * op.size("write") <= _SMALL * desc.write_bytes


def _moved(desc: KernelDesc) -> float:
    return max(desc.read_bytes + desc.write_bytes, 1.0)


def _moved_to(entry: Entry, seconds: float, why: str) -> Entry:
    ratio = seconds / entry.seconds
    low, high = min(entry.low * ratio, seconds), max(entry.high * ratio, seconds)  # whatever rounding does
    return replace(entry, seconds=seconds, low=low, high=high, note="; ".join(n for n in (entry.note, why) if n))
