"""How else people write operators: the names and fields of other tools, brought to ours.

    {"op": "bmm", "B": 8, "M": 512, "N": 512, "K": 64, "dtype": "fp32"}
        ──► {"op": "matmul", "b": 8, "m": 512, "n": 512, "k": 64, "dtype": "float32"}

Only what can mean one thing is understood. A value that two fields give is an error, and a field that is not known
here is passed on, for the schema to refuse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tvmhet.cluster.document import suggest
from tvmhet.cost.describe import ELEMENTWISE_NAMES, MOVEMENT_NAMES
from tvmhet.errors import BadInput


def _aliases(**words: str) -> dict[str, str]:
    """Return alias -> ours from ours="alias alias"."""
    return {alias: ours for ours, text in words.items() for alias in text.split()}


_OPS = _aliases(
    matmul="bmm batch_matmul batched_matmul",
    linear="dense fc fully_connected addmm gemm mm",
    conv2d="conv convolution conv_2d",
    elementwise="ewise pointwise element_wise vec",
    layer_norm="layernorm ln",
    batch_norm="batchnorm bn",
    reduction="reduce",
    attention_prefill="prefill context_attention prefill_attention attention_context flash_attention sdpa",
    attention_decode="decode generation_attention decode_attention attention_generation",
    moe="fused_moe mixture_of_experts",
    embedding="embedding_lookup",
    pooling="pool pool2d max_pool2d avg_pool2d maxpool avgpool",
    movement="data_movement memory copy_kernel",
    all_reduce="allreduce",
    all_gather="allgather",
    reduce_scatter="reducescatter",
    all_to_all="alltoall",
    send="p2p point_to_point send_recv sendrecv",
)
#: Operators that are members of a family here: alias -> (op, name).
_MEMBERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "rms_norm": ("layer_norm", "rms_norm"), "rmsnorm": ("layer_norm", "rms_norm"),
        "group_norm": ("layer_norm", "group_norm"), "instance_norm": ("layer_norm", "instance_norm"),
        "log_softmax": ("softmax", "log_softmax"), "logsoftmax": ("softmax", "log_softmax"),
        **{f"reduce_{name}": ("reduction", name) for name in ("sum", "mean", "max", "min", "prod")},
        "sum": ("reduction", "sum"), "mean": ("reduction", "mean"),
    }
)  # fmt: skip
_NAMES = _aliases(
    subtract="sub",
    multiply="mul",
    divide="div truediv true_divide",
    power="pow",
    silu="swish",
    negative="neg",
    astype="cast to",
    concat="cat concatenate",
    permute_dims="transpose permute",
    hardswish="hard_swish",
    hardsigmoid="hard_sigmoid",
    leakyrelu="leaky_relu",
    gelu_tanh="gelu_new gelu_approx",
    add_scalar="addu",
    multiply_scalar="mulu",
    divide_scalar="divu",
    power_scalar="powu",
    floor_divide="floordiv",
    copy="clone contiguous",
)
_DTYPES = _aliases(
    float64="fp64 double f64",
    float32="fp32 float f32 single",
    tfloat32="tf32",
    float16="fp16 half f16",
    bfloat16="bf16",
    float8="fp8 fp8_block",
    float8_e4m3fn="fp8_e4m3 e4m3 float8_e4m3",
    float8_e5m2="fp8_e5m2 e5m2",
    int8="i8",
    int32="i32",
    int64="i64",
)
_MAKERS = _aliases(library="cublas cudnn cublaslt torch pytorch vendor", tvm="generated tvm_generated")
_PASSES = {"forward": False, "fwd": False, "fw": False, "backward": True, "bwd": True, "bw": True}

_PRODUCT = _aliases(b="batch batch_size", m="rows tokens num_tokens", n="cols out_features", k="in_features reduction")
_IMAGE = _aliases(
    n="b batch batch_size",
    c="in_channels input_channels in_channel input_channel ic c_in channels",
    h="height",
    w="width",
    oc="out_channels output_channels out_channel output_channel c_out filters num_filters",
    kh="r kernel_h",
    kw="s kernel_w",
    stride="strides",
    padding="pad pads",
    dilation="dilations",
)
_ROWS = _aliases(rows="b batch m num_rows tokens num_tokens", cols="h n hidden dim hidden_size num_cols")
_ATTENTION = _aliases(
    batch="b batch_size",
    heads="num_heads n_heads h num_q_heads",
    kv_heads="num_kv_heads n_kv_heads num_key_value_heads",
    head_dim="d head_size dim_head",
    window="window_size sliding_window",
)
_EXCHANGE = _aliases(
    gpus="num_gpus n_gpus devices num_devices ranks world_size",
    bytes="size_bytes message_bytes",
    elements="num_elements count",
    nodes="num_nodes n_nodes nnodes",
    network_gbit_s="network_gbps network_gbit_per_s",
)
_FIELDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "matmul": _PRODUCT,
        "linear": _PRODUCT,
        "conv2d": _IMAGE,
        "pooling": _IMAGE,
        "elementwise": {},
        "movement": {},
        "softmax": _ROWS,
        "layer_norm": _ROWS,
        "batch_norm": {},
        "reduction": _ROWS,
        "attention_prefill": _ATTENTION | _aliases(q_len="s seq_len seqlen isl sequence", kv_len="kv_seq_len"),
        "attention_decode": _ATTENTION | _aliases(kv_len="s seq_len seqlen context context_len kv_seq_len"),
        "moe": _aliases(
            tokens="num_tokens m",
            hidden="hidden_size",
            inter="inter_size intermediate_size moe_intermediate_size",
            topk="top_k k",
            experts="num_experts e",
        ),
        "embedding": _aliases(tokens="rows num_tokens indices", vocab="vocab_size num_embeddings", dim="embedding_dim"),
        **dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"), _EXCHANGE),
    }
)


def canonical(record: Any, schema: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """Return `record` in the words of `schema`. Raises BadInput if it is no operator or says one thing twice."""
    if not isinstance(record, dict):
        raise BadInput(f"an operator is {_short(record)}", 'write one JSON object a line: {"op": "softmax", ...}')
    op = record.get("op")
    fields = schema.get(op) if isinstance(op, str) else None
    if fields is not None and all(k in fields or k in common or k == "op" for k in record):
        found = dict(record)  # in our words already, but for the values of names
    else:
        found = _renamed(record, schema)
    for key, words in (("dtype", _DTYPES), ("maker", _MAKERS)):
        if key in found:
            found[key] = _word(found[key], words)
    if "name" in found:
        _name(found)
    return found


def _renamed(record: Mapping[Any, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    lowered: dict[str, Any] = {}
    for key, value in record.items():
        _put(lowered, str(key).strip().lower().replace("-", "_"), value, key)
    found = _operator(lowered, schema)
    if "pass" in lowered or "direction" in lowered:
        _pass(lowered, found)
    _special(found["op"], lowered, schema[found["op"]])
    names = _FIELDS[found["op"]]
    for key, value in lowered.items():
        _put(found, key if key in schema[found["op"]] else names.get(key, key), value, key)
    return found


def _operator(record: dict[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Take the operator out of `record` and return it, with the name of a family's member."""
    given = record.pop("op", None)
    if not isinstance(given, str):
        raise BadInput(f"op is {_short(given)}", f"name the operator: one of {', '.join(schema)}")
    word = given.strip().lower().replace("-", "_").replace(" ", "_")
    op = word if word in schema else _OPS.get(word)
    if op is not None:
        return {"op": op}
    if word in ("attention", "mha", "gqa"):
        return {"op": _phase(record, word)}
    if word in _MEMBERS:
        op, name = _MEMBERS[word]
        return {"op": op, "name": name}
    name = _NAMES.get(word, word)
    base = name.removesuffix("_scalar")
    if base in ELEMENTWISE_NAMES:
        return {"op": "elementwise", "name": name}
    if name in MOVEMENT_NAMES:
        return {"op": "movement", "name": name}
    raise BadInput(f"operator {given!r} is unknown", suggest(word, {*schema, *_OPS, *_MEMBERS, *ELEMENTWISE_NAMES}))


def _phase(record: dict[str, Any], word: str) -> str:
    phase = record.pop("phase", None)
    known = {"prefill": "prefill", "context": "prefill", "decode": "decode", "generation": "decode"}
    if not isinstance(phase, str) or phase.lower() not in known:
        raise BadInput(f"{word}: phase is {_short(phase)}", 'give "prefill" or "decode"')
    return f"attention_{known[phase.lower()]}"


def _pass(record: dict[str, Any], found: dict[str, Any]) -> None:
    key = "pass" if "pass" in record else "direction"
    value = record.pop(key)
    if not isinstance(value, str) or value.lower() not in _PASSES:
        raise BadInput(f"{found['op']}: {key} is {_short(value)}", 'give "forward" or "backward"')
    _put(found, "backward", _PASSES[value.lower()], key)


def _special(op: str, record: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Bring fields that hold several of ours, or whose meaning the others decide, to ours."""
    if "shape" in record and "rows" in fields and isinstance(record["shape"], list) and record["shape"]:
        _rows_of(op, record)
    if "shape" in fields and "shape" not in record:
        _shape_of(record)
    if op in ("conv2d", "pooling"):
        _window_of(op, record)


def _rows_of(op: str, record: dict[str, Any]) -> None:
    """A shape as rows and cols: a batch norm's channels are its second side, other operators work along the last."""
    shape = record.pop("shape")
    if not all(type(v) is int and v >= 1 for v in shape):
        raise BadInput(f"{op}: shape is {_short(shape)}", "give a list of whole numbers of 1 or more")
    along = shape[min(1, len(shape) - 1)] if op == "batch_norm" else math.prod(shape[:-1])
    _put(record, "rows", along, "shape")
    _put(record, "cols", math.prod(shape) // along, "shape")


def _shape_of(record: dict[str, Any]) -> None:
    """The shape of an elementwise operator from its number of elements, or from rows and columns."""
    for names in (("elements",), ("numel",), ("size",), ("rows", "cols"), ("b", "h")):
        if all(name in record for name in names):
            record["shape"] = [record.pop(name) for name in names]
            return


def _window_of(op: str, record: dict[str, Any]) -> None:
    """Square windows and images by one number. `k` is cuDNN's output channels, unless those have their own name."""
    channels = {"oc", *(alias for alias, ours in _IMAGE.items() if ours == "oc")}
    if "k" in record:
        named = op == "pooling" or not channels.isdisjoint(record)
        _put(record, "kernel_size" if named else "oc", record.pop("k"), "k")
    for key, sides in (("kernel_size", ("kh", "kw")), ("kernel", ("kh", "kw")), ("input_size", ("h", "w"))):
        if key in record:
            value = record.pop(key)
            both = value if isinstance(value, list) and len(value) == 2 else [value, value]
            for side, one in zip(sides, both, strict=True):
                _put(record, side, one, key)


def _name(found: dict[str, Any]) -> None:
    """Bring an operator's name to ours; a name that says that one operand is a number sets `scalar`."""
    found["name"] = name = _word(found["name"], _NAMES)
    if found.get("op") == "elementwise" and isinstance(name, str) and name.endswith("_scalar"):
        if found.get("scalar", True) is not True:
            raise BadInput(f"elementwise: name is {name!r}, scalar {found['scalar']!r}", "leave scalar out")
        found["name"], found["scalar"] = _NAMES.get(name[:-7], name[:-7]), True


def _word(value: Any, words: Mapping[str, str]) -> Any:
    if not isinstance(value, str):
        return value
    word = value.strip().lower().replace("-", "_").removeprefix("torch.").removeprefix("nn.")
    return words.get(word, word)


def _put(record: dict[str, Any], key: str, value: Any, said: Any) -> None:
    if key in record:
        raise BadInput(f"{said!r} gives {key!r}, which another field gives already", "give each value once")
    record[key] = value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
