"""Replace ONNX operators by their definition in simpler operators, where ONNX gives one.

Before:  y = Celu(x)          After:  the four operators that the ONNX standard defines Celu by

Functions that the model itself defines are always inlined; standard ones only when named, because TVM converts most
of them better whole. The model that was given is left as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

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
    return inliner.inline_selected_functions(proto, [("", name) for name in present], inline_schema_functions=True)


def has_definition(operator: str, opset: int) -> bool:
    """True when the ONNX standard defines `operator` by simpler ones at that opset."""
    import onnx

    try:
        schema = onnx.defs.get_schema(operator, opset)
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)
