"""Compute once, on the host, what depends on parameters and constants only; the results are the new parameters.

Before:  main(x, w):   t = R.permute_dims(w)        After:  main(x, w'):   y = R.matmul(x, w')
                       y = R.matmul(x, t)                   params["w'"] = transposed values, made now

This is where transposed weights, batch norms folded into weights, position tables and attention masks disappear from
the code. A group of results that share parameters, or one of constants only, is folded only when the parameters do not
grow by more than `slack_bytes`: an embedding that is read as it is *and* transposed is not stored twice. What a result
that is not folded was computed from may be: of the masks of a Swin transformer, 30 MiB, the numbers of its windows. A
result takes the name of the largest parameter it came from when that one is gone. Runs last. Idempotent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import tvm
from tvm import relax

from tvmhet.ir.host_eval import can_evaluate, evaluate, scalar, torch_dtype
from tvmhet.ir.model import ENTRY, Model, from_torch_tensor, to_torch
from tvmhet.ir.rewrite import Rebuild, bindings_of, children, dtype_of, rebuild, shape_of

SLACK_BYTES = 1 << 20


@dataclass(frozen=True)
class _Value:
    """One expression of parameters and constants only: its call, and the parameters it reads, first read first."""

    var: Any
    call: Any
    leaves: tuple[Any, ...]


def fold_parameters(model: Model, *, slack_bytes: int = SLACK_BYTES) -> Model:
    """Return the model with parameter-only arithmetic done, and without the parameters that nothing reads any more."""
    main = model.main
    parameters = tuple(main.params[model.num_inputs :])
    values = _values(main, parameters)
    chosen = _chosen(values, main, parameters, slack_bytes)
    gone = _unread(main, parameters, values, chosen)
    if not chosen and not gone:
        return model
    tensors = _evaluate(model, values, chosen)
    kept = [p for p in parameters if p not in gone]
    names = _names([values[v] for v in chosen], gone, {str(p.name) for p in (*main.params[: model.num_inputs], *kept)})
    made = {v: relax.Var(n, v.ty) for v, n in zip(chosen, names, strict=True)}
    dead = _dead(main, values, set(chosen))

    def step(state: Rebuild, var: relax.Var, value: Any) -> Any:
        if var in made:
            state.became[var] = made[var]
        return None if var in dead or var in made else value

    params = [*main.params[: model.num_inputs], *kept, *made.values()]
    mod = model.mod.clone()
    mod.update_func(mod.get_global_var(ENTRY), rebuild(main, step, params))
    new_values = {str(p.name): model.params[str(p.name)] for p in kept}
    new_values |= {n: from_torch_tensor(tensors[v]) for v, n in zip(chosen, names, strict=True)}
    return replace(model, mod=mod, params=new_values)


def _values(main: relax.Function, parameters: Sequence[Any]) -> dict[Any, _Value]:
    """Every variable that the host can compute, by variable."""
    known: dict[Any, _Value] = {p: _Value(p, None, (p,)) for p in parameters}
    for binding in bindings_of(main):
        call = binding.value
        if isinstance(call, relax.Call) and can_evaluate(call) and all(_known(known, a) for a in call.args):
            leaves = dict.fromkeys(leaf for a in _variables(call.args) for leaf in known[a].leaves)
            known[binding.var] = _Value(binding.var, call, tuple(leaves))
    return known


def _known(known: dict[Any, _Value], expr: Any) -> bool:
    if isinstance(expr, tvm.ir.Var):
        return expr in known
    if isinstance(expr, relax.Tuple):
        return all(_known(known, f) for f in expr.fields)
    return isinstance(expr, tvm.ir.GenericConst | relax.ShapeExpr) or scalar(expr) is not None


def _variables(exprs: Iterable[Any]) -> list[Any]:
    """Variables read by the expressions, in order."""
    found: list[Any] = []
    for expr in exprs:
        found += [expr] if isinstance(expr, tvm.ir.Var) else _variables(children(expr))
    return found


def _frontier(main: relax.Function, values: dict[Any, _Value]) -> list[Any]:
    """Computable variables that something not computable reads, in order of first reading; parameters included."""
    readers = [b.value for b in bindings_of(main) if b.var not in values] + [main.body.body]
    return list(dict.fromkeys(v for v in _variables(readers) if v in values))


def _chosen(values: dict[Any, _Value], main: relax.Function, parameters: Sequence[Any], slack_bytes: int) -> list[Any]:
    """Results to fold. Those that are too large are computed at every call, from what is folded in their stead."""
    left = dict(values)
    while True:
        live = _frontier(main, left)
        chosen = _worth_folding(left, live, main, parameters, slack_bytes)
        too_large = {v for v in live if left[v].call is not None} - set(chosen)
        if not too_large:
            return chosen
        left = {v: value for v, value in left.items() if v not in too_large}


def _worth_folding(
    values: dict[Any, _Value],
    live: list[Any],
    main: relax.Function,
    parameters: Sequence[Any],
    slack_bytes: int,
) -> list[Any]:
    """Of the frontier's computed variables, those whose group does not make the parameters grow."""
    group = {p: p for p in parameters}

    def root(p: Any) -> Any:
        while group[p] is not p:
            p = group[p]
        return p

    def group_of(v: Any) -> Any:
        return root(values[v].leaves[0]) if values[v].leaves else v

    results = [v for v in live if values[v].call is not None]
    for v in results:
        for leaf in values[v].leaves[1:]:
            group[root(leaf)] = root(values[v].leaves[0])
    growth: dict[Any, int] = {}
    for v in results:
        growth[group_of(v)] = growth.get(group_of(v), 0) + _bytes(v)
    needed = {root(p) for v in results for p in values[v].leaves}
    for p in parameters:
        if root(p) in needed and p not in live:
            growth[root(p)] -= _bytes(p)
    return [v for v in results if growth[group_of(v)] <= slack_bytes]


def _bytes(var: Any) -> int:
    shape = shape_of(var)
    assert shape is not None, f"{var.name} has no static shape"
    return math.prod(shape) * int(torch_dtype(dtype_of(var)).itemsize)


def _dead(main: relax.Function, values: dict[Any, _Value], chosen: set[Any]) -> set[Any]:
    """Computed variables that nothing reads once `chosen` are parameters."""
    read = set(_variables([main.body.body]))
    dead: set[Any] = set()
    for binding in reversed(bindings_of(main)):
        if binding.var in values and binding.var not in read and binding.var not in chosen:
            dead.add(binding.var)
        elif binding.var not in chosen:
            read.update(_variables([binding.value]))
    return dead


def _unread(
    main: relax.Function, parameters: Sequence[Any], values: dict[Any, _Value], chosen: Sequence[Any]
) -> set[Any]:
    """Parameters that nothing reads once `chosen` are parameters."""
    skipped = _dead(main, values, set(chosen)) | set(chosen)
    read = set(_variables([b.value for b in bindings_of(main) if b.var not in skipped] + [main.body.body]))
    return {p for p in parameters if p not in read}


def _evaluate(model: Model, values: dict[Any, _Value], chosen: Sequence[Any]) -> dict[Any, torch.Tensor]:
    """Values of the chosen variables; what they share is computed once, and dropped as soon as they are done.

    Where the parameters have no contents, neither have these.
    """
    if not model.has_values:
        return {v: torch.empty(shape_of(v) or (), dtype=torch_dtype(dtype_of(v))) for v in chosen}
    results = {}
    for v in chosen:
        memo: dict[Any, torch.Tensor] = {}
        results[v] = _value_of(model, values, v, memo)
    return results


def _value_of(model: Model, values: dict[Any, _Value], expr: Any, memo: dict[Any, torch.Tensor]) -> Any:
    if isinstance(expr, tvm.ir.GenericConst):
        return to_torch(expr.value)
    if isinstance(expr, relax.Tuple):
        return [_value_of(model, values, f, memo) for f in expr.fields]
    if isinstance(expr, relax.ShapeExpr):
        return [int(d) for d in expr.values]
    if not isinstance(expr, tvm.ir.Var):
        return scalar(expr)
    if expr not in memo:
        call = values[expr].call
        memo[expr] = (
            to_torch(model.params[str(expr.name)])
            if call is None
            else evaluate(call, [_value_of(model, values, a, memo) for a in call.args])
        )
    return memo[expr]


def _names(chosen: Sequence[_Value], gone: set[Any], taken: set[str]) -> list[str]:
    """A name for each result: its largest parameter's when that is gone and free, else one with a suffix."""
    names: list[str] = []
    for value in chosen:
        lead = max(value.leaves, key=_bytes) if value.leaves else None  # max keeps the first of equals
        base = str(lead.name) if lead is not None else "const"
        candidates = ([base] if lead is None or lead in gone else []) + [f"{base}_folded"]
        name = next((c for c in candidates if c not in taken), None)
        k = 1
        while name is None or name in taken:
            name, k = f"{base}_folded_{k}", k + 1
        taken.add(name)
        names.append(name)
    return names
