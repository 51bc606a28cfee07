"""Which values of a straight-line function depend on parameters and constants only."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from tvmhet.ir.attrs import NUM_INPUT_ATTR
from tvmhet.ir.rewrite import bindings_of, children


def parameters_of(func: relax.Function) -> tuple[relax.Var, ...]:
    """Return the parameters of `func` after its inputs; none when it does not say how many inputs it has."""
    if not func.attrs or NUM_INPUT_ATTR not in func.attrs:
        return ()
    return tuple(func.params[int(func.attrs[NUM_INPUT_ATTR]) :])


def parameter_values(func: relax.Function) -> frozenset[Any]:
    """Return the parameters of `func` and every variable computed from them and from constants only."""
    known: set[Any] = set(parameters_of(func))

    def fixed(expr: Any) -> bool:
        if isinstance(expr, tvm.ir.Var):
            return expr in known
        return all(fixed(c) for c in children(expr))

    for binding in bindings_of(func):
        if isinstance(binding, relax.VarBinding) and fixed(binding.value):
            known.add(binding.var)
    return frozenset(known)
