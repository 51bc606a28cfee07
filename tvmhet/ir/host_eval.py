"""Evaluate Relax operators on the host with torch: what `fold_parameters` computes once instead of at every call.

An operator without an entry in `EVALUATORS` is simply not evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import tvm
from tvm import relax

from tvmhet.ir.rewrite import dtype_of, op_name, shape_of

Evaluator = Callable[[relax.Call, list[Any]], torch.Tensor]


def can_evaluate(call: relax.Call) -> bool:
    """True when the operator has an evaluator and its result a static shape and a dtype that torch has."""
    return op_name(call) in EVALUATORS and shape_of(call) is not None and hasattr(torch, dtype_of(call))


def evaluate(call: relax.Call, operands: list[Any]) -> torch.Tensor:
    """Return the value of `call`; `operands` are its arguments as torch tensors, lists of them, numbers or shapes."""
    result = EVALUATORS[op_name(call)](call, operands)
    dtype, shape = torch_dtype(dtype_of(call)), shape_of(call)
    assert tuple(result.shape) == shape, f"{op_name(call)}: {tuple(result.shape)} instead of {shape}"
    return result.to(dtype).contiguous()


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of that name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def scalar(expr: Any) -> int | float | None:
    """Return the number that a Relax scalar expression holds, or None when it is no literal."""
    if isinstance(expr, tvm.ir.GenericConst):
        return None
    return expr.value if hasattr(expr, "value") else None


def _permute(call: relax.Call, a: list[Any]) -> torch.Tensor:
    axes = call.attrs.axes
    return a[0].permute(*(reversed(range(a[0].dim())) if axes is None else [int(x) for x in axes]))


def _expand_dims(call: relax.Call, a: list[Any]) -> torch.Tensor:
    return a[0].reshape(shape_of(call))


def _arange(call: relax.Call, a: list[Any]) -> torch.Tensor:
    return torch.arange(*a, dtype=torch_dtype(dtype_of(call)))


def _full(call: relax.Call, a: list[Any]) -> torch.Tensor:
    return a[1].reshape(()).to(torch_dtype(dtype_of(call))).expand(shape_of(call))


def _take(call: relax.Call, a: list[Any]) -> torch.Tensor:
    data, index = a
    if call.attrs.axis is None:
        return data.reshape(-1)[index.long()]
    axis = int(call.attrs.axis) % data.dim()
    flat = data.index_select(axis, index.long().reshape(-1))
    return flat.reshape([*data.shape[:axis], *index.shape, *data.shape[axis + 1 :]])


def _strided_slice(_call: relax.Call, a: list[Any]) -> torch.Tensor:
    data, axes, begins, ends, *steps = a
    for axis, begin, end, step in zip(axes, begins, ends, steps[0] if steps else [1] * len(axes), strict=True):
        places = range(*slice(begin, end, step).indices(data.shape[axis]))
        data = data.index_select(axis, torch.tensor(places, dtype=torch.int64))
    return data


def _slice_scatter(call: relax.Call, a: list[Any]) -> torch.Tensor:
    x, part, begin, end, step = a
    return torch.slice_scatter(x, part, int(call.attrs.axis), begin, end, step)


def _clip(_call: relax.Call, a: list[Any]) -> torch.Tensor:
    return torch.clamp(a[0], a[1], a[2])


def _fill(call: relax.Call, value: float) -> torch.Tensor:
    return torch.full(shape_of(call), value, dtype=torch_dtype(dtype_of(call)))


def _axes(call: relax.Call, x: torch.Tensor) -> tuple[int, ...]:
    axis = call.attrs.axis
    return tuple(range(x.dim())) if axis is None else tuple(int(a) for a in axis)


def _reduce(function: Callable[..., torch.Tensor]) -> Evaluator:
    return lambda call, a: function(a[0], _axes(call, a[0]), keepdim=bool(call.attrs.keepdims))


def _elementwise(function: Callable[..., torch.Tensor]) -> Evaluator:
    return lambda _call, a: function(*a)


def _instance_norm(call: relax.Call, a: list[Any]) -> torch.Tensor:
    x, scale, shift = a
    axes = [int(i) % x.dim() for i in call.attrs.axes]
    channel = int(call.attrs.channel_axis) % x.dim()
    each = [x.shape[i] if i == channel else 1 for i in range(x.dim())]
    centred = x - x.mean(axes, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(axes, keepdim=True) + float(call.attrs.epsilon))
    out = out * scale.reshape(each) if call.attrs.scale else out
    return out + shift.reshape(each) if call.attrs.center else out


def _reshaped(call: relax.Call, a: list[Any]) -> torch.Tensor:
    return a[0].reshape(shape_of(call))


EVALUATORS: dict[str, Evaluator] = {
    "add": _elementwise(torch.add),
    "subtract": _elementwise(torch.sub),
    "multiply": _elementwise(torch.mul),
    "negative": _elementwise(torch.neg),
    "sqrt": _elementwise(torch.sqrt),
    "rsqrt": _elementwise(torch.rsqrt),
    "exp": _elementwise(torch.exp),
    "sin": _elementwise(torch.sin),
    "cos": _elementwise(torch.cos),
    "less": _elementwise(torch.lt),
    "less_equal": _elementwise(torch.le),
    "greater": _elementwise(torch.gt),
    "greater_equal": _elementwise(torch.ge),
    "equal": _elementwise(torch.eq),
    "not_equal": _elementwise(torch.ne),
    "logical_not": _elementwise(torch.logical_not),
    "logical_and": _elementwise(torch.logical_and),
    "where": _elementwise(torch.where),
    "minimum": _elementwise(torch.minimum),
    "maximum": _elementwise(torch.maximum),
    "abs": _elementwise(torch.abs),
    "log": _elementwise(torch.log),
    "astype": lambda call, a: a[0].to(torch_dtype(dtype_of(call))),
    "divide": lambda call, a: torch.div(*a) if a[0].is_floating_point() else torch.div(*a, rounding_mode="trunc"),
    "reshape": _reshaped,
    "squeeze": _reshaped,
    "expand_dims": _expand_dims,
    "broadcast_to": lambda call, a: a[0].expand(shape_of(call)),
    "permute_dims": _permute,
    "concat": lambda call, a: torch.cat(a[0], int(call.attrs.axis or 0)),
    "arange": _arange,
    "full": _full,
    "zeros": lambda call, _a: _fill(call, 0),
    "ones": lambda call, _a: _fill(call, 1),
    "clip": _clip,
    "power": _elementwise(torch.pow),
    "tanh": _elementwise(torch.tanh),
    "sigmoid": _elementwise(torch.sigmoid),
    "floor": _elementwise(torch.floor),
    "floor_divide": _elementwise(torch.floor_divide),
    "floor_mod": _elementwise(torch.remainder),
    "logical_or": _elementwise(torch.logical_or),
    "bitwise_and": _elementwise(torch.bitwise_and),
    "bitwise_or": _elementwise(torch.bitwise_or),
    "triu": lambda _call, a: torch.triu(*a),
    "tril": lambda _call, a: torch.tril(*a),
    "sum": _reduce(torch.sum),
    "mean": _reduce(torch.mean),
    "max": _reduce(torch.amax),
    "min": _reduce(torch.amin),
    "stack": lambda call, a: torch.stack(a[0], int(call.attrs.axis or 0)),
    "tile": lambda call, a: a[0].tile([int(r) for r in call.attrs.repeats]),
    "take": _take,
    "strided_slice": _strided_slice,
    "slice_scatter": _slice_scatter,
    "matmul": lambda _call, a: torch.matmul(*a),
    "nn.instance_norm": _instance_norm,  # how weights are standardised
    "nn.relu": _elementwise(torch.relu),
    "nn.softmax": lambda call, a: torch.softmax(a[0], int(call.attrs.axis)),
}
