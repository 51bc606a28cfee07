"""fx -> Relax converters of resizing (`F.interpolate`): TVM's own take other positions where a size is no multiple.

Each dim is resized apart, what becomes smaller first and rows before what is across them (`ir/resizing.py`), by a
linear map that torch's own operator shows when it resizes the identity:

    resized identity (made, size)   ──►   few inputs an output: y = sum_k x[..., place[k], ...] * weight[k]
                                          more of them:         y = x @ weights.T
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from tvm import relax

from tvmhet.errors import UnsupportedOperator
from tvmhet.ir.fx_node import arg_of, describe, dims_of, result_dtype

op = relax.op

_MAX_TAPS = 4  # of a cubic


def _resize(node: fx.Node, importer: Any) -> relax.Expr:
    x, dtype = importer.env[node.args[0]], result_dtype(node)
    if "nearest" not in str(node.target) and not dtype.startswith(("float", "bfloat")):
        raise UnsupportedOperator(
            f"operator {describe(node)} makes means of {dtype}, which torch rounds in its own way",
            "convert to float32 first",
        )
    sizes, made = dims_of(x)[2:], [int(d) for d in node.meta["val"].shape[2:]]
    if not all(isinstance(d, int) for d in sizes):
        raise NotImplementedError("resizing a dim without a known size")
    grown = [axis for axis, (size, want) in enumerate(zip(sizes, made, strict=True)) if want > size]
    for axis in (*(a for a in range(len(sizes)) if a not in grown), *reversed(grown)):
        size, want = sizes[axis], made[axis]
        weights = _weights(node, len(sizes), axis, size, want)
        if want != size or not torch.equal(weights, torch.eye(size, dtype=weights.dtype)):
            x = _apply(importer.block_builder.emit, x, weights, axis + 2, dtype)
    return x


def _weights(node: fx.Node, rank: int, axis: int, size: int, made: int) -> torch.Tensor:
    """Shape (made, size): what torch's operator does along one dim, in its own precision.

    The other dims stay 2 long: torch 2.13 is wrong about antialiased planes 1 wide.
    """
    precision = torch.float64 if node.meta["val"].dtype is torch.float64 else torch.float32
    columns = torch.eye(size, dtype=precision).reshape(1, size, *[size if d == axis else 1 for d in range(rank)])
    columns = columns.expand(1, size, *[size if d == axis else 2 for d in range(rank)]).contiguous()
    output = [2] * rank
    output[axis] = made
    names = [argument.name for argument in node.target._schema.arguments]
    given: dict[str, Any] = {name: arg_of(node, i, name) for i, name in enumerate(names) if i}
    if "scale_factors" in names:  # either of the two
        scales = given.pop("scale_factors")
        given["output_size"] = None if scales else output
        given["scale_factors"] = [s if i == axis else 1.0 for i, s in enumerate(scales)] if scales else None
    else:
        given["output_size"] = output
        given |= {n: v if i == axis else None for i, (n, v) in enumerate(_scales(given))}
    if given.get("align_corners") is None:
        given.pop("align_corners", None)
    resized = node.target(columns, **given)[0].movedim(axis + 1, 1)
    return resized.reshape(size, made, -1)[:, :, 0].T


def _scales(given: dict[str, Any]) -> list[tuple[str, Any]]:
    """The scale of each dim, in the order of the dims (`scales` for one dim, `scales_h`, `scales_w` ... for more)."""
    return [(n, v) for n, v in given.items() if n.startswith("scales")]


def _apply(emit: Callable[[Any], Any], x: relax.Expr, weights: torch.Tensor, axis: int, dtype: str) -> relax.Expr:
    """Map one dim of x by weights of shape (made, size)."""
    taps = int((weights != 0).sum(dim=1).max())
    if taps > _MAX_TAPS:
        return _product(emit, x, weights, axis, dtype)
    places = weights.abs().argsort(dim=1, descending=True, stable=True)[:, :taps].sort(dim=1)[0]
    kept = weights.gather(1, places)
    shape = [1] * len(dims_of(x))
    shape[axis] = len(weights)
    total = None
    for k in range(taps):
        part = emit(op.take(x, relax.const(places[:, k].numpy(), "int64"), axis=axis, mode="clip"))
        if not torch.equal(kept[:, k], torch.ones(len(weights), dtype=kept.dtype)):
            part = emit(op.multiply(part, _const(kept[:, k].reshape(shape), dtype)))
        total = part if total is None else emit(op.add(total, part))
    return total


def _product(emit: Callable[[Any], Any], x: relax.Expr, weights: torch.Tensor, axis: int, dtype: str) -> relax.Expr:
    last = len(dims_of(x)) - 1
    order = list(range(last + 1))
    order[axis], order[last] = last, axis
    turned = x if axis == last else emit(op.permute_dims(x, order))
    product = emit(op.matmul(turned, _const(weights.T, dtype), out_dtype=dtype))
    return product if axis == last else emit(op.permute_dims(product, order))


def _const(values: torch.Tensor, dtype: str) -> relax.Expr:
    return relax.const(values.contiguous().numpy(), dtype)


def _resize_2d(node: fx.Node, importer: Any) -> relax.Expr:
    """TVM's operator where it is right, since it is one kernel: sizes that are whole multiples."""
    sizes = dims_of(importer.env[node.args[0]])[2:]
    made = node.meta["val"].shape[2:]
    scales = arg_of(node, len(node.target._schema.arguments) - 1, "scale_factors")
    whole = all(isinstance(n, int) and isinstance(m, int) and m % n == 0 for n, m in zip(sizes, made, strict=True))
    if (
        whole
        and result_dtype(node) != "float64"
        and (not scales or all(n * s == m for n, s, m in zip(sizes, scales, made, strict=True)))
    ):
        return importer.create_convert_map()[node.target.__name__](node)
    return _resize(node, importer)


_EVERY_MODE = (
    "upsample_nearest1d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
)

#: Operators that export must leave whole.
RESIZING_KEPT = tuple(getattr(torch.ops.aten, name).vec for name in _EVERY_MODE)

RESIZING: dict[str, Callable[[fx.Node, Any], Any]] = {
    "upsample_nearest2d.vec": _resize_2d,
    "upsample_bilinear2d.vec": _resize_2d,
    **{f"{name}.vec": _resize for name in _EVERY_MODE},
    **{f"_upsample_{mode}2d_aa.default": _resize for mode in ("bilinear", "bicubic", "lanczos")},
}
