"""torch's scaled_dot_product_attention in Relax operators, so that each part can be placed and fused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx
from tvm import relax

from tvmhet.ir.fx_node import arg_of, dims_of, result_dtype

op = relax.op


def _attention(node: fx.Node, importer: Any) -> relax.Expr:
    """softmax(q @ k.T * scale + mask) @ v.

    A row whose mask is false everywhere gives zeros, as torch does; without a mask no row can be.
    """
    q, k, v = (importer.env[n] for n in node.args[:3])
    mask, causal = arg_of(node, 3, "attn_mask"), arg_of(node, 5, "is_causal", False)
    scale, gqa = node.kwargs.get("scale"), node.kwargs.get("enable_gqa", False)
    emit, dtype = importer.block_builder.emit, result_dtype(node)
    rank = len(dims_of(q))
    if gqa:
        repeats = dims_of(q)[-3] // dims_of(k)[-3]
        k, v = emit(op.repeat(k, repeats, axis=rank - 3)), emit(op.repeat(v, repeats, axis=rank - 3))
    k_t = emit(op.permute_dims(k, [*range(rank - 2), rank - 1, rank - 2]))
    factor = scale if scale is not None else 1.0 / math.sqrt(dims_of(q)[-1])
    scores = emit(op.multiply(emit(op.matmul(q, k_t, out_dtype=dtype)), relax.const(factor, dtype)))
    allowed = None
    if causal:
        allowed = _lower_triangle(emit, dims_of(scores)[-2], dims_of(scores)[-1])
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
    empty = emit(op.equal(emit(op.max(scores, axis=-1, keepdims=True)), relax.const(-math.inf, dtype)))
    return emit(op.where(empty, relax.const(0.0, dtype), weights))


ATTENTION: dict[str, Callable[[fx.Node, Any], Any]] = {"scaled_dot_product_attention.default": _attention}
