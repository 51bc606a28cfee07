"""Every kernel that the makers can make of a graph."""

from __future__ import annotations

from collections.abc import Sequence

from tvmhet.cluster.device import DeviceType
from tvmhet.errors import BadInput, UnsupportedOperator
from tvmhet.graph.attention import attention_kernels
from tvmhet.graph.bags import bag_kernels
from tvmhet.graph.concurrent import CONCURRENT, concurrent_kernels
from tvmhet.graph.fusion import LegalKernel, legal_kernels
from tvmhet.graph.library import library_kernels
from tvmhet.graph.operands import with_moved_operands
from tvmhet.graph.opgraph import OpGraph
from tvmhet.graph.pooled import pooled_products
from tvmhet.graph.prologues import with_prologues
from tvmhet.graph.rows import row_kernels

MAKERS = ("tvm", "library")


def makers_on(makers: Sequence[str], devices: Sequence[DeviceType]) -> tuple[str, ...]:
    """Return `makers`, without "concurrent" where no device is a CPU with several cores. Raises BadInput."""
    if isinstance(makers, str):
        raise BadInput(f"makers is the text {makers!r}", f"give a tuple: makers=({makers!r},)")
    several = any(d.is_cpu and d.num_sms > 1 for d in devices)
    return tuple(m for m in makers if several or m != CONCURRENT)


def candidate_kernels(graph: OpGraph, makers: Sequence[str]) -> tuple[LegalKernel, ...]:
    """Every kernel that the makers can make."""
    if not makers or set(makers) - {*MAKERS, CONCURRENT}:
        raise BadInput(f"makers are {tuple(makers)!r}", f'use one or both of {MAKERS}, with "tvm" also {CONCURRENT!r}')
    generated = tuple(legal_kernels(graph)) if "tvm" in makers else ()
    at_once = concurrent_kernels(graph, generated) if {"tvm", CONCURRENT} <= set(makers) else ()
    if generated:
        generated += (
            with_moved_operands(graph, generated)
            + with_prologues(graph, generated)
            + pooled_products(graph, generated)
            + row_kernels(graph, generated)
            + attention_kernels(graph)
            + bag_kernels(graph)
        )
    found = generated + (library_kernels(graph) if "library" in makers else ()) + at_once
    made = {i for kernel in found for i in kernel.ops if len(kernel.ops) == 1}
    if missing := [op for i, op in enumerate(graph.operators) if i not in made]:
        raise UnsupportedOperator(
            f"operator {missing[0].name!r} ({missing[0].family}) has no maker among {tuple(makers)} on any device, "
            f"{len(missing)} operators have none; the maker 'tvm' makes them on every device",
            'use makers=("tvm", "library")',
        )
    return found
