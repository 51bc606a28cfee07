"""Reading fx nodes and Relax tensors: what every converter needs."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx
from tvm import relax


def arg_of(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def dims_of(expr: relax.Expr) -> list[Any]:
    """Return the dims of a tensor expression: int where static, else the symbolic expression."""
    return [int(d) if hasattr(d, "value") else d for d in expr.ty.shape.values]


def result_dtype(node: fx.Node) -> str:
    """Return the dtype of the tensor that the node makes."""
    return str(node.meta["val"].dtype).removeprefix("torch.")


def describe(node: fx.Node) -> str:
    """Name a node by its operator, fx name and module path: `'aten.histc.default' (node 'histc' in layer1.0)`."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    where = f" in module {path!r}" if path else ""
    return f"{node.target!s} (node {node.name!r}{where})"


def unread_result(node: fx.Node, importer: Any, index: int) -> relax.Expr:
    """Stand for a result that nobody reads but backward operators, which find it again by themselves.

    Raises NotImplementedError where another operator reads it.
    """
    taken = [u for u in node.users if u.target is operator.getitem and u.args[1] == index]
    if readers := [r for u in taken for r in u.users if not str(r.target).endswith("_backward.default")]:
        raise NotImplementedError(f"result {index} is read by {readers[0].target!s}")
    like = node.meta["val"][index]
    return importer.block_builder.emit(relax.op.zeros(list(like.shape), str(like.dtype).removeprefix("torch.")))
