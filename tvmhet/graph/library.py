"""What the library can make of a graph: operators, and chains that it computes as one; and the program of each.

    conv2d ─► add(bias) ─► relu      LegalKernel((conv2d, add, relu), "library")
                                     spec: [["nn.conv2d", {...}, ["i0", "i1"]], ["bias", {}, ["o0", "i2"]], ...]

The library is torch: oneDNN on CPU, cuBLAS and cuDNN on CUDA. A kernel's `spec` is a JSON program of its steps, so a
plan says all that the emitter needs. Chains are

- a product: operands cut, reshaped or permuted and read where they lie, the product, its bias, a residual to add, its
  activation;
- attention: a product of queries and keys, a scale, a mask, softmax, the product with the values;
- the gradient of a softmax, g * y - y * sum(g * y);
- the gradient of a convolution towards its weight.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tvmhet.graph.attention import attention_of
from tvmhet.graph.concurrent import concurrent_spec
from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.library_rows import CONVOLUTIONS, LIBRARY_FAMILIES, library_takes
from tvmhet.graph.operands import only_reader, viewed_operands
from tvmhet.graph.opgraph import Operator, OpGraph
from tvmhet.graph.placement import KernelPlacement

__all__ = ["LIBRARY_FAMILIES", "bias_of", "library_kernels", "library_spec", "place_kernel"]

_PRODUCTS = CONVOLUTIONS | {"matmul"}
EPILOGUES = frozenset({"nn.relu", "nn.gelu", "nn.gelu_tanh", "nn.silu", "tanh", "sigmoid"})


def library_kernels(graph: OpGraph) -> tuple[LegalKernel, ...]:
    """Return every kernel the library can make: single operators, products with what joins them, attention."""
    found: dict[tuple[int, ...], None] = {}
    for i, op in enumerate(graph.operators):
        if _takes(graph, op):
            found |= dict.fromkeys(tuple(sorted(ops)) for ops in _chains(graph, i))
    return tuple(LegalKernel(ops, "library") for ops in found)


def _takes(graph: OpGraph, op: Operator) -> bool:
    if len(op.outputs) != 1:
        return False
    inputs = [graph.tensors[t] for t in op.inputs]
    return library_takes(op.family, op.attrs, inputs, graph.tensors[op.outputs[0]])


def _chains(graph: OpGraph, start: int) -> Iterator[tuple[int, ...]]:
    """The operator alone; a product with what joins it, its operands read where they lie or not; attention."""
    yield (start,)
    if gradient := _softmax_backward(graph, start):
        yield gradient
    if graph.operators[start].family not in _PRODUCTS:
        return
    views = _views(graph, start)
    for tail in ((), *_tails(graph, start), *_weight_gradient(graph, start)):
        yield (start, *tail)
        for before in views:
            yield (*before, start, *tail)
    if attention := _attention(graph, start):
        yield attention
        for before in _views(graph, start, attention[-1]):
            yield (*before, *attention)


def _views(graph: OpGraph, *products: int) -> list[tuple[int, ...]]:
    """What may be read in place before the operands of products: permuted operands only, and all that are views."""
    views = [i for p in products for i in viewed_operands(graph, p) if _takes(graph, graph.operators[i])]
    permuted = [i for i in views if graph.operators[i].family == "permute_dims"]
    return [tuple(found) for found in ([permuted, views] if len(permuted) < len(views) else [views]) if found]


def _tails(graph: OpGraph, product: int) -> Iterator[tuple[int, ...]]:
    """What may follow a product in one kernel: its bias, a residual of a convolution, its activation."""
    tail: tuple[int, ...] = ()
    after = only_reader(graph, product)
    if after is not None and bias_of(graph, product, after) is not None:
        tail = (after,)
        yield tail
        after = only_reader(graph, after)
    if after is not None and graph.operators[product].family in CONVOLUTIONS and _adds_equals(graph, after):
        tail = (*tail, after)
        yield tail
        after = only_reader(graph, after)
    if after is not None and graph.operators[after].family in EPILOGUES and _takes(graph, graph.operators[after]):
        yield (*tail, after)


def _adds_equals(graph: OpGraph, add: int) -> bool:
    """Whether an operator adds two different tensors of one shape."""
    op = graph.operators[add]
    shapes = {graph.tensors[t].shape for t in (*op.inputs, *op.outputs)}
    return op.family == "add" and len(set(op.inputs)) == 2 and len(shapes) == 1 and _takes(graph, op)


def _attention(graph: OpGraph, scores: int) -> tuple[int, ...]:
    """Return the operators of attention that the library makes at once: of four axes, with a scale, then a mask."""
    chain = attention_of(graph, scores)
    if not chain or not all(_takes(graph, graph.operators[i]) for i in chain):
        return ()
    last = graph.operators[chain[-1]]
    if any(len(graph.tensors[t].shape) != 4 for t in (graph.operators[scores].inputs[0], last.inputs[1])):
        return ()
    between, made = list(chain[1:-2]), graph.operators[scores].outputs[0]
    for joins in (_scales, _masks):
        if between and joins(graph, between[0], made):
            made = graph.operators[between.pop(0)].outputs[0]
    return () if between else chain


def _softmax_backward(graph: OpGraph, start: int) -> tuple[int, ...]:
    """Return the operators of g * y - y * sum(g * y), of which `start` is g * y; none if it is no such gradient."""
    both = graph.operators[start]
    made = graph.tensors[both.outputs[0]]
    if both.family != "multiply" or len(both.inputs) != 2 or made.is_output or len(made.consumers) != 2:
        return ()
    if any(graph.tensors[t].shape != made.shape for t in both.inputs):
        return ()
    total, last = sorted(made.consumers, key=lambda i: graph.operators[i].family == "subtract")
    shared = only_reader(graph, total)
    if [graph.operators[i].family for i in (total, last)] != ["sum", "subtract"] or shared is None:
        return ()
    axes, keepdims = (graph.operators[total].attrs[key] for key in ("axis", "keepdims"))
    others = [t for t in graph.operators[shared].inputs if t != graph.operators[total].outputs[0]]
    rows = axes is not None and len(axes) == 1 and bool(keepdims)
    scaled = graph.operators[shared].family == "multiply" and len(others) == 1 and others[0] in both.inputs
    closed = scaled and only_reader(graph, shared) == last
    operands = (both.outputs[0], graph.operators[shared].outputs[0])
    ops = (start, total, shared, last)
    if not (rows and closed and graph.operators[last].inputs == operands):
        return ()
    return ops if all(_takes(graph, graph.operators[i]) for i in ops) else ()


def _weight_gradient(graph: OpGraph, product: int) -> Iterator[tuple[int, ...]]:
    """What makes a convolution of exchanged batch and channels a gradient towards a weight: a cut to its size, the
    exchange back.

    The gradient of y = conv2d(x, w) towards w is the convolution of x by y's gradient with batch and channels of both
    exchanged, stride and dilation too; of its result only the weight's size counts.
    """
    conv = graph.operators[product]
    if conv.family != "nn.conv2d" or int(conv.attrs["groups"]) != 1:
        return
    tail: tuple[int, ...] = ()
    made, last = graph.tensors[conv.outputs[0]], only_reader(graph, product)
    if last is not None and graph.operators[last].family == "strided_slice":
        tail, made, last = (last,), graph.tensors[graph.operators[last].outputs[0]], only_reader(graph, last)
    if last is None or graph.operators[last].family != "permute_dims" or not _exchanges(graph.operators[last]):
        return
    sizes, gradients = (graph.tensors[t].shape[2:] for t in conv.inputs)
    same = made.shape[:2] == graph.tensors[conv.outputs[0]].shape[:2]  # only rows and columns are cut
    walk = (conv.attrs["strides"], conv.attrs["dilation"], conv.attrs["padding"][:2])
    if (
        same
        and all(  # the convolution that this is the gradient of gives as many rows as its gradient has
            (size + 2 * int(padding) - int(stride) * (kernel - 1) - 1) // int(dilation) + 1 == rows
            for size, rows, kernel, stride, dilation, padding in zip(
                sizes, gradients, made.shape[2:], *walk, strict=True
            )
        )
    ):
        ops = (*tail, last)
        if all(_takes(graph, graph.operators[i]) for i in ops):
            yield ops


def _exchanges(op: Operator) -> bool:
    """Whether an operator exchanges the first two of four axes."""
    axes = op.attrs["axes"]
    return axes is not None and [int(a) % 4 for a in axes] == [1, 0, 2, 3]


def _scales(graph: OpGraph, op: int, made: int) -> bool:
    """Whether an operator multiplies or divides the scores by a number."""
    scale = graph.operators[op]
    number = scale.attrs.get("arg1")
    return (
        scale.family in ("multiply", "divide")
        and scale.inputs == (made,)
        and number is not None
        and _takes(graph, scale)
    )


def _masks(graph: OpGraph, op: int, made: int) -> bool:
    """Whether an operator adds a mask of four axes to the scores, or puts minus infinity where a condition is false."""
    mask = graph.operators[op]
    if not _takes(graph, mask):
        return False
    if mask.family == "where":
        hidden = mask.attrs.get("arg2")
        return mask.inputs[1:] == (made,) and hidden is not None and float(hidden["value"]) == float("-inf")
    return mask.family == "add" and len(mask.inputs) == 2 and made in mask.inputs and mask.inputs[0] != mask.inputs[1]


def bias_of(graph: OpGraph, product: int, add: int) -> int | None:
    """Return the tensor that `add` adds to the product as a bias, one value per output channel; None if it does not."""
    made = graph.operators[product].outputs[0]
    op = graph.operators[add]
    if graph.operators[product].family not in _PRODUCTS:
        return None
    others = [t for t in op.inputs if t != made]
    if op.family != "add" or len(op.inputs) != 2 or len(others) != 1 or any(k.startswith("arg") for k in op.attrs):
        return None
    bias, product_shape = graph.tensors[others[0]], graph.tensors[made].shape
    if (
        bias.producer >= 0
        or bias.dtype != graph.tensors[made].dtype
        or graph.tensors[op.outputs[0]].shape != product_shape
    ):
        return None
    if graph.operators[product].family in CONVOLUTIONS:
        by_channel = (product_shape[1], *[1] * (len(product_shape) - 2))
        fits = bias.shape in ((1, *by_channel), by_channel)
    else:
        weight = graph.tensors[graph.operators[product].inputs[1]]
        fits = len(weight.shape) == 2 and bias.shape in ((product_shape[-1],), (1, product_shape[-1]))
    return others[0] if fits else None


def library_spec(graph: OpGraph, ops: Sequence[int]) -> str:
    """Return the JSON program of a library kernel: [family, attributes, arguments] per operator.

    The family of an addition that is a bias is "bias", that of a `take` with a constant index "select". Arguments are
    "i<n>", the kernel's n-th live-in in order of first use; "o<k>", the result of step k; a number as {"dtype",
    "value"}; or what the operator takes as it is (a shape).
    """
    steps: list[list[Any]] = []
    local: dict[int, str] = {}
    num_inputs = 0
    for k, i in enumerate(ops):
        op = graph.operators[i]
        for t in op.inputs:
            if t not in local:
                local[t], num_inputs = f"i{num_inputs}", num_inputs + 1
        family, arguments = op.family, _arguments(op, local)
        product = next((p for p in ops[:k] if graph.operators[p].outputs[0] in op.inputs), None)
        if family == "add" and product is not None and (bias := bias_of(graph, product, i)) is not None:
            family, arguments = "bias", [local[graph.operators[product].outputs[0]], local[bias]]
        attrs = {key: value for key, value in op.attrs.items() if not key.startswith("arg")}
        if family == "take" and "arg1" in op.attrs:
            family, attrs["index"], arguments = "select", op.attrs["arg1"]["value"], arguments[:1]
        steps.append([family, attrs, arguments])
        local[op.outputs[0]] = f"o{k}"
    return json.dumps(steps, sort_keys=True)


def _arguments(op: Operator, local: dict[int, str]) -> list[Any]:
    """Tensors and numbers of a call in their places; the graph has a number at position n as the attribute "arg<n>"."""
    numbers = {int(key.removeprefix("arg")): value for key, value in op.attrs.items() if key.startswith("arg")}
    tensors = iter(op.inputs)
    return [numbers[n] if n in numbers else local[next(tensors)] for n in range(len(op.inputs) + len(numbers))]


def place_kernel(graph: OpGraph, kernel: LegalKernel, schedule: str = "") -> KernelPlacement:
    """Return the kernel by name: called after its last operator, with the library's program, its branches, or its own
    `schedule`.
    """
    names = tuple(graph.operators[i].name for i in kernel.ops)
    if kernel.branches:
        schedule = concurrent_spec(graph, kernel)
    spec = library_spec(graph, kernel.ops) if kernel.maker == "library" else schedule
    return KernelPlacement(names[-1], names, kernel.maker, spec)
