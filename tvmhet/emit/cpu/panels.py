"""How wide the panels of each weight are on a CPU: as wide as makes the product's steps the fewest cycles.

    2304 columns, AVX-512: 36 panels of 64      AVX2: 96 of 24, as 4 rows of 3 vectors fill its registers

A product that packs its weights at every run reads each of them, writes it to a panel and reads it again, while it
computes nothing, and reads it in short rows, page after page. With AVX-512 (AMD EPYC of family 26) and weights from
memory 128 x 768 x 2304 takes 0.87 of the time from panels, 32 x 768 x 768 0.68, 8 x 768 x 768 0.48.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from tvmhet.emit.cpu.blocks import CpuTarget
from tvmhet.emit.cpu.contraction import Tile, choose_tile
from tvmhet.emit.lower import make_target
from tvmhet.graph.opgraph import OpGraph
from tvmhet.graph.panels import num_rows

_MOST_VECTORS = 4  # in a row of a panel
_MOST_MORE = 1.5  # cycles of its tile, over the best tile's


def panel_columns(graph: OpGraph, weights: Collection[int], description: Mapping[str, Any]) -> dict[str, int]:
    """Return the columns of each weight's panels by its name, for a device type's `target`; {} for a GPU's.

    `weights` are some of `graph.panels.panel_weights`. Those that stay as they are, are left out.
    """
    target = make_target(description)
    if target.kind.name != "llvm":
        return {}
    cpu = CpuTarget.of(target)
    found: dict[str, int] = {}
    for t in sorted(weights):
        weight = graph.tensors[t]
        rows = num_rows(graph.tensors[graph.operators[weight.consumers[0]].inputs[0]], weight)  # as many in all
        if columns := columns_of(rows, weight.shape[-1], cpu, cpu.lanes(weight.dtype)):
            found[weight.name] = columns
    return found


@lru_cache(maxsize=4096)
def columns_of(num_rows: int, num_columns: int, cpu: CpuTarget, lanes: int) -> int:
    """The width with the fewest cycles, best that of a register tile, and of a large one, which reads less of panels.

    0 where packing at every run takes less.
    """

    def tile(within: int) -> Tile:
        return choose_tile(num_rows, num_columns, cpu, lanes, within=within)

    def cycles(within: int) -> float:
        return tile(within).cycles(num_rows, num_columns, cpu)

    whole = [v * lanes for v in range(_MOST_VECTORS, 0, -1) if num_columns % (v * lanes) == 0]
    best = min(whole, key=lambda w: (cycles(w), tile(w).columns != w, -tile(w).rows * w), default=0)
    return best if best and cycles(best) <= _MOST_MORE * cycles(0) else 0
