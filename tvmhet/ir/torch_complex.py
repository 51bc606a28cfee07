"""Complex tensors of an exported program as real ones, of one more axis: (..., 2) holds real and imaginary part.

    polar(r, angle)               ──►  stack(r cos(angle), r sin(angle))
    view_as_complex(x)            ──►  x
    (a + bi) (c + di)             ──►  stack(ac - bd, ad + bc)
    unsqueeze(z, -1)              ──►  unsqueeze(z, -2)

Rotary embeddings are often written so, and what is between Fourier transforms (`torch_fourier.py`). Complex parameters
and constants are stored as real ones. Complex inputs and results, and operators without a rule here, are refused by
name; so are complex parameters in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from tvmhet.ir.fx_node import arg_of
from tvmhet.ir.torch_fourier import FOURIER
from tvmhet.ir.torch_pairs import Pairs, Rule, is_complex

_ATEN = torch.ops.aten
_STORED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def with_real_pairs(program: torch.export.ExportedProgram) -> None:
    """Replace complex tensors by pairs of real ones, in place. Raises UnsupportedOperator and BadModel."""
    if any(map(is_complex, program.graph.nodes)):
        pair_nodes(program.graph, _real_stored(program))
        program.graph_module.recompile()


def pair_nodes(graph: fx.Graph, stored: Sequence[fx.Node] = ()) -> None:
    """Replace complex nodes by pairs of real ones; those of `stored` are pairs already. Raises as `with_real_pairs`."""
    if not stored and not any(is_complex(node) for node in graph.nodes):
        return
    for node in graph.find_nodes(op="call_function", target=_ATEN._assert_tensor_metadata.default):
        if is_complex(node.args[0]) or node.args[0] in stored:  # that it is complex, of which nothing follows
            graph.erase_node(node)
    graph.eliminate_dead_code()
    pairs = Pairs(graph, stored, _RULES)
    for node in list(graph.nodes):
        pairs.visit(node)
    graph.eliminate_dead_code()


def _real_stored(program: torch.export.ExportedProgram) -> list[fx.Node]:
    """Store complex parameters and constants as real ones, and return their nodes."""
    names = {s.arg.name: s.target for s in program.graph_signature.input_specs if s.kind in _STORED}
    found = []
    # the program that this one was written out from has the same dicts
    program._state_dict, program._constants = dict(program.state_dict), dict(program.constants)
    for node in program.graph.find_nodes(op="placeholder"):
        if not is_complex(node) or (target := names.get(node.name)) is None:
            continue
        for held in (program.state_dict, program.constants):
            if isinstance(value := held.get(target), torch.Tensor):
                held[target] = torch.view_as_real(value.detach().resolve_conj()).contiguous()
        node.meta["val"] = torch.view_as_real(node.meta["val"])
        found.append(node)
    return found


def _polar(p: Pairs, node: fx.Node) -> fx.Node:
    size, angle = node.args
    waves = [p.call(wave, angle) for wave in (_ATEN.cos.default, _ATEN.sin.default)]
    return p.stack(*(p.call(_ATEN.mul.Tensor, size, w) for w in waves))


def _complex(p: Pairs, node: fx.Node) -> fx.Node:
    """Of two parts, each as large as both together."""
    real, imaginary = node.args
    zeros = [p.call(_ATEN.zeros_like.default, x) for x in (imaginary, real)]
    return p.stack(*(p.call(_ATEN.add.Tensor, x, z) for x, z in zip((real, imaginary), zeros, strict=True)))


def _mul(p: Pairs, node: fx.Node) -> fx.Node:
    one, other = node.args[:2]
    if isinstance(other, complex) or (p.has(one) and p.has(other)):
        (a, b), (c, d) = p.parts(one), (other.real, other.imag) if isinstance(other, complex) else p.parts(other)
        products = [p.call(_ATEN.mul.Tensor, x, y) for x, y in ((a, c), (b, d), (a, d), (b, c))]
        real = p.call(_ATEN.sub.Tensor, products[0], products[1])
        return p.stack(real, p.call(_ATEN.add.Tensor, products[2], products[3]))
    pair, factor = (one, other) if p.has(one) else (other, one)
    if isinstance(factor, fx.Node):
        factor = p.call(_ATEN.unsqueeze.default, factor, -1)
    return p.call(_ATEN.mul.Tensor, p.of(pair), factor)


def _sum(p: Pairs, node: fx.Node) -> fx.Node:
    """Sums and differences, part by part."""
    one, other = node.args[:2]
    if isinstance(other, fx.Node):
        return p.call(node.target, p.of(one), p.of(other))
    real, imaginary = p.parts(one)
    return p.stack(p.call(node.target, real, other), imaginary)


def _quotient(p: Pairs, node: fx.Node) -> fx.Node:
    one, other = node.args[:2]
    if not p.has(other):
        other = p.call(_ATEN.unsqueeze.default, other, -1) if isinstance(other, fx.Node) else other
        return p.call(_ATEN.div.Tensor, p.of(one), other)
    (a, b), (c, d) = p.parts(one), p.parts(other)
    tops = [p.call(_ATEN.mul.Tensor, x, y) for x, y in ((a, c), (b, d), (b, c), (a, d))]
    size = p.call(_ATEN.add.Tensor, *(p.call(_ATEN.mul.Tensor, x, x) for x in (c, d)))
    real, imaginary = p.call(_ATEN.add.Tensor, *tops[:2]), p.call(_ATEN.sub.Tensor, *tops[2:])
    return p.stack(*(p.call(_ATEN.div.Tensor, x, size) for x in (real, imaginary)))


def _exponential(p: Pairs, node: fx.Node) -> fx.Node:
    real, angle = p.parts(node.args[0])
    size, waves = p.call(node.target, real), (_ATEN.cos.default, _ATEN.sin.default)
    return p.stack(*(p.call(_ATEN.mul.Tensor, size, p.call(wave, angle)) for wave in waves))


def _matrix_product(p: Pairs, node: fx.Node) -> fx.Node:
    """One product of real matrices: rows a, then rows b, by pairs (c, d) as they lie: (.., 2 m, k) by (.., k, 2 n).

    What the rows b give is turned by i and added: the second matrix, often a parameter, is stored and read once.
    """
    one, other = (p.of(x) for x in node.args)
    *batch, m, k, _ = one.meta["val"].shape
    *batch_of_other, _, n, _ = other.meta["val"].shape
    rows = p.call(_ATEN.transpose.int, p.call(_ATEN.transpose.int, one, -1, -2), -2, -3)
    left, right = p.reshape(rows, [*batch, 2 * m, k]), p.reshape(other, [*batch_of_other, k, 2 * n])
    *kept, _, _ = node.meta["val"].shape
    made = p.reshape(p.call(node.target, left, right), [*kept, 2, m, n, 2])
    (ac, ad), (bc, bd) = (
        [p.call(_ATEN.select.int, p.call(_ATEN.select.int, made, -1, j), -3, i) for j in (0, 1)] for i in (0, 1)
    )
    return p.stack(p.call(_ATEN.sub.Tensor, ac, bd), p.call(_ATEN.add.Tensor, ad, bc))


def _converted(p: Pairs, node: fx.Node) -> fx.Node:
    """Real values become complex ones, or pairs of another precision; imaginary parts are not dropped so."""
    (x,), dtype = node.args, node.meta["val"].dtype
    if not dtype.is_complex:
        raise NotImplementedError("their imaginary parts are dropped; take .real")
    if p.has(x):
        return p.call(node.target, p.of(x), dtype=dtype.to_real())
    return p.of_real(node, p.call(node.target, x, dtype=dtype.to_real()))


def _filled(p: Pairs, node: fx.Node) -> fx.Node:
    *size, value = node.args  # a scalar has no size
    keywords = {"dtype": node.meta["val"].dtype.to_real(), "device": node.meta["val"].device}
    return p.stack(*(p.call(node.target, *size, part, **keywords) for part in (value, 0.0)))


def _chosen(p: Pairs, node: fx.Node) -> fx.Node:
    mask = p.call(_ATEN.unsqueeze.default, node.args[0], -1)
    return p.call(node.target, mask, p.of(node.args[1]), p.of(node.args[2]))


def _is_number(p: Pairs, node: fx.Node) -> fx.Node:
    parts = zip(p.parts(node.args[0]), (node.args[1], 0), strict=True)
    return p.call(_ATEN.logical_and.default, *(p.call(node.target, x, value) for x, value in parts))


def _sign(p: Pairs, node: fx.Node) -> fx.Node:
    """z / |z|, and 0 of 0."""
    size = p.call(_ATEN.unsqueeze.default, _abs(p, node), -1)
    is_zero = p.call(_ATEN.eq.Scalar, size, 0)
    return p.call(_ATEN.div.Tensor, p.of(node.args[0]), p.call(_ATEN.add.Tensor, size, is_zero))


def _filled_like(p: Pairs, node: fx.Node) -> fx.Node:
    part = p.parts(node.args[0])[0]
    return p.stack(*(p.call(node.target, part, value) for value in (node.args[1], 0.0)))


def _padded(p: Pairs, node: fx.Node) -> fx.Node:
    x, pads, value = node.args[0], node.args[1], complex(arg_of(node, 2, "value", 0))
    if value == 0:
        return p.call(node.target, p.of(x), [0, 0, *pads], 0)
    parts = zip(p.parts(x), (value.real, value.imag), strict=True)
    return p.stack(*(p.call(node.target, part, pads, number) for part, number in parts))


def _placed(p: Pairs, node: fx.Node) -> fx.Node:
    into, what = (p.of(x) for x in node.args[:2])
    return p.call(node.target, into, what, _axis(arg_of(node, 2, "dim", 0)), *node.args[3:])


def _copied(p: Pairs, node: fx.Node) -> fx.Node:
    into, what = (p.of(x) for x in node.args[:2])
    return p.call(_ATEN.expand.default, what, [d if isinstance(d, int) else -1 for d in into.meta["val"].shape])


def _rolled(p: Pairs, node: fx.Node) -> fx.Node:
    return p.call(node.target, p.of(node.args[0]), node.args[1], [_axis(d) for d in arg_of(node, 2, "dims")])


def _conjugate(p: Pairs, node: fx.Node) -> fx.Node:
    real, imaginary = p.parts(node.args[0])
    return p.stack(real, p.call(_ATEN.neg.default, imaginary))


def _abs(p: Pairs, node: fx.Node) -> fx.Node:
    squares = [p.call(_ATEN.mul.Tensor, x, x) for x in p.parts(node.args[0])]
    return p.call(_ATEN.sqrt.default, p.call(_ATEN.add.Tensor, *squares))


def _reshaped(p: Pairs, node: fx.Node) -> fx.Node:
    return p.call(_ATEN.reshape.default, p.of(node.args[0]), [*arg_of(node, 1, "size"), 2])


def _repeated(p: Pairs, node: fx.Node) -> fx.Node:
    return p.call(node.target, p.of(node.args[0]), [*arg_of(node, 1, "size"), -1])


def _permuted(p: Pairs, node: fx.Node) -> fx.Node:
    order = arg_of(node, 1, "dims")
    return p.call(node.target, p.of(node.args[0]), [*(d % len(order) for d in order), len(order)])


def _along(*positions: int) -> Rule:
    """An operator whose arguments at `positions` are axes."""

    def rule(p: Pairs, node: fx.Node) -> fx.Node:
        args: list[Any] = [p.of(node.args[0]), *node.args[1:]]
        for i in positions:
            if i < len(args):
                args[i] = [_axis(d) for d in args[i]] if isinstance(args[i], Sequence) else _axis(args[i])
        return p.call(node.target, *args)

    return rule


def _total(p: Pairs, node: fx.Node) -> fx.Node:
    axes = arg_of(node, 1, "dim") or range(node.args[0].meta["val"].dim())
    return p.call(node.target, p.of(node.args[0]), [_axis(d) for d in axes], arg_of(node, 2, "keepdim", False))


def _joined(p: Pairs, node: fx.Node) -> fx.Node:
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
    _ATEN.div.Tensor: _quotient,
    _ATEN.div.Scalar: _quotient,
    _ATEN.exp.default: _exponential,
    _ATEN.mm.default: _matrix_product,
    _ATEN.bmm.default: _matrix_product,
    _ATEN.matmul.default: _matrix_product,
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
    _ATEN._to_copy.default: _converted,
    _ATEN.full.default: _filled,
    _ATEN.full_like.default: _filled_like,
    _ATEN.scalar_tensor.default: _filled,
    _ATEN.where.self: _chosen,
    _ATEN.eq.Scalar: _is_number,
    _ATEN.sgn.default: _sign,
    _ATEN.constant_pad_nd.default: _padded,
    _ATEN.slice_scatter.default: _placed,
    _ATEN.copy.default: _copied,
    _ATEN.flip.default: _along(1),
    _ATEN.roll.default: _rolled,
    **FOURIER,
}
