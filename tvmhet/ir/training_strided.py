"""Write `as_strided` of a whole dense tensor, and its gradient `as_strided_scatter`, as permutations and a reshape.

    as_strided(x, sizes, strides)   ──►   x in the order of its memory ─► reshape ─► permute to `sizes`

Autograd makes them of pools and views that keep a channels-last memory. Views of a part of a tensor are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

_aten = torch.ops.aten


def replace_strided(graph: fx.Graph) -> None:
    """Rewrite what can be; the rest meets the importer, which has no converter for it."""
    for node in graph.find_nodes(op="call_function", target=_aten.as_strided.default):
        source, sizes, strides, *offset = node.args
        if not any(offset):
            _reread(graph, node, source, _order(_shape(source), _strides(source)), sizes, _order(sizes, strides))
    for node in graph.find_nodes(op="call_function", target=_aten.as_strided_scatter.default):
        source, new, sizes, strides, *offset = node.args
        if not any(offset):
            own = _order(_shape(source), _strides(source))
            _reread(graph, node, new, _order(sizes, strides), _shape(source), own)


def _shape(node: fx.Node) -> Sequence[int]:
    return tuple(node.meta["val"].shape)


def _strides(node: fx.Node) -> Sequence[int]:
    return tuple(node.meta["val"].stride())


def _order(sizes: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    """Return the dims from the outermost in memory to the innermost; None for memory with gaps or overlaps."""
    order = sorted(range(len(sizes)), key=lambda d: (-strides[d] if sizes[d] > 1 else 0, d))
    step = 1
    for d in reversed(order):
        if sizes[d] > 1:
            if strides[d] != step:
                return None
            step *= sizes[d]
    return order


def _reread(
    graph: fx.Graph,
    node: fx.Node,
    source: fx.Node,
    order: list[int] | None,
    sizes: Sequence[int],
    order_of_result: list[int] | None,
) -> None:
    """Make `node` the elements of `source`, whose memory is in `order`, as `sizes` whose memory is in the other."""
    if order is None or order_of_result is None or math.prod(_shape(source)) != math.prod(sizes):
        return
    with graph.inserting_before(node):
        value = _call(graph, _aten.permute.default, source, order)
        value = _call(graph, _aten.reshape.default, value, [sizes[d] for d in order_of_result])
        back = [order_of_result.index(d) for d in range(len(sizes))]
        value = _call(graph, _aten.permute.default, value, back)
    node.replace_all_uses_with(value)
    graph.erase_node(node)


def _call(graph: fx.Graph, operator: torch._ops.OpOverload, source: fx.Node, argument: list[int]) -> fx.Node:
    """Add a call, unless it changes nothing."""
    before = list(range(len(argument))) if operator is _aten.permute.default else list(_shape(source))
    if argument == before:
        return source
    node = graph.call_function(operator, (source, argument))
    node.meta = dict(source.meta, val=operator(source.meta["val"], argument))
    return node
