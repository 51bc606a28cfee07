"""Complex tensors of an exported program as real ones, of one more axis: (..., 2) holds real and imaginary part.

    polar(r, angle)               ──►  stack(r cos(angle), r sin(angle))
    view_as_complex(x)            ──►  x
    (a + bi) (c + di)             ──►  stack(ac - bd, ad + bc)
    unsqueeze(z, -1)              ──►  unsqueeze(z, -2)

Rotary embeddings are often written so. Complex constants are stored as real ones. Complex inputs, parameters and
results, and operators without a rule here, are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from tvmhet.errors import BadModel, UnsupportedOperator
from tvmhet.ir.fx_node import arg_of, describe

_ATEN = torch.ops.aten
_REMEDY = "compute it from real and imaginary parts, as torch.view_as_real gives them"
_CONSTANTS = (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def with_real_pairs(program: torch.export.ExportedProgram) -> None:
    """Replace complex tensors by pairs of real ones, in place. Raises UnsupportedOperator and BadModel."""
    if any(map(_is_complex, program.graph.nodes)):
        pair_nodes(program.graph, _real_constants(program))
        program.graph_module.recompile()


def pair_nodes(graph: fx.Graph, stored: Sequence[fx.Node] = ()) -> None:
    """Replace complex nodes by pairs of real ones; those of `stored` are pairs already. Raises as `with_real_pairs`."""
    if not stored and not any(_is_complex(node) for node in graph.nodes):
        return
    for node in graph.find_nodes(op="call_function", target=_ATEN._assert_tensor_metadata.default):
        if _is_complex(node.args[0]) or node.args[0] in stored:  # that it is complex, of which nothing follows
            graph.erase_node(node)
    graph.eliminate_dead_code()
    pairs = _Pairs(graph, stored)
    for node in list(graph.nodes):
        pairs.visit(node)
    graph.eliminate_dead_code()


def _is_complex(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.is_complex()


def _real_constants(program: torch.export.ExportedProgram) -> list[fx.Node]:
    """Store complex constants as real ones, and return their nodes."""
    names = {s.arg.name: s.target for s in program.graph_signature.input_specs if s.kind in _CONSTANTS}
    found = []
    # the program that this one was written out from has the same dicts
    program._state_dict, program._constants = dict(program.state_dict), dict(program.constants)
    for node in program.graph.find_nodes(op="placeholder"):
        if not _is_complex(node) or (target := names.get(node.name)) is None:
            continue
        for held in (program.state_dict, program.constants):
            if isinstance(value := held.get(target), torch.Tensor):
                held[target] = torch.view_as_real(value.detach().resolve_conj()).contiguous()
        node.meta["val"] = torch.view_as_real(node.meta["val"])
        found.append(node)
    return found


def _refused(node: fx.Node) -> BadModel:
    if node.op == "output":
        return BadModel("a result of the model is complex", "return torch.view_as_real of it")
    return BadModel(f"input or parameter {node.name!r} of the model is complex", "hand over torch.view_as_real of it")


class _Pairs:
    """The real pair of each complex node, in the order of the graph."""

    def __init__(self, graph: fx.Graph, stored: Sequence[fx.Node]) -> None:
        self._graph, self._pair = graph, {node: node for node in stored}
        self._node: fx.Node | None = None

    def visit(self, node: fx.Node) -> None:
        """Give a node that makes a complex tensor its pair; replace one that reads such and makes a real one."""
        if node in self._pair or not (_is_complex(node) or any(n in self._pair for n in node.all_input_nodes)):
            return
        if node.op != "call_function":
            raise _refused(node)
        made = self._made(node)
        if made is None:
            raise UnsupportedOperator(f"operator {describe(node)} is not imported for complex numbers", _REMEDY)
        if _is_complex(node):
            self._pair[node] = made
        else:
            node.replace_all_uses_with(made)

    def _made(self, node: fx.Node) -> fx.Node | None:
        """What stands for a call; None for operators and arguments without a rule."""
        rule = _RULES.get(node.target)
        if rule is None or set(node.kwargs) - {"memory_format"} or any(isinstance(a, complex) for a in node.args):
            return None
        self._node = node
        try:
            with self._graph.inserting_before(node):
                made = rule(self, node)
        except (RuntimeError, TypeError, ValueError, IndexError):  # other arguments than the rule's
            return None
        own = node.meta["val"]
        want = (*own.shape, 2) if own.is_complex() else tuple(own.shape)
        return made if tuple(made.meta["val"].shape) == want else None

    def call(self, target: Any, *args: Any) -> fx.Node:
        """Add a call, with its value's shape and dtype, and the place of the node that it stands for."""
        assert self._node is not None
        made = self._graph.call_function(target, args)
        made.meta = {k: v for k, v in self._node.meta.items() if k != "val"}
        made.meta["val"] = target(*fx.node.map_arg(args, lambda n: n.meta["val"]))
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

    def has(self, node: Any) -> bool:
        """Whether a node is a pair's."""
        return isinstance(node, fx.Node) and node in self._pair


Rule = Callable[[_Pairs, fx.Node], fx.Node]


def _polar(p: _Pairs, node: fx.Node) -> fx.Node:
    size, angle = node.args
    waves = [p.call(wave, angle) for wave in (_ATEN.cos.default, _ATEN.sin.default)]
    return p.stack(*(p.call(_ATEN.mul.Tensor, size, w) for w in waves))


def _complex(p: _Pairs, node: fx.Node) -> fx.Node:
    """Of two parts, each as large as both together."""
    real, imaginary = node.args
    zeros = [p.call(_ATEN.zeros_like.default, x) for x in (imaginary, real)]
    return p.stack(*(p.call(_ATEN.add.Tensor, x, z) for x, z in zip((real, imaginary), zeros, strict=True)))


def _mul(p: _Pairs, node: fx.Node) -> fx.Node:
    one, other = node.args[:2]
    if p.has(one) and p.has(other):
        (a, b), (c, d) = p.parts(one), p.parts(other)
        products = [p.call(_ATEN.mul.Tensor, x, y) for x, y in ((a, c), (b, d), (a, d), (b, c))]
        real = p.call(_ATEN.sub.Tensor, products[0], products[1])
        return p.stack(real, p.call(_ATEN.add.Tensor, products[2], products[3]))
    pair, factor = (one, other) if p.has(one) else (other, one)
    if isinstance(factor, fx.Node):
        factor = p.call(_ATEN.unsqueeze.default, factor, -1)
    return p.call(_ATEN.mul.Tensor, p.of(pair), factor)


def _sum(p: _Pairs, node: fx.Node) -> fx.Node:
    """Sums and differences, part by part."""
    one, other = node.args[:2]
    if isinstance(other, fx.Node):
        return p.call(node.target, p.of(one), p.of(other))
    real, imaginary = p.parts(one)
    return p.stack(p.call(node.target, real, other), imaginary)


def _conjugate(p: _Pairs, node: fx.Node) -> fx.Node:
    real, imaginary = p.parts(node.args[0])
    return p.stack(real, p.call(_ATEN.neg.default, imaginary))


def _abs(p: _Pairs, node: fx.Node) -> fx.Node:
    squares = [p.call(_ATEN.mul.Tensor, x, x) for x in p.parts(node.args[0])]
    return p.call(_ATEN.sqrt.default, p.call(_ATEN.add.Tensor, *squares))


def _reshaped(p: _Pairs, node: fx.Node) -> fx.Node:
    return p.call(node.target, p.of(node.args[0]), [*arg_of(node, 1, "size"), 2])


def _repeated(p: _Pairs, node: fx.Node) -> fx.Node:
    return p.call(node.target, p.of(node.args[0]), [*arg_of(node, 1, "size"), -1])


def _permuted(p: _Pairs, node: fx.Node) -> fx.Node:
    order = arg_of(node, 1, "dims")
    return p.call(node.target, p.of(node.args[0]), [*(d % len(order) for d in order), len(order)])


def _along(*positions: int) -> Rule:
    """An operator whose arguments at `positions` are axes."""

    def rule(p: _Pairs, node: fx.Node) -> fx.Node:
        args: list[Any] = [p.of(node.args[0]), *node.args[1:]]
        for i in positions:
            if i < len(args):
                args[i] = [_axis(d) for d in args[i]] if isinstance(args[i], Sequence) else _axis(args[i])
        return p.call(node.target, *args)

    return rule


def _total(p: _Pairs, node: fx.Node) -> fx.Node:
    axes = arg_of(node, 1, "dim") or range(node.args[0].meta["val"].dim())
    return p.call(node.target, p.of(node.args[0]), [_axis(d) for d in axes], arg_of(node, 2, "keepdim", False))


def _joined(p: _Pairs, node: fx.Node) -> fx.Node:
    parts = [p.of(x) for x in arg_of(node, 0, "tensors")]
    return p.call(node.target, parts, _axis(arg_of(node, 1, "dim", 0)))


def _axis(dim: int) -> int:
    """The axis of the pair: those counted from the end are one further from it."""
    return dim if dim >= 0 else dim - 1


_RULES: dict[Any, Rule] = {
    _ATEN.polar.default: _polar,
    _ATEN.complex.default: _complex,
    _ATEN.view_as_complex.default: lambda p, n: n.args[0],
    _ATEN.view_as_real.default: lambda p, n: p.of(n.args[0]),
    _ATEN.real.default: lambda p, n: p.parts(n.args[0])[0],
    _ATEN.imag.default: lambda p, n: p.parts(n.args[0])[1],
    _ATEN.angle.default: lambda p, n: p.call(_ATEN.atan2.default, *p.parts(n.args[0])[::-1]),
    _ATEN.abs.default: _abs,
    _ATEN.mul.Tensor: _mul,
    _ATEN.mul.Scalar: _mul,
    _ATEN.add.Tensor: _sum,
    _ATEN.sub.Tensor: _sum,
    _ATEN.neg.default: lambda p, n: p.call(n.target, p.of(n.args[0])),
    _ATEN.clone.default: lambda p, n: p.call(n.target, p.of(n.args[0])),
    _ATEN.alias.default: lambda p, n: p.of(n.args[0]),
    _ATEN._conj.default: _conjugate,
    _ATEN._conj_physical.default: _conjugate,
    _ATEN.conj_physical.default: _conjugate,
    _ATEN.resolve_conj.default: lambda p, n: p.of(n.args[0]),
    _ATEN.view.default: _reshaped,
    _ATEN._unsafe_view.default: _reshaped,
    _ATEN.reshape.default: _reshaped,
    _ATEN.expand.default: _repeated,
    _ATEN.permute.default: _permuted,
    _ATEN.transpose.int: _along(1, 2),
    _ATEN.unsqueeze.default: _along(1),
    _ATEN.squeeze.dims: _along(1),
    _ATEN.squeeze.dim: _along(1),
    _ATEN.select.int: _along(1),
    _ATEN.slice.Tensor: _along(1),
    _ATEN.index_select.default: _along(1),
    _ATEN.sum.dim_IntList: _total,
    _ATEN.index.Tensor: lambda p, n: p.call(n.target, p.of(n.args[0]), n.args[1]),
    _ATEN.cat.default: _joined,
    _ATEN.stack.default: _joined,
}
