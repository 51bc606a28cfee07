"""From operators of an OpGraph to the kernel description that cost models take.

    describe(graph, ops=(conv, add, relu), maker="tvm") ──► KernelDesc(ops=(conv2d, elementwise, elementwise), ...)

Total: an operator that no rule knows becomes "generic", priced by its FLOPs and bytes and flagged as out of range.
Bytes of a kernel are its live-ins and live-outs; what stays inside it costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from tvmhet.cost.model import DTYPE_BYTES, KernelDesc, OpDesc, dilated
from tvmhet.errors import BadInput
from tvmhet.graph.families import ELEMENTWISE
from tvmhet.graph.opgraph import Operator, OpGraph, Tensor

#: Operators that touch no more of each operand than they produce.
_SPARSE_READERS = frozenset(
    {"take", "strided_slice", "dynamic_strided_slice", "gather_elements", "gather_nd", "index_tensor"}
)

Rule = Callable[[Operator, Sequence[Tensor], Sequence[Tensor]], tuple[str, tuple[int, ...], str]]


def describe(graph: OpGraph, ops: Sequence[int], maker: str, panels: Collection[int] = ()) -> KernelDesc:
    """Return the description of the kernel that runs the operators `ops` (indices into `graph`) fused into one.

    Of the tensors that it reads, those of `panels` may be stored in panels. Raises BadInput if `ops` is empty, repeats
    an operator, or the maker is unknown.
    """
    if not ops or len(set(ops)) != len(ops):
        raise BadInput(f"kernel operators {list(ops)}", "give at least one operator, each once")
    members = sorted(ops)
    inside = frozenset(members)
    descs = tuple(_describe_operator(graph, graph.operators[i]) for i in members)
    return KernelDesc(
        ops=descs,
        flop=float(sum(graph.operators[i].flop for i in members)),
        read_bytes=_read_bytes(graph, members, inside),
        write_bytes=_write_bytes(graph, members, inside),
        dtype=max(descs, key=lambda d: math.prod(d.sizes)).dtype,
        maker=maker,
        panels=any(t in panels for i in members for t in graph.operators[i].inputs),
    )


def _read_bytes(graph: OpGraph, members: Sequence[int], inside: frozenset[int]) -> float:
    """Bytes read from outside the kernel: each tensor once, and of gathered tables only what is gathered."""
    touched: dict[int, int] = {}
    for i in members:
        op = graph.operators[i]
        written = sum(graph.tensors[t].size_bytes for t in op.outputs)
        for t in op.inputs:
            tensor = graph.tensors[t]
            if tensor.producer in inside:
                continue
            read = min(tensor.size_bytes, written) if op.family in _SPARSE_READERS else tensor.size_bytes
            touched[t] = max(touched.get(t, 0), read)
    return float(sum(touched.values()))


def _write_bytes(graph: OpGraph, members: Sequence[int], inside: frozenset[int]) -> float:
    outputs = [graph.tensors[t] for i in members for t in graph.operators[i].outputs]
    return float(sum(t.size_bytes for t in outputs if t.is_output or any(c not in inside for c in t.consumers)))


def _describe_operator(graph: OpGraph, op: Operator) -> OpDesc:
    """Return the description of one operator; generic when no rule knows it or its shapes break the rule."""
    ins = [graph.tensors[t] for t in op.inputs]
    outs = [graph.tensors[t] for t in op.outputs]
    dtype = _dtype(ins, outs)
    rule = _RULES.get(op.family)
    if rule is None or not outs:
        return OpDesc("generic", (), dtype, op.family)
    try:
        family, sizes, name = rule(op, ins, outs)
        return OpDesc(family, tuple(int(s) for s in sizes), dtype, name)
    except (BadInput, IndexError, ValueError, KeyError, ZeroDivisionError):
        return OpDesc("generic", (), dtype, op.family)


def _dtype(ins: Sequence[Tensor], outs: Sequence[Tensor]) -> str:
    """The dtype of the largest floating operand, else of the result, else float32 (a tuple or a shape)."""
    floating = [t for t in (*ins, *outs) if "float" in t.dtype and t.dtype in DTYPE_BYTES]
    if floating:
        return max(floating, key=lambda t: t.size_bytes).dtype
    return next((t.dtype for t in outs if t.dtype in DTYPE_BYTES), "float32")


def _count(tensors: Sequence[Tensor]) -> int:
    return sum(max(math.prod(t.shape), 1) for t in tensors)


def _matmul(op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[str, tuple[int, ...], str]:
    left, right, out = ins[0].shape, ins[1].shape, outs[0].shape
    k = left[-1]
    n = 1 if len(right) == 1 else right[-1]
    if len(right) <= 2:
        return "linear", (1, max(math.prod(out) // n, 1), n, k), ""
    m = 1 if len(left) == 1 else left[-2]
    return "matmul", (max(math.prod(out) // (m * n), 1), m, n, k), ""


def _linear(op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[str, tuple[int, ...], str]:
    n = outs[0].shape[-1]
    return "linear", (1, max(math.prod(outs[0].shape) // n, 1), n, ins[0].shape[-1]), ""


def _by_letter(tensor: Tensor, layout: str, batch: str, channel: str) -> tuple[int, int, tuple[int, int]]:
    """Return (batch, channels, (height, width)) of a tensor in `layout`; depth joins the batch, 1-d has h = 1."""
    at = dict(zip(layout, tensor.shape, strict=True))
    spatial = [at[c] for c in layout if c not in (batch, channel)]
    *outer, height, width = [1, *spatial] if len(spatial) == 1 else spatial
    return at[batch] * math.prod(outer), at[channel], (height, width)


def _conv(op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[str, tuple[int, ...], str]:
    rank = len(ins[0].shape) - 2
    default = ("NCW", "OIW") if rank == 1 else ("NCHW", "OIHW") if rank == 2 else ("NCDHW", "OIDHW")
    data_layout = str(op.attrs.get("data_layout", default[0]))
    kernel_layout = str(op.attrs.get("kernel_layout", default[1]))
    out_layout = str(op.attrs.get("out_layout") or data_layout)
    _, c, (h, w) = _by_letter(ins[0], data_layout, "N", "C")
    on, oc, (oh, ow) = _by_letter(outs[0], out_layout, "N", "C")
    depth, _, (kh, kw) = _by_letter(ins[1], kernel_layout, "O", "I")
    taps_deep = depth // dict(zip(kernel_layout, ins[1].shape, strict=True))["O"]
    groups = int(op.attrs.get("groups", 1))
    if "transpose" in op.family:  # the gradient of a convolution towards its input: read it the other way round
        return "conv2d", (on, oc * taps_deep, oh, ow, c, kh, kw, h, w, groups), "transpose"
    dilation = [int(d) for d in op.attrs.get("dilation", ())]
    return "conv2d", (on, c * taps_deep, h, w, oc, kh, kw, oh, ow, groups), dilated(dilation)


def _pool(op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[str, tuple[int, ...], str]:
    layout = str(op.attrs.get("layout", {3: "NCW", 4: "NCHW", 5: "NCDHW"}[len(ins[0].shape)]))
    n, c, (h, w) = _by_letter(ins[0], layout, "N", "C")
    _, _, (oh, ow) = _by_letter(outs[0], layout, "N", "C")
    window = [int(v) for v in op.attrs.get("pool_size", ())] or [-(-h // oh), -(-w // ow)]
    kh, kw = (1, window[0]) if len(window) == 1 else window[-2:]
    return "pooling", (n, c, h, w, kh, kw, oh, ow), op.family.removeprefix("nn.")


def _axes(op: Operator, rank: int) -> tuple[int, ...]:
    axis = op.attrs.get("axis", op.attrs.get("axes"))
    if axis is None:
        return tuple(range(rank))
    listed = [int(axis)] if isinstance(axis, (int, float, str)) else [int(a) for a in axis]
    return tuple(a % rank for a in listed)


def _along(family: str) -> Rule:
    """Rows x cols of the first operand, cols being the axes that the operator works along."""

    def rule(op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[str, tuple[int, ...], str]:
        shape = ins[0].shape
        axes = (
            _axes(op, len(shape))
            if "axis" in op.attrs or "axes" in op.attrs or family == "reduction"
            else (len(shape) - 1,)
        )
        cols = math.prod(shape[a] for a in axes)
        return family, (max(math.prod(shape) // max(cols, 1), 1), cols), op.family.removeprefix("nn.")

    return rule


def _group_norm(op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[str, tuple[int, ...], str]:
    shape = ins[0].shape
    rows = shape[0] * int(op.attrs.get("num_groups", shape[1]))
    return "layer_norm", (rows, max(math.prod(shape) // rows, 1)), op.family.removeprefix("nn.")


def _batch_norm(op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[str, tuple[int, ...], str]:
    shape = ins[0].shape
    rows = shape[int(op.attrs.get("axis", 1)) % len(shape)]
    return "batch_norm", (rows, math.prod(shape) // rows), "batch_norm"


def _attention(op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[str, tuple[int, ...], str]:
    batch, q_len, heads, head_dim = ins[0].shape
    kv_len, kv_heads = ins[1].shape[1:3]
    window = op.attrs.get("window_size")
    mask = "causal" if op.attrs.get("causal_mask") not in (None, "", "None") else ""
    family = "attention_decode" if q_len == 1 else "attention_prefill"
    return family, (batch, heads, kv_heads, q_len, kv_len, head_dim, int(window) if window else 0), mask


def _take(op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[str, tuple[int, ...], str]:
    table = ins[0].shape
    if len(table) != 2 or (op.attrs.get("axis") is not None and int(op.attrs["axis"]) % 2 != 0):
        return _move(op, ins, outs)
    return "embedding", (max(math.prod(outs[0].shape) // table[1], 1), *table), "take"


def _elementwise(op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[str, tuple[int, ...], str]:
    name = op.family.removeprefix("nn.")
    by_one_number = len(ins) == 2 and min(_count([t]) for t in ins) == 1 < _count(outs)
    return "elementwise", (_count(ins), _count(outs)), f"{name}_scalar" if by_one_number else name


def _move(op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[str, tuple[int, ...], str]:
    written = _count(outs)
    read = sum(min(_count([t]), written) if op.family in _SPARSE_READERS else _count([t]) for t in ins)
    return "movement", (read, written), op.family.removeprefix("nn.")


_ELEMENTWISE = (*ELEMENTWISE, "nn.prelu", "nn.dropout")
_MOVEMENT = (
    "reshape permute_dims transpose flatten squeeze expand_dims broadcast_to concat split stack strided_slice "
    "dynamic_strided_slice tile repeat flip gather_elements gather_nd index_tensor scatter_elements scatter_nd "
    "slice_scatter index_put layout_transform collapse_sum_like collapse_sum_to copy zeros zeros_like ones "
    "ones_like full full_like arange eye tril triu one_hot meshgrid nn.pad nn.batch_flatten nn.pixel_shuffle "
    "image.resize2d image.resize3d"
)
_REDUCTION = "sum mean max min prod std variance argmax argmin all any cumsum cumprod median topk sort argsort"

#: Members of the families that hold many, as descriptions name them.
ELEMENTWISE_NAMES = tuple(name.removeprefix("nn.") for name in _ELEMENTWISE)
MOVEMENT_NAMES = tuple(name.removeprefix("nn.") for name in _MOVEMENT.split())
REDUCTION_NAMES = tuple(_REDUCTION.split())

_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "matmul": _matmul,
        "linear": _linear,
        **dict.fromkeys(("nn.conv1d", "nn.conv2d", "nn.conv3d", "nn.conv1d_transpose"), _conv),
        **dict.fromkeys(("nn.conv2d_transpose", "nn.conv3d_transpose"), _conv),
        **dict.fromkeys(("nn.attention", "nn.attention_bias", "nn.attention_var_len"), _attention),
        **{f"nn.{kind}_pool{d}d": _pool for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for d in (1, 2, 3)},
        "nn.softmax": _along("softmax"),
        "nn.log_softmax": _along("softmax"),
        "nn.layer_norm": _along("layer_norm"),
        "nn.rms_norm": _along("layer_norm"),
        "nn.group_norm": _group_norm,
        "nn.instance_norm": _group_norm,
        "nn.batch_norm": _batch_norm,
        "take": _take,
        **dict.fromkeys(_ELEMENTWISE, _elementwise),
        **dict.fromkeys(_MOVEMENT.split(), _move),
        **dict.fromkeys(_REDUCTION.split(), _along("reduction")),
    }
)
