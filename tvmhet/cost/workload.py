"""Arithmetic and traffic of a single operator, from its sizes alone.

These are the algorithm's own counts (each operand read once, each result written once), not what a cache makes of
them. A fused kernel's traffic is counted on the graph instead, by `describe`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tvmhet.cost.model import DTYPE_BYTES, KernelDesc, OpDesc

#: (multiply-add as 2, elements read, elements written) of an operator's sizes.
Counts = tuple[float, float, float]


def _matmul(b: int, m: int, n: int, k: int) -> Counts:
    return 2.0 * b * m * n * k, float(b) * (m * k + k * n), float(b) * m * n


def _linear(b: int, m: int, n: int, k: int) -> Counts:
    return 2.0 * b * m * n * k, float(b) * m * k + float(n) * k, float(b) * m * n


def _conv2d(n: int, c: int, h: int, w: int, oc: int, kh: int, kw: int, oh: int, ow: int, groups: int) -> Counts:
    out = float(n) * oc * oh * ow
    return 2.0 * out * (c / groups) * kh * kw, float(n) * c * h * w + float(oc) * (c / groups) * kh * kw, out


def _pairs(q_len: int, kv_len: int, window: int, causal: bool) -> float:
    """Return how many (query, key) pairs are computed; query i of a causal mask sees the keys up to its own place."""
    cap = min(kv_len, window) if window else kv_len
    if not causal:
        return float(q_len) * cap
    before = max(kv_len - q_len, 0)
    growing = min(max(cap - before, 0), q_len)
    return growing * before + 0.5 * growing * (growing + 1) + float(q_len - growing) * cap


def _attention(op: OpDesc) -> Counts:
    """Both products over the pairs that the mask leaves; every key and value that is seen is read once."""
    batch, heads, kv_heads, q_len, kv_len, head_dim, window = op.sizes
    pairs = _pairs(q_len, kv_len, window, op.name == "causal")
    keys = min(kv_len, window + q_len - 1) if window else kv_len
    q = float(batch) * heads * q_len * head_dim
    return 4.0 * batch * heads * pairs * head_dim, q + 2.0 * batch * kv_heads * keys * head_dim, q


def _moe(tokens: int, hidden: int, inter: int, topk: int, experts: int) -> Counts:
    """Gate, up and down products. Weights of the experts that tokens reach, in expectation of a uniform router."""
    reached = experts * (1.0 - (1.0 - min(topk, experts) / experts) ** tokens)
    rows = float(tokens) * hidden
    return 6.0 * rows * topk * inter, 3.0 * reached * hidden * inter + rows, rows


def _rows(flop_per_value: float) -> Callable[..., Counts]:
    return lambda rows, cols: (flop_per_value * rows * cols, float(rows) * cols, float(rows) * cols)


_COUNTS: Mapping[str, Callable[..., Counts]] = MappingProxyType(
    {
        "matmul": _matmul,
        "linear": _linear,
        "conv2d": _conv2d,
        "elementwise": lambda read, write: (float(write), float(read), float(write)),
        "reduction": lambda rows, cols: (float(rows) * cols, float(rows) * cols, float(rows)),
        "softmax": _rows(5.0),  # max, subtract, exp, sum, divide
        "layer_norm": _rows(8.0),  # mean, centre, square, sum, scale, gain, bias
        "batch_norm": _rows(8.0),
        "moe": _moe,
        "embedding": lambda tokens, vocab, dim: (0.0, float(min(tokens, vocab)) * dim, float(tokens) * dim),
        "pooling": lambda n, c, h, w, kh, kw, oh, ow: (
            float(n) * c * oh * ow * kh * kw,
            float(n) * c * h * w,
            float(n) * c * oh * ow,
        ),
        "movement": lambda read, write: (0.0, float(read), float(write)),
        "generic": lambda: (0.0, 0.0, 0.0),
    }
)


def counts(op: OpDesc) -> Counts:
    """Return (FLOPs, elements read, elements written) of `op`; a gradient costs twice the forward arithmetic."""
    flop, read, write = _attention(op) if op.family.startswith("attention") else _COUNTS[op.family](*op.sizes)
    if not op.backward:
        return flop, read, write
    return 2.0 * flop, read + 2.0 * write, read


def kernel_of(op: OpDesc, maker: str = "library") -> KernelDesc:
    """Return the kernel that runs `op` alone."""
    flop, read, write = counts(op)
    width = DTYPE_BYTES[op.dtype]
    return KernelDesc((op,), flop, read * width, write * width, op.dtype, maker)
