"""Prepare an ONNX graph for the front end: small tensors become constants, large weights become inputs.

Before:  input x; initializers w (float, 4 MiB), axes (int64, 2 elements)      constants = {"k": [3]}
         y = MatMul(x, w); z = ReduceSum(y, axes); v, i = TopK(z, k)
After:   inputs x, w; initializers axes, k                                     weights = [values of w]

Axes, shapes and counts must be constants for shapes to be known; weights must not, or each is copied several times on
its way through the importer. `constants` fixes inputs that a model leaves open although they are no data. The model
that was given is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx

#: Initializers up to this many elements stay constants: axes, shapes, pads, scales, counts.
MAX_CONSTANT_ELEMENTS = 64


def bind_small_integers(
    proto: onnx.ModelProto, constants: Mapping[str, np.ndarray]
) -> tuple[onnx.ModelProto, list[np.ndarray]]:
    """Return a model whose trailing graph inputs are the large initializers, and their values in that order."""
    import onnx

    source = proto.graph
    graph = onnx.GraphProto(name=source.name)
    graph.node.extend(source.node)
    graph.output.extend(source.output)
    graph.value_info.extend(source.value_info)
    initialized = {i.name for i in source.initializer}
    graph.input.extend(i for i in source.input if i.name not in initialized and i.name not in constants)
    graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items())
    weights: list[np.ndarray] = []
    used = _operands(source)
    for tensor in source.initializer:
        if tensor.name in constants or tensor.name not in used:
            continue
        if np.prod(tensor.dims, dtype=np.int64) <= MAX_CONSTANT_ELEMENTS:
            graph.initializer.append(tensor)
        else:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
            weights.append(onnx.numpy_helper.to_array(tensor))
    out = onnx.ModelProto(ir_version=proto.ir_version, graph=graph)
    out.opset_import.extend(proto.opset_import)
    out.functions.extend(proto.functions)
    return out, weights


def _operands(graph: Any) -> set[str]:
    """Names that the nodes read, those of branches included, and the graph's own results."""
    names = {o.name for o in graph.output}
    for node in graph.node:
        names.update(node.input)
        for attribute in node.attribute:
            for branch in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                names |= _operands(branch)
    return names
