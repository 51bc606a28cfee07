"""Operators as people write them, one JSON object each, and their way to kernel descriptions.

    {"op": "linear", "b": 8, "m": 512, "n": 1024, "k": 64, "dtype": "float32", "maker": "library"}

`SCHEMA` says every operator's fields; `parse` reads one object. Nothing is guessed: an unknown field is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tvmhet.cost.model import KernelDesc, OpDesc
from tvmhet.cost.workload import kernel_of
from tvmhet.errors import BadInput

#: Operands of elementwise operators that take two; all others take one.
_BINARY = frozenset(
    ("add", "subtract", "multiply", "divide", "power", "maximum", "minimum", "floor_divide", "mod", "equal", "greater",
     "less", "where")
)  # fmt: skip
_SHORT_NAMES = {"sub": "subtract", "mul": "multiply", "div": "divide", "pow": "power"}
_SHORT_DTYPES = {
    "fp64": "float64", "fp32": "float32", "tf32": "tfloat32", "fp16": "float16", "half": "float16",
    "bf16": "bfloat16", "fp8": "float8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Field:
    """One field of an operator: `default` None means that it must be given."""

    meaning: str
    default: int | str | bool | None = None


_INT = "a whole number of 1 or more"
_COMMON = {
    "dtype": Field("dtype of the operands, such as float32 or bfloat16", "float32"),
    "maker": Field("library (vendor kernel) or tvm (generated)", "library"),
    "backward": Field("true for the gradient of the operator of these sizes", False),
}


def _fields(required: str, **optional: Field) -> Mapping[str, Field]:
    return MappingProxyType({**{name: Field(_INT) for name in required.split()}, **optional})


_CONV = _fields(
    "n c h w oc kh kw",
    stride=Field("stride in both directions", 1),
    padding=Field("padding on every side", 0),
    dilation=Field("dilation in both directions", 1),
    groups=Field("convolution groups", 1),
)
_ATTENTION = {
    "kv_heads": Field("heads of keys and values; 0: as many as heads", 0),
    "window": Field("keys each query sees at most; 0: all", 0),
}

#: Fields of every operator besides dtype, maker and backward.
SCHEMA: Mapping[str, Mapping[str, Field]] = MappingProxyType(
    {
        "matmul": _fields("b m n k"),
        "linear": _fields("m n k", b=Field("leading rows: the product has b * m rows", 1)),
        "conv2d": _CONV,
        "elementwise": MappingProxyType(
            {
                "name": Field("add, subtract, multiply, divide, power, relu, gelu, tanh, ..."),
                "shape": Field("list of whole numbers of 1 or more"),
                "scalar": Field("true if the second operand is one number", False),
            }
        ),
        "softmax": _fields("rows cols"),
        "layer_norm": _fields("rows cols"),
        "batch_norm": _fields("rows cols"),
        "reduction": _fields("rows cols", name=Field("sum, mean, max, ...", "sum")),
        "attention_prefill": _fields(
            "batch heads q_len head_dim",
            kv_len=Field("keys and values; 0: as many as queries", 0),
            causal=Field("whether a query sees only what came before it", True),
            **_ATTENTION,
        ),
        "attention_decode": _fields("batch heads kv_len head_dim", **_ATTENTION),
        "moe": _fields("tokens hidden inter topk experts", balanced=Field("tokens spread evenly over experts", True)),
        "embedding": _fields("tokens vocab dim"),
        "pooling": _fields("n c h w kh kw", stride=Field("stride; 0: as the window", 0), padding=Field("padding", 0)),
        "movement": MappingProxyType(
            {
                "name": Field("transpose, concat, copy, ...", "copy"),
                "shape": Field("list of whole numbers of 1 or more"),
            }
        ),
    }
)


def parse(record: Mapping[str, Any]) -> KernelDesc:
    """Return the kernel that `record` describes. Raises BadInput that names the field, its value and the limit."""
    if not isinstance(record, Mapping):
        raise BadInput(f"an operator is {record!r}", 'write one JSON object a line, such as {"op": "softmax", ...}')
    op = record.get("op")
    fields = SCHEMA.get(op) if isinstance(op, str) else None
    if fields is None:
        raise BadInput(f"operator {op!r} is unknown", f"use one of {', '.join(SCHEMA)}")
    for key in record:
        if key not in fields and key not in _COMMON and key != "op":
            raise BadInput(f"{op}: field {key!r} is unknown", f"use {', '.join((*fields, *_COMMON))}")
    values = {name: _value(str(op), name, field, record) for name, field in fields.items()}
    dtype, maker, backward = (_value(str(op), name, _COMMON[name], record) for name in ("dtype", "maker", "backward"))
    family, sizes, name = _BUILD[str(op)](values)
    return kernel_of(OpDesc(family, sizes, _SHORT_DTYPES.get(dtype, dtype), name, backward), maker)


def _value(op: str, name: str, field: Field, record: Mapping[str, Any]) -> Any:
    """Return the field's value, checked; its default if the record leaves it out."""
    if name not in record:
        if field.default is None:
            raise BadInput(f"{op}: field {name!r} is missing", f"give {field.meaning}")
        return field.default
    value = record[name]
    if name == "shape":
        if not isinstance(value, list) or not value or not all(type(v) is int and v >= 1 for v in value):
            raise BadInput(f"{op}: shape is {value!r}", f"give a {field.meaning}")
        return value
    expected: type = str if field.default is None and name == "name" else type(field.default)
    if field.default is None and name != "name":
        expected = int
    if expected is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    least = 1 if field.default is None else 0
    if type(value) is not expected or (isinstance(value, int) and value < least):
        raise BadInput(f"{op}: {name} is {record[name]!r}", f"give {field.meaning}")
    return value


Parts = tuple[str, tuple[int, ...], str]


def _conv2d(v: Mapping[str, Any]) -> Parts:
    if v["stride"] < 1 or v["dilation"] < 1 or v["groups"] < 1:
        raise BadInput(f"conv2d: stride {v['stride']}, dilation {v['dilation']}, groups {v['groups']}", f"give {_INT}")
    if v["c"] % v["groups"] or v["oc"] % v["groups"]:
        raise BadInput(f"conv2d: {v['groups']} groups do not divide c {v['c']} and oc {v['oc']}", "change groups")
    oh, ow = (
        _out("conv2d", v[s], v[k], v["stride"], v["padding"], v["dilation"]) for s, k in (("h", "kh"), ("w", "kw"))
    )
    return "conv2d", (v["n"], v["c"], v["h"], v["w"], v["oc"], v["kh"], v["kw"], oh, ow, v["groups"]), ""


def _pooling(v: Mapping[str, Any]) -> Parts:
    oh, ow = (_out("pooling", v[s], v[k], v["stride"] or v[k], v["padding"], 1) for s, k in (("h", "kh"), ("w", "kw")))
    return "pooling", (v["n"], v["c"], v["h"], v["w"], v["kh"], v["kw"], oh, ow), ""


def _out(op: str, size: int, window: int, stride: int, padding: int, dilation: int) -> int:
    out: int = (size + 2 * padding - dilation * (window - 1) - 1) // stride + 1
    if out < 1:
        raise BadInput(f"{op}: a window of {window} does not fit an input of {size}", "pad it or use a smaller window")
    return out


def _elementwise(v: Mapping[str, Any]) -> Parts:
    name, count = _SHORT_NAMES.get(v["name"], v["name"]), math.prod(v["shape"])
    if name not in _BINARY:
        return "elementwise", (count, count), name
    return "elementwise", (count if v["scalar"] else 2 * count, count), name + "_scalar" if v["scalar"] else name


def _prefill(v: Mapping[str, Any]) -> Parts:
    heads = v["kv_heads"] or v["heads"]
    sizes = (v["batch"], v["heads"], heads, v["q_len"], v["kv_len"] or v["q_len"], v["head_dim"], v["window"])
    return "attention_prefill", sizes, "causal" if v["causal"] else ""


def _decode(v: Mapping[str, Any]) -> Parts:
    heads = v["kv_heads"] or v["heads"]
    return "attention_decode", (v["batch"], v["heads"], heads, 1, v["kv_len"], v["head_dim"], v["window"]), "causal"


def _plain(family: str, names: str, label: str = "") -> Callable[[Mapping[str, Any]], Parts]:
    return lambda v: (family, tuple(v[n] for n in names.split()), v.get("name", label))


_BUILD: Mapping[str, Callable[[Mapping[str, Any]], Parts]] = MappingProxyType(
    {
        "matmul": _plain("matmul", "b m n k"),
        "linear": _plain("linear", "b m n k"),
        "conv2d": _conv2d,
        "elementwise": _elementwise,
        "softmax": _plain("softmax", "rows cols", "softmax"),
        "layer_norm": _plain("layer_norm", "rows cols", "layer_norm"),
        "batch_norm": _plain("batch_norm", "rows cols", "batch_norm"),
        "reduction": _plain("reduction", "rows cols"),
        "attention_prefill": _prefill,
        "attention_decode": _decode,
        "moe": lambda v: (
            "moe",
            tuple(v[n] for n in ("tokens", "hidden", "inter", "topk", "experts")),
            "" if v["balanced"] else "power_law",
        ),
        "embedding": _plain("embedding", "tokens vocab dim"),
        "pooling": _pooling,
        "movement": lambda v: ("movement", (math.prod(v["shape"]),) * 2, v["name"]),
    }
)


def schema_text() -> str:
    """Return every operator's fields as text for people: name, meaning, default."""
    lines = ["Each line is one JSON object. Fields of all operators:"]
    lines += [f"  {name}: {f.meaning} (default {f.default!r})" for name, f in _COMMON.items()]
    for op, fields in SCHEMA.items():
        lines.append(f'{{"op": "{op}"}}')
        for name, field in fields.items():
            tail = "" if field.default is None else f" (default {field.default!r})"
            lines.append(f"  {name}: {field.meaning}{tail}")
    return "\n".join(lines) + "\n"
