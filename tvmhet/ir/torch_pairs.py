"""The real pair, of one more axis, that stands for each complex node of a graph: what the rules work with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import fx
from torch._guards import detect_fake_mode

from tvmhet.errors import BadModel, UnsupportedOperator
from tvmhet.ir.fx_node import describe

_ATEN = torch.ops.aten
_Made = TypeVar("_Made")
_REMEDY = "compute it from real and imaginary parts, as torch.view_as_real gives them"
#: Where a tensor lies and how: what pairs need not know.
_KEYWORDS = {"memory_format", "dtype", "layout", "device", "pin_memory"}


def is_complex(node: Any) -> bool:
    """Whether a node makes a complex tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.is_complex()


def _refused(node: fx.Node) -> BadModel:
    if node.op == "output":
        return BadModel("a result of the model is complex", "return torch.view_as_real of it")
    return BadModel(f"input {node.name!r} of the model is complex", "hand over torch.view_as_real of it")


class Pairs:
    """The real pair of each complex node, in the order of the graph."""

    def __init__(self, graph: fx.Graph, stored: Sequence[fx.Node], rules: Mapping[Any, Rule]) -> None:
        self._graph, self._rules = graph, rules
        self._pair = {node: node for node in stored}
        self._real: dict[fx.Node, fx.Node] = {}
        self._made_once: dict[Any, Any] = {}
        self._node: fx.Node | None = None

    def visit(self, node: fx.Node) -> None:
        """Give a node that makes a complex tensor its pair; replace one that reads such and makes a real one."""
        if node in self._pair or not (is_complex(node) or any(n in self._pair for n in node.all_input_nodes)):
            return
        if node.op != "call_function":
            raise _refused(node)
        problem = f"operator {describe(node)} is not imported for complex numbers"
        try:
            made = self._made(node)
        except NotImplementedError as reason:
            raise UnsupportedOperator(f"{problem}: {reason}", _REMEDY) from None
        if made is None:
            raise UnsupportedOperator(problem, _REMEDY)
        if is_complex(node):
            self._pair[node] = made
        else:
            node.replace_all_uses_with(made)

    def _made(self, node: fx.Node) -> fx.Node | None:
        """What stands for a call; None for operators and arguments without a rule. NotImplementedError tells why."""
        rule = self._rules.get(node.target)
        takes_numbers = node.target in (_ATEN.mul.Tensor, _ATEN.mul.Scalar)
        has_number = any(isinstance(a, complex) for a in node.args)
        if rule is None or set(node.kwargs) - _KEYWORDS or (has_number and not takes_numbers):
            return None
        self._node = node
        try:
            with self._graph.inserting_before(node):
                made = rule(self, node)
        except NotImplementedError:  # a RuntimeError
            raise
        except (RuntimeError, TypeError, ValueError, IndexError):  # other arguments than the rule's
            return None
        own = node.meta["val"]
        want = ((*own.shape, 2), own.dtype.to_real()) if own.is_complex() else (tuple(own.shape), own.dtype)
        value = made.meta["val"]
        return made if (tuple(value.shape), value.dtype) == want else None

    def call(self, target: Any, *args: Any, **keywords: Any) -> fx.Node:
        """Add a call, with its value's shape and dtype, and the place of the node that it stands for."""
        assert self._node is not None
        made = self._graph.call_function(target, args, keywords)
        made.meta = {k: v for k, v in self._node.meta.items() if k != "val"}
        with detect_fake_mode(self._node.meta["val"]) or nullcontext():
            made.meta["val"] = target(*fx.node.map_arg(args, lambda n: n.meta["val"]), **keywords)
        return made

    def of(self, node: Any) -> fx.Node:
        """The pair of an operand; of a real one its value and zeros."""
        return self._pair[node] if node in self._pair else self.stack(node, self.call(_ATEN.zeros_like.default, node))

    def parts(self, node: Any) -> tuple[fx.Node, fx.Node]:
        """Real and imaginary part."""
        pair = self.of(node)
        return self.call(_ATEN.select.int, pair, -1, 0), self.call(_ATEN.select.int, pair, -1, 1)

    def stack(self, real: fx.Node, imaginary: fx.Node) -> fx.Node:
        """The pair of two parts."""
        return self.call(_ATEN.cat.default, [self.call(_ATEN.unsqueeze.default, x, -1) for x in (real, imaginary)], -1)

    def reshape(self, x: fx.Node, shape: Sequence[Any]) -> fx.Node:
        """Row-major, copied where it lies otherwise; an extent that is not fixed, of which one may be, follows."""
        return self.call(_ATEN.reshape.default, x, [d if isinstance(d, int) else -1 for d in shape])

    def of_real(self, node: fx.Node, real: fx.Node) -> fx.Node:
        """The pair of a complex node without imaginary part; `real_of` it is `real`."""
        self._real[node] = real
        return self.stack(real, self.call(_ATEN.zeros_like.default, real))

    def real_of(self, node: Any) -> fx.Node | None:
        """The real values that a complex node was made of, if it has no imaginary part."""
        return self._real.get(node)

    def once(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """What `make` adds, added at its first use: for what depends on no other node."""
        if key not in self._made_once:
            self._made_once[key] = make()
        made: _Made = self._made_once[key]
        return made

    def has(self, node: Any) -> bool:
        """Whether a node is a pair's."""
        return isinstance(node, fx.Node) and node in self._pair


Rule = Callable[[Pairs, fx.Node], fx.Node]
