"""Which operators the library can make: one table, the operator's family and a rule on its attributes and tensors.

    "nn.conv2d": _convolution       (attrs, inputs, output) -> bool

`tvmhet.emit.library_steps` holds one function for each name of `LIBRARY_FAMILIES`; the tests demand both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvmhet.graph.opgraph import Tensor

FLOATS = frozenset({"float32", "float64", "float16", "bfloat16"})
CONVOLUTIONS = frozenset({"nn.conv1d", "nn.conv2d", "nn.conv3d"})
TRANSPOSED_CONVOLUTIONS = frozenset(f"{family}_transpose" for family in CONVOLUTIONS)
_MOVABLE = FLOATS | {"int32", "int64", "bool"}
Rule = Callable[[Mapping[str, Any], Sequence[Tensor], Tensor], bool]


def _same_float(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    """All tensors have one floating dtype."""
    return output.dtype in FLOATS and all(t.dtype == output.dtype for t in inputs)


def _convolution(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    return _slides(attrs, "OI") and len(inputs) == 2 and _same_float(attrs, inputs, output)


def _convolution_transpose(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    """The gradient of a convolution towards its input is this operator."""
    extra = all(
        o < max(s, d) for o, s, d in zip(attrs["output_padding"], attrs["strides"], attrs["dilation"], strict=True)
    )
    return _slides(attrs, "IO") and extra and len(inputs) == 2 and _same_float(attrs, inputs, output)


def _slides(attrs: Mapping[str, Any], channels: str) -> bool:
    """Torch pads both sides alike; channels come before the one to three axes that a window slides along."""
    rank = len(attrs["strides"])
    axes = "DHW"[3 - rank :]
    layouts = attrs["data_layout"], attrs["kernel_layout"], attrs["out_layout"] or f"NC{axes}"
    padding = list(attrs["padding"])
    return padding[:rank] == padding[rank:] and layouts == (f"NC{axes}", f"{channels}{axes}", f"NC{axes}")


def _window(attrs: Mapping[str, Any]) -> bool:
    """Torch pads both sides alike, by half a window at most, in NCHW."""
    top, left, bottom, right = attrs["padding"]
    half = all(2 * p <= k for p, k in zip((top, left), attrs["pool_size"], strict=True))
    plain = attrs["layout"] == "NCHW" and attrs["out_layout"] in ("", "NCHW") and (top, left) == (bottom, right)
    return plain and half


def _pool2d(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    return _window(attrs) and _same_float(attrs, inputs, output)


def _avg_pool2d(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    return list(attrs["dilation"]) == [1, 1] and _pool2d(attrs, inputs, output)


def _global_pool2d(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    return attrs["layout"] == "NCHW" and attrs["out_layout"] in ("", "NCHW") and _same_float(attrs, inputs, output)


def _layer_norm(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    rank = len(output.shape)
    axes = sorted(a % rank for a in attrs["axes"])
    trailing = axes == list(range(rank - len(axes), rank))
    return trailing and len(inputs) == 3 and _same_float(attrs, inputs, output)


def _embedding(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    """Rows of a matrix by integer index. Out of range, "clip" takes the nearest row and "fast" may do anything."""
    if len(inputs) == 1:
        return _one_slice(attrs, inputs, output)
    if len(inputs) != 2:
        return False
    table, index = inputs
    rows = len(table.shape) == 2 and attrs["axis"] in (0, None) and index.dtype in ("int32", "int64")
    return rows and attrs["mode"] in ("fast", "clip") and table.dtype == output.dtype and table.dtype in FLOATS


def _one_slice(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    """A constant index, within the extent."""
    index, axis = attrs.get("arg1"), attrs["axis"]
    if not isinstance(index, Mapping) or axis is None or not inputs[0].shape or inputs[0].dtype not in _MOVABLE:
        return False
    return bool(0 <= index["value"] < inputs[0].shape[axis])


def _unary(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    return len(inputs) == 1 and _same_float(attrs, inputs, output)


def _arithmetic(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    """One or two tensors; the other operand is a number then."""
    return 1 <= len(inputs) <= 2 and _same_float(attrs, inputs, output)


def _where(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    """A condition that is a tensor; one branch at least is one."""
    return (
        len(inputs) >= 2 and inputs[0].dtype == "bool" and "arg0" not in attrs and _same_float({}, inputs[1:], output)
    )


def _matmul(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    return all(len(t.shape) >= 2 for t in inputs) and _same_float(attrs, inputs, output)


def _reduction(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    """Over one axis at least, none of them empty: torch and TVM differ on those."""
    empty = 0 in inputs[0].shape
    return bool(inputs[0].shape) and not empty and _unary(attrs, inputs, output)


def _move(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    return len(inputs) == 1 and output.dtype in _MOVABLE and inputs[0].dtype == output.dtype


def _cut(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    """Constant bounds within the extents, without strides."""
    axes, begin, end = (attrs.get(f"arg{n}") for n in (1, 2, 3))
    if not isinstance(axes, list) or not isinstance(begin, list) or not isinstance(end, list) or "arg4" in attrs:
        return False
    shape = inputs[0].shape
    inside = all(0 <= a < len(shape) and 0 <= b < e <= shape[a] for a, b, e in zip(axes, begin, end, strict=True))
    return inside and _move(attrs, inputs, output)


def _concat(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    return attrs["axis"] is not None and output.dtype in _MOVABLE and all(t.dtype == output.dtype for t in inputs)


def _added_rows(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    """Rows added to a tensor's at integer places, as the gradient of an embedding does."""
    if attrs["reduction"] != "add" or len(inputs) != 3:
        return False
    data, places, rows = inputs
    by_row = len(places.shape) == 2 and places.shape[1] == 1 and places.dtype in ("int32", "int64")
    return by_row and _same_float(attrs, (data, rows), output)


def _attention(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    """Queries, keys, values (batch, length, heads, width), as many heads in each, and maybe a bias to add."""
    plain = attrs.get("causal_mask") in (None, "", "None") and attrs.get("window_size") in (None, "", "None")
    heads = {t.shape[2] for t in inputs[:3]}
    return plain and 3 <= len(inputs) <= 4 and len(heads) == 1 and _same_float(attrs, inputs, output)


#: Relax operators that the library makes, and when. The key is `Operator.family`.
LIBRARY_FAMILIES: Mapping[str, Rule] = {
    "matmul": _matmul,
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    **dict.fromkeys(TRANSPOSED_CONVOLUTIONS, _convolution_transpose),
    "nn.max_pool2d": _pool2d,
    "nn.avg_pool2d": _avg_pool2d,
    "nn.adaptive_avg_pool2d": _global_pool2d,
    "nn.attention": _attention,
    "nn.attention_bias": _attention,
    "nn.softmax": _unary,
    "nn.log_softmax": _unary,
    "nn.layer_norm": _layer_norm,
    **dict.fromkeys(("nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.relu"), _unary),
    **dict.fromkeys(("tanh", "sigmoid", "exp", "erf", "log", "sqrt", "rsqrt", "negative", "abs"), _unary),
    **dict.fromkeys(("add", "subtract", "multiply", "divide", "power", "maximum", "minimum"), _arithmetic),
    **dict.fromkeys(("sum", "mean", "max", "min"), _reduction),
    "clip": _unary,
    "where": _where,
    "take": _embedding,
    **dict.fromkeys(("reshape", "permute_dims", "expand_dims", "squeeze"), _move),
    "concat": _concat,
    "strided_slice": _cut,
    "scatter_nd": _added_rows,
    "grad.max_pool2d_backward": lambda attrs, inputs, output: len(inputs) == 2 and _pool2d(attrs, inputs, output),
    "grad.avg_pool2d_backward": lambda attrs, inputs, output: len(inputs) == 2 and _avg_pool2d(attrs, inputs, output),
}

#: Families whose arguments may be numbers or shapes; the graph has them as attributes "arg<position>".
_WITH_NUMBERS = frozenset(
    {"add", "subtract", "multiply", "divide", "power", "maximum", "minimum", "clip", "where", "take", "reshape"}
    | {"strided_slice"}
)


def library_takes(family: str, attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    """Whether the library makes this operator."""
    rule = LIBRARY_FAMILIES.get(family)
    numbers = [value for key, value in attrs.items() if key.startswith("arg")]
    if rule is None or (numbers and (family not in _WITH_NUMBERS or not all(map(_is_number, numbers)))):
        return False
    return rule(attrs, inputs, output)


def _is_number(value: Any) -> bool:
    """Whether an argument is a scalar constant, a plain number, or a list of whole numbers (a shape)."""
    if isinstance(value, Mapping):
        return value.get("shape") == [] and "value" in value and value.get("dtype") in _MOVABLE
    if isinstance(value, list):
        return all(isinstance(v, int) for v in value)
    return isinstance(value, int | float)
