"""The cost interface: kernel descriptions in, seconds with an interval and a source out.

    KernelDesc(ops=(linear, gelu), flop, read_bytes, write_bytes, dtype, maker)
        └── CostModel.predict ──► Predictions(seconds, low, high, in_range, source)

A cost model is built for one device type. It never sees Relax, nor a graph: what it must know of an operator stands in
`OpDesc.sizes`, whose meaning per family is `SIZES`. Predicting is pure and batched, and every answer is finite and > 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tvmhet.errors import BadInput, BadTime

#: What `OpDesc.sizes` holds, by family. Rows x cols families work along cols. `read` and `write` count elements.
SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "matmul": ("b", "m", "n", "k"),  # b products of (m, k) by (k, n), all operands distinct
        "linear": ("b", "m", "n", "k"),  # (b * m, k) by one shared (n, k) weight
        "conv2d": ("n", "c", "h", "w", "oc", "kh", "kw", "oh", "ow", "groups"),
        "elementwise": ("read", "write"),
        "reduction": ("rows", "cols"),
        "softmax": ("rows", "cols"),
        "layer_norm": ("rows", "cols"),
        "batch_norm": ("rows", "cols"),  # rows channels, cols values of each
        "attention_prefill": ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "window"),
        "attention_decode": ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "window"),
        "moe": ("tokens", "hidden", "inter", "topk", "experts"),  # gated: three products per token and expert
        "embedding": ("tokens", "vocab", "dim"),
        "pooling": ("n", "c", "h", "w", "kh", "kw", "oh", "ow"),
        "movement": ("read", "write"),
        "generic": (),  # known by its FLOPs and bytes only; never in range
    }
)

_DILATED = "dilated "


def dilated(dilation: Sequence[int]) -> str:
    """Return the name of a convolution whose window's elements lie so far apart; "" where side by side.

    >>> dilated((1, 1)), dilated((6, 12))
    ('', 'dilated 12')
    """
    return f"{_DILATED}{max(dilation)}" if dilation and max(dilation) > 1 else ""


def dilation_of(name: str) -> int:
    """Return what `dilated` was given, at most; 1 for any other name."""
    return int(name.removeprefix(_DILATED)) if name.startswith(_DILATED) else 1


#: Families whose arithmetic runs on matrix units where the dtype has them.
MATRIX_FAMILIES = frozenset({"matmul", "linear", "conv2d", "attention_prefill", "attention_decode", "moe"})
#: Sizes that may be 0: no window, or an operator that reads nothing (zeros, full).
_MAY_BE_ZERO = frozenset({"window", "read"})

DTYPE_BYTES: Mapping[str, float] = MappingProxyType(
    {
        "float64": 8, "int64": 8, "uint64": 8, "float32": 4, "tfloat32": 4, "int32": 4, "uint32": 4,
        "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2,
        "float8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1,
        "int4": 0.5, "float4": 0.5,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpDesc:
    """One operator: family, sizes in the order of `SIZES[family]`, dtype of its main operand.

    `name` tells members of a family apart ("add", "gelu", "causal", "dilated 2"; free text, "" if it does not matter).
    `backward` marks a gradient operator described by the sizes of its forward one. Raises BadInput for an unknown
    family or dtype and for sizes that are missing, zero or negative.
    """

    family: str
    sizes: tuple[int, ...]
    dtype: str
    name: str = ""
    backward: bool = False

    def __post_init__(self) -> None:
        names = SIZES.get(self.family)
        if names is None:
            raise BadInput(f"operator family {self.family!r} is unknown", f"use one of {', '.join(SIZES)}")
        if self.dtype not in DTYPE_BYTES:
            raise BadInput(f"dtype {self.dtype!r} is unknown", f"use one of {', '.join(DTYPE_BYTES)}")
        if len(self.sizes) != len(names):
            raise BadInput(f"{self.family} has {len(self.sizes)} sizes {self.sizes}", f"give {len(names)}: {names}")
        for name, value in zip(names, self.sizes, strict=True):
            if not isinstance(value, int) or value < (0 if name in _MAY_BE_ZERO else 1):
                raise BadInput(f"{self.family}: {name} is {value!r}", "give a whole number of 1 or more")

    def size(self, name: str) -> int:
        """Return the size called `name` in `SIZES[family]`; ValueError if the family has none."""
        return self.sizes[SIZES[self.family].index(name)]


@dataclass(frozen=True, slots=True)
class KernelDesc:
    """One kernel: its operators in order, and what it computes and moves as a whole.

    A fused kernel moves its live-ins and live-outs only, so `read_bytes` and `write_bytes` are less than the sum over
    `ops`. `dtype` is that of the arithmetic. `panels`: on a CPU it reads a weight in panels. Raises BadInput for no
    operator, an unknown maker, or a figure that is negative or not finite.
    """

    ops: tuple[OpDesc, ...]
    flop: float
    read_bytes: float
    write_bytes: float
    dtype: str
    maker: str = "library"
    panels: bool = False

    def __post_init__(self) -> None:
        if not self.ops:
            raise BadInput("a kernel has no operator", "describe at least one")
        if self.maker not in ("library", "tvm"):
            raise BadInput(f"maker {self.maker!r} is unknown", "use 'library' or 'tvm'")
        if self.dtype not in DTYPE_BYTES:
            raise BadInput(f"dtype {self.dtype!r} is unknown", f"use one of {', '.join(DTYPE_BYTES)}")
        for name, value in (("flop", self.flop), ("read_bytes", self.read_bytes), ("write_bytes", self.write_bytes)):
            if not (value >= 0 and math.isfinite(value)):
                raise BadInput(f"kernel of {self.ops[0].family}: {name} is {value}", "give a finite figure >= 0")

    @property
    def num_products(self) -> int:
        """How many products and convolutions it computes."""
        return sum(op.family in MATRIX_FAMILIES for op in self.ops)

    @property
    def root(self) -> OpDesc:
        """The operator that decides how the kernel runs: a matrix operator, else a row-wise one, else the largest."""
        return max(self.ops, key=lambda op: (_RANK[op.family], math.prod(max(s, 1) for s in op.sizes)))


def to_text(desc: KernelDesc) -> str:
    """Return the description as JSON."""
    return json.dumps(asdict(desc))


def from_text(text: str) -> KernelDesc:
    """Return the description that `to_text` wrote. Raises BadInput where it is none."""
    try:
        tree = json.loads(text)
        ops = tuple(OpDesc(**{**op, "sizes": tuple(op["sizes"])}) for op in tree.pop("ops"))
        return KernelDesc(ops=ops, **tree)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInput(f"{text[:60]!r} describes no kernel: {error}", "measure the kernel again") from error


_RANK: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(SIZES, 1),
        **dict.fromkeys(("reduction", "softmax", "layer_norm", "batch_norm", "pooling"), 2),
        **dict.fromkeys(MATRIX_FAMILIES, 3),
        "generic": 0,
        "movement": 0,
    }
)


@dataclass(frozen=True, slots=True)
class Predictions:
    """One entry per kernel, in order: seconds, the 80 % interval, whether inputs lie in the model's range, the source.

    Raises BadTime unless 0 < low <= seconds <= high < inf everywhere.
    """

    seconds: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    in_range: NDArray[np.bool_]
    source: tuple[str, ...]  # "measured", "learned", "transfer", "calibrated" or "roofline"

    def __post_init__(self) -> None:
        lengths = {len(self.seconds), len(self.low), len(self.high), len(self.in_range), len(self.source)}
        if len(lengths) != 1:
            raise BadTime(f"predictions have fields of lengths {sorted(lengths)}", "give one entry per kernel")
        ok = (self.low > 0) & (self.low <= self.seconds) & (self.seconds <= self.high) & np.isfinite(self.high)
        if not ok.all():
            i = int(np.argmin(ok))
            raise BadTime(
                f"prediction {i} is {self.seconds[i]} s in [{self.low[i]}, {self.high[i]}]",
                "a time is finite and positive and lies in its interval; look at the kernel's sizes",
            )

    def __len__(self) -> int:
        return len(self.seconds)


class CostModel(Protocol):
    """Run time of kernels on the one device type that the model was built for."""

    def predict(self, descs: Sequence[KernelDesc]) -> Predictions:
        """Return one prediction per kernel, in order. Raises BadInput for a dtype that the device cannot compute."""
