"""Make inputs and results of a model states: what a call returns for one is what the next call is given.

main(x, cache, w) -> (cache', y)    with_state(model, {"cache": 0})    main(x, cache, w) -> (y, cache')
                                                                            ╰─ num_state = 1 ─╯
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import tvm
from tvm import relax

from tvmhet.errors import BadInput, NotSupported
from tvmhet.ir.attrs import NUM_SESSIONS_ATTR, NUM_STATE_ATTR
from tvmhet.ir.bindings import Bindings, Emitter, flatten, rebuild_main
from tvmhet.ir.model import ENTRY, Model, State, from_torch_tensor, to_torch
from tvmhet.ir.relax_import import checked_value
from tvmhet.results import without


def with_sessions(model: Model, num_sessions: int) -> Model:
    """Return the model for so many sessions. Raises BadInput for several of a model without states."""
    if type(num_sessions) is not int or num_sessions < 1:
        raise BadInput(f"the number of sessions is {num_sessions!r}", "give a whole number of at least 1")
    if num_sessions == model.num_sessions:
        return model
    if not model.states:
        raise BadInput(f"{num_sessions} sessions of a model without state", "leave num_sessions out")
    mod = model.mod.clone()
    mod.update_func(mod.get_global_var(ENTRY), model.main.with_attr(NUM_SESSIONS_ATTR, num_sessions))
    return replace(model, mod=mod)


def with_state(
    model: Model, renewed: Mapping[str, int], *, initial: Mapping[str, Any] | None = None, num_sessions: int = 1
) -> Model:
    """Return the model with inputs as states, which calls hand on to each other on the devices.

    `renewed` names inputs, and for each which of the model's results, counted from 0, it is in the next call; those
    results are not returned any more. `initial` gives their first values (default zeros). Each of `num_sessions`
    sessions has its own, and calls of different sessions overlap.

    Raises BadInput for names and results that are not there or do not fit, NotSupported for a model that is placed
    whole.
    """
    if model.whole_reason:
        raise NotSupported(f"states of a model that cannot be cut: {model.whole_reason}", "bind its shapes first")
    bindings = Bindings(model.main)
    results = tuple(flatten(bindings.output))
    num_old = model.num_states
    places = range(len(results) - num_old)
    own = {str(v.name): v for v in model.inputs}
    for name, place in renewed.items():
        if name not in own:
            raise BadInput(f"{name!r} is no input of the model", f"it takes {', '.join(own) or 'none'}")
        if place not in places:
            raise BadInput(f"input {name!r} becomes result {place!r}", f"the model has {len(places)}, counted from 0")
        was, becomes = _type(own[name].ty), _type(bindings.types[results[place]])
        if was != becomes:
            raise BadInput(
                f"input {name!r} is {was[0]} {was[1]} and result {place} is {becomes[0]} {becomes[1]}",
                "a state keeps its shape and dtype: write into a part of it, in place of joining to it",
            )
    if strange := [n for n in initial or {} if n not in renewed]:
        raise BadInput(
            f"{strange[0]!r} has a first value and is no state", f"states are {', '.join(renewed) or 'none'}"
        )
    gone = set(renewed.values())
    if len(gone) == len(places):
        raise BadInput("all results of the model are states", "return one tensor more")
    states = tuple(State(name, _first(own[name], (initial or {}).get(name))) for name in renewed)
    inputs = [v for n, v in own.items() if n not in renewed] + [own[n] for n in renewed]
    old = list(model.main.params[len(own) :])  # states from before, and weights
    rest = [r for i, r in enumerate(results[: len(places)]) if i not in gone]
    order = [*rest, *(results[i] for i in renewed.values()), *results[len(places) :]]
    main = _reordered(model.mod, bindings, [*inputs, *old], order)
    main = main.with_attr(NUM_STATE_ATTR, num_old + len(states))
    mod = model.mod.clone()
    mod.update_func(mod.get_global_var(ENTRY), main)
    structure = without(model.structure or ("tuple" if len(results) > 1 else "single"), gone, len(places))
    made = replace(model, mod=mod, states=(*states, *model.states), structure=structure)
    return with_sessions(made, num_sessions)


def _reordered(mod: tvm.IRModule, bindings: Bindings, params: list[relax.Var], results: list[str]) -> relax.Function:
    def emit(emitter: Emitter, env: dict[str, relax.Expr]) -> None:
        for call in bindings.calls:
            env |= emitter.emit(bindings.rebuild(call, env), bindings.results[call], call)

    fresh = [relax.Var(v.name, v.ty) for v in params]
    return rebuild_main(mod, bindings, emit, fresh, results)[ENTRY]


def _type(ty: Any) -> tuple[tuple[int, ...], str]:
    return tuple(int(d) for d in ty.shape.values), str(ty.dtype)


def _first(var: relax.Var, value: Any) -> Any:
    """Return the first value of a state as a TVM tensor of its own: the one given, or zeros."""
    shape, dtype = _type(var.ty)
    given = torch.zeros(shape, dtype=getattr(torch, dtype)) if value is None else to_torch(checked_value(var, value))
    return from_torch_tensor(given.clone())
