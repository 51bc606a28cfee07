"""What each operator does on a part of its operands: how its result is cut, or that it makes partial sums.

    add(x[.., /2], b)       the same part of the result, of the same part of a parameter b
    matmul(x[.., /2], w)    partial sums, of the rows of w that x has columns of
    softmax(x), along -1    a part along any other axis; None along -1: its operands must be whole

Every rule is given an operator of the whole graph, its operands and results, and the axis along which each operand is
cut. None says that it cannot work on such parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from tvmhet.graph.opgraph import Operator, PatternKind, Tensor

#: An axis from the right, -1 the last, so that it means the same where shapes are broadcast; None: whole.
Axis = int | None


@dataclass(frozen=True, slots=True)
class Step:
    """What an operator does on a part: axes of its results and parameters; or sums that are to be added up."""

    outputs: Mapping[int, int]
    params: Mapping[int, int]
    is_sum: bool = False
    blocks: int = 1  # of the results' axes


Rule = Callable[[Operator, Sequence[Tensor], Sequence[Tensor], Sequence[Axis], int], Step | None]


def elementwise(
    op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor], axes: Sequence[Axis], degree: int
) -> Step | None:
    """All operands cut alike; a whole one must be the same along that axis, a parameter is cut with the others."""
    (axis,) = {a for a in axes if a is not None} if len({a for a in axes if a is not None}) == 1 else (None,)
    if axis is None:
        return None
    params: dict[int, int] = {}
    for at, tensor, a in zip(op.inputs, ins, axes, strict=True):
        full = len(tensor.shape) >= -axis and tensor.shape[axis] > 1
        if tensor.is_param and full:
            params[at] = axis
        elif full and a is None:
            return None
    return Step({op.outputs[0]: axis}, params)


def _product(
    op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor], axes: Sequence[Axis], degree: int
) -> Step | None:
    left, right = axes[:2]
    if op.family == "linear" and (left != -1 or not ins[1].is_param or len(ins) > 2):
        return None  # a bias would be added once by every device
    inner = -1 if op.family == "linear" else -2
    if ins[1].is_param:
        if left == -1 and len(ins[1].shape) >= 2 and ins[1].shape[inner] % degree == 0:
            return Step({}, {op.inputs[1]: inner}, is_sum=True)
        rows = left is not None and left < -1 and len(ins[1].shape) == 2
        return Step({op.outputs[0]: left}, {}) if left is not None and rows else None
    if (left, right) == (-1, -2):
        return Step({}, {}, is_sum=True)
    for mine, other, tensor in ((left, right, ins[1]), (right, left, ins[0])):
        if mine is None or mine > -3:
            continue
        whole = len(tensor.shape) < -mine or tensor.shape[mine] == 1
        return Step({op.outputs[0]: mine}, {}) if other == mine or (other is None and whole) else None
    if (left, right) in ((-2, None), (None, -1)):
        return Step({op.outputs[0]: -2 if right is None else -1}, {})
    return None


def reshape(op: Operator, source: Tensor, result: Tensor, axis: Axis, degree: int, blocks: int) -> Step | None:
    """The cut falls between the same elements: in as many blocks, and those of the new axis can be cut too."""
    shape, new = source.shape, result.shape
    if axis is None:
        return None
    every = math.prod(shape[: len(shape) + axis]) * blocks
    for b in range(len(new)):
        before = math.prod(new[:b])
        if before <= every < before * new[b] and every % before == 0:
            inside = every // before
            fits = new[b] % (inside * degree) == 0
            return Step({op.outputs[0]: b - len(new)}, {}, blocks=inside) if fits else None
    return None


def _reduction(
    op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor], axes: Sequence[Axis], degree: int
) -> Step | None:
    """Over other axes than that which is cut."""
    rank, axis = len(ins[0].shape), axes[0]
    over = {int(a) % rank for a in op.attrs.get("axis") or range(rank)}
    if axis is None or rank + axis in over:
        return None
    gone = 0 if op.attrs.get("keepdims") else sum(a > rank + axis for a in over)
    return Step({op.outputs[0]: axis + gone}, {})


def pieces_read(op: Operator, source: Tensor, tensors: Sequence[Tensor], axis: int) -> list[tuple[int, int]] | None:
    """Return the (begin, end) of the pieces along an axis that an operator makes of a tensor; None if it does else."""
    size = source.shape[axis]
    if op.family == "split":
        if int(op.attrs.get("axis", 0)) % len(source.shape) != len(source.shape) + axis:
            return None
        ends = list(accumulate(tensors[t].shape[axis] for t in op.outputs))
        return list(zip([0, *ends[:-1]], ends, strict=True))
    if op.family != "strided_slice":
        return None
    axes = [int(a) % len(source.shape) for a in op.attrs.get("arg1") or ()]
    begin, end, strides = ([int(n) for n in op.attrs.get(f"arg{i}") or ()] for i in (2, 3, 4))
    if axes != [len(source.shape) + axis] or strides not in ([], [1]):
        return None
    first, last = (n + size if n < 0 else min(n, size) for n in (*begin, *end))
    return [(first, last)]


def _join(
    op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor], axes: Sequence[Axis], degree: int
) -> Step | None:
    """Side by side along another axis, all cut alike."""
    axis = axes[0]
    own = int(op.attrs.get("axis") or 0) % len(outs[0].shape)
    if axis is None or set(axes) != {axis} or len(outs[0].shape) + axis == own:
        return None
    return Step({op.outputs[0]: axis}, {})


def _scatter(
    op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor], axes: Sequence[Axis], degree: int
) -> Step | None:
    """Values into slices along another axis; a parameter that they are written into is cut with them."""
    axis, rank = axes[1], len(ins[0].shape)
    into_part = ins[0].is_param or axes[0] == axis
    if axis is None or not into_part or int(op.attrs.get("axis") or 0) % rank == rank + axis:
        return None
    return Step({op.outputs[0]: axis}, {op.inputs[0]: axis} if ins[0].is_param else {})


def _broadcast(
    op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor], axes: Sequence[Axis], degree: int
) -> Step | None:
    """Repeated along other axes."""
    axis = axes[0]
    return Step({op.outputs[0]: axis}, {}) if axis is not None and ins[0].shape[axis] == outs[0].shape[axis] else None


def _repeat(
    op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor], axes: Sequence[Axis], degree: int
) -> Step | None:
    """Each element several times in a row: a part's elements make a part."""
    axis = axes[0]
    return Step({op.outputs[0]: axis}, {}) if axis is not None and op.attrs.get("axis") is not None else None


def _take(
    op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor], axes: Sequence[Axis], degree: int
) -> Step | None:
    """Places along another axis, which every device takes of its part."""
    axis, rank, own = axes[0], len(ins[0].shape), op.attrs.get("axis")
    if axis is None or own is None or rank + axis == int(own) % rank or any(a is not None for a in axes[1:]):
        return None
    after = int(own) % rank > rank + axis  # then as many axes as places have stand between the cut and the right end
    return Step({op.outputs[0]: axis - (len(outs[0].shape) - rank) * after}, {})


def _permute(
    op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor], axes: Sequence[Axis], degree: int
) -> Step | None:
    rank = len(ins[0].shape)
    if axes[0] is None:
        return None
    order = [int(a) % rank for a in op.attrs.get("axes") or range(rank - 1, -1, -1)]
    return Step({op.outputs[0]: order.index(rank + axes[0]) - rank}, {})


def _along(
    op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor], axes: Sequence[Axis], degree: int
) -> Step | None:
    """Works along one axis, on parts along another."""
    rank = len(ins[0].shape)
    own = int(op.attrs.get("axis", -1)) % rank
    if axes[0] is None or rank + axes[0] == own or any(a is not None for a in axes[1:]):
        return None
    return Step({op.outputs[0]: axes[0]}, {})


def _attention(
    op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor], axes: Sequence[Axis], degree: int
) -> Step | None:
    """Heads apart: (batch, sequence, heads, head size)."""
    if len(ins) != 3 or list(axes) != [-2, -2, -2]:
        return None
    return Step({op.outputs[0]: -2}, {})


PRODUCTS = frozenset(("matmul", "linear"))
REDUCTIONS = frozenset(("max", "mean", "min", "sum"))
ELEMENTWISE = frozenset((PatternKind.ELEM_WISE, PatternKind.BROADCAST))
MOVES = frozenset(("split", "strided_slice", "concat", "broadcast_to", "repeat"))  # whatever their pattern
RESHAPES = frozenset(("reshape", "flatten", "squeeze", "expand_dims"))
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(PRODUCTS, _product),
        **dict.fromkeys(REDUCTIONS, _reduction),
        **dict.fromkeys(("permute_dims", "transpose"), _permute),
        **dict.fromkeys(("nn.softmax", "nn.log_softmax"), _along),
        "nn.attention": _attention,
        "take": _take,
        "concat": _join,
        "slice_scatter": _scatter,
        "broadcast_to": _broadcast,
        "repeat": _repeat,
    }
)
