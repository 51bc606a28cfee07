"""The optimisers, as torch defines them: what they keep per parameter, and the numbers that a step needs.

p' = p - lr * (momentum of (g + weight_decay * p))                          Sgd
p' = p - lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps), weight_decay * p added to g      Adam
p' = p * (1 - lr * weight_decay) - lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)      AdamW
p' = p - lr * (momentum of g / (sqrt(v) + eps)), weight_decay * p added to g     RmsProp
p' = p - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(sum of g^2) + eps), weight_decay * p added to g   Adagrad
p' = p * (1 - lr * weight_decay) - lr * sign(b1 * m + (1 - b1) * g)         Lion (Chen et al., 2023), not in torch

m and v are running means of g and g^2. `ParameterGroups` has one of them for each group of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from numbers import Real
from typing import Any

from tvmhet.errors import BadInput


@dataclass(frozen=True, slots=True)
class Sgd:
    """torch.optim.SGD: momentum starts from the first gradient."""

    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_options(self)
        if self.nesterov and self.momentum == 0.0:
            raise BadInput("nesterov is set and momentum is 0", "give a momentum above 0, or nesterov=False")

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the tensors kept per parameter, as torch calls them."""
        return ("momentum_buffer",) if self.momentum else ()

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the numbers that change with the step: the rate alone."""
        del step
        return (lr,)


@dataclass(frozen=True, slots=True)
class Adam:
    """torch.optim.Adam: weight decay is part of the gradient."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False

    def __post_init__(self) -> None:
        _check_options(self)

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the tensors kept per parameter, as torch calls them."""
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if self.amsgrad else ()))

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the numbers of step `step` (from 1) at rate `lr`: 1, lr / (1 - b1^t), sqrt(1 - b2^t)."""
        return (1.0, *_corrections(self.betas, step, lr))


@dataclass(frozen=True, slots=True)
class AdamW(Adam):
    """torch.optim.AdamW, with decoupled weight decay."""

    weight_decay: float = 1e-2

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the numbers of step `step` (from 1) at rate `lr`: 1 - lr * decay, lr / (1 - b1^t), sqrt(1 - b2^t)."""
        return (1.0 - lr * self.weight_decay, *_corrections(self.betas, step, lr))


@dataclass(frozen=True, slots=True)
class RmsProp:
    """torch.optim.RMSprop. `centered` subtracts the square of the mean gradient from the mean square."""

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False

    def __post_init__(self) -> None:
        _check_options(self)

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the tensors kept per parameter, as torch calls them."""
        mean = ("grad_avg",) if self.centered else ()
        return ("square_avg", *mean, *(("momentum_buffer",) if self.momentum else ()))

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the numbers that change with the step: the rate alone."""
        del step
        return (lr,)


@dataclass(frozen=True, slots=True)
class Adagrad:
    """torch.optim.Adagrad, whose sums of squares start from zero."""

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        _check_options(self)

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the tensors kept per parameter, as torch calls them."""
        return ("sum",)

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the number of step `step` (from 1) at rate `lr`: lr / (1 + (t - 1) * decay)."""
        return (lr / (1.0 + (step - 1) * self.lr_decay),)


@dataclass(frozen=True, slots=True)
class Lion:
    """Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023): the sign of a momentum, decoupled decay."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_options(self)

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the tensors kept per parameter."""
        return ("exp_avg",)

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the numbers of a step at rate `lr`: 1 - lr * decay, lr."""
        del step
        return (1.0 - lr * self.weight_decay, lr)


Rule = Sgd | Adam | RmsProp | Adagrad | Lion


@dataclass(frozen=True, slots=True)
class ParameterGroups:
    """Groups of parameters, by torch's names, each with the same rule at its own options, as torch's `param_groups`."""

    rules: tuple[Rule, ...]
    names: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        first = self.rules[0]
        for rule in self.rules:
            if type(rule) is not type(first) or rule.state != first.state:
                raise BadInput(
                    f"one group of parameters keeps {_kept(first)}, another {_kept(rule)}",
                    "give all groups one optimizer, and momentum (amsgrad, centered) to all of them or to none",
                )

    @property
    def lr(self) -> float | tuple[float, ...]:
        """The rate of each group; of one group a number."""
        rates = tuple(rule.lr for rule in self.rules)
        return rates if len(rates) > 1 else rates[0]

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the tensors kept per parameter, as torch calls them."""
        return self.rules[0].state


Optimizer = Rule | ParameterGroups
Rates = float | Sequence[float]

_BY_NAME: Mapping[str, type[Rule]] = {
    "sgd": Sgd,
    "adam": Adam,
    "adamw": AdamW,
    "rmsprop": RmsProp,
    "adagrad": Adagrad,
    "lion": Lion,
}


#: Tensors kept per parameter, by what plans call an optimiser. Adam holds and moves as much as AdamW.
KEPT: Mapping[str, int] = {
    "sgd": 0,
    "momentum": 1,
    "rmsprop": 1,
    "adagrad": 1,
    "lion": 1,
    "adamw": 2,
    "rmsprop+centered": 2,
    "rmsprop+momentum": 2,
    "rmsprop+centered+momentum": 3,
    "amsgrad": 3,
}


def plan_name(optimizer: Optimizer) -> str:
    """Return what plans call it, a key of `KEPT`."""
    rule = rules_of(optimizer)[0]
    match rule:
        case Sgd():
            return "momentum" if rule.momentum else "sgd"
        case Adam():
            return "amsgrad" if rule.amsgrad else "adamw"
        case RmsProp():
            return "rmsprop" + "+centered" * rule.centered + "+momentum" * bool(rule.momentum)
    return type(rule).__name__.lower()


def rules_of(optimizer: Optimizer) -> tuple[Rule, ...]:
    """Return the rule of each group of parameters; without groups all are one."""
    return optimizer.rules if isinstance(optimizer, ParameterGroups) else (optimizer,)


def scalars_of(optimizer: Optimizer, step: int, lr: Rates) -> tuple[float, ...]:
    """Return the numbers of step `step` (from 1) of every group, at one rate for all or one for each.

    Raises BadInput for what are no rates.
    """
    rules = rules_of(optimizer)
    rates = tuple(lr) if isinstance(lr, Sequence) and not isinstance(lr, str) else (lr,) * len(rules)
    if len(rates) != len(rules):
        raise BadInput(
            f"there are {len(rates)} rates and {len(rules)} groups of parameters", "give one, or one for each"
        )
    for rate in rates:
        if isinstance(rate, bool) or not isinstance(rate, Real) or not 0.0 <= float(rate) < math.inf:
            raise BadInput(f"lr is {rate!r}", "give a number of at least 0")
    return tuple(s for rule, rate in zip(rules, rates, strict=True) for s in rule.scalars(step, float(rate)))


def group_of(optimizer: Optimizer, parameter: str) -> int:
    """Return the group of the parameter that torch calls `parameter`."""
    if not isinstance(optimizer, ParameterGroups):
        return 0
    return next(g for g, names in enumerate(optimizer.names) if parameter in names)


def optimizer_of(chosen: str | Optimizer, options: Mapping[str, float]) -> Optimizer:
    """Return the optimiser called `chosen` with these options, or the one that was given."""
    if isinstance(chosen, Optimizer):
        if options:
            raise BadInput(f"options {sorted(options)} were given beside {chosen}", "give them to the optimiser itself")
        return chosen
    if not isinstance(chosen, str):
        raise BadInput(
            f"the optimizer is a {getattr(chosen, '__name__', type(chosen).__name__)}, not a name",
            'give its name and options, such as optimizer="adamw", lr=1e-3, weight_decay=0.01, or one of torch.optim, '
            "made for the model's parameters",
        )
    if chosen not in _BY_NAME:
        raise BadInput(f"optimizer {chosen!r} is unknown", f"use one of {', '.join(_BY_NAME)}")
    kind = _BY_NAME[chosen]
    known = [f.name for f in fields(kind)]
    if unknown := sorted(options.keys() - set(known)):
        raise BadInput(f"optimizer {chosen!r} does not take {unknown[0]!r}", f"it takes {', '.join(known)}")
    return kind(**options)  # type: ignore[arg-type]


def optimizer_tree(optimizer: Optimizer) -> list[list[object]]:
    """Return plain data for `read_optimizer`: name, options and parameters (None: all) of each group."""
    groups = optimizer.names if isinstance(optimizer, ParameterGroups) else (None,)
    return [
        [type(rule).__name__.lower(), asdict(rule), names]
        for rule, names in zip(rules_of(optimizer), groups, strict=True)
    ]


def read_optimizer(tree: Sequence[Any]) -> Optimizer:
    """Return what `optimizer_tree` wrote, or of older bundles the name and options of the one rule."""
    if isinstance(tree[0], str):
        return read_optimizer([(*tree, None)])
    rules = tuple(_BY_NAME[name](**_tuples(options)) for name, options, _ in tree)
    if tree[0][2] is None:
        return rules[0]
    return ParameterGroups(rules, tuple(tuple(names or ()) for _, _, names in tree))


def _tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


def _corrections(betas: tuple[float, float], step: int, lr: float) -> tuple[float, float]:
    return lr / (1.0 - betas[0] ** step), (1.0 - betas[1] ** step) ** 0.5


def _kept(rule: Rule) -> str:
    return f"{', '.join(rule.state) or 'nothing'} ({type(rule).__name__})"


def _check_options(rule: Rule) -> None:
    """Refuse what is no number in its range; running means of momentum 1 never forget."""
    for field in fields(rule):
        value = getattr(rule, field.name)
        if field.type == "bool":
            if type(value) is not bool:
                raise BadInput(f"{field.name} is {value!r}", "give True or False")
        elif field.name == "betas":
            if not isinstance(value, tuple | list) or len(value) != 2:
                raise BadInput(f"betas is {value!r}", "give two numbers in [0, 1)")
            for beta in value:
                _check_range("beta", beta, 1.0)
        else:
            _check_range(field.name, value)


def _check_range(name: str, value: float, high: float = float("inf")) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < high:
        raise BadInput(f"{name} is {value!r}", f"give a number in [0, {high:g})")
