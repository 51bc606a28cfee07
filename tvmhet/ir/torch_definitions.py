"""Operators that TVM lacks, written out in operators that it has: torch's own definitions, and ours where it has none.

    aten.logcumsumexp(x, d)   ──►   m = cummax(x, d);  log(cumsum(exp(x - m), d)) + m

`definition_of` is what an import asks for an operator without a conversion, or whose conversion failed. Ours are plain
torch, so that tests compare them with the operators they stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from tvmhet.ir import (
    torch_defined_elements,
    torch_defined_gamma,
    torch_defined_gradients,
    torch_defined_linear,
    torch_defined_order,
    torch_defined_places,
    torch_defined_pools,
    torch_defined_sampling,
    torch_defined_sums,
)

Definition = Callable[..., Any]

_OWN: dict[Any, Definition] = {
    **torch_defined_elements.DEFINITIONS,
    **torch_defined_gamma.DEFINITIONS,
    **torch_defined_gradients.DEFINITIONS,
    **torch_defined_linear.DEFINITIONS,
    **torch_defined_order.DEFINITIONS,
    **torch_defined_places.DEFINITIONS,
    **torch_defined_pools.DEFINITIONS,
    **torch_defined_sampling.DEFINITIONS,
    **torch_defined_sums.DEFINITIONS,
}


def definition_of(operator: Any) -> Definition | None:
    """Return a function of the operator's arguments that computes it from simpler operators, or None."""
    if str(operator) in torch_defined_sums.BY_NAME:
        return torch_defined_sums.BY_NAME[str(operator)]
    if operator in _OWN:
        return _OWN[operator]
    composite = torch.export.default_decompositions()
    found: Definition | None = composite[operator] if operator in composite else _torch_definitions().get(operator)
    return found


@cache
def _torch_definitions() -> Any:
    from torch._decomp import decomposition_table

    return decomposition_table
