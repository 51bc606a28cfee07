"""Layers to be held by the nodes of an uneven cluster, as numbers: see layers.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvmhet.errors import BadGraph


@dataclass(frozen=True, slots=True)
class LayerProblem:
    """`rate[i][k - 1]`: tokens/s of node i when it holds k layers. Links in tokens/s; 0 where there is none.

    `partial`: a node may also work on the last part of its layers only, for tokens that enter in the middle.
    """

    num_layers: int
    rate: tuple[tuple[float, ...], ...]
    from_source: tuple[float, ...]
    to_sink: tuple[float, ...]
    link: tuple[tuple[float, ...], ...]
    partial: bool = False

    def __post_init__(self) -> None:
        n = len(self.rate)
        if not n or self.num_layers < 1:
            raise BadGraph(f"{n} nodes and {self.num_layers} layers", "give at least one of each")
        if len(self.from_source) != n or len(self.to_sink) != n or [len(row) for row in self.link] != [n] * n:
            raise BadGraph(f"links do not match {n} nodes", "give one per node, and one per pair")
        if any(not 0 <= x < math.inf for row in (*self.rate, *self.link, self.from_source, self.to_sink) for x in row):
            raise BadGraph("a rate or link is negative, infinite or NaN", "rates are finite and >= 0")
