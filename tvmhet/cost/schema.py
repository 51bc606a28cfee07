"""The schema of operator lines as text for people: every operator, its fields, and a line that can be copied."""

from __future__ import annotations

import json
from collections.abc import Mapping
from textwrap import wrap
from types import MappingProxyType
from typing import Any

from tvmhet.cost.fields import Field, Kind
from tvmhet.cost.operators import COMMON, SCHEMA

#: One line of every operator.
EXAMPLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "matmul": {"b": 8, "m": 512, "n": 512, "k": 64, "dtype": "float32", "maker": "library"},
        "linear": {"b": 8, "m": 512, "n": 3072, "k": 768, "dtype": "bfloat16"},
        "conv2d": {
            "n": 32, "c": 64, "h": 56, "w": 56, "oc": 128, "kh": 3, "kw": 3, "stride": 2, "padding": 1, "groups": 1
        },
        "elementwise": {"name": "gelu", "shape": [8, 512, 3072]},
        "softmax": {"rows": 65536, "cols": 512, "pass": "backward"},
        "layer_norm": {"rows": 4096, "cols": 768},
        "batch_norm": {"rows": 64, "cols": 401408},
        "reduction": {"name": "mean", "rows": 4096, "cols": 768},
        "attention_prefill": {
            "batch": 1, "heads": 32, "kv_heads": 8, "q_len": 2048, "head_dim": 128, "dtype": "bfloat16"
        },
        "attention_decode": {
            "batch": 16, "heads": 32, "kv_heads": 8, "kv_len": 2048, "head_dim": 128, "dtype": "bfloat16"
        },
        "moe": {"tokens": 256, "hidden": 4096, "inter": 14336, "topk": 2, "experts": 8, "dtype": "bfloat16"},
        "embedding": {"tokens": 4096, "vocab": 30522, "dim": 768},
        "pooling": {"n": 32, "c": 64, "h": 112, "w": 112, "kh": 3, "kw": 3, "stride": 2, "padding": 1},
        "movement": {"name": "transpose", "shape": [8, 12, 512, 64]},
        "all_reduce": {"gpus": 8, "bytes": 16777216},
        "all_gather": {"gpus": 16, "nodes": 2, "network_gbit_s": 3200, "elements": 8388608, "dtype": "float16"},
        "reduce_scatter": {"gpus": 8, "bytes": 16777216},
        "all_to_all": {"gpus": 8, "bytes": 16777216},
        "send": {"gpus": 2, "bytes": 1048576},
    }
)  # fmt: skip
#: What each operator computes, in the words of its fields.
MEANING: Mapping[str, str] = MappingProxyType(
    {
        "matmul": "b products of (m, k) by (k, n), all operands distinct",
        "linear": "(b * m, k) by one shared (n, k) weight",
        "conv2d": "n images of c channels, h x w, by oc filters of kh x kw",
        "elementwise": "one value a place; the bytes of all operands count",
        "softmax": "over each of rows, cols long",
        "layer_norm": "over each of rows, cols long",
        "batch_norm": "rows channels of cols values each, in training",
        "reduction": "each of rows, cols long, to one value",
        "attention_prefill": "softmax(q k) v of q_len queries a sequence, batch sequences",
        "attention_decode": "softmax(q k) v of one query a sequence that has kv_len keys, batch sequences",
        "moe": "gated experts: tokens of hidden values, each through topk of experts that are inter wide",
        "embedding": "tokens rows of dim values out of a table of vocab",
        "pooling": "n images of c channels, h x w, by a window of kh x kw",
        "movement": "values to other places",
        "all_reduce": "the sum of every device's message, on every device",
        "all_gather": "the parts of all devices as one message, on every device",
        "reduce_scatter": "of the sum of all messages to each device its part",
        "all_to_all": "of each device's message to every device its part",
        "send": "a message from one device to another",
    }
)
_WIDTH = 116
_HEAD = (
    'One JSON object a line: "op" and its fields. An answer a line, in the same order: seconds; low and high, the '
    "80 % interval; source; in_range, false where the operator is unlike what the models were fitted on."
)
_SPELLING = (
    "Other spellings are understood where they can mean one thing only: bmm, gemm, layernorm, allreduce; a member's "
    'name as the op ({"op": "gelu"}); upper case; out_channels, r, s, kernel_size; num_heads, seq_len, hidden_size; '
    'fp32, bf16; "shape" for rows and cols; "pass": "backward" for "backward": true. Unknown fields are errors.'
)


def example_line(op: str) -> str:
    """Return a line of `op` that can be copied."""
    return json.dumps({"op": op, **EXAMPLES[op]})


def schema_text() -> str:
    """Return the whole schema: every operator with its fields, their types and defaults, and an example line."""
    lines = [*wrap(_HEAD, _WIDTH), "", *wrap(_SPELLING, _WIDTH), "", "Fields of every operator:"]
    lines += _fields(COMMON)
    for op, fields in SCHEMA.items():
        lines += ["", f"{op}: {MEANING[op]}", *_fields(fields), f"  {example_line(op)}"]
    return "\n".join(lines) + "\n"


def _fields(fields: Mapping[str, Field]) -> list[str]:
    """Return a line for every field; those of one description share it."""
    names: dict[str, list[str]] = {}
    for name, field in fields.items():
        names.setdefault(_description(field), []).append(name)
    lines: list[str] = []
    for text, alike in names.items():
        lines += wrap(f"{', '.join(alike)}: {text}", _WIDTH, initial_indent="  ", subsequent_indent="      ")
    return lines


def _description(field: Field) -> str:
    holds = f"one of {', '.join(field.choices)}" if field.kind is Kind.NAME else field.kind.value
    must = "required" if field.default is None else f"default {json.dumps(field.default)}"
    return "; ".join(part for part in (holds, must, field.meaning) if part)
