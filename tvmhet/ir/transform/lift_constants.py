"""Make parameters of the tensors that a front end left in the code as constants.

Before:  main(x):         y = R.add(x, <constant of 4 MiB>)
After:   main(x, const):  y = R.add(x, const)               params["const"] = the 4 MiB

So that every weight is counted, placed and shipped alike, whichever front end it came through. Constants below
`MIN_BYTES` stay: they are scalars, axes and shapes. Those without elements do not, as TVM cannot read them back from a
library, nor those that stand beside tensors in one argument (of a concat) or in the result, which names tensors only,
nor operands of products and convolutions, whose rules read both. Values are shared, not copied. Idempotent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tvm
from tvm import relax

from tvmhet.ir.model import ENTRY, Model, tensor_bytes
from tvmhet.ir.rewrite import Rebuild, bindings_of, children, rebuild

MIN_BYTES = 256  # scalars, axes and shapes take less
_OF_TWO_TENSORS = ("relax.matmul", *(f"relax.nn.conv{n}d{kind}" for n in (1, 2, 3) for kind in ("", "_transpose")))


def lift_constants(model: Model) -> Model:
    """Return the model with constants as parameters: of at least `MIN_BYTES`, of 0, or where tensors are asked for."""
    main = model.main
    found = _constants(main)
    if not found:
        return model
    names = _fresh_names({str(p.name) for p in main.params}, len(found))
    lifted = {c: relax.Var(n, c.ty) for c, n in zip(found, names, strict=True)}

    def substitute(expr: Any) -> Any:
        if isinstance(expr, tvm.ir.GenericConst):
            return lifted.get(expr, expr)
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([substitute(f) for f in expr.fields])
        return expr

    def step(_state: Rebuild, _var: relax.Var, value: Any) -> Any:
        if isinstance(value, relax.Call) and any(c in lifted for c in _leaves(value)):
            return relax.Call(value.op, [substitute(a) for a in value.args], value.attrs, value.ty_args)
        return substitute(value)

    mod = model.mod.clone()
    func = rebuild(main, step, [*main.params, *lifted.values()], substitute)
    mod.update_func(mod.get_global_var(ENTRY), func)
    values = {n: c.value for c, n in zip(found, names, strict=True)}
    return replace(model, mod=mod, params={**model.params, **values})


def _constants(func: relax.Function) -> list[Any]:
    """Distinct constants (by object) to be lifted, in the order of their first use."""
    found: dict[Any, None] = {}
    for binding in bindings_of(func):
        among = _among_tensors(binding.value) | _operands(binding.value)
        for leaf in _leaves(binding.value):
            if isinstance(leaf, tvm.ir.GenericConst):
                size = tensor_bytes(leaf.value)
                if size == 0 or size >= MIN_BYTES or leaf in among:
                    found[leaf] = None
    found |= dict.fromkeys(leaf for leaf in _leaves(func.body.body) if isinstance(leaf, tvm.ir.GenericConst))
    return list(found)


def _among_tensors(value: Any) -> set[Any]:
    """Constants in a tuple argument that holds other values too."""
    tuples = [a for a in value.args if isinstance(a, relax.Tuple)] if isinstance(value, relax.Call) else []
    mixed = [t for t in tuples if not all(isinstance(f, tvm.ir.GenericConst) for f in t.fields)]
    return {f for t in mixed for f in t.fields if isinstance(f, tvm.ir.GenericConst)}


def _operands(value: Any) -> set[Any]:
    """Constants that a product or a convolution reads."""
    if not isinstance(value, relax.Call) or getattr(value.op, "name", "") not in _OF_TWO_TENSORS:
        return set()
    return {a for a in value.args if isinstance(a, tvm.ir.GenericConst)}


def _leaves(expr: Any) -> list[Any]:
    below = children(expr)
    return [leaf for c in below for leaf in _leaves(c)] if below else [expr]


def _fresh_names(taken: set[str], count: int) -> list[str]:
    names: list[str] = []
    k = 0
    while len(names) < count:
        name = f"const_{k}" if k else "const"
        k += 1
        if name not in taken:
            names.append(name)
    return names
