"""Transposed convolutions, in numbers: when a product and a sum make them, and what lies in memory between the two.

    image [c, h, w], window [c, o, kh, kw]  ──►  products [o, kh, kw, h, w]  ──►  results [o, y, x]

How they are made is in `tvmhet/ir/transposed_convolutions.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.library_rows import TRANSPOSED_CONVOLUTIONS
from tvmhet.graph.opgraph import OpGraph

_LAYOUTS = {("NCW", "IOW"), ("NCHW", "IOHW"), ("NCDHW", "IODHW")}
_FIRST_PLACE = 2  # axis of the places
_MIN_GROWTH = 2  # results to elements of the image: with zeros between these, as many more products
_MAX_TERMS = 64  # that fall on one place


@dataclass(frozen=True, slots=True)
class Along:
    """One axis: lengths of image, window and result, how far the window moves, how many results are cut off before."""

    length: int
    window: int
    result: int
    stride: int
    cut: int

    @property
    def num_terms(self) -> int:
        """How many elements of the window may fall on one place."""
        return min(math.ceil(self.window / self.stride), self.length)


def as_product(
    attrs: Mapping[str, Any], image: Sequence[int], weight: Sequence[int], result: Sequence[int]
) -> tuple[Along, ...] | None:
    """The axes of the places of a transposed convolution of these shapes; None where it is made with zeros.

    Hardly more results than elements, as of steps of one, have few zeros; by channel there is no product, and many
    terms of a place are much code. None for other layouts, too.
    """
    data = attrs["data_layout"]
    if (data, attrs["kernel_layout"]) not in _LAYOUTS or (attrs["out_layout"] or data) != data:
        return None
    rank = len(image) - _FIRST_PLACE
    wide = [(w - 1) * int(d) + 1 for w, d in zip(weight[_FIRST_PLACE:], attrs["dilation"], strict=True)]
    strides, cut = ([int(v) for v in attrs[name]][:rank] for name in ("strides", "padding"))
    lengths = zip(image[_FIRST_PLACE:], wide, result[_FIRST_PLACE:], strides, cut, strict=True)
    axes = tuple(Along(*along) for along in lengths)
    growth = math.prod(a.result for a in axes) / math.prod(a.length for a in axes)
    few = math.prod(a.num_terms for a in axes) <= _MAX_TERMS
    return axes if few and growth >= _MIN_GROWTH and image[1] > int(attrs["groups"]) else None


def between_bytes(graph: OpGraph, kernel: LegalKernel) -> int:
    """Bytes of the products that a generated kernel holds between the two: 0 for any other kernel."""
    if kernel.maker != "tvm":
        return 0
    return sum(_products_bytes(graph, op) for op in kernel.ops if graph.operators[op].family in TRANSPOSED_CONVOLUTIONS)


def _products_bytes(graph: OpGraph, index: int) -> int:
    op = graph.operators[index]
    x, weight, result = (graph.tensors[t] for t in (*op.inputs[:2], op.outputs[0]))
    axes = as_product(op.attrs, x.shape, weight.shape, result.shape)
    if axes is None:
        return 0
    made = result.shape[0] * result.shape[1] * math.prod(a.window * a.length for a in axes)
    return made * result.size_bytes // math.prod(result.shape)
