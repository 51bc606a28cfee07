"""The rules for CPU kernels, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvmhet.emit.cpu.attention import attention
from tvmhet.emit.cpu.blocks import CpuTarget, Schedule
from tvmhet.emit.cpu.columns import columns
from tvmhet.emit.cpu.contraction import contraction
from tvmhet.emit.cpu.depthwise import depthwise
from tvmhet.emit.cpu.in_turn import in_turn
from tvmhet.emit.cpu.injective import injective
from tvmhet.emit.cpu.rows import rows
from tvmhet.emit.cpu.sliding import sliding
from tvmhet.emit.cpu.windows import windows

CpuRule = Callable[[Any, CpuTarget], Schedule | None]

RULES: tuple[tuple[str, CpuRule], ...] = (
    ("injective", injective),
    ("attention", attention),
    ("depthwise", depthwise),
    ("sliding", sliding),
    ("contraction", contraction),
    ("columns", columns),
    ("windows", windows),
    ("rows", rows),
    ("in turn", in_turn),
)
