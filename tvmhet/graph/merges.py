"""Products of one tensor that may become one product: queries, keys and values; the 1 x 1 convolutions of a block.

             ┌─ q ─ q_add ─┐                       ┌─ slice ─┐
    x ───────┼─ k ─ k_add ─┼──     ==>   x ─ qkv ──┼─ slice ─┼──      weights side by side, one kernel
             └─ v ─ v_add ─┘                       └─ slice ─┘

Members are alike (family, attributes, dtypes, weight shapes up to the channels) and so is what follows them: a bias
in all or in none, the same activation in all or in none. Weights and biases are parameters that nothing else reads.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from tvmhet.graph.library import EPILOGUES, bias_of
from tvmhet.graph.operands import only_reader
from tvmhet.graph.opgraph import OpGraph
from tvmhet.graph.rewrites import Merge

_MAX_MEMBERS = 64  # of one merge; products of one tensor beyond it are merged in runs of so many


def find_merges(graph: OpGraph, without: Collection[str] = ()) -> tuple[tuple[Merge, ...], ...]:
    """Return lists of disjoint merges: all members together where that is possible, and in pairs.

    Pairs are offered where there are more than two members: they may lie in one stage where all do not. Operators named
    in `without` are left alone. Deterministic.
    """
    groups = [g for t in range(len(graph.tensors)) for g in _groups(graph, t, frozenset(without))]
    whole = [_merge(graph, g[i : i + _MAX_MEMBERS]) for g in groups for i in range(0, len(g), _MAX_MEMBERS)]
    pairs = [_merge(graph, g[i : i + 2]) for g in groups if len(g) > 2 for i in range(0, len(g), 2)]
    return tuple(level for level in (_merges(whole), _merges(pairs)) if level)


def _merges(found: Sequence[Merge | None]) -> tuple[Merge, ...]:
    return tuple(m for m in found if m is not None)


def _groups(graph: OpGraph, tensor: int, without: frozenset[str]) -> list[list[int]]:
    """The products of a tensor by parameters, alike ones together, in topological order."""
    alike: dict[str, list[int]] = {}
    if graph.tensors[tensor].is_param:
        return []
    for i in graph.tensors[tensor].consumers:
        op = graph.operators[i]
        if op.name not in without and _is_product(graph, i) and op.inputs[0] == tensor:
            weight = graph.tensors[op.inputs[1]]
            shape = (weight.shape[0],) if op.family == "matmul" else weight.shape[1:]
            key = json.dumps([op.family, dict(op.attrs), shape, weight.dtype], sort_keys=True, default=str)
            alike.setdefault(key, []).append(i)
    return [group for group in alike.values() if len(group) > 1]


def _is_product(graph: OpGraph, i: int) -> bool:
    """A matmul by a matrix, or a convolution in one group in NCHW, whose second operand is a parameter of its own."""
    op = graph.operators[i]
    if op.family not in ("matmul", "nn.conv2d") or len(op.inputs) != 2 or not _is_own(graph, op.inputs[1]):
        return False
    if op.family == "matmul":
        return len(graph.tensors[op.inputs[1]].shape) == 2 and len(graph.tensors[op.inputs[0]].shape) >= 2
    layouts = op.attrs["data_layout"], op.attrs["kernel_layout"], op.attrs["out_layout"] or "NCHW"
    return layouts == ("NCHW", "OIHW", "NCHW") and int(op.attrs["groups"]) == 1


def _is_own(graph: OpGraph, tensor: int) -> bool:
    found = graph.tensors[tensor]
    return found.is_param and not found.is_output and len(found.consumers) == 1


def _merge(graph: OpGraph, products: Sequence[int]) -> Merge | None:
    """The merge of some products with as much of what follows as they have in common; None for fewer than two."""
    if len(products) < 2:
        return None
    members = [[p] for p in products]
    for follows in (_bias, _activation):
        after = [follows(graph, m) for m in members]
        if len({kind for kind, _ in after}) == 1 and after[0][0]:
            for member, (_, op) in zip(members, after, strict=True):
                member.append(op)
    return Merge(tuple(tuple(graph.operators[i].name for i in m) for m in members))


def _bias(graph: OpGraph, member: Sequence[int]) -> tuple[str, int]:
    """The addition of a bias after a member: (its kind, operator); an empty kind if none follows."""
    after = only_reader(graph, member[-1])
    bias = None if after is None else bias_of(graph, member[0], after)
    if after is None or bias is None or not _is_own(graph, bias):
        return "", -1
    made_first = graph.operators[after].inputs[0] == graph.operators[member[-1]].outputs[0]
    return f"bias {len(graph.tensors[bias].shape)} {made_first}", after


def _activation(graph: OpGraph, member: Sequence[int]) -> tuple[str, int]:
    after = only_reader(graph, member[-1])
    if after is None or graph.operators[after].family not in EPILOGUES:
        return "", -1
    return graph.operators[after].family, after
