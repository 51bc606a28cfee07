"""Compute the shape arithmetic of an ONNX graph before it is converted.

Before:  s = Shape(x); n = Gather(s, 0); t = Concat(n, [-1]); y = Reshape(x, t)        x: [4, 2, 8]
After:   y = Reshape(x, [4, -1])

Exporters write shapes as little programs. TVM's front end follows some of them; computed here, with ONNX's own shape
inference and reference evaluator, none is left. Only small values (`max_elements`) and operators without randomness;
of an If whose condition is so known one branch is left; nodes that make a result of the model stay. The model that was
given is left as it is. Idempotent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmhet.ir.transform.choose_onnx_branch import chosen_branch

if TYPE_CHECKING:
    import onnx

MAX_ELEMENTS = 1024  # of a value computed at import: shapes and indices have fewer, weights more
_RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Dropout"}
)


def fold_onnx_shapes(proto: onnx.ModelProto, *, max_elements: int = MAX_ELEMENTS) -> onnx.ModelProto:
    """Return the model with every small value that does not depend on data as an initializer."""
    import onnx

    out = onnx.ModelProto()
    out.CopyFrom(proto)
    while True:
        inferred = with_types(out)
        values = {i.name: onnx.numpy_helper.to_array(i) for i in inferred.graph.initializer}
        kept, changed = [], False
        for node in inferred.graph.node:
            if _fold(node, inferred, values, max_elements):
                changed = True
            elif node.op_type == "If" and node.input[0] in values:
                kept += chosen_branch(node, bool(values[node.input[0]].all()))
                changed = True
            else:
                kept.append(node)
        if not changed:
            return out
        read = {name for n in kept for name in reads(n)} | {o.name for o in out.graph.output}
        graph = onnx.GraphProto(name=out.graph.name, node=kept, input=out.graph.input, output=out.graph.output)
        graph.initializer.extend(onnx.numpy_helper.from_array(v, n) for n, v in values.items() if n in read)
        out.graph.CopyFrom(graph)


def with_types(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with inferred types; as it is where inference fails, so that the converter reports the node."""
    import onnx

    try:
        return onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except Exception:
        return proto


def _fold(node: Any, proto: onnx.ModelProto, values: dict[str, np.ndarray], max_elements: int) -> bool:
    """Compute the node's results into `values` and return True, or return False when it must stay."""
    results = {o.name for o in proto.graph.output}
    if any(o in results for o in node.output) or reads(node) != set(node.input) - {""}:
        return False
    if node.op_type in ("Shape", "Size"):
        shape = static_shape(proto, node.input[0], values)
        made = None if shape is None else evaluate(node, {node.input[0]: np.empty(shape, dtype=np.bool_)})
    elif all(i == "" or i in values for i in node.input):
        made = evaluate(node, values, proto)
    else:
        return False
    if made is None or any(not isinstance(v, np.ndarray) or v.size > max_elements for v in made):
        return False
    values.update(zip(node.output, made, strict=False))
    return True


def evaluate(node: Any, values: Mapping[str, np.ndarray], proto: onnx.ModelProto | None = None) -> list[Any] | None:
    """Return the node's results by ONNX's reference, or None where it cannot make them, or not the same ones twice."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    if node.op_type in _RANDOM:
        return None
    if node.op_type == "Constant" and node.attribute[0].name == "value":
        return [onnx.numpy_helper.to_array(node.attribute[0].t)]  # without the reference, which takes 1 ms for each
    opsets = proto.opset_import if proto is not None else [onnx.helper.make_opsetid("", 18)]
    names = [i for i in dict.fromkeys(node.input) if i]
    inputs = [onnx.helper.make_value_info(n, onnx.TypeProto()) for n in names]
    outputs = [onnx.helper.make_value_info(o, onnx.TypeProto()) for o in node.output if o]
    graph = onnx.helper.make_graph([node], "node", inputs, outputs)
    model = onnx.helper.make_model(graph, opset_imports=opsets)
    try:
        made = ReferenceEvaluator(model).run(None, {n: values[n] for n in names})
    except Exception:
        return None
    return [np.asarray(v) if isinstance(v, np.generic) else v for v in made]


def static_shape(proto: onnx.ModelProto, name: str, values: Mapping[str, np.ndarray]) -> tuple[int, ...] | None:
    """Return the dims of a tensor whose dims are all known, from a model with inferred types; else None."""
    if name in values:
        return values[name].shape
    for info in (*proto.graph.input, *proto.graph.value_info, *proto.graph.output):
        if info.name == name and info.type.tensor_type.HasField("shape"):
            dims = info.type.tensor_type.shape.dim
            return tuple(d.dim_value for d in dims) if all(d.HasField("dim_value") for d in dims) else None
    return None


def element_type(proto: onnx.ModelProto, name: str) -> np.dtype[Any] | None:
    """Return the dtype of a tensor, from a model with inferred types; None where it is not known."""
    import onnx

    infos = (*proto.graph.input, *proto.graph.value_info, *proto.graph.output)
    known = [i.type.tensor_type.elem_type for i in infos if i.name == name]
    known += [i.data_type for i in proto.graph.initializer if i.name == name]
    found: np.dtype[Any] | None = next((onnx.helper.tensor_dtype_to_np_dtype(t) for t in known if t), None)
    return found


def reads(node: Any) -> set[str]:
    """Names that a node reads, those that its branches take from outside included."""
    names = set(node.input) - {""}
    for attribute in node.attribute:
        for branch in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
            names |= {name for inner in branch.node for name in reads(inner)} | {o.name for o in branch.output}
    return names
