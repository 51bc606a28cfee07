"""Attention as one kernel: a product of queries and keys, its softmax, and the product of that with the values.

    q ─► reshape ─► permute_dims ─┐
    k ─► reshape ─► permute_dims ─┴─► matmul ─► multiply ─► add(mask) ─► softmax ─┐
    v ─► reshape ─► permute_dims ─────────────────────────────────────────────────┴─► matmul ─► permute_dims ─► reshape

TVM's fusion rules take one product into a kernel at most (`fusion.py`). The scores between these two are as large as
queries times keys, and are read by nothing else. The library has attention, too (`library.py`); ours also writes the
result where it is wanted, and takes three axes and any arithmetic on the scores. On GPUs nothing makes it: one PrimFunc
becomes several kernels there.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.operands import only_reader, viewed_operands
from tvmhet.graph.opgraph import OpGraph

_ARITHMETIC = frozenset({"add", "subtract", "multiply", "divide", "maximum", "minimum", "where"})
_RANKS = (3, 4)
_DTYPE = "float32"
_WHOLE = 4  # channels of a value are a multiple of the shortest vector
_MAX_KEYS = 1 << 13
_LEAST = 2  # queries, keys and channels: TVM drops axes of 1


def attention_of(graph: OpGraph, scores: int) -> tuple[int, ...]:
    """Return the operators from the product of queries and keys to that with the values; none if it is no attention.

    In between are arithmetic that keeps the shape of the scores, and a softmax along the last axis.
    """
    first = graph.operators[scores]
    if first.family != "matmul":
        return ()
    made, chain = graph.tensors[first.outputs[0]], [scores]
    after = only_reader(graph, scores)
    while after is not None and graph.operators[after].family in _ARITHMETIC:
        op = graph.operators[after]
        if (
            op.inputs.count(graph.operators[chain[-1]].outputs[0]) != 1
            or graph.tensors[op.outputs[0]].shape != made.shape
        ):
            return ()
        chain.append(after)
        after = only_reader(graph, after)
    if after is None or graph.operators[after].family != "nn.softmax":
        return ()
    softmax = graph.operators[after]
    values = only_reader(graph, after)
    if int(softmax.attrs["axis"]) not in (-1, len(made.shape) - 1) or values is None:
        return ()
    last = graph.operators[values]
    own = last.family == "matmul" and last.inputs[0] == softmax.outputs[0] != last.inputs[1]
    return (*chain, after, values) if own else ()


def attention_kernels(graph: OpGraph) -> tuple[LegalKernel, ...]:
    """Return the kernels that our rule for CPUs makes of each attention, in lexicographic order.

    With what permutes, cuts and reshapes its operands or without, and with what moves its result or without.
    """
    found: set[tuple[int, ...]] = set()
    for scores in range(len(graph.operators)):
        chain = attention_of(graph, scores)
        if chain and _fits(graph, chain):
            for after in _moves_after(graph, chain[-1]):
                found.update(tuple(sorted({*before, *chain, *after})) for before in _views(graph, chain))
    return tuple(LegalKernel(ops, cpu_only=True) for ops in sorted(found))


def _fits(graph: OpGraph, chain: tuple[int, ...]) -> bool:
    first, last = graph.operators[chain[0]], graph.operators[chain[-1]]
    query, key, value = (graph.tensors[t] for t in (*first.inputs, last.inputs[1]))
    if len({len(t.shape) for t in (query, key, value)}) > 1 or len(query.shape) not in _RANKS:
        return False
    if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2] or key is query:
        return False
    sizes = (query.shape[-2], query.shape[-1], key.shape[-1], value.shape[-1])
    tensors = (query, key, value, graph.tensors[last.outputs[0]])
    return (
        min(sizes) >= _LEAST
        and key.shape[-1] <= _MAX_KEYS
        and value.shape[-1] % _WHOLE == 0
        and all(t.dtype == _DTYPE for t in tensors)
    )


def _views(graph: OpGraph, chain: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """What may be read in place before the operands: nothing, permuted operands, and all that are views."""
    views = [i for product in (chain[0], chain[-1]) for i in viewed_operands(graph, product)]
    yield ()
    yield tuple(i for i in views if graph.operators[i].family == "permute_dims")
    yield tuple(views)


def _moves_after(graph: OpGraph, product: int) -> Iterator[tuple[int, ...]]:
    """What may move the result in the same kernel: nothing, a permutation, and a reshape after it."""
    moved: tuple[int, ...] = ()
    yield moved
    after = only_reader(graph, product)
    for family in ("permute_dims", "reshape"):
        if after is None or graph.operators[after].family != family:
            return
        moved = (*moved, after)
        yield moved
        after = only_reader(graph, after)
