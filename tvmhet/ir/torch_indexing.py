"""fx -> Relax converters of everything that reads or writes at positions given by tensors or numbers.

TVM's own read foreign memory at negative positions, or give a wrong shape for `z[:, i, j]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import fx
from tvm import relax

from tvmhet.ir.fx_node import arg_of, dims_of, result_dtype

op = relax.op
_READ_IN_PASSING = 4  # elements of a row for each number that says whether, and by which value, it is written


def _embedding(node: fx.Node, importer: Any) -> relax.Expr:
    """Rows of a table. An index out of range reads the nearest row (TVM's converter would read foreign memory)."""
    weight, index = importer.env[node.args[0]], importer.env[node.args[1]]
    return importer.block_builder.emit(op.take(weight, index, axis=0, mode="clip"))


def _embedding_bag(node: fx.Node, importer: Any) -> relax.Expr:
    """Sum, mean or maximum of the rows of each bag, where all bags have one known length."""
    weight, index, offsets = (importer.env.get(n) if n is not None else None for n in node.args[:3])
    mode, weights, padding = (
        arg_of(node, 4, "mode", 0),
        arg_of(node, 6, "per_sample_weights"),
        arg_of(node, 8, "padding_idx"),
    )
    length = _bag_length(node, dims_of(index))
    if length is None or padding is not None or (offsets is not None and arg_of(node, 7, "include_last_offset", False)):
        raise NotImplementedError("bags of data-dependent length or with a padding index")
    emit = importer.block_builder.emit
    bags = emit(op.reshape(index, [-1, length]))
    rows = emit(op.take(weight, bags, axis=0, mode="clip"))
    if weights is not None:
        rows = emit(op.multiply(rows, emit(op.reshape(importer.env[weights], [*dims_of(bags), 1]))))
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
    dims = dims_of(x)
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


def _select(node: fx.Node, importer: Any) -> relax.Expr:
    """x[..., i, ...] with a number i, negative ones too."""
    x, dim, index = importer.env[node.args[0]], int(node.args[1]), node.args[2]
    sizes = dims_of(x)
    if not isinstance(index, int) or (index < 0 and not isinstance(sizes[dim], int)):
        raise NotImplementedError("a position that is not a number")
    place = index + sizes[dim] if index < 0 else index
    return importer.block_builder.emit(op.take(x, relax.const(place, "int64"), axis=dim % len(sizes)))


def _index_put(node: fx.Node, importer: Any) -> relax.Expr:
    """A copy of x with x[:, i, j, ...] = values, or += where the node accumulates.

    Indexed dims that do not stand side by side are moved to the front, where torch has those of the values.
    """
    x, index, values = importer.env[node.args[0]], list(node.args[1]), importer.env[node.args[2]]
    emit, sizes = importer.block_builder.emit, dims_of(x)
    where = [i for i, v in enumerate(index) if v is not None]
    tensors = [importer.env[index[i]] for i in where]
    if any(str(t.ty.dtype) == "bool" for t in tensors):
        raise NotImplementedError("a boolean index")
    if any(0 in dims_of(t) for t in tensors):
        return x  # nothing is written
    accumulates = bool(arg_of(node, 3, "accumulate", False))
    if where == list(range(where[0], where[-1] + 1)):
        return _put(emit, x, where, tensors, values, accumulates=accumulates)
    order = [*where, *(d for d in range(len(sizes)) if d not in where)]
    moved = emit(op.permute_dims(x, order))
    out = _put(emit, moved, range(len(where)), tensors, values, accumulates=accumulates)
    return emit(op.permute_dims(out, [order.index(d) for d in range(len(sizes))]))


def _put(
    emit: Callable[[Any], Any],
    x: relax.Expr,
    where: Sequence[int],
    tensors: Sequence[relax.Expr],
    values: relax.Expr,
    *,
    accumulates: bool,
) -> relax.Expr:
    """The same for indexed dims `where` that stand side by side."""
    sizes = dims_of(x)
    first, rest = where[0], sizes[where[-1] + 1 :]
    linear = _flat_index(emit, [sizes[d] for d in where], tensors)
    places = dims_of(linear)
    count, rows = math.prod(places), math.prod(sizes[d] for d in where)
    values = emit(op.broadcast_to(values, [*sizes[:first], *places, *rest]))
    values = emit(op.reshape(values, [*sizes[:first], count, *rest]))
    if len(where) == 1 and not accumulates and 0 < count * _READ_IN_PASSING <= math.prod(sizes) // rows:
        return _written_rows(emit, x, first, emit(op.reshape(linear, [count])), values)
    flat = emit(op.reshape(x, [*sizes[:first], rows, *rest]))
    order = [first, *range(first), *range(first + 1, first + 1 + len(rest))]
    if first:
        flat, values = emit(op.permute_dims(flat, order)), emit(op.permute_dims(values, order))
    mode = "add" if accumulates else "update"
    out = emit(op.scatter_nd(flat, emit(op.reshape(linear, [count, 1])), values, mode))
    if first:
        out = emit(op.permute_dims(out, [order.index(d) for d in range(len(order))]))
    return emit(op.reshape(out, sizes))


def _written_rows(
    emit: Callable[[Any], Any], x: relax.Expr, axis: int, index: relax.Expr, values: relax.Expr
) -> relax.Expr:
    """A copy of x with x[:, index] = values, in one pass over x, as caches are written. The last of equals wins.

    A scatter would pass over x three times, if the rows are not those of its first dim.
    """
    (count,), sizes = dims_of(index), dims_of(x)
    rows, rank = sizes[axis], len(sizes)
    every = emit(op.reshape(relax.const(torch.arange(rows).numpy(), "int64"), [rows, 1]))
    turn = relax.const(torch.arange(1, count + 1).numpy(), "int64")
    writes = emit(op.where(emit(op.equal(every, index)), turn, relax.const(0, "int64")))
    last = emit(op.max(writes, axis=1)) if count > 1 else emit(op.reshape(writes, [rows]))  # 0: none
    if count > 1:
        place = emit(op.maximum(emit(op.subtract(last, relax.const(1, "int64"))), relax.const(0, "int64")))
        values = emit(op.take(values, place, axis=axis, mode="clip"))
    is_written = emit(op.greater(last, relax.const(0, "int64")))
    return emit(op.where(emit(op.reshape(is_written, [rows] + [1] * (rank - axis - 1))), values, x))


def _scatter_add(node: fx.Node, importer: Any) -> relax.Expr:
    x, dim, index, source = importer.env[node.args[0]], int(node.args[1]), node.args[2], node.args[3]
    return importer.block_builder.emit(
        op.scatter_elements(x, importer.env[index], importer.env[source], axis=dim, reduction="add")
    )


def _scatter_reduce(node: fx.Node, importer: Any) -> relax.Expr:
    """Reductions in which the element itself takes part; `torch_definitions` has the others."""
    x, dim, index, source, how = node.args[:5]
    reductions = {"prod": "mul", "amax": "max", "amin": "min"}
    whole = list(index.meta["val"].shape) == list(source.meta["val"].shape)
    if how not in reductions or not node.kwargs.get("include_self", True) or not whole:
        raise NotImplementedError(f"the reduction {how!r}")
    env = importer.env
    return importer.block_builder.emit(
        op.scatter_elements(env[x], env[index], env[source], axis=int(dim), reduction=reductions[how])
    )


def _triangle_indices(node: fx.Node, importer: Any) -> relax.Expr:
    """Positions below or above the diagonal: numbers only, so torch makes them now."""
    del importer
    function = torch.tril_indices if "tril" in str(node.target) else torch.triu_indices
    return relax.const(function(*node.args).numpy(), result_dtype(node))


INDEXING: dict[str, Callable[[fx.Node, Any], Any]] = {
    "embedding.default": _embedding,
    "embedding_bag.padding_idx": _embedding_bag,
    "index.Tensor": _index_tensor,
    "_unsafe_index.Tensor": _index_tensor,
    "index_put.default": _index_put,
    "_unsafe_index_put.default": _index_put,
    "scatter_add.default": _scatter_add,
    "scatter_reduce.two": _scatter_reduce,
    "select.int": _select,
    "tril_indices.default": _triangle_indices,
    "triu_indices.default": _triangle_indices,
}
