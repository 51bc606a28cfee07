"""Random operators of a training step become inputs, so that a step is a pure function and a seed fixes it.

mask = rand_like(x) < p   ──►   mask = noise_0 < p,  noise_0 a new input, "uniform"
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tvmhet.errors import UnsupportedOperator

_aten = torch.ops.aten

#: Random operators that become inputs, and what their noise is distributed as.
_RANDOM = {"rand_like": "uniform", "rand": "uniform", "randn_like": "normal", "randn": "normal"}


def _bernoulli(x: torch.Tensor, p: float = 0.5, **_: Any) -> torch.Tensor:
    return (torch.rand_like(x) < p).to(x.dtype)


def _exponential(x: torch.Tensor, rate: float = 1.0, **_: Any) -> torch.Tensor:
    return -torch.log(1.0 - torch.rand_like(x)) / rate  # 1 - noise is in (0, 1]


def _uniform(x: torch.Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> torch.Tensor:
    return low + (high - low) * torch.rand_like(x)


def _normal(x: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> torch.Tensor:
    return mean + std * torch.randn_like(x)


#: Random operators that are arithmetic on noise of `_RANDOM` (dropped paths, Gumbel noise, jitter).
FROM_NOISE: dict[Any, Callable[..., Any]] = {
    _aten.bernoulli.p: _bernoulli,
    _aten.exponential.default: _exponential,
    _aten.uniform.default: _uniform,
    _aten.normal_functional.default: _normal,
}


def lift_randomness(graph: fx.Graph) -> list[tuple[fx.Node, str]]:
    """Replace each random operator by a new placeholder; raise for kinds whose noise cannot be an input."""
    lifted: list[tuple[fx.Node, str]] = []
    first = next(iter(graph.nodes))
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        kind = _RANDOM.get(base_name(node))
        if kind is None:
            if torch.Tag.nondeterministic_seeded in node.target.tags:
                raise UnsupportedOperator(
                    f"operator {node.target!s} (node {node.name!r}) draws random numbers that cannot be made an input",
                    f"use dropout or one of {', '.join(_RANDOM)}",
                )
            continue
        with graph.inserting_before(first):
            holder = graph.placeholder(f"noise_{len(lifted)}")
        holder.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(holder)
        graph.erase_node(node)
        lifted.append((holder, kind))
    return lifted


def base_name(node: fx.Node) -> str:
    """The name of a node's operator without its overload."""
    if node.target is operator.getitem:
        return "getitem"
    return str(getattr(node.target, "__name__", "")).split(".")[0]
