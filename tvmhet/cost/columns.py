"""Kernel descriptions as columns, one table per group of families that run alike on a GPU.

    [KernelDesc(linear), KernelDesc(add), KernelDesc(conv2d), ...]
        ──► {"matmul_tensor": Columns(index=[0], ...), "stream": Columns(index=[1], ...), "conv": ...}

A group is what one learned model answers for. Families without measurements of their own join the group that they
resemble; their operators' names, which the group's card does not list, tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from tvmhet.cost.model import DTYPE_BYTES, MATRIX_FAMILIES, SIZES, KernelDesc, OpDesc

Floats = NDArray[np.float64]

GROUPS = (
    "matmul_tensor",  # 16-bit matrix units
    "matmul_narrow",  # 8-bit matrix units
    "batched_vector",  # batched products in float32 and float64 without matrix units
    "linear_vector",  # the same, by one shared weight
    "conv",
    "stream",
    "softmax",
    "norm",  # layer and batch normalisation; reductions
    "attention_prefill",
    "attention_decode",
    "moe",
)

_GROUP_OF_FAMILY: Mapping[str, str] = MappingProxyType(
    {
        "conv2d": "conv",
        "elementwise": "stream",
        "movement": "stream",
        "embedding": "stream",
        "pooling": "stream",
        "softmax": "softmax",
        "layer_norm": "norm",
        "batch_norm": "norm",
        "reduction": "norm",
        "attention_prefill": "attention_prefill",
        "attention_decode": "attention_decode",
        "moe": "moe",
    }
)
MATMUL_GROUPS = frozenset({"matmul_tensor", "matmul_narrow", "batched_vector", "linear_vector"})
ATTENTION_GROUPS = frozenset({"attention_prefill", "attention_decode"})
#: Products without matrix units: thread warps outside the result skip their arithmetic.
VECTOR_GROUPS = frozenset({"batched_vector", "linear_vector"})
_VECTOR_DTYPES = frozenset({"float32", "float64", "int32", "int64"})
#: Operators that run as one of those in the training data: the same traffic, a little other arithmetic.
_RUNS_LIKE: Mapping[str, str] = MappingProxyType(
    {
        "subtract": "add", "subtract_scalar": "add_scalar", "maximum": "add", "minimum": "add", "abs": "relu",
        "negative": "relu", "clip": "relu", "square": "relu", "sqrt": "relu", "rsqrt": "relu", "relu6": "relu",
        "sigmoid": "tanh", "exp": "tanh", "log": "tanh", "erf": "gelu", "silu": "gelu", "gelu_tanh": "gelu",
        "log_softmax": "softmax", "mean": "sum",
    }
)  # fmt: skip


def group_of(op: OpDesc) -> str | None:
    """Return the group that prices kernels rooted in `op`, or None for a generic operator."""
    if op.family in ("matmul", "linear"):
        if op.dtype in _VECTOR_DTYPES:
            return "batched_vector" if op.family == "matmul" else "linear_vector"
        return "matmul_narrow" if DTYPE_BYTES[op.dtype] <= 1 else "matmul_tensor"
    if op.family == "conv2d" and op.size("c") == op.size("groups") > 1:
        return "stream"  # by channel: little arithmetic on what is read and written
    return _GROUP_OF_FAMILY.get(op.family)


@dataclass(frozen=True, slots=True)
class Columns:
    """Kernels of one group; every array has one entry (or row) per kernel.

    `sizes` holds the root operator's sizes (of the stream group: elements read and written; of linear ones b is
    folded into m); `family`, `name` and `dtype` are the root operator's; `num_ops` counts the operators fused,
    `window` is `window_of` the root.
    """

    group: str
    index: NDArray[np.int64]
    sizes: Floats
    width_bytes: Floats
    flop: Floats
    read_bytes: Floats
    write_bytes: Floats
    family: NDArray[np.str_]
    name: NDArray[np.str_]
    dtype: NDArray[np.str_]
    backward: NDArray[np.bool_]
    num_ops: NDArray[np.int64]
    window: Floats

    def __len__(self) -> int:
        return len(self.index)

    @property
    def bytes_moved(self) -> Floats:
        """Bytes read and written, at least one."""
        return np.maximum(self.read_bytes + self.write_bytes, 1.0)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Columns:
        """Return the selected rows."""
        arrays = {f: getattr(self, f)[rows] for f in self.__slots__ if f != "group"}
        return Columns(self.group, **arrays)


def columns(descs: Sequence[KernelDesc]) -> dict[str, Columns]:
    """Return one table per group that occurs, in the order of `GROUPS`; generic kernels are left out."""
    roots = [d.ops[0] if len(d.ops) == 1 else d.root for d in descs]
    members: dict[str, list[int]] = {}
    for i, root in enumerate(roots):
        group = group_of(root)
        if group is not None:
            members.setdefault(group, []).append(i)
    return {g: _table(g, members[g], descs, roots) for g in GROUPS if g in members}


def _table(group: str, rows: Sequence[int], descs: Sequence[KernelDesc], roots: Sequence[OpDesc]) -> Columns:
    picked, ops = [descs[i] for i in rows], [roots[i] for i in rows]
    return Columns(
        group=group,
        index=np.array(rows, dtype=np.int64),
        sizes=_sizes(group, picked, ops),
        width_bytes=np.array([DTYPE_BYTES[op.dtype] for op in ops], dtype=np.float64),
        flop=np.array([d.flop for d in picked], dtype=np.float64),
        read_bytes=np.array([d.read_bytes for d in picked], dtype=np.float64),
        write_bytes=np.array([d.write_bytes for d in picked], dtype=np.float64),
        family=np.array([op.family for op in ops], dtype=np.str_),
        name=np.array([_RUNS_LIKE.get(op.name, op.name) for op in ops], dtype=np.str_),
        dtype=np.array([op.dtype for op in ops], dtype=np.str_),
        backward=np.array([op.backward for op in ops], dtype=np.bool_),
        num_ops=np.array([len(d.ops) for d in picked], dtype=np.int64),
        window=np.array([window_of(op) for op in ops], dtype=np.float64),
    )


def window_of(op: OpDesc) -> float:
    """Return the values that a thread of the library's takes in for each result of a pooling; 1 of other operators.

    Adaptive pools of whole images are means, which many threads share.
    """
    walks = op.family == "pooling" and not op.name.startswith("adaptive")
    return float(op.size("kh") * op.size("kw")) if walks else 1.0


def _flat(op: OpDesc) -> tuple[int, ...]:
    """Return the sizes of `op`; a product by one shared weight is one product, whatever its leading shape."""
    if op.family != "linear":
        return op.sizes
    b, m, n, k = op.sizes
    return (1, b * m, n, k)


def _sizes(group: str, descs: Sequence[KernelDesc], ops: Sequence[OpDesc]) -> Floats:
    """Root sizes, one row per kernel; of streaming kernels what they read and write, in elements."""
    if group != "stream":
        return np.array([_flat(op) for op in ops], dtype=np.float64)
    moved = [(d.read_bytes, d.write_bytes) for d in descs]
    widths = np.array([[DTYPE_BYTES[op.dtype]] for op in ops])
    sizes: Floats = np.array(moved, dtype=np.float64) / widths
    return sizes


assert all(f in SIZES for f in (*_GROUP_OF_FAMILY, *MATRIX_FAMILIES))
