"""Which operators the library can make, alone or with a bias and an activation: one table, and the program it runs.

    conv2d ─► add(bias) ─► relu      LegalKernel((conv2d, add, relu), "library")
                                     spec: [["nn.conv2d", {...}, ["i0", "i1"]], ["bias", {}, ["o0", "i2"]], ...]

The library is torch: oneDNN on CPU, cuBLAS and cuDNN on CUDA. A kernel's `spec` is a JSON program of its steps, so a
plan says all that the emitter needs. `tvmhet.emit.library` holds one function for each name in `LIBRARY_FAMILIES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tvmhet.errors import NotSupported
from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.opgraph import Operator, OpGraph, Tensor
from tvmhet.graph.placement import KernelPlacement

FLOATS = frozenset({"float32", "float64", "float16", "bfloat16"})
Rule = Callable[[Mapping[str, Any], Sequence[Tensor], Tensor], bool]


def _same_float(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    """All tensors have one floating dtype."""
    return output.dtype in FLOATS and all(t.dtype == output.dtype for t in inputs)


def _conv2d(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    top, left, bottom, right = attrs["padding"]
    layouts = attrs["data_layout"], attrs["kernel_layout"], attrs["out_layout"] or "NCHW"
    plain = (top, left) == (bottom, right) and layouts == ("NCHW", "OIHW", "NCHW")
    return plain and len(inputs) == 2 and _same_float(attrs, inputs, output)


def _pool2d(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    top, left, bottom, right = attrs["padding"]
    half = all(2 * p <= k for p, k in zip((top, left), attrs["pool_size"], strict=True))
    plain = attrs["layout"] == "NCHW" and attrs["out_layout"] in ("", "NCHW") and (top, left) == (bottom, right)
    return plain and half and _same_float(attrs, inputs, output)


def _avg_pool2d(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    return list(attrs["dilation"]) == [1, 1] and _pool2d(attrs, inputs, output)


def _layer_norm(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    rank = len(output.shape)
    axes = sorted(a % rank for a in attrs["axes"])
    trailing = axes == list(range(rank - len(axes), rank))
    return trailing and len(inputs) == 3 and _same_float(attrs, inputs, output)


def _embedding(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    """Rows of a matrix by integer index. Out of range, "clip" takes the nearest row and "fast" may do anything."""
    if len(inputs) != 2:
        return False
    table, index = inputs
    rows = len(table.shape) == 2 and attrs["axis"] in (0, None) and index.dtype in ("int32", "int64")
    return rows and attrs["mode"] in ("fast", "clip") and table.dtype == output.dtype and table.dtype in FLOATS


def _unary(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    return len(inputs) == 1 and _same_float(attrs, inputs, output)


def _matmul(attrs: Mapping[str, Any], inputs: Sequence[Tensor], output: Tensor) -> bool:
    return all(len(t.shape) >= 2 for t in inputs) and _same_float(attrs, inputs, output)


#: Relax operators that the library makes, and when. The key is `Operator.family`.
LIBRARY_FAMILIES: Mapping[str, Rule] = {
    "matmul": _matmul,
    "nn.conv2d": _conv2d,
    "nn.max_pool2d": _pool2d,
    "nn.avg_pool2d": _avg_pool2d,
    "nn.softmax": _unary,
    "nn.log_softmax": _unary,
    "nn.layer_norm": _layer_norm,
    "nn.gelu": _unary,
    "nn.gelu_tanh": _unary,
    "nn.silu": _unary,
    "nn.relu": _unary,
    "tanh": _unary,
    "sigmoid": _unary,
    "exp": _unary,
    "erf": _unary,
    "take": _embedding,
}
_EPILOGUES = frozenset({"nn.relu", "nn.gelu", "nn.gelu_tanh", "nn.silu", "tanh", "sigmoid"})


def library_kernels(graph: OpGraph) -> tuple[LegalKernel, ...]:
    """Return every kernel the library can make: single operators, and products with a bias and an activation."""
    found: list[LegalKernel] = []
    for i, op in enumerate(graph.operators):
        if _takes(graph, op):
            found.extend(LegalKernel(ops, "library") for ops in _chains(graph, i))
    return tuple(found)


def _takes(graph: OpGraph, op: Operator) -> bool:
    rule = LIBRARY_FAMILIES.get(op.family)
    if rule is None or len(op.outputs) != 1 or any(key.startswith("arg") for key in op.attrs):
        return False
    return rule(op.attrs, [graph.tensors[t] for t in op.inputs], graph.tensors[op.outputs[0]])


def _chains(graph: OpGraph, start: int) -> Iterator[tuple[int, ...]]:
    """The operator alone; a matmul or convolution also with its bias, its activation, or both."""
    yield (start,)
    if graph.operators[start].family not in ("matmul", "nn.conv2d"):
        return
    chain: tuple[int, ...] = (start,)
    after = _only_reader(graph, start)
    if after is not None and bias_of(graph, start, after) is not None:
        chain = (start, after)
        yield chain
        after = _only_reader(graph, after)
    if after is not None and graph.operators[after].family in _EPILOGUES and _takes(graph, graph.operators[after]):
        yield (*chain, after)


def _only_reader(graph: OpGraph, op: int) -> int | None:
    tensor = graph.tensors[graph.operators[op].outputs[0]]
    return tensor.consumers[0] if len(tensor.consumers) == 1 and not tensor.is_output else None


def bias_of(graph: OpGraph, product: int, add: int) -> int | None:
    """Return the tensor that `add` adds to the product as a bias, one value per output channel; None if it does not."""
    made = graph.operators[product].outputs[0]
    op = graph.operators[add]
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
    if graph.operators[product].family == "nn.conv2d":
        fits = bias.shape in ((1, product_shape[1], 1, 1), (product_shape[1], 1, 1))
    else:
        weight = graph.tensors[graph.operators[product].inputs[1]]
        fits = len(weight.shape) == 2 and bias.shape in ((product_shape[-1],), (1, product_shape[-1]))
    return others[0] if fits else None


def library_spec(graph: OpGraph, ops: Sequence[int]) -> str:
    """Return the JSON program of a library kernel: [family or "bias", attributes, arguments] per operator.

    Arguments are "i<n>", the kernel's n-th live-in in order of first use, or "o<k>", the result of step k.
    """
    steps: list[list[Any]] = []
    local: dict[int, str] = {}
    num_inputs = 0
    for k, i in enumerate(ops):
        op = graph.operators[i]
        for t in op.inputs:
            if t not in local:
                local[t], num_inputs = f"i{num_inputs}", num_inputs + 1
        arguments = [local[t] for t in op.inputs]
        family = op.family
        if family == "add":
            bias = bias_of(graph, ops[k - 1], i) if k else None
            if bias is None:
                raise NotSupported(f"the library cannot make {op.name!r}: it adds no bias", "let TVM make this kernel")
            family, arguments = "bias", [f"o{k - 1}", local[bias]]
        attrs = {key: value for key, value in op.attrs.items() if not isinstance(value, dict)}
        steps.append([family, attrs, arguments])
        local[op.outputs[0]] = f"o{k}"
    return json.dumps(steps, sort_keys=True)


def place_kernel(graph: OpGraph, kernel: LegalKernel) -> KernelPlacement:
    """Return the kernel by name: called after its last operator, with its program if the library makes it."""
    names = tuple(graph.operators[i].name for i in kernel.ops)
    spec = library_spec(graph, kernel.ops) if kernel.maker == "library" else ""
    return KernelPlacement(names[-1], names, kernel.maker, spec)
