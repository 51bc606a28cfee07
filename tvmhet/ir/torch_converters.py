"""Our own fx -> Relax converters, where TVM's are wrong, missing, or leave more operators than the model has.

Each takes (node, importer) like TVM's own; `importer.env` maps fx nodes to Relax expressions. Keyed by the operator's
name with overload, as fx spells it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import fx
from tvm import relax

op = relax.op
_aten = torch.ops.aten

#: Composite operators that TVM takes whole (or one of our converters does), so that export must not take them apart.
KEPT_OPERATORS = (
    _aten.linear.default,
    _aten.matmul.default,
    _aten.scaled_dot_product_attention.default,
    _aten.layer_norm.default,
    _aten.group_norm.default,
    _aten.silu.default,
    _aten.hardswish.default,
    _aten.hardsigmoid.default,
    _aten.max_pool2d.default,
    _aten.adaptive_avg_pool2d.default,
    _aten.one_hot.default,
    _aten.embedding_bag.padding_idx,
)


def _arg(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _dims(expr: relax.Expr) -> list[Any]:
    return [int(d) if hasattr(d, "value") else d for d in expr.ty.shape.values]


def _dtype_of(node: fx.Node) -> str:
    return str(node.meta["val"].dtype).removeprefix("torch.")


def _binary(relax_op: Callable[[Any, Any], Any]) -> Callable[[fx.Node, Any], Any]:
    """Promote both operands as torch does, then apply; `alpha` scales the second (TVM's converters do neither)."""

    def convert(node: fx.Node, importer: Any) -> relax.Expr:
        emit = importer.block_builder.emit
        values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args[:2]]
        dtype = str(torch.result_type(*values)).removeprefix("torch.")
        result = _dtype_of(node)
        dtype = dtype if result == "bool" else result
        operands = [_as_dtype(importer, a, dtype) for a in node.args[:2]]
        alpha = node.kwargs.get("alpha", 1)
        if alpha != 1:
            operands[1] = emit(op.multiply(operands[1], relax.const(alpha, dtype)))
        return emit(relax_op(*operands))

    return convert


def _as_dtype(importer: Any, operand: Any, dtype: str) -> relax.Expr:
    expr = importer.env[operand] if isinstance(operand, fx.Node) else operand
    if not isinstance(expr, relax.Expr):
        return relax.const(expr, dtype)
    return expr if str(expr.ty.dtype) == dtype else importer.block_builder.emit(op.astype(expr, dtype))


def _embedding(node: fx.Node, importer: Any) -> relax.Expr:
    """Rows of a table. An index out of range reads the nearest row (TVM's converter would read foreign memory)."""
    weight, index = importer.env[node.args[0]], importer.env[node.args[1]]
    return importer.block_builder.emit(op.take(weight, index, axis=0, mode="clip"))


def _embedding_bag(node: fx.Node, importer: Any) -> relax.Expr:
    """Sum, mean or maximum of the rows of each bag, where all bags have one known length."""
    weight, index, offsets = (importer.env.get(n) if n is not None else None for n in node.args[:3])
    mode, weights, padding = _arg(node, 4, "mode", 0), _arg(node, 6, "per_sample_weights"), _arg(node, 8, "padding_idx")
    length = _bag_length(node, _dims(index))
    if length is None or padding is not None or (offsets is not None and _arg(node, 7, "include_last_offset", False)):
        raise NotImplementedError("bags of data-dependent length or with a padding index")
    emit = importer.block_builder.emit
    bags = emit(op.reshape(index, [-1, length]))
    rows = emit(op.take(weight, bags, axis=0, mode="clip"))
    if weights is not None:
        rows = emit(op.multiply(rows, emit(op.reshape(importer.env[weights], [*_dims(bags), 1]))))
    return emit((op.sum, op.mean, op.max)[mode](rows, axis=1))


def _bag_length(node: fx.Node, dims: Sequence[int]) -> int | None:
    """Return the common length of all bags: the row length of 2-d indices, or the step of offsets made by arange."""
    offsets = node.args[2]
    if len(dims) == 2:
        return dims[1]
    if not isinstance(offsets, fx.Node) or "arange" not in str(offsets.target) or len(offsets.args) != 3:
        return None
    start, stop, step = offsets.args
    return int(step) if start == 0 and stop == dims[0] and stop % step == 0 else None


def _linear(node: fx.Node, importer: Any) -> relax.Expr:
    """x @ w.T + b in the operands' own dtype (TVM's converter always gives float32)."""
    x, weight, bias = importer.env[node.args[0]], importer.env[node.args[1]], _arg(node, 2, "bias")
    emit = importer.block_builder.emit
    product = emit(op.matmul(x, emit(op.permute_dims(weight)), out_dtype=_dtype_of(node)))
    return product if bias is None else emit(op.add(product, importer.env[bias]))


def _matmul(node: fx.Node, importer: Any) -> relax.Expr:
    """A product in the operands' own dtype (TVM's converter always gives float32)."""
    a, b = importer.env[node.args[0]], importer.env[node.args[1]]
    return importer.block_builder.emit(op.matmul(a, b, out_dtype=_dtype_of(node)))


def _addmm(node: fx.Node, importer: Any) -> relax.Expr:
    """beta * c + alpha * (a @ b)."""
    c, a, b = (importer.env[n] for n in node.args[:3])
    emit, dtype = importer.block_builder.emit, _dtype_of(node)
    product = emit(op.matmul(a, b, out_dtype=dtype))
    for name, side in (("alpha", "product"), ("beta", "c")):
        factor = node.kwargs.get(name, 1)
        if factor != 1 and side == "product":
            product = emit(op.multiply(product, relax.const(factor, dtype)))
        elif factor != 1:
            c = emit(op.multiply(c, relax.const(factor, dtype)))
    return emit(op.add(product, c))


def _attention(node: fx.Node, importer: Any) -> relax.Expr:
    """softmax(q @ k.T * scale + mask) @ v, so that each part can be placed and fused.

    A row whose mask is false everywhere gives zeros, as torch does; without a mask no row can be.
    """
    q, k, v = (importer.env[n] for n in node.args[:3])
    mask, causal = _arg(node, 3, "attn_mask"), _arg(node, 5, "is_causal", False)
    scale, gqa = node.kwargs.get("scale"), node.kwargs.get("enable_gqa", False)
    emit, dtype = importer.block_builder.emit, _dtype_of(node)
    rank = len(_dims(q))
    if gqa:
        repeats = _dims(q)[-3] // _dims(k)[-3]
        k, v = emit(op.repeat(k, repeats, axis=rank - 3)), emit(op.repeat(v, repeats, axis=rank - 3))
    k_t = emit(op.permute_dims(k, [*range(rank - 2), rank - 1, rank - 2]))
    factor = scale if scale is not None else 1.0 / math.sqrt(_dims(q)[-1])
    scores = emit(op.multiply(emit(op.matmul(q, k_t, out_dtype=dtype)), relax.const(factor, dtype)))
    allowed = None
    if causal:
        allowed = _lower_triangle(emit, _dims(scores)[-2], _dims(scores)[-1])
    elif mask is not None and str(importer.env[mask].ty.dtype) == "bool":
        allowed = importer.env[mask]
    if allowed is not None:
        scores = emit(op.where(allowed, scores, relax.const(-math.inf, dtype)))
    elif mask is not None:
        scores = emit(op.add(scores, importer.env[mask]))
    weights = emit(op.nn.softmax(scores, axis=-1))
    if mask is not None:
        weights = _zero_rows_without_key(emit, scores, weights, dtype)
    return emit(op.matmul(weights, v, out_dtype=dtype))


def _lower_triangle(emit: Callable[[Any], Any], rows: Any, columns: Any) -> relax.Expr:
    row = emit(op.reshape(emit(op.arange(0, rows, 1, "int64")), [rows, 1]))
    return emit(op.greater_equal(row, emit(op.arange(0, columns, 1, "int64"))))


def _zero_rows_without_key(emit: Callable[[Any], Any], scores: Any, weights: Any, dtype: str) -> relax.Expr:
    best = emit(op.max(scores, axis=-1, keepdims=True))
    empty = emit(op.equal(best, relax.const(-math.inf, dtype)))
    return emit(op.where(empty, relax.const(0.0, dtype), weights))


def _cumsum(node: fx.Node, importer: Any) -> relax.Expr:
    """Sum integers and booleans as int64, as torch does (TVM would sum booleans as booleans)."""
    x, dtype = importer.env[node.args[0]], _dtype_of(node)
    emit = importer.block_builder.emit
    x = x if str(x.ty.dtype) == dtype else emit(op.astype(x, dtype))
    return emit(op.cumsum(x, int(_arg(node, 1, "dim")), dtype))


def _index_tensor(node: fx.Node, importer: Any) -> relax.Expr:
    """x[:, i, j, ...] with integer index tensors, negative ones too; one `take` over the indexed dims flattened.

    Indexed dims that do not stand side by side are moved to the front, as torch does.
    """
    x, index = importer.env[node.args[0]], list(node.args[1])
    emit = importer.block_builder.emit
    where = [i for i, v in enumerate(index) if v is not None]
    tensors = [importer.env[index[i]] for i in where]
    if any(str(t.ty.dtype) == "bool" for t in tensors):
        raise NotImplementedError("a boolean index selects a data-dependent number of elements")
    dims = _dims(x)
    if where != list(range(where[0], where[-1] + 1)):
        order = [*where, *(d for d in range(len(dims)) if d not in where)]
        x, dims, where = emit(op.permute_dims(x, order)), [dims[d] for d in order], list(range(len(where)))
    linear = _flat_index(emit, [dims[d] for d in where], tensors)
    if len(where) > 1:
        x = emit(op.reshape(x, [*dims[: where[0]], math.prod(dims[d] for d in where), *dims[where[-1] + 1 :]]))
    return emit(op.take(x, linear, axis=where[0], mode="clip"))


def _flat_index(emit: Callable[[Any], Any], dims: Sequence[int], tensors: Sequence[relax.Expr]) -> relax.Expr:
    """Row-major position of (i, j, ...) in a box of `dims`, as int64; negative indices count from the end."""

    def position(dim: int, index: relax.Expr) -> relax.Expr:
        index = index if str(index.ty.dtype) == "int64" else emit(op.astype(index, "int64"))
        below = emit(op.less(index, relax.const(0, "int64")))
        return emit(op.where(below, emit(op.add(index, relax.const(dim, "int64"))), index))

    placed = [position(d, t) for d, t in zip(dims, tensors, strict=True)]
    pairs = zip(dims[1:], placed[1:], strict=True)
    return reduce(
        lambda acc, pair: emit(op.add(emit(op.multiply(acc, relax.const(pair[0], "int64"))), pair[1])), pairs, placed[0]
    )


_ARITHMETIC = {
    "add": op.add,
    "sub": op.subtract,
    "mul": op.multiply,
    "div": op.divide,
    "eq": op.equal,
    "ne": op.not_equal,
    "lt": op.less,
    "le": op.less_equal,
    "gt": op.greater,
    "ge": op.greater_equal,
}

CONVERTERS: dict[str, Callable[[fx.Node, Any], Any]] = {
    **{f"{name}.{kind}": _binary(f) for name, f in _ARITHMETIC.items() for kind in ("Tensor", "Scalar")},
    "embedding.default": _embedding,
    "embedding_bag.padding_idx": _embedding_bag,
    "linear.default": _linear,
    "mm.default": _matmul,
    "bmm.default": _matmul,
    "matmul.default": _matmul,
    "addmm.default": _addmm,
    "scaled_dot_product_attention.default": _attention,
    "cumsum.default": _cumsum,
    "index.Tensor": _index_tensor,
}
