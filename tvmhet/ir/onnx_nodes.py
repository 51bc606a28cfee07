"""Write ONNX operators out in others: a pass over the nodes, and what is known of the model that they are in.

y = DFT(x)  ──►  nodes that make y, if the writer for DFT knows enough of x; else the node as it is
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmhet.ir.transform.fold_onnx_shapes import element_type, fold_onnx_shapes, static_shape, with_types

if TYPE_CHECKING:
    import onnx

_SCALES_BY_CHANNEL = 13  # the operator set since which scales may be vectors, with an axis


def operator_set(proto: onnx.ModelProto) -> int:
    """Return the version of ONNX's own operators that a model is written in."""
    return next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 1)


class Known:
    """What is known of the tensors of a model: types, and the values of small ones that do not depend on data."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.proto = proto

    @cached_property
    def _typed(self) -> onnx.ModelProto:
        return with_types(self.proto)

    @cached_property
    def _folded(self) -> onnx.ModelProto:
        return with_types(fold_onnx_shapes(self.proto))

    @cached_property
    def values(self) -> Mapping[str, np.ndarray]:
        """Values by name."""
        import onnx

        return {i.name: onnx.numpy_helper.to_array(i) for i in self._folded.graph.initializer}

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the dims of a tensor, or None if not all of them are known."""
        return static_shape(self._folded, name, self.values)

    def dtype(self, name: str) -> np.dtype[Any] | None:
        """Return the dtype of a tensor, or None if it is not known."""
        return element_type(self._typed, name)


class Nodes:
    """The nodes that write out one other, in order; their results are named after its first."""

    def __init__(self, node: onnx.NodeProto, opset: int, known: Known) -> None:
        self.nodes: list[Any] = []
        self.opset = opset
        self.known = known
        self.result = next(filter(None, node.output))
        self._prefix = f"{self.result}/{node.op_type}"

    def add(self, operator: str, *inputs: str, result: str | None = None, **attributes: Any) -> str:
        """Append a node and return the name of its result."""
        import onnx

        name = result or f"{self._prefix}_{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    def constant(self, value: Any, dtype: Any) -> str:
        """Append a constant and return its name."""
        import onnx

        return self.add("Constant", value=onnx.numpy_helper.from_array(np.array(value, dtype)))

    def cast(self, value: str, dtype: Any, result: str | None = None) -> str:
        """Append a cast and return the name of its result."""
        import onnx

        return self.add("Cast", value, result=result, to=onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def axis(self, axis: int) -> dict[str, Any]:
        """Return the attribute that gives the axis of scales that may be vectors."""
        return {"axis": axis} if self.opset >= _SCALES_BY_CHANNEL else {}

    def on_axes(self, operator: str, value: str, axes: list[int]) -> str:
        """Append an Unsqueeze or Squeeze, whose axes are an attribute before operator set 13."""
        if self.opset < _SCALES_BY_CHANNEL:
            return self.add(operator, value, axes=axes)
        return self.add(operator, value, self.constant(axes, "int64"))


#: Appends the nodes that write out a node with these attributes, and returns True; or False where it cannot.
Write = Callable[[Nodes, Any, Mapping[str, Any]], bool]


def write_out(proto: onnx.ModelProto, writers: Mapping[str, Write]) -> onnx.ModelProto:
    """Return the model with its nodes written out by the writers of their operators; `proto` itself if none is."""
    import onnx

    if not any(n.op_type in writers for n in proto.graph.node):
        return proto
    opset, known = operator_set(proto), Known(proto)
    nodes: list[Any] = []
    changed = False
    for node in proto.graph.node:
        made = Nodes(node, opset, known)
        write = writers.get(node.op_type)
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        is_written = write is not None and write(made, node, attributes)
        nodes += made.nodes if is_written else [node]
        changed |= is_written
    if not changed:
        return proto
    out = onnx.ModelProto()
    out.CopyFrom(proto)
    del out.graph.node[:]
    out.graph.node.extend(nodes)
    return out
