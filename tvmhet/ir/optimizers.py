"""The optimisers, as torch defines them: what they keep per parameter, and the numbers that a step needs.

p' = p - lr * (momentum of (g + weight_decay * p))                          Sgd
p' = p - lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps), weight_decay * p added to g      Adam
p' = p * (1 - lr * weight_decay) - lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)      AdamW
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from tvmhet.errors import BadInput


@dataclass(frozen=True, slots=True)
class Sgd:
    """torch.optim.SGD: momentum starts from the first gradient."""

    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_range("lr", self.lr)
        _check_range("momentum", self.momentum)
        _check_range("weight_decay", self.weight_decay)
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
class AdamW:
    """torch.optim.AdamW, with decoupled weight decay."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        _check_adam(self)

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the tensors kept per parameter, as torch calls them."""
        return ("exp_avg", "exp_avg_sq")

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the numbers of step `step` (from 1) at rate `lr`: 1 - lr * decay, lr / (1 - b1^t), sqrt(1 - b2^t)."""
        return (1.0 - lr * self.weight_decay, *_corrections(self.betas, step, lr))


@dataclass(frozen=True, slots=True)
class Adam:
    """torch.optim.Adam: weight decay is part of the gradient."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_adam(self)

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the tensors kept per parameter, as torch calls them."""
        return ("exp_avg", "exp_avg_sq")

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the numbers of step `step` (from 1) at rate `lr`: 1, lr / (1 - b1^t), sqrt(1 - b2^t)."""
        return (1.0, *_corrections(self.betas, step, lr))


def _check_adam(chosen: Adam | AdamW) -> None:
    _check_range("lr", chosen.lr)
    _check_range("weight_decay", chosen.weight_decay)
    _check_range("eps", chosen.eps)
    if not isinstance(chosen.betas, tuple | list) or len(chosen.betas) != 2:
        raise BadInput(f"betas is {chosen.betas!r}", "give two numbers in [0, 1)")
    for beta in chosen.betas:
        _check_range("beta", beta, 1.0)


def _corrections(betas: tuple[float, float], step: int, lr: float) -> tuple[float, float]:
    return lr / (1.0 - betas[0] ** step), (1.0 - betas[1] ** step) ** 0.5


Optimizer = Sgd | Adam | AdamW

_BY_NAME: Mapping[str, type[Sgd] | type[Adam] | type[AdamW]] = {"sgd": Sgd, "adam": Adam, "adamw": AdamW}


def optimizer_of(chosen: str | Optimizer, options: Mapping[str, float]) -> Optimizer:
    """Return the optimiser called `chosen` with these options, or the one that was given."""
    if isinstance(chosen, Sgd | Adam | AdamW):
        if options:
            raise BadInput(f"options {sorted(options)} were given beside {chosen}", "give them to the optimiser itself")
        return chosen
    if not isinstance(chosen, str):
        raise BadInput(
            f"the optimizer is a {getattr(chosen, '__name__', type(chosen).__name__)}, not a name",
            'give its name and options, such as optimizer="adamw", lr=1e-3, weight_decay=0.01',
        )
    if chosen not in _BY_NAME:
        raise BadInput(f"optimizer {chosen!r} is unknown", f"use one of {', '.join(_BY_NAME)}")
    kind = _BY_NAME[chosen]
    known = [f.name for f in fields(kind)]
    if unknown := sorted(options.keys() - set(known)):
        raise BadInput(f"optimizer {chosen!r} does not take {unknown[0]!r}", f"it takes {', '.join(known)}")
    return kind(**options)  # type: ignore[arg-type]


def _check_range(name: str, value: float, high: float = float("inf")) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < high:
        raise BadInput(f"{name} is {value!r}", f"give a number in [0, {high:g})")
