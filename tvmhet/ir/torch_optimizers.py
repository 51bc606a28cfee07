"""An optimiser of torch, made for a module's parameters -> the optimiser of a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tvmhet.errors import BadInput
from tvmhet.ir.optimizers import Adagrad, Adam, AdamW, Optimizer, ParameterGroups, RmsProp, Rule, Sgd, optimizer_of

#: Options of torch that say how an update is computed, not what.
_HOW = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})

_RULES: Mapping[type[torch.optim.Optimizer], tuple[Callable[..., Rule], tuple[str, ...]]] = {
    torch.optim.SGD: (Sgd, ("lr", "momentum", "weight_decay", "nesterov")),
    torch.optim.Adam: (Adam, ("lr", "betas", "eps", "weight_decay", "amsgrad")),
    torch.optim.AdamW: (AdamW, ("lr", "betas", "eps", "weight_decay", "amsgrad")),
    torch.optim.RMSprop: (RmsProp, ("lr", "alpha", "eps", "weight_decay", "momentum", "centered")),
    torch.optim.Adagrad: (Adagrad, ("lr", "lr_decay", "weight_decay", "eps")),
}


def chosen_optimizer(
    chosen: str | Optimizer | torch.optim.Optimizer, options: Mapping[str, Any], model: nn.Module
) -> Optimizer:
    """Return the optimiser of a name and options, of groups of the parameters of `model`, or the one that was given."""
    if not isinstance(chosen, torch.optim.Optimizer):
        return optimizer_of(chosen, options)
    if options:
        kind = type(chosen).__name__
        raise BadInput(f"options {sorted(options)} were given beside {kind}", "give them to the optimizer itself")
    return groups_of_torch(chosen, model)


def groups_of_torch(optimizer: torch.optim.Optimizer, model: nn.Module) -> Optimizer:
    """Return the rule and options of each group, whose parameters go by their names in `model`; one of all is no group.

    Raises BadInput for optimisers and options that have no rule here, for one that has already taken steps, and for
    parameters that are not of `model`.
    """
    kind = type(optimizer)
    if kind not in _RULES:
        known = ", ".join(k.__name__ for k in _RULES)
        raise BadInput(f"there is no rule for the optimizer {kind.__name__}", f"use one of torch.optim: {known}")
    if any(state.get("step", 1) for state in optimizer.state.values()):  # Adagrad keeps zeros before the first
        raise BadInput(f"the {kind.__name__} that was given has taken steps", "give one that was just made")
    names = {id(p): name for name, p in model.named_parameters()}
    rules, members = [], []
    for g, group in enumerate(optimizer.param_groups):
        rules.append(_rule(kind, group))
        if strange := [p for p in group["params"] if id(p) not in names]:
            raise BadInput(
                f"group {g} of the optimizer has a parameter of shape {tuple(strange[0].shape)} that is none of "
                f"{type(model).__name__}'s",
                "make the optimizer for the parameters of the module that is imported",
            )
        members.append(tuple(names[id(p)] for p in group["params"]))
    if len(rules) == 1 and set(members[0]) == set(names.values()):
        return rules[0]
    return ParameterGroups(tuple(rules), tuple(members))


@contextmanager
def in_groups_only(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Let parameters have gradients only if they are in a group, meanwhile: torch updates no other."""
    if not isinstance(optimizer, ParameterGroups):
        yield
        return
    members = {name for names in optimizer.names for name in names}
    others = [p for name, p in model.named_parameters() if p.requires_grad and name not in members]
    try:
        for p in others:
            p.requires_grad_(False)
        yield
    finally:
        for p in others:
            p.requires_grad_(True)


def _rule(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> Rule:
    make, own = _RULES[kind]
    default = kind([nn.Parameter(torch.zeros(1))]).param_groups[0]
    for name, usual in default.items():
        if name not in _HOW and name not in own and group[name] != usual:
            raise BadInput(f"{name} of {kind.__name__} is {group[name]!r}", f"there is a rule for {usual!r} alone")
    return make(**{name: _number(group[name]) for name in own})


def _number(value: Any) -> Any:
    """Return a rate or a beta that torch holds as a tensor as the number that it is."""
    if isinstance(value, tuple | list):
        return tuple(_number(v) for v in value)
    return value.item() if isinstance(value, torch.Tensor) else value
