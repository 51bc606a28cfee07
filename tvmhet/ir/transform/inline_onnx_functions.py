"""Replace ONNX operators by their definition in simpler operators, where ONNX gives one.

Before:  y = Celu(x)          After:  the four operators that the ONNX standard defines Celu by

Functions that the model itself defines are always inlined; standard ones only when named, because TVM converts most
of them better whole. The model that was given is left as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from tvmhet.ir.onnx_nodes import operator_set
from tvmhet.ir.transform.fold_onnx_shapes import with_types

if TYPE_CHECKING:
    import onnx


def inline_onnx_functions(proto: onnx.ModelProto, operators: Collection[str] = ()) -> onnx.ModelProto:
    """Return the model with its own functions, and the standard operators named, replaced by their definitions."""
    from onnx import inliner

    if proto.functions:
        proto = inliner.inline_local_functions(proto)
    present = sorted({n.op_type for n in proto.graph.node} & set(operators))
    if not present:
        return proto
    proto = _with_defaults(_with_initializer_types(with_types(proto)), present)
    return inliner.inline_selected_functions(proto, [("", name) for name in present], inline_schema_functions=True)


def _with_initializer_types(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the types of its initializers, and of inputs that are left out, written down.

    onnx asks for the types of all inputs of a function that depends on them, also of those without a name.
    """
    import onnx

    out = onnx.ModelProto()
    out.CopyFrom(proto)
    known = {i.name for i in (*out.graph.input, *out.graph.value_info)}
    for i in out.graph.initializer:
        if i.name not in known:
            out.graph.value_info.append(onnx.helper.make_tensor_value_info(i.name, i.data_type, list(i.dims)))
    out.graph.value_info.append(onnx.ValueInfoProto(name="", type=onnx.TypeProto()))
    return out


def _with_defaults(proto: onnx.ModelProto, operators: Collection[str]) -> onnx.ModelProto:
    """Return the model with the default attributes of `operators` written down: definitions refer to them by name."""
    import onnx

    out = onnx.ModelProto()
    out.CopyFrom(proto)
    opset = operator_set(proto)
    for node in out.graph.node:
        if node.op_type in operators:
            given = {a.name for a in node.attribute}
            known = onnx.defs.get_schema(node.op_type, opset).attributes.values()
            node.attribute.extend(a.default_value for a in known if a.name not in given and a.default_value.name)
    return out


def has_definition(operator: str, opset: int) -> bool:
    """True when the ONNX standard defines `operator` by simpler ones at that opset."""
    import onnx

    try:
        schema = onnx.defs.get_schema(operator, opset)
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)
