"""torch's normalisations in Relax operators; bfloat16 is computed in float32, which TVM's operators need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from tvm import relax

from tvmhet.ir.fx_node import arg_of, dims_of, result_dtype

op = relax.op


def _layer_norm(node: fx.Node, importer: Any) -> relax.Expr:
    """Layer norm with or without weight and bias."""
    shape, epsilon = list(node.args[1]), arg_of(node, 4, "eps", 1e-5)
    axes = list(range(-len(shape), 0))
    return _normalised(
        node, importer, shape, lambda x, gamma, beta: op.nn.layer_norm(x, gamma, beta, axes=axes, epsilon=epsilon)
    )


def _group_norm(node: fx.Node, importer: Any) -> relax.Expr:
    """Group norm with or without weight and bias."""
    dims, groups = dims_of(importer.env[node.args[0]]), int(node.args[1])
    options = {"channel_axis": 1, "axes": list(range(2, len(dims))), "epsilon": float(arg_of(node, 4, "eps", 1e-5))}
    return _normalised(
        node, importer, [dims[1]], lambda x, gamma, beta: op.nn.group_norm(x, gamma, beta, groups, **options)
    )


def _normalised(
    node: fx.Node, importer: Any, affine: list[Any], norm: Callable[[Any, Any, Any], relax.Expr]
) -> relax.Expr:
    """norm(x, gamma, beta) in the dtype that TVM computes it in; `affine` is the shape of gamma and beta."""
    emit, dtype = importer.block_builder.emit, result_dtype(node)
    if dtype == "float64":
        raise NotImplementedError("TVM computes it in float32")
    inner = "float32" if dtype == "bfloat16" else dtype

    def cast(value: relax.Expr) -> relax.Expr:
        return value if str(value.ty.dtype) == inner else emit(op.astype(value, inner))

    def operand(position: int, name: str, default: float) -> relax.Expr:
        given = arg_of(node, position, name)
        return emit(op.full(affine, relax.const(default, inner), inner)) if given is None else cast(importer.env[given])

    x = cast(importer.env[node.args[0]])
    y = emit(norm(x, operand(2, "weight", 1.0), operand(3, "bias", 0.0)))
    return y if inner == dtype else emit(op.astype(y, dtype))


def _instance_norm(node: fx.Node, importer: Any) -> Any:
    """Batch norm by the batch's own statistics, which TVM computes in float32 and float16 only."""
    if str(node.meta["val"][0].dtype) not in ("torch.float32", "torch.float16"):
        raise NotImplementedError("TVM computes it in float32")
    return importer.create_convert_map()["_native_batch_norm_legit.no_stats"](node)


NORMS: dict[str, Callable[[fx.Node, Any], Any]] = {
    "layer_norm.default": _layer_norm,
    "group_norm.default": _group_norm,
    "_native_batch_norm_legit.no_stats": _instance_norm,
}
